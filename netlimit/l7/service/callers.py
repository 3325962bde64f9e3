"""Connections over gRPC: where there are many, those go that ask nothing, so that whoever asks comes in.

gRPC itself refuses who comes last, and tells nobody which connections there are. So they are looked for among the open
files of this process, and are shut, as if the other end had gone: it is gRPC that closes them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from typing import NamedTuple

PATIENCE = 1.0
"""So many seconds after it was made a connection counts as one that has asked: it is about to."""
_LOOK_SECONDS = 0.05
_REST = 4
"""Looking at connections takes so small a part of the time at most."""
_TOLD_SECONDS = 60.0
_INFO_BYTES = 56
"""The beginning of `struct tcp_info`: the last four bytes are `tcpi_last_data_recv`."""

log = logging.getLogger(__name__)


class _Asked(NamedTuple):
    """That a peer has asked: whether he has shown the token, and when it was."""

    known: bool
    when: float


class _Seen(NamedTuple):
    """An open file: what tells it from a later one of the same number, and of a connection who the peer is, as gRPC
    names him, and since when it says nothing."""

    inode: int
    peer: str | None
    since: float


class Callers:
    """Who is connected, and who asks. Three quarters of the places are for all, the others for those who come while it
    is found out who has to go. For one event loop."""

    def __init__(self, most: int) -> None:
        """`most` are there before gRPC refuses some."""
        self._most = most
        self._many = most * 3 // 4
        self._asked: dict[str, _Asked] = {}
        self._seen: dict[int, _Seen] = {}
        self._crowded = float("-inf")

    @property
    def troubles(self) -> list[str]:
        """A sentence, where connections have gone for others in the last minute."""
        if time.monotonic() - self._crowded > _TOLD_SECONDS:
            return []
        return [
            f"More than {self._many} connections are open over gRPC, and those that ask nothing are closed: let nobody "
            f"reach NETLIMIT_LIMITER_GRPC_LISTEN but proxies and applications of yours."
        ]

    def note(self, peer: str, known: bool) -> None:
        """A peer asks; whether he shows the token."""
        before = self._asked.pop(peer, None)
        self._asked[peer] = _Asked(known or (before is not None and before.known), time.monotonic())
        if len(self._asked) > 2 * self._most:
            del self._asked[next(iter(self._asked))]

    async def watch(self, port: int) -> None:
        """Have some go whenever there are many at this port, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if _count_files() <= self._many:
                continue
            began = time.monotonic()
            try:
                gone = await asyncio.to_thread(self._make_room, port)
            except OSError as error:  # there is no file left to look with
                log.warning("Connections over gRPC could not be looked at: %s.", error.strerror)
                gone = 0
            if gone:
                self._tell()
            await asyncio.sleep(_REST * (time.monotonic() - began) if gone else 1)

    def _tell(self) -> None:
        news, self._crowded = not self.troubles, time.monotonic()
        if news:
            log.warning("%s", self.troubles[0])

    def _make_room(self, port: int) -> int:
        """Shut those that have said nothing for longest; how many."""
        connections = self._find(port)
        excess = len(connections) - self._many
        if excess <= 0:
            return 0
        connections.sort(key=self._rank)
        return sum(_shut(number, seen.peer, port) for number, seen in connections[: excess + self._many // 16])

    def _rank(self, connection: tuple[int, _Seen]) -> tuple[bool, bool, float]:
        _, seen = connection
        asked = self._asked.get(seen.peer or "")
        if asked is not None:
            return asked.known, True, asked.when
        return False, time.monotonic() - seen.since < PATIENCE, seen.since

    def _find(self, port: int) -> list[tuple[int, _Seen]]:
        """The connections at this port, by the numbers of their files."""
        seen = dict[int, _Seen]()
        for number in map(int, os.listdir("/proc/self/fd")):
            try:
                inode = os.fstat(number).st_ino
            except OSError:
                continue
            before = self._seen.get(number)
            seen[number] = before if before is not None and before.inode == inode else _look(number, inode, port)
        self._seen = seen
        return [(number, each) for number, each in seen.items() if each.peer is not None]


def _count_files() -> int:
    """How many files this process has open, or somewhat more."""
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))  # Linux before 6.2 says 0


def _look(number: int, inode: int, port: int) -> _Seen:
    peer, silent = None, 0.0
    try:
        looked = socket.socket(fileno=number)
    except OSError:  # no socket
        return _Seen(inode, None, 0.0)
    try:
        peer = _name_peer(looked, port)
        if peer is not None:
            told = looked.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            silent = int.from_bytes(told[-4:], sys.byteorder) / 1000
    except OSError:
        pass
    finally:
        looked.detach()  # it is gRPC's
    return _Seen(inode, peer, time.monotonic() - silent)


def _name_peer(looked: socket.socket, port: int) -> str | None:
    """The peer of a connection at this port, as gRPC names him; None for all else. Raises OSError."""
    if looked.family not in (socket.AF_INET, socket.AF_INET6) or looked.getsockname()[1] != port:
        return None
    host, number = looked.getpeername()[:2]
    host = host.removeprefix("::ffff:")
    return f"ipv6:%5B{host}%5D:{number}" if ":" in host else f"ipv4:{host}:{number}"


def _shut(number: int, peer: str | None, port: int) -> bool:
    """Shut a connection if it still is the one that it was; whether it was."""
    try:
        shut = socket.socket(fileno=number)
    except OSError:
        return False
    try:
        if _name_peer(shut, port) != peer:
            return False
        shut.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    finally:
        shut.detach()
    return True
