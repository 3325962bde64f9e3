"""The sockets of the API and of the limiter outlive them: systemd, played by the test, holds them meanwhile
(sd_notify(3))."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import grpc
import httpx
import pytest

from netlimit.cli import descriptor_store
from netlimit.cli.daemons import hold
from netlimit.cli.limiter import _hold_grpc
from netlimit.settings import Listen
from tests.cli.running import PROGRAM, SECONDS, Netlimit, until
from tests.ports import free_port
from tests.warm import ROOT

START = 'export LISTEN_PID=$$ && exec "$@"'


class Manager:
    """What systemd does: hears what the service says, and hands it the sockets that it holds."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "notify"
        self.hears = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.hears.bind(str(self.path))
        self.hears.settimeout(SECONDS)
        self.path.chmod(0o777)

    def hear(self) -> tuple[dict[str, str], list[int]]:
        text, descriptors, _, _ = socket.recv_fds(self.hears, 4096, 4)
        said = dict(line.split("=", 1) for line in text.decode().splitlines())
        assert said.get("FDPOLL") == "0" or not any(map(hangs_up, descriptors)), "systemd closes it (sd_notify(3))"
        return said, descriptors

    @contextmanager
    def start(
        self, netlimit: Netlimit, *held: tuple[str, int], pid: str = "", part: str = "api"
    ) -> Iterator[subprocess.Popen[bytes]]:
        """`netlimit api` or `netlimit limiter` with the sockets that are held, from descriptor 3 on; it answers."""
        environment = {**netlimit.environment, "NOTIFY_SOCKET": str(self.path)}
        if held:
            environment |= {"LISTEN_FDS": str(len(held)), "LISTEN_FDNAMES": ":".join(name for name, _ in held)}
        user = ("--user", "nobody") if os.geteuid() == 0 else ()
        lead = START.replace("$$", pid or "$$")
        copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 50) for _, descriptor in held]
        moves = " ".join(f"{number}<&{copy} {copy}<&-" for number, copy in enumerate(copies, 3))
        command = ["bash", "-c", f"{lead} {moves}" if moves else lead, "bash", *PROGRAM, part, *user]
        with Path(netlimit.environment["LOG"]).open("ab") as log:
            process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=log, pass_fds=copies)
        for copy in copies:
            os.close(copy)
        try:
            answers = is_deciding if part == "limiter" else is_answering
            until(lambda: process.poll() is not None or answers(netlimit))
            assert process.poll() is None, Path(netlimit.environment["LOG"]).read_text()
            yield process
        finally:
            process.terminate()
            process.wait(SECONDS)


