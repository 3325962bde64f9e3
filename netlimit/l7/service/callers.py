"""Connections over gRPC: where there are many, those go that ask nothing, so that whoever asks comes in.

gRPC itself refuses who comes last, and tells nobody which connections there are. So they are looked for among the open
files of this process, and are shut, as if the other end had gone: it is gRPC that closes them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

PATIENCE = 1.0
"""So many seconds after it was made a connection counts as one that has asked: it is about to."""
_LOOK_SECONDS = 0.05
_REST = 4
"""Looking at connections takes so small a part of the time at most."""
_TOLD_SECONDS = 60.0
_INFO_BYTES = 56
"""The beginning of `struct tcp_info`: the last four bytes are `tcpi_last_data_recv`."""
_CREDENTIALS = struct.Struct("3i")
"""`struct ucred` (unix(7))."""
_CROWD = 64
"""A process that has fewer connections is like one that has a single one: else who has one in each of many processes
drove out who has two."""

log = logging.getLogger(__name__)


class _Asked(NamedTuple):
    """That a peer has asked: whether he has shown the token, and when it was."""

    known: bool
    when: float


class _Seen(NamedTuple):
    """An open file: what tells it from a later one of the same number, and of a connection who the peer is, as gRPC
    names him, and since when it says nothing. Of one to a Unix socket it is the process that has made it, and when it
    was seen first: there gRPC gives all the same name, and the kernel tells no time."""

    inode: int
    peer: str | None
    since: float


_Connection = tuple[int, _Seen]


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

    async def watch(self, place: int | str) -> None:
        """Have some go whenever there are many at this port, or at the Unix socket of this path, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if _count_files() <= self._many:
                continue
            began = time.monotonic()
            try:
                gone = await asyncio.to_thread(self._make_room, place)
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

    def _make_room(self, place: int | str) -> int:
        """Shut those that have said nothing for longest, of a Unix socket those of who has most; how many."""
        connections = self._find(place)
        excess = len(connections) - self._many
        if excess <= 0:
            return 0
        connections.sort(key=self._rank if isinstance(place, int) else _rank_by_crowd(connections))
        return sum(_shut(number, seen.peer, place) for number, seen in connections[: excess + self._many // 16])

    def _rank(self, connection: _Connection) -> tuple[float, ...]:
        _, seen = connection
        asked = self._asked.get(seen.peer or "")
        if asked is not None:
            return asked.known, True, asked.when
        return False, time.monotonic() - seen.since < PATIENCE, seen.since

    def _find(self, place: int | str) -> list[_Connection]:
        """The connections at this place, by the numbers of their files."""
        seen = dict[int, _Seen]()
        for number in map(int, os.listdir("/proc/self/fd")):
            try:
                inode = os.fstat(number).st_ino
            except OSError:
                continue
            before = self._seen.get(number)
            seen[number] = before if before is not None and before.inode == inode else _look(number, inode, place)
        self._seen = seen
        return [(number, each) for number, each in seen.items() if each.peer is not None]


def _count_files() -> int:
    """How many files this process has open, or somewhat more."""
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))  # Linux before 6.2 says 0


def _rank_by_crowd(connections: list[_Connection]) -> Callable[[_Connection], tuple[float, ...]]:
    """First those of processes that have many, then those that were there first: who comes gets in."""
    crowds = Counter(seen.peer for _, seen in connections)
    return lambda each: (-(crowds[each[1].peer] // _CROWD), each[1].since)


def _look(number: int, inode: int, place: int | str) -> _Seen:
    peer, silent = None, 0.0
    try:
        looked = socket.socket(fileno=number)
    except OSError:  # no socket
        return _Seen(inode, None, 0.0)
    try:
        peer = _name_peer(looked, place)
        if peer is not None and looked.family != socket.AF_UNIX:
            told = looked.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            silent = int.from_bytes(told[-4:], sys.byteorder) / 1000
    except OSError:
        pass
    finally:
        looked.detach()  # it is gRPC's
    return _Seen(inode, peer, time.monotonic() - silent)


def _name_peer(looked: socket.socket, place: int | str) -> str | None:
    """The peer of a connection at this place, as gRPC names him, of a Unix socket his process; None for all else.
    Raises OSError."""
    if isinstance(place, str):
        return _name_process(looked, place)
    if looked.family not in (socket.AF_INET, socket.AF_INET6) or looked.getsockname()[1] != place:
        return None
    host, number = looked.getpeername()[:2]
    host = host.removeprefix("::ffff:")
    return f"ipv6:%5B{host}%5D:{number}" if ":" in host else f"ipv4:{host}:{number}"


def _name_process(looked: socket.socket, path: str) -> str | None:
    """The process at the other end of a connection; not its user, who has no number here where the unit has
    PrivateUsers."""
    if looked.family != socket.AF_UNIX or looked.getsockname() != path:
        return None
    looked.getpeername()  # an error of what listens
    process, _, _ = _CREDENTIALS.unpack(looked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return f"process {process}"


def _shut(number: int, peer: str | None, place: int | str) -> bool:
    """Shut a connection if it still is the one that it was; whether it was."""
    try:
        shut = socket.socket(fileno=number)
    except OSError:
        return False
    try:
        if _name_peer(shut, place) != peer:
            return False
        shut.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    finally:
        shut.detach()
    return True
