"""The TCP connections that are open to some of this host's ports."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

from netlimit.kernel.background import Background
from netlimit.kernel.base import Connection
from netlimit.kernel.sockets import OPEN, Socket, read_sockets

_MOST_STRAY = 4096
"""Connections that no process has of which more are not looked at: any user can have as many as he likes that nobody
accepts."""


class ConnectionReader:
    """Reads those of some users, and some of those that no process has, without a wait. For one thread."""

    def __init__(self) -> None:
        self._readings: dict[tuple[int, frozenset[int]], Background[list[Connection]]] = {}

    def read(self, ports: Iterable[int], owners: Collection[int]) -> list[Connection]:
        """The connections whose near end is one of these ports, or those that there were when it was last looked.
        Raises OSError."""
        return [each for port in ports for each in self._at(port, frozenset(owners)).get()]

    def _at(self, port: int, owners: frozenset[int]) -> Background[list[Connection]]:
        if (port, owners) not in self._readings:
            self._readings[port, owners] = Background(partial(list_connections, port, owners))
        return self._readings[port, owners]


def list_connections(port: int, owners: Collection[int]) -> list[Connection]:
    """Those of one port. Raises OSError."""
    return [_describe(each) for each in read_sockets(OPEN, port, owners, _MOST_STRAY)]


def _describe(found: Socket) -> Connection:
    owner = found.owner if found.inode else None
    return Connection(6 if ":" in found.far else 4, found.far, found.far_port, found.near, found.near_port, owner)
