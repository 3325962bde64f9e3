"""The limiter at Unix sockets: whom their directory lets through, and whose their paths are."""

from __future__ import annotations

import os
import pwd
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from tests.cli.running import Netlimit, Server, settings_in, until
from tests.cli.test_descriptor_store import Manager, manager  # noqa: F401  a fixture
from tests.cli.test_limiter import RULES
from tests.l7.service.serving import Asker, describe
from tests.places import is_ready, open_client
from tests.ports import free_port

OWNER, PROXY, STRANGER = "nobody", 54321, 54322
"""Whom the limiter runs as; the group of the directory, and another user's."""
CONNECT = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as made:
    try: made.connect(sys.argv[1])
    except OSError as error: print(type(error).__name__)
    else: print("connected")
"""


@dataclass(frozen=True)
class Place:
    """A directory for sockets of the limiter's, and the limiter's settings."""

    directory: Path
    netlimit: Netlimit

    @property
    def http(self) -> Path:
        return self.directory / "http.sock"

    @property
    def grpc(self) -> Path:
        return self.directory / "grpc.sock"

    def ask(self, question: str, address: str = "192.0.2.7") -> httpx.Response:
        with open_client(f"unix:{self.http}") as client:
            return client.get(question, headers={"X-Forwarded-For": address})

    def is_deciding(self) -> bool:
        with open_client(f"unix:{self.http}") as client:
            return is_ready(f"unix:{self.http}", client)

    def start(self) -> Server:
        server = self.netlimit.start("limiter", "--user", OWNER)
        until(lambda: server.ended or self.is_deciding(), server.said)
        assert not server.ended, server.said()
        return server

    def refuse(self) -> str:
        return self.netlimit.refuse("limiter", "--user", OWNER)


def make_sockets_directory(directory: Path, owner: str = OWNER, group: int = PROXY) -> Path:
    """A directory for sockets of a limiter's, within another."""
    sockets = directory / "sockets"
    sockets.mkdir()
    os.chown(sockets, pwd.getpwnam(owner).pw_uid, group)
    sockets.chmod(0o710)
    return sockets


@pytest.fixture
def place(root: None, directory: Path) -> Iterator[Place]:
    sockets = make_sockets_directory(directory)
    rules = directory / "web.yaml"
    rules.write_text(RULES % 2 + "  - key: remote_address\n    rate_limit: {unit: hour, requests_per_unit: 1}\n")
    rules.chmod(0o644)
    settings = {
        "NETLIMIT_LIMITS": str(rules),
        "NETLIMIT_LIMITER_LISTEN": f"unix:{sockets}/http.sock",
        "NETLIMIT_LIMITER_GRPC_LISTEN": f"unix:{sockets}/grpc.sock",
    }
    made = Place(sockets, Netlimit(settings_in(directory, **settings)))
    made.netlimit.make_database(OWNER)
    yield made
    made.netlimit.end_all()


