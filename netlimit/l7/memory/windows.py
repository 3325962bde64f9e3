"""Fixed windows, and the sliding window that two of them make."""

from __future__ import annotations

from collections import Counter as Sizes
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import inf

from netlimit.l7.decision import Crowded, Decision, new
from netlimit.l7.limit import Limit
from netlimit.l7.memory.budget import Budget
from netlimit.l7.memory.counter import SECOND, Clock, Counter
from netlimit.l7.memory.shares import Shares


class FixedWindow(Counter):
    """A count a key and window. Windows begin at multiples of their length since 1970 (UTC)."""

    def __init__(self, limit: Limit, clock: Clock, keys: int, budget: Budget | None = None) -> None:
        super().__init__(limit, clock, keys, budget)
        self._amount = limit.amount
        self._period = limit.seconds * SECOND
        self._start = self._end = 0
        self._counts: dict[str, int] = {}

    def hit(self, key: str, hits: int = 1, slack: int = 0, charge: bool = False, longest: float = inf) -> Decision:
        """Count and answer."""
        self._acquire()
        try:
            now = self._clock()
            if not self._start <= now < self._end:
                self._turn(now)
            counts = self._counts
            count, asked = counts.get(key), key
            if count is None:
                if len(counts) >= self._room:
                    key = self._admit_key(key)
                    counts = self._counts
                count = counts.get(key, 0)
            ceiling = self._amount + slack
            rest = (self._end - now) / SECOND
            after = count + hits
            if after <= ceiling and hits:
                counts[key] = after
                left = self._amount - after
                wait = 0.0 if after + hits <= ceiling else rest
                if left >= 0:
                    return new(Decision, (True, left, wait, rest, 0.0, False))
                return new(Decision, (True, 0, wait, rest, 0.0, True))
            if hits and charge:
                counts[key] = count = after
            left = self._amount - count
            if 1 < hits <= self._amount:
                self._note_want(key, hits)
            fits = count + 1 <= ceiling and not hits
            wait = 0.0 if fits else inf if (hits or 1) > ceiling else rest
            kind = Decision if key is asked else Crowded
            return new(kind, (fits, left if left > 0 else 0, wait, rest if count else 0.0, 0.0, False))
        finally:
            self._release()

    def _turn(self, now: int) -> None:
        self._start = now - (now + self._origin) % self._period
        self._end = self._start + self._period
        self._counts = {}

    def _shift(self, now: int, origin: int) -> None:
        self._sweep(now)
        counts = self._counts
        super()._shift(now, origin)
        self._turn(now)
        self._counts = counts

    def _adopt(self, other: Counter) -> None:
        assert isinstance(other, FixedWindow)
        self._start, self._end, self._counts = other._start, other._end, dict(other._counts)

    def _holds(self, key: str) -> bool:
        return key in self._counts

    def __len__(self) -> int:
        return len(self._counts)

    def _list_keys(self) -> Iterable[str]:
        return self._counts

    def _sweep(self, now: int) -> None:
        if not self._start <= now < self._end:
            self._turn(now)

    def _drop_within(self, now: int) -> None:
        want = self._wants.get
        self._counts = {key: count for key, count in self._counts.items() if count + want(hash(key), 1) > self._amount}

    def _cut(self, shares: Shares, room: int) -> Mapping[str, Sequence[str]]:
        return shares.cut(self._counts, room)

    def _merge(self, keys: Sequence[str], crowd: str) -> None:
        _merge_counts(self._counts, keys, crowd)


