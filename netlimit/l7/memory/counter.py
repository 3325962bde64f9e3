"""What all counters in memory have in common: a lock, a clock, and a bound on their keys."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from threading import Lock
from typing import NamedTuple

from netlimit.l7.decision import Decision
from netlimit.l7.forks import renew_after_fork
from netlimit.l7.limit import Limit
from netlimit.l7.memory.budget import KEY_BYTES, Budget
from netlimit.l7.memory.shares import Shares

SECOND = 10**9
"""Nanoseconds."""
_DOUBT_SECONDS = 10
"""Whether those who have more than their share are to be held to it is found out no more often: it is a sweep."""
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
    swept whenever their number has doubled. Where that is not enough, networks that have more than their share (see
    `netlimit.l7.memory.shares`) keep that, and what their clients have and bring beyond it is counted together for a
    while. Where that is not enough either, keys that are within their limit are forgotten, never one that is over it;
    and when three quarters are over it, newcomers share one counter for a while.
    """

    def __init__(self, limit: Limit, clock: Clock, keys: int, budget: Budget | None = None) -> None:
        self.limit = limit
        self._budget = budget or Budget()
        self._clock = clock.read
        self._origin = clock.origin
        self._keys = keys
        self.shares: Shares | None = None
        """What networks have of its room, where keys tell a client and something besides."""
        self.forgets = True
        """Whether keys that are within their limit make room for others; if not, newcomers share one counter."""
        self._shares_end = 0  # who has more than his share is held to it until then at least
        self._few = self._room = self._due = min(FEW, keys, self._budget.welcome(self) // KEY_BYTES)
        self._crowd = self._crowd_end = 0  # so many newcomers more share a counter, until then
        self._wants: dict[int, float] = {}  # see `_note_want`; by the hashes of keys, which take less
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
            self.shares, self._shares_end = other.shares, other._shares_end
            self._wants = dict(other._wants)
            if self.shares is not None and self.shares.any_greedy:
                self._room = 0

    @abstractmethod
    def _adopt(self, other: Counter) -> None: ...

    def set_origin(self, origin: int) -> None:
        """The time of day was set: windows begin by it from now on, and what is counted in one goes on counting."""
        with self._lock:
            self._shift(self._clock(), origin)

    def _shift(self, now: int, origin: int) -> None:
        self._origin = origin

    def has_place(self, key: str) -> bool:
        """Whether a key is counted by itself, or would be now: what is said of another is said of a crowd."""
        return self.find_place(key) == key

    def find_place(self, key: str) -> str:
        """The key by which a key would be counted now: itself, or that of a crowd."""
        with self._lock:
            return self._find_place(key)

    def holds(self, key: str) -> bool:
        """Whether something is counted by a key."""
        with self._lock:
            return self._holds(key)

    def _find_place(self, key: str) -> str:
        return key if self._holds(key) or len(self) < self._room else self._admit_key(key)

    @abstractmethod
    def _holds(self, key: str) -> bool: ...

    @abstractmethod
    def __len__(self) -> int:
        """The keys that are held."""

    def sweep(self) -> None:
        """Drop what no longer makes a difference."""
        with self._lock:
            self._sweep(self._clock())

    @abstractmethod
    def _sweep(self, now: int) -> None: ...

    def _note_want(self, key: str, hits: float) -> None:
        """So many hits must be free for a key for what was refused to it to be admitted: until they are, it is not
        within its limit. Where that is one hit, nothing needs to be noted."""
        if len(self._wants) > len(self) * 5 // 4 + self._few:
            held = {hash(each) for each in self._list_keys()}
            self._wants = {each: want for each, want in self._wants.items() if each in held}
        self._wants[hash(key)] = hits

    @abstractmethod
    def _list_keys(self) -> Iterable[str]:
        """The keys that are held; one may be there twice."""

    @abstractmethod
    def _drop_within(self, now: int) -> None:
        """Forget the keys that are within their limit: for which as many hits are free as they want."""

    @abstractmethod
    def _cut(self, shares: Shares, room: int) -> Mapping[str, Sequence[str]]:
        """Have networks held to their shares of so many keys; the keys to merge, by their crowd."""

    @abstractmethod
    def _merge(self, keys: Sequence[str], crowd: str) -> None:
        """Forget keys, and count for that of their crowd as much as for the one that has used most."""

    def _admit_key(self, key: str) -> str:
        """Make room for a new key; the key itself, or that of a crowd."""
        now = self._clock()
        if self.shares is not None and self.shares.any_greedy:
            if now >= self._shares_end:
                self._sweep(now)
                self._doubt_shares(now)
                self._set_room(self._due)
            if (crowd := self.shares.find_crowd(key)) is not None:
                return crowd
            if len(self) < self._due:
                return key
        if self._crowd and now < self._crowd_end:
            self._crowd -= 1
            return CROWD
        self._sweep(now)
        bound = min(self._keys, self._offer())
        most = bound * 3 // 4  # a sweep costs as much as there are keys: it is to make room for many
        if len(self) > most:
            self._cut_shares(now, bound // 2)
        if len(self) > most and self.forgets:
            self._drop_within(now)
        crowd = self.shares.find_crowd(key) if self.shares is not None else None
        if len(self) > most:
            # A sweep takes as long as there are keys, also where the budget leaves less than these.
            self._crowd, self._crowd_end = max(1, bound // 4, len(self) // 4), now + self.limit.seconds * SECOND
            return crowd or CROWD
        if crowd is None and self.shares is not None and len(self) >= bound // 2:
            crowd = self._watch_shares(now, key, bound)
        self._set_room(max(min(self._few, bound), min(2 * len(self), bound)))
        return crowd or key

    def _watch_shares(self, now: int, key: str, room: int) -> str | None:
        """While half the room is free, see to it that nobody takes that, too, who has taken most of the other: to count
        together what is there already takes long, and nobody is answered meanwhile. The crowd of the key, if it is
        his."""
        assert self.shares is not None
        if not self.shares.watch(self._list_keys(), len(self), room):
            return None
        self._shares_end = now + max(self.limit.seconds, _DOUBT_SECONDS) * SECOND
        return self.shares.find_crowd(key)

    def _cut_shares(self, now: int, room: int) -> None:
        """Hold networks to their shares of the room for as long as what is counted together makes a difference."""
        if self.shares is not None:
            self._doubt_shares(now)
            self._merge_all(self._cut(self.shares, room))

    def _doubt_shares(self, now: int) -> None:
        """Those are held no longer of whom a sweep has left nothing that is counted together."""
        if self.shares is not None:
            self.shares.forget(self._holds)
            self._shares_end = now + max(self.limit.seconds, _DOUBT_SECONDS) * SECOND

    def _merge_all(self, excess: Mapping[str, Sequence[str]]) -> None:
        for crowd, keys in excess.items():
            self._merge(keys, crowd)
            wants = [self._wants.pop(each) for each in map(hash, keys) if each in self._wants] if self._wants else []
            if wants:
                self._note_want(crowd, max(wants))

    def _set_room(self, keys: int) -> None:
        """So many keys may come before they are looked at again; where some are held to their share, each new one is
        looked at."""
        self._due = keys
        self._room = 0 if self.shares is not None and self.shares.any_greedy else keys
        self._hold(keys)

    def shrink(self) -> None:
        """Forget what those have who have more than their share, or else the keys that are within their limit, for
        others need the memory; not if it is in use."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            now = self._clock()
            self._sweep(now)
            size = len(self)
            self._cut_shares(now, size // 2)
            if len(self) > size * 3 // 4:
                self._drop_within(now)
            self._set_room(min(self._due, max(1, len(self) + len(self) // 4)))
        finally:
            self._lock.release()

    def _offer(self) -> int:
        """How many keys the budget has room for."""
        return self._budget.offer(self) // KEY_BYTES

    def _hold(self, keys: int) -> None:
        """Take so many keys' memory from the budget."""
        self._budget.hold(self, keys * KEY_BYTES)