def connect_as(user: int, path: Path) -> str:
    command = [sys.executable, "-S", "-c", CONNECT, str(path), str(user)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def count_listening(path: Path) -> int:
    """How many sockets of this path there are that listen, in the whole host."""
    printed = subprocess.run(["ss", "-Hxl", "src", str(path)], capture_output=True, text=True, check=True).stdout
    return len(printed.splitlines())


def test_who_may_enter_the_directory_may_ask_and_nobody_else(place: Place) -> None:
    server = place.start()
    for path in (place.http, place.grpc):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        assert path.stat().st_uid == pwd.getpwnam(OWNER).pw_uid
        assert [connect_as(user, path) for user in (PROXY, STRANGER)] == ["connected", "PermissionError"]
    question = "/v1/auth?domain=web&key=remote_address&deny=429"
    asked = [place.ask(question, address).status_code for address in ("192.0.2.7", "192.0.2.7", "192.0.2.8")]
    assert asked == [200, 429, 200]
    asker = Asker(f"unix:{place.grpc}")
    assert [asker.ask(describe(user="alice")).overall_code for _ in range(3)] == [1, 1, 2]
    asker.close()
    assert server.end() == 0
    assert not place.http.exists()
    assert not place.grpc.exists()
    assert "WARNING" not in server.said()  # nobody but those is let in, whom it would warn of


def test_requests_without_a_client_s_address_are_one_client_s(place: Place) -> None:
    server = place.start()
    question = "/v1/auth?domain=web&key=remote_address&deny=429"
    assert [place.ask(question, "").status_code for _ in range(2)] == [200, 429]
    assert place.ask(question, "192.0.2.7").status_code == 200
    assert server.end() == 0


def test_what_a_killed_limiter_has_left_is_replaced(place: Place) -> None:
    place.start().end(signal.SIGKILL)
    assert place.http.is_socket()
    assert place.grpc.is_socket()
    server = place.start()
    asker = Asker(f"unix:{place.grpc}")
    assert asker.ask(describe(user="alice")).overall_code == 1
    asker.close()
    assert server.end() == 0


def test_a_socket_at_which_somebody_listens_is_taken(place: Place) -> None:
    server = place.start()
    said = place.refuse()
    assert said == (
        f"netlimit: The limiter cannot listen at unix:{place.http}: Address already in use. "
        "Set NETLIMIT_LIMITER_LISTEN to another place.\n"
    )
    place.netlimit.environment["NETLIMIT_LIMITER_LISTEN"] = f"127.0.0.1:{free_port()}"  # type: ignore[index]
    assert "cannot listen at unix:" in (said := place.refuse())
    assert "grpc.sock: Address already in use. Set NETLIMIT_LIMITER_GRPC_LISTEN" in said
    assert (count_listening(place.http), count_listening(place.grpc)) == (1, 1)
    assert place.is_deciding()
    assert server.end() == 0


@pytest.mark.parametrize("backlog", [0, 10])
def test_nor_is_one_of_another_program_removed(place: Place, backlog: int) -> None:
    with socket.socket(socket.AF_UNIX) as other, ExitStack() as waiting:
        other.bind(str(place.grpc))
        place.grpc.chmod(0o666)
        other.listen(backlog)
        if not backlog:  # so many wait to be accepted that no more may
            waiting.enter_context(socket.socket(socket.AF_UNIX)).connect(str(place.grpc))
        assert "Address already in use" in place.refuse()
        assert place.grpc.is_socket()
    assert not place.http.exists()


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_what_is_no_socket_stays_and_links_lead_nowhere(place: Place, directory: Path, kind: str) -> None:
    elsewhere = directory / "elsewhere.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(elsewhere))
    match kind:
        case "file":
            place.http.write_text("kept")
        case "link":
            place.http.symlink_to(elsewhere)
        case _:
            place.http.mkdir()
    assert "There is something else of that name" in place.refuse()
    assert place.http.is_symlink() or not place.http.is_socket()
    assert elsewhere.is_socket()


def test_a_lock_that_is_a_link_is_not_followed(place: Place, directory: Path) -> None:
    Path(f"{place.http}.lock").symlink_to(directory / "made")
    assert f"{place.http}.lock: Too many levels of symbolic links" in place.refuse()
    assert not (directory / "made").exists()


@pytest.mark.parametrize(("mode", "refused"), [(0o711, True), (0o712, True), (0o770, True), (0o750, False)])
def test_a_directory_that_keeps_nobody_away_is_refused(place: Place, mode: int, refused: bool) -> None:
    place.directory.chmod(mode)
    if not refused:
        assert place.start().end() == 0
        return
    said = place.refuse()
    assert f"The directory {place.directory} (mode {mode:04o}) keeps nobody from {place.http}" in said
    command = f"install -d -m 0710 -o {OWNER} -g GROUP {place.directory}"
    assert command in said
    subprocess.run(command.replace("GROUP", str(PROXY)), shell=True, check=True)  # noqa: S602
    assert place.start().end() == 0


def test_so_is_one_of_somebody_else_s(place: Place) -> None:
    os.chown(place.directory, STRANGER, PROXY)
    assert f"The directory {place.directory} belongs to user {STRANGER}, who could put" in place.refuse()
    assert not list(place.directory.iterdir())


def test_and_one_that_is_not_there(place: Place) -> None:
    place.directory.rmdir()
    said = place.refuse()
    assert f"There is no directory {place.directory} for {place.http}. Make it by `install -d -m 0710 -o nobody" in said


def test_both_cannot_be_at_one_path(place: Place) -> None:
    place.netlimit.environment["NETLIMIT_LIMITER_GRPC_LISTEN"] = f"unix:{place.http}"  # type: ignore[index]
    assert "Address already in use. Set NETLIMIT_LIMITER_GRPC_LISTEN" in place.refuse()
    assert not place.http.exists()


def test_one_of_them_may_be_a_port(place: Place) -> None:
    grpc_place = f"127.0.0.1:{free_port()}"
    place.netlimit.environment["NETLIMIT_LIMITER_GRPC_LISTEN"] = grpc_place  # type: ignore[index]
    server = place.start()
    asker = Asker(grpc_place)
    assert asker.ask(describe(user="alice"), wait=60).overall_code == 1
    asker.close()
    assert not place.grpc.exists()
    assert server.end() == 0


def test_the_report_comes_by_the_socket(place: Place) -> None:
    said = place.netlimit.refuse("limits", "report")
    assert said.startswith(f"netlimit: No limiter answers at unix:{place.http} (")
    server = place.start()
    assert {each["rule"] for each in place.netlimit.ask("limits", "report")["limits"]} == {"user", "remote_address"}
    assert server.end() == 0


def test_a_kernel_that_lets_few_wait_is_told_of(place: Place) -> None:
    name = place.directory.parent.name
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        set_it = ["ip", "netns", "exec", name, "sysctl", "-q", "-w", "net.core.somaxconn=128"]
        subprocess.run(set_it, check=True)
        server = Place(place.directory, replace(place.netlimit, namespace=name)).start()
        assert "Where 128 connections wait for the limiter, the next is told" in server.said()
        assert server.end() == 0
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@contextmanager
def port() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_systemd_keeps_no_unix_socket_and_lets_former_places_go(
    place: Place,
    manager: Manager,  # noqa: F811
) -> None:
    """Their directory keeps them from others: one that is kept would have no path once that is made anew."""
    environment = {**place.netlimit.environment, "NOTIFY_SOCKET": str(manager.path)}
    given = "export LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=limiter:limiter-grpc"
    with port() as http, port() as other:
        command = f'{given}; exec 3<&{http.fileno()} 4<&{other.fileno()}; exec "$@"'
        netlimit = Netlimit(environment, before=("bash", "-c", command, "bash"))
        for each in (http, other):
            os.set_inheritable(each.fileno(), True)
        process = subprocess.Popen(
            netlimit.within(sys.executable, "-m", "netlimit.cli.main", "limiter", "--user", OWNER),
            env=environment,
            pass_fds=(http.fileno(), other.fileno()),
        )
    try:
        until(lambda: process.poll() is not None or place.is_deciding())
        for _ in range(2):
            said, none = manager.hear()
            assert (said["FDSTOREREMOVE"], none) == ("1", [])
        manager.hears.settimeout(0.5)
        with pytest.raises(TimeoutError):
            manager.hear()
    finally:
        process.terminate()
        assert process.wait(60) == 0
