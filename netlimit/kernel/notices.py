"""Readings that are good until the kernel says that something has changed (rtnetlink(7), multicast groups)."""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

LINKS, QUEUES = 0x1, 0x8
"""Changes of devices; of qdiscs, classes and filters (linux/rtnetlink.h: RTMGRP_LINK, RTMGRP_TC)."""
LONGEST_TRUST = 30.0
"""Seconds after which everything is read again, told or not."""
_RECEIVE = 1 << 16
T = TypeVar("T")


class Notices:
    """Hears of changes of some kinds (`groups`), from the first question on."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._socket: socket.socket | None = None

    def heard(self) -> bool:
        """Whether the kernel has told of anything since the last question. Raises OSError."""
        if self._socket is None:  # opened late: the socket belongs to a network namespace
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
            weakref.finalize(self, self._socket.close)
            self._socket.setblocking(False)
            self._socket.bind((0, self._groups))
        changed = False
        while True:
            try:
                self._socket.recv(_RECEIVE)
            except BlockingIOError:
                return changed
            except OSError:  # ENOBUFS: there was more than the buffer holds
                pass
            changed = True


class Watched(Generic[T]):
    """What `read` gives, kept until the kernel tells of a change, or half a minute has passed; or until `ask`, for what
    it does not tell by itself, gives something else."""

    def __init__(self, groups: int, read: Callable[[], T], ask: Callable[[], object] = lambda: None) -> None:
        self._notices = Notices(groups)
        self._read = read
        self._ask = ask
        self._asked: object = None
        self._kept: tuple[T] | None = None
        self._until = 0.0

    def get(self) -> T:
        """The same object as before while nothing has changed. Raises what `read` and `ask` do."""
        asked = self._ask()
        has_changed = self._notices.heard() or asked != self._asked
        if has_changed or self._kept is None or time.monotonic() >= self._until:
            self._kept = None  # what cannot be read is not kept
            self._kept, self._asked = (self._read(),), asked
            self._until = time.monotonic() + LONGEST_TRUST
        return self._kept[0]