class SlidingWindowCounter(Counter):
    """Two fixed windows a key: of the previous one as large a part counts as the sliding window still covers.

    Admitted while floor(current + previous * covered part) + hits <= amount; what is refused is not counted.
    """

    def __init__(self, limit: Limit, clock: Clock, keys: int, budget: Budget | None = None) -> None:
        super().__init__(limit, clock, keys, budget)
        self._amount = limit.amount
        self._period = limit.seconds * SECOND
        self._start = self._end = 0
        self._current: dict[str, int] = {}
        self._previous: dict[str, int] = {}

    def hit(self, key: str, hits: int = 1, slack: int = 0, charge: bool = False, longest: float = inf) -> Decision:
        """Count and answer."""
        self._acquire()
        try:
            now = self._clock()
            if not self._start <= now < self._end:
                self._turn(now)
            current = self._current
            count, asked = current.get(key), key
            if count is None:
                if len(current) + len(self._previous) >= self._room and key not in self._previous:
                    key = self._admit_key(key)
                    current = self._current
                count = current.get(key, 0)
            previous = self._previous.get(key, 0)
            ceiling = self._amount + slack
            used = count + (previous * (self._end - now) // self._period if previous else 0) + hits
            if used <= ceiling and hits:
                current[key] = count = count + hits
                left = self._amount - used
                wait = 0.0 if used + hits <= ceiling else self._wait(count, previous, hits, ceiling, now)
                reset = (self._end - now + self._period) / SECOND
                return new(Decision, (True, left if left > 0 else 0, wait, reset, 0.0, left < 0))
            if hits and charge:
                current[key] = count = count + hits
            else:
                used -= hits
            wait = self._wait(count, previous, hits or 1, ceiling, now)
            reset = (self._end - now + (self._period if count else 0)) / SECOND if count or previous else 0.0
            left = self._amount - used
            if 1 < hits <= self._amount:
                self._note_want(key, hits)
            kind = Decision if key is asked else Crowded
            return new(kind, (not hits and not wait, left if left > 0 else 0, wait, reset, 0.0, False))
        finally:
            self._release()

    def _wait(self, count: int, previous: int, hits: int, ceiling: int, now: int) -> float:
        """Seconds until floor(count + previous * (end - t) / period) + hits <= ceiling."""
        if hits > ceiling:
            return inf
        end = self._end
        if count + hits > ceiling:  # not in this window: in the next one it is the previous that counts
            end, count, previous = end + self._period, 0, count
        room = (ceiling - count - hits + 1) * self._period - 1
        at = end - self._period if previous * self._period <= room else end - room // previous
        return (at - now) / SECOND if at > now else 0.0

    def _turn(self, now: int) -> None:
        start = now - (now + self._origin) % self._period
        self._previous = self._current if start == self._end else {}
        self._current = {}
        self._start, self._end = start, start + self._period

    def _shift(self, now: int, origin: int) -> None:
        self._sweep(now)
        counts = self._current, self._previous
        super()._shift(now, origin)
        self._turn(now)
        self._current, self._previous = counts

    def _adopt(self, other: Counter) -> None:
        assert isinstance(other, SlidingWindowCounter)
        self._start, self._end, self._current, self._previous = (
            other._start, other._end, dict(other._current), dict(other._previous),
        )  # fmt: skip

    def _holds(self, key: str) -> bool:
        return key in self._current or key in self._previous

    def __len__(self) -> int:
        return len(self._current) + len(self._previous)

    def _list_keys(self) -> Iterable[str]:
        return chain(self._current, self._previous)

    def _sweep(self, now: int) -> None:
        if not self._start <= now < self._end:
            self._turn(now)

    def _drop_within(self, now: int) -> None:
        part, want = self._end - now, self._wants.get
        over = {
            key
            for window in (self._current, self._previous)
            for key in window
            if self._current.get(key, 0) + self._previous.get(key, 0) * part // self._period + want(hash(key), 1)
            > self._amount
        }
        self._current = {key: count for key, count in self._current.items() if key in over}
        self._previous = {key: count for key, count in self._previous.items() if key in over}

    def _cut(self, shares: Shares, room: int) -> Mapping[str, Sequence[str]]:
        return shares.cut(Sizes([*self._previous, *self._current]), room, int)

    def _merge(self, keys: Sequence[str], crowd: str) -> None:
        for counts in (self._previous, self._current):
            _merge_counts(counts, keys, crowd)


def _merge_counts(counts: dict[str, int], keys: Sequence[str], crowd: str) -> None:
    most = max([counts.pop(key, 0) for key in keys])
    if most:
        counts[crowd] = max(most, counts.get(crowd, 0))