def hangs_up(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


@pytest.fixture
def manager(directory: Path) -> Iterator[Manager]:
    made = Manager(directory)
    yield made
    made.hears.close()


@pytest.fixture
def ready(root: None, netlimit: Netlimit, directory: Path) -> Netlimit:
    """With a database that nobody may use."""
    netlimit.do("db", "upgrade")
    for path in (directory / "database", *(directory / "database").iterdir()):
        os.chown(path, 65534, 65534)
    return netlimit


def is_answering(netlimit: Netlimit) -> bool:
    return not netlimit.run("status").returncode


def is_deciding(netlimit: Netlimit) -> bool:
    """Over HTTP and gRPC."""
    try:
        asked = httpx.get(f"http://{netlimit.environment['NETLIMIT_LIMITER_LISTEN']}/readyz")
        with grpc.insecure_channel(netlimit.environment["NETLIMIT_LIMITER_GRPC_LISTEN"]) as channel:
            grpc.channel_ready_future(channel).result(timeout=5)
    except (httpx.TransportError, grpc.FutureTimeoutError):
        return False
    return asked.status_code == 200


def inode(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


def listeners(netlimit: Netlimit) -> set[int]:
    """The inodes of those who listen at the API's port."""
    port = netlimit.environment["NETLIMIT_LISTEN"].rpartition(":")[2]
    command = ["ss", "-Hltne", f"sport = :{port}"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {int(word.removeprefix("ino:")) for word in printed.split() if word.startswith("ino:")}


def test_the_socket_is_kept_over_a_restart(ready: Netlimit, manager: Manager) -> None:
    """And is never free for others: who connects meanwhile is answered by the next one."""
    with manager.start(ready):
        said, (kept,) = manager.hear()
        assert (said["FDSTORE"], said["FDNAME"]) == ("1", "api")
        assert listeners(ready) == {inode(kept)}
    host, _, port = ready.environment["NETLIMIT_LISTEN"].partition(":")
    with pytest.raises(OSError, match="in use"):
        socket.create_server((host, int(port)))
    with socket.create_connection((host, int(port)), SECONDS) as waiting:
        waiting.sendall(b"GET /healthz HTTP/1.1\r\nHost: gw\r\n\r\n")
        with manager.start(ready, ("api", kept)):
            assert waiting.recv(100).startswith(b"HTTP/1.1 200")
            assert listeners(ready) == {inode(kept)}
    os.close(kept)


def test_one_of_another_place_is_given_back(ready: Netlimit, manager: Manager) -> None:
    """After the settings have changed: nobody would answer there."""
    with socket.create_server(("127.0.0.1", 0)) as old, manager.start(ready, ("api", old.fileno())) as process:
        said, none = manager.hear()
        assert (said["FDSTOREREMOVE"], said["FDNAME"], none) == ("1", "api", [])
        said, (kept,) = manager.hear()
        assert (said["FDSTORE"], said["FDNAME"]) == ("1", "api")
        assert listeners(ready) == {inode(kept)}
        os.close(kept)
        held = {os.readlink(each) for each in Path(f"/proc/{process.pid}/fd").iterdir() if each.exists()}
        assert f"socket:[{inode(old.fileno())}]" not in held


def test_the_former_place_keeps_nobody_from_all_addresses_at_its_port(ready: Netlimit, manager: Manager) -> None:
    """The manager lets go of the former socket when it gets to it, which is after the new one is made."""
    host, _, port = ready.environment["NETLIMIT_LISTEN"].partition(":")
    open_to_all = replace(ready, environment={**ready.environment, "NETLIMIT_LISTEN": f"0.0.0.0:{port}"})
    with socket.create_server((host, int(port))) as old, manager.start(open_to_all, ("api", old.fileno())):
        assert manager.hear()[0]["FDSTOREREMOVE"] == "1"
        said, (kept,) = manager.hear()
        assert said["FDSTORE"] == "1"
        assert listeners(ready) == {inode(kept)}
        os.close(kept)


def test_the_former_place_of_grpc_keeps_nobody_from_all_addresses(
    root: None, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(manager.path))
    monkeypatch.setattr(descriptor_store, "_read_given", lambda: iter([("limiter-grpc", os.dup(former.fileno()))]))
    port = free_port()
    wider = Listen("0.0.0.0", port)  # noqa: S104  what is tried
    with hold(Listen("127.0.0.1", port), "limiter", "LIMITER_GRPC_LISTEN") as former:
        assert descriptor_store.take({"limiter-grpc": wider}) == {}
        with _hold_grpc(wider, None):
            pass


def test_what_does_not_listen_or_is_no_socket_is_not_taken(ready: Netlimit, manager: Manager, directory: Path) -> None:
    host, _, port = ready.environment["NETLIMIT_LISTEN"].partition(":")
    with socket.socket() as bound, (directory / "file").open("w") as file:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, int(port)))
        with manager.start(ready, ("other", file.fileno()), ("api", bound.fileno())):
            kinds = [manager.hear()[0] for _ in range(2)]
            assert [sorted(each) for each in kinds] == [["FDNAME", "FDSTOREREMOVE"], ["FDNAME", "FDPOLL", "FDSTORE"]]


def test_what_was_meant_for_another_process_is_left_alone(ready: Netlimit, manager: Manager) -> None:
    with (
        socket.create_server(("127.0.0.1", free_port())) as other,
        manager.start(ready, ("api", other.fileno()), pid="1"),
    ):
        said, (kept,) = manager.hear()
        assert said["FDSTORE"] == "1"
        assert inode(kept) != inode(other.fileno())
        os.close(kept)


def test_without_a_manager_it_starts_as_ever(ready: Netlimit, manager: Manager) -> None:
    manager.path.unlink()
    with manager.start(ready):
        assert listeners(ready)


@pytest.fixture
def limiting(ready: Netlimit) -> Netlimit:
    places = {each: f"127.0.0.1:{free_port()}" for each in ("NETLIMIT_LIMITER_LISTEN", "NETLIMIT_LIMITER_GRPC_LISTEN")}
    return replace(ready, environment={**ready.environment, **places})


def take_as_nobody(place: str, *options: int) -> str:
    """What keeps another user of the host from listening there."""
    host, _, port = place.partition(":")
    code = (
        "import os, socket, sys; os.setuid(12345); s = socket.socket()\n"
        "try: [s.setsockopt(1, int(each), 1) for each in sys.argv[3:]]; s.bind((sys.argv[1], int(sys.argv[2])))\n"
        "except OSError as error: print(error.strerror)\n"
        "else:\n"
        " try: s.listen()\n"
        " except OSError as error: print(error.strerror)\n"
    )
    command = [sys.executable, "-S", "-c", code, host, port, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_limiter_s_places_are_nobody_else_s_while_it_restarts(limiting: Netlimit, manager: Manager) -> None:
    """Who took one would decide in its place, and read the token of those who ask."""
    with manager.start(limiting, part="limiter"):
        kept = dict[str, int]()
        for _ in range(2):
            said, (held,) = manager.hear()
            assert said["FDSTORE"] == "1"
            kept[said["FDNAME"]] = held
    places = {each: limiting.environment[f"NETLIMIT_{each.upper().replace('-', '_')}_LISTEN"] for each in kept}
    assert sorted(places) == ["limiter", "limiter-grpc"]
    reuse = (socket.SO_REUSEADDR, socket.SO_REUSEPORT)
    for name, place in places.items():
        for options in ((), *combinations(reuse, 1), reuse):
            assert take_as_nobody(place, *options) == "Address already in use\n", (name, options)
    with manager.start(limiting, *kept.items(), part="limiter"):
        manager.hears.settimeout(0.5)
        with pytest.raises(TimeoutError):
            manager.hear()
    for held in kept.values():
        os.close(held)
    assert take_as_nobody(places["limiter-grpc"]) == ""


def test_two_limiters_do_not_share_the_place_of_grpc(limiting: Netlimit, manager: Manager) -> None:
    with manager.start(limiting, part="limiter"):
        other = replace(
            limiting, environment={**limiting.environment, "NETLIMIT_LIMITER_LISTEN": f"127.0.0.1:{free_port()}"}
        )
        place = limiting.environment["NETLIMIT_LIMITER_GRPC_LISTEN"]
        said = other.refuse("limiter", "--user", "nobody")
        assert f"The limiter cannot listen at {place}: Address already in use. Set NETLIMIT_LIMITER_GRPC_LISTEN" in said


def test_a_place_that_another_user_has_held_is_let_go(
    root: None, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limiter was his before; gRPC could not listen beside his socket."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(manager.path))
    place = Listen("127.0.0.1", free_port())
    former = hold(place, "limiter", "LIMITER_GRPC_LISTEN")
    os.fchown(former.fileno(), 12345, 12345)
    with former.dup(), _hold_grpc(place, former) as held:  # the manager has it still
        assert held is not former
        removed, none = manager.hear()
        assert (removed["FDSTOREREMOVE"], removed["FDNAME"], none) == ("1", "limiter-grpc", [])
        assert manager.hear()[0]["FDSTORE"] == "1"
        assert _hold_grpc(place, held) is held
