"""The API's listening socket outlives it: systemd, played by the test, holds it meanwhile (sd_notify(3))."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
        return dict(line.split("=", 1) for line in text.decode().splitlines()), descriptors

    @contextmanager
    def start(self, netlimit: Netlimit, *held: tuple[str, int], pid: str = "") -> Iterator[subprocess.Popen[bytes]]:
        """`netlimit api` with the sockets that are held, from descriptor 3 on."""
        environment = {**netlimit.environment, "NOTIFY_SOCKET": str(self.path)}
        if held:
            environment |= {"LISTEN_FDS": str(len(held)), "LISTEN_FDNAMES": ":".join(name for name, _ in held)}
        user = ("--user", "nobody") if os.geteuid() == 0 else ()
        lead = START.replace("$$", pid or "$$")
        copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 50) for _, descriptor in held]
        moves = " ".join(f"{number}<&{copy} {copy}<&-" for number, copy in enumerate(copies, 3))
        command = ["bash", "-c", f"{lead} {moves}" if moves else lead, "bash", *PROGRAM, "api", *user]
        with Path(netlimit.environment["LOG"]).open("ab") as log:
            process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=log, pass_fds=copies)
        for copy in copies:
            os.close(copy)
        try:
            until(lambda: process.poll() is not None or not netlimit.run("status").returncode)
            assert process.poll() is None, Path(netlimit.environment["LOG"]).read_text()
            yield process
        finally:
            process.terminate()
            process.wait(SECONDS)


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


def test_what_does_not_listen_or_is_no_socket_is_not_taken(ready: Netlimit, manager: Manager, directory: Path) -> None:
    host, _, port = ready.environment["NETLIMIT_LISTEN"].partition(":")
    with socket.socket() as bound, (directory / "file").open("w") as file:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, int(port)))
        with manager.start(ready, ("other", file.fileno()), ("api", bound.fileno())):
            kinds = [manager.hear()[0] for _ in range(2)]
            assert [sorted(each) for each in kinds] == [["FDNAME", "FDSTOREREMOVE"], ["FDNAME", "FDSTORE"]]


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
