"""Ends of a pipe, a socket and a terminal that nobody reads, and what was written to them."""

from __future__ import annotations

import os
import pty
import select
import socket
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

CHUNK = 65536
SETTLING = 100
"""Milliseconds in which a terminal that is full makes room once more: the kernel carries on what was written."""


@dataclass
class Outlet:
    """Where something is written to, and where it could be read."""

    write_end: int
    read_end: int

    def fill(self) -> int:
        """Write dots until there is room for nothing; how many."""
        room = select.poll()
        room.register(self.write_end, select.POLLOUT)
        os.set_blocking(self.write_end, False)
        filled = self._write_dots()
        while room.poll(SETTLING):
            filled += self._write_dots()
        os.set_blocking(self.write_end, True)
        return filled

    def _write_dots(self) -> int:
        written = 0
        for size in (CHUNK, 1):  # a pipe may have room for a few when it has none for many
            with suppress(BlockingIOError):
                while True:
                    written += os.write(self.write_end, b"." * size)
        return written

    def read(self) -> bytes:
        """What there is to read now."""
        os.set_blocking(self.read_end, False)
        found = b""
        with suppress(BlockingIOError, OSError):  # EIO: a terminal's other end is closed
            while more := os.read(self.read_end, CHUNK):
                found += more
        return found

    def leave(self) -> None:
        """Nobody can read it any more."""
        if self.read_end >= 0:
            os.close(self.read_end)
        self.read_end = -1


def open_pipe() -> Outlet:
    read_end, write_end = os.pipe()
    return Outlet(write_end, read_end)


def open_socket() -> Outlet:
    """As systemd's journal has it."""
    ours, theirs = socket.socketpair()
    return Outlet(ours.detach(), theirs.detach())


def open_terminal() -> Outlet:
    master, slave = pty.openpty()
    tty.setraw(slave)
    return Outlet(slave, master)


OUTLETS: dict[str, Callable[[], Outlet]] = {"pipe": open_pipe, "socket": open_socket, "terminal": open_terminal}


@contextmanager
def opened(kind: str) -> Iterator[Outlet]:
    """An outlet of this kind, closed in the end."""
    outlet = OUTLETS[kind]()
    try:
        yield outlet
    finally:
        outlet.leave()
        os.close(outlet.write_end)
