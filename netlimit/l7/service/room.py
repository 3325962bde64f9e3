"""Room for connections over HTTP: how many there are, how long each may keep others waiting, and who goes for whom."""

from __future__ import annotations

import resource
from typing import Protocol

MOST = 8192
"""Connections at once, where as many files may be open."""
BACKLOG = 4096
"""So many wait to be let in; who comes to a Unix socket then is told at once that he cannot."""
HEAD_SECONDS = 10
"""The head of a request is complete so long after its first byte, however it drips."""
BODY_SECONDS = 12
"""And its body so long after that: who reads it gives up at 10 s, and says so."""
IDLE_SECONDS = 75
"""How long a connection may be idle: longer than proxies keep theirs (60 s in nginx), so that they close them first."""
TAKE_SECONDS = 30
"""How long answers may lie here that the other end does not take."""
TICK_SECONDS = 0.1
"""How often the room hears how late it is, unless the event loop is kept from it."""
_SPARED_FILES = 256
_SHARE = 16
"""Where there is no room this share of all is made free: finding the oldest takes milliseconds."""


class Guest(Protocol):
    """A connection."""

    @property
    def began(self) -> int | None:
        """Since when it has been waited for, in seconds of the room; None while it is being answered."""
        ...

    @property
    def half_sent(self) -> bool:
        """Whether it has sent a part of a request."""
        ...

    def look(self, now: int) -> None:
        """Go if it is time to."""
        ...

    def drop(self) -> None:
        """Go at once."""
        ...


class Room:
    """The connections that are open. For one event loop, which says how time passes.

    Where there are too many, those go that have been waited for longest, requests that are half sent first: so neither
    they nor connections that say nothing keep a proxy from being answered. One that is being answered stays.
    """

    def __init__(self, most: int = MOST) -> None:
        self.now = 0
        """The second: a clock that costs nothing to read."""
        self._most = most
        self._inside: dict[Guest, None] = {}
        self._passed = self._late = 0.0

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, guest: Guest) -> None:
        """Let a connection in. Others may go for it, or itself, if all are being answered."""
        self._inside[guest] = None
        if len(self._inside) > self._most:
            self._make_room()

    def leave(self, guest: Guest) -> None:
        """A connection has ended. One that has left already is no error."""
        self._inside.pop(guest, None)

    def pass_time(self, now: float) -> None:
        """So late it is by a clock that never jumps (`time.monotonic`), ten times a second: once a second those go
        whose time is over."""
        self._late = self._find_delay(now)
        self._passed = now
        if int(now) <= self.now:
            return
        self.now = int(now)
        for guest in list(self._inside):
            guest.look(self.now)

    def find_arrival(self, now: float) -> float:
        """When something that is read now may have come to this host at the earliest: it has lain as long as the event
        loop was kept from it, about which a tenth of a second is not known."""
        return now - max(self._late, self._find_delay(now))

    def _find_delay(self, now: float) -> float:
        """How late the room hears how late it is."""
        return max(now - self._passed - TICK_SECONDS, 0.0) if self._passed else 0.0

    def _make_room(self) -> None:
        waiting = [(not (each.half_sent and began < self.now), began, each) for each in self._inside
                   if (began := each.began) is not None]  # fmt: skip
        waiting.sort(key=lambda each: each[:2])  # of equals, who came first goes first
        for _, _, guest in waiting[: max(1, self._most // _SHARE)]:
            self.leave(guest)
            guest.drop()
        if len(self._inside) > self._most:
            guest = next(reversed(self._inside))
            self.leave(guest)
            guest.drop()


def find_most() -> int:
    """How many connections there may be: half of the files that may be open are left to gRPC and to what is behind."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(_SPARED_FILES // 4, min(MOST, (soft - _SPARED_FILES) // 2))
