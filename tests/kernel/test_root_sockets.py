"""Who is logged in, and where sshd listens, is found out also where a user opens sockets without end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from netlimit.kernel import root_sockets
from netlimit.kernel.root_sockets import RootSockets
from netlimit.kernel.sockets import LISTENING, Socket
from scripts.testbed.namespaces import Lab

SSHD = Socket(LISTENING, "0.0.0.0", 22, "0.0.0.0", 0, 0, 7)  # noqa: S104
NEW = SSHD._replace(near_port=2222)
LISTEN = (
    "import os, socket, sys; os.setuid(int(sys.argv[1])); server = socket.create_server(('', int(sys.argv[2]))); "
    "print(flush=True); input()"
)
READ = "from netlimit.kernel.root_sockets import *; print(*sorted(each.near_port for each in list_root_sockets()))"


class Slow:
    """What a kernel tells that takes its time, once it may end."""

    def __init__(self) -> None:
        self.found: list[Socket] | OSError = [SSHD]
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self) -> list[Socket]:
        self.begun.release()
        self.may_end.acquire()
        if isinstance(self.found, OSError):
            raise self.found
        return self.found


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    monkeypatch.setattr(root_sockets, "PATIENCE", 0.01)
    monkeypatch.setattr(root_sockets, "_SHARE", 0)
    slow = Slow()
    yield slow
    slow.may_end.release(100)


def settle(sockets: RootSockets) -> None:
    """Wait until a reading has ended."""
    assert sockets._thread is not None
    sockets._thread.join(60)


def test_the_first_reading_is_waited_for_and_no_other(slow: Slow) -> None:
    sockets = RootSockets(slow)
    slow.may_end.release()
    assert sockets.read() == [SSHD]
    slow.found = [NEW]
    assert sockets.read() == [SSHD], "while it reads anew"
    assert sockets.read() == [SSHD]
    slow.may_end.release()
    settle(sockets)
    assert sockets.read() == [NEW]


def test_it_rests_after_a_long_reading(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_sockets, "_SHARE", 10**9)
    sockets = RootSockets(slow)
    slow.may_end.release(2)
    assert sockets.read() == sockets.read() == [SSHD]
    assert slow.begun.acquire(blocking=False)
    assert not slow.begun.acquire(blocking=False)


def test_what_cannot_be_read_says_so_each_time(slow: Slow) -> None:
    sockets = RootSockets(slow)
    slow.found = OSError("no room")
    slow.may_end.release(2)
    for _ in range(2):
        with pytest.raises(OSError, match="no room"):
            sockets.read()
    slow.found = [NEW]
    slow.may_end.release()
    assert sockets.read() == [NEW]


def test_sockets_of_others_are_not_among_them(root: None) -> None:
    with Lab() as lab:
        for user, port in ((0, 2022), (65534, 2023)):
            process = lab.gateway.popen(
                sys.executable, "-c", LISTEN, str(user), str(port), stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert process.stdout is not None
            assert process.stdout.readline() == "\n"
        assert lab.gateway.run(sys.executable, "-c", READ).stdout == "2022\n"
