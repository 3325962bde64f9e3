"""What all counters in memory have in common: a lock, a clock, and a bound on their keys."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf
from threading import Lock
from typing import NamedTuple

from netlimit.l7.decision import Decision
from netlimit.l7.forks import renew_after_fork
from netlimit.l7.limit import Limit
from netlimit.l7.memory.budget import KEY_BYTES, Budget

SECOND = 10**9
"""Nanoseconds."""
FEW = 1024
"""Below so many keys nothing is swept."""
CROWD = "\0crowd"
"""The key that newcomers share when every key that is kept is over its limit."""


class Clock(NamedTuple):
    """Time in nanoseconds: `read` never jumps, and `read() + origin` is the time since 1970 (UTC)."""

    read: Callable[[], int]
    origin: int


def steady_clock() -> Clock:
    """The time of day as it was at the start, carried on by a clock that nobody sets."""
    return Clock(time.monotonic_ns, time.time_ns() - time.monotonic_ns())


class Counter(ABC):
    """The counters of one limit, by key; every method may be called by any thread.

    It holds at most `keys` of them, and no more than its `budget` has left. Those that no longer make a difference are
    swept whenever their number has doubled. Where that is not enough, keys that are within their limit are forgotten,
    never one that is over it; and when three quarters are over it, newcomers share one counter for a while.
    """

    def __init__(self, limit: Limit, clock: Clock, keys: int, budget: Budget | None = None) -> None:
        self.limit = limit
        self._budget = budget or Budget()
        self._clock = clock.read
        self._origin = clock.origin
        self._keys = keys
        self._room = min(FEW, keys, self._budget.welcome(self) // KEY_BYTES)
        self._crowd = self._crowd_end = 0  # so many newcomers more share a counter, until then
        self.start_anew()
        renew_after_fork(self)

    def start_anew(self) -> None:
        """Make the lock anew (see `netlimit.l7.forks`)."""
        self._lock = Lock()
        # For `hit`: a `with` takes twice as long, since it looks these up each time.
        self._acquire, self._release = self._lock.acquire, self._lock.release

    @abstractmethod
    def hit(self, key: str, hits: int = 1, slack: int = 0, charge: bool = False, longest: float = inf) -> Decision:
        """Count and answer; the arguments are those of `netlimit.l7.store.Ask`."""

    def adopt(self, other: Counter) -> None:
        """Go on from the counts of one whose limit differs in its amount alone."""
        with other._lock:
            self._adopt(other)

    @abstractmethod
    def _adopt(self, other: Counter) -> None: ...

    def set_origin(self, origin: int) -> None:
        """The time of day was set: windows begin by it from now on, and what is counted in one goes on counting."""
        with self._lock:
            self._shift(self._clock(), origin)

    def _shift(self, now: int, origin: int) -> None:
        self._origin = origin

    @abstractmethod
    def __len__(self) -> int:
        """The keys that are held."""

    def sweep(self) -> None:
        """Drop what no longer makes a difference."""
        with self._lock:
            self._sweep(self._clock())

    @abstractmethod
    def _sweep(self, now: int) -> None: ...

    @abstractmethod
    def _drop_within(self, now: int) -> None:
        """Forget the keys that are within their limit."""

    def _admit_key(self, key: str) -> str:
        """Make room for a new key; the key itself, or that of the crowd."""
        now = self._clock()
        if self._crowd and now < self._crowd_end:
            self._crowd -= 1
            return CROWD
        self._sweep(now)
        bound = min(self._keys, self._offer())
        most = bound * 3 // 4  # a sweep costs as much as there are keys: it is to make room for many
        if len(self) > most:
            self._drop_within(now)
        if len(self) > most:
            self._crowd, self._crowd_end = max(1, bound // 4), now + self.limit.seconds * SECOND
            return CROWD
        self._room = max(min(FEW, bound), min(2 * len(self), bound))
        self._hold(self._room)
        return key

    def shrink(self) -> None:
        """Forget the keys that are within their limit, for others need the memory; not if it is in use."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            now = self._clock()
            self._sweep(now)
            self._drop_within(now)
            self._room = max(1, len(self) + len(self) // 4)
            self._hold(self._room)
        finally:
            self._lock.release()

    def _offer(self) -> int:
        """How many keys the budget has room for."""
        return self._budget.offer(self) // KEY_BYTES

    def _hold(self, keys: int) -> None:
        """Take so many keys' memory from the budget."""
        self._budget.hold(self, keys * KEY_BYTES)
