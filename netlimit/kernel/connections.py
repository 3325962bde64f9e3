"""The TCP connections that are open to some of this host's ports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from netlimit.kernel.base import Connection
from netlimit.kernel.sockets import OPEN, read_sockets


def read_connections(ports: Iterable[int]) -> Iterator[Connection]:
    """The connections whose near end is one of these ports. Raises OSError."""
    for port in ports:
        for each in read_sockets(OPEN, port):
            owner = each.owner if each.inode else None
            family = 6 if ":" in each.far else 4
            yield Connection(family, each.far, each.far_port, each.near, each.near_port, owner)
