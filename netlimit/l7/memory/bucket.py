"""Buckets: GCRA, the token bucket and the leaky bucket, which are one arithmetic in whole numbers.

What a bucket has been given since time began is `now * amount`, where a hit costs `period`; a key's *level* is so much
of it as is used or spilt. It lies between `now * amount - capacity * period` (a full bucket) and `now * amount` (an
empty one). Divided by `amount` it is the theoretical arrival time of the virtual scheduling algorithm (ITU-T I.371,
annex A), less its tolerance; in whole numbers nothing is ever rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd, inf

from netlimit.l7.decision import Crowded, Decision, new
from netlimit.l7.limit import Algorithm, Limit, bound_debt
from netlimit.l7.memory.budget import Budget
from netlimit.l7.memory.counter import SECOND, Clock, Counter
from netlimit.l7.memory.shares import Shares


class Bucket(Counter):
    """A level a key. Of a leaky bucket's requests each waits until those before it have had their time."""

    def __init__(self, limit: Limit, clock: Clock, keys: int, budget: Budget | None = None) -> None:
        super().__init__(limit, clock, keys, budget)
        period = limit.seconds * SECOND
        common = gcd(limit.amount, period)
        self._amount = limit.amount // common
        self._cost = period // common
        self._full = limit.capacity * self._cost
        self._given = (self._amount or 1) * SECOND  # a second
        self._queues = limit.algorithm is Algorithm.LEAKY_BUCKET
        self._levels: dict[str, int] = {}

    def hit(self, key: str, hits: int = 1, slack: int = 0, charge: bool = False, longest: float = inf) -> Decision:
        """Count and answer."""
        self._acquire()
        try:
            supply = self._clock() * self._amount
            level, asked = self._levels.get(key), key
            if level is None:
                if len(self._levels) >= self._room:
                    key = self._admit_key(key)
                level = self._levels.get(key, supply - self._full)
            room = supply - level
            if room > self._full:
                room = self._full
            cost = self._cost if hits == 1 else hits * self._cost
            left = room - cost
            full, given = self._full, self._given
            if left < 0 or not hits or (self._queues and full - room > longest * given):
                answer = self._answer_beyond(key, room, supply, hits, slack, charge, longest)
                return answer if key is asked else Crowded(*answer)
            self._levels[key] = supply - left
            wait = 0.0 if left >= cost else max(0, cost - left - slack * self._cost) / given
            delay = (full - room) / given if self._queues else 0.0
            return new(Decision, (True, left // self._cost, wait, (full - left) / given, delay, False))
        finally:
            self._release()

    def _answer_beyond(
        self, key: str, room: int, supply: int, hits: int, slack: int, charge: bool, longest: float
    ) -> Decision:
        """Peeks, what the bucket itself does not hold, and whose turn comes too late."""
        full, given = self._full, self._given
        lowest = -bound_debt(slack, self.limit.capacity) * self._cost if slack else -full
        if room < lowest:  # a clock since set back has counted it, or more was tolerated then
            room = lowest
            self._levels[key] = supply - room
        cost, tolerated = (hits or 1) * self._cost, slack * self._cost
        late = self._queues and hits > 0 and full - room > longest * given
        admitted = cost <= room + tolerated and not late
        left = room
        if hits and (admitted or charge):
            left = max(room - cost, lowest)
            self._levels[key] = supply - left
        if late:
            self._note_want(key, max(1.0, (full - longest * given) / self._cost))
        elif not admitted and 1 < hits <= self.limit.capacity:
            self._note_want(key, hits)
        lack = cost - left - tolerated
        wait = 0.0
        if lack > 0:
            wait = lack / given if cost <= full + tolerated and self._amount else inf
        if late:
            wait = max(wait, (full - left) / given)
        delay = (full - room) / given if self._queues and admitted and hits else 0.0
        free = left // self._cost if left > 0 and not late else 0
        return new(Decision, (admitted, free, wait, (full - left) / given, delay, admitted and left < 0 < hits))

    def _adopt(self, other: Counter) -> None:
        assert isinstance(other, Bucket)
        now = self._clock()
        supply, given = now * self._amount, now * other._amount
        for key, level in other._levels.items():
            used = level - given + other._full
            if used > 0:  # rounded up: an amount that goes up and down gives no hits anew
                self._levels[key] = supply - self._full - (-used * self._cost // other._cost)

    def _holds(self, key: str) -> bool:
        return key in self._levels

    def __len__(self) -> int:
        return len(self._levels)

    def _list_keys(self) -> Iterable[str]:
        return self._levels

    def _sweep(self, now: int) -> None:
        full = now * self._amount - self._full
        self._levels = {key: level for key, level in self._levels.items() if level > full}

    def _drop_within(self, now: int) -> None:
        supply, cost, wants = now * self._amount, self._cost, self._wants
        nearly = supply - cost
        self._levels = {
            key: level
            for key, level in self._levels.items()
            if level > nearly or (wants and supply - level < wants.get(hash(key), 1) * cost)
        }

    def _cut(self, shares: Shares, room: int) -> Mapping[str, Sequence[str]]:
        return shares.cut(self._levels, room)

    def _merge(self, keys: Sequence[str], crowd: str) -> None:
        levels = [self._levels.pop(key) for key in keys]
        self._levels[crowd] = max(self._levels.get(crowd, levels[0]), *levels)


class IntervalBucket(Counter):
    """A token bucket that gets its whole amount at once, whenever a unit (by the clock, UTC) begins.

    The same arithmetic with units for time: what has been given is `amount` a unit begun, and a hit costs 1.
    """

    def __init__(self, limit: Limit, clock: Clock, keys: int, budget: Budget | None = None) -> None:
        super().__init__(limit, clock, keys, budget)
        self._amount = limit.amount
        self._period = limit.seconds * SECOND
        self._full = limit.capacity
        self._levels: dict[str, int] = {}

    def hit(self, key: str, hits: int = 1, slack: int = 0, charge: bool = False, longest: float = inf) -> Decision:
        """Count and answer."""
        self._acquire()
        try:
            units, into = divmod(self._clock() + self._origin, self._period)
            supply = units * self._amount
            floor = supply - self._full
            before, asked = self._levels.get(key), key
            if before is None:
                if len(self._levels) >= self._room:
                    key = self._admit_key(key)
                before = self._levels.get(key, floor)
            if before < floor:
                before = floor
            most = supply + (bound_debt(slack, self._full) if slack else self._full)
            if before > most:
                self._levels[key] = before = most
            weight = hits or 1
            ceiling = supply + slack
            admitted = before + weight <= ceiling
            level = before
            if hits and (admitted or charge):
                level = min(before + hits, most)
                self._levels[key] = level
            over = level + weight - ceiling
            wait = 0.0 if over <= 0 else inf if weight > self._full + slack else self._until(over, into)
            left = supply - level
            if not admitted and 1 < hits <= self._full:
                self._note_want(key, hits)
            reset = self._until(level - floor, into)
            kind = Decision if key is asked else Crowded
            return new(kind, (admitted, left if left > 0 else 0, wait, reset, 0.0, admitted and left < 0 < hits))
        finally:
            self._release()

    def _until(self, tokens: int, into: int) -> float:
        """Seconds until so many more have been given."""
        if not tokens:
            return 0.0
        if not self._amount:
            return inf
        return (-(-tokens // self._amount) * self._period - into) / SECOND

    def _shift(self, now: int, origin: int) -> None:
        moved = ((now + origin) // self._period - (now + self._origin) // self._period) * self._amount
        super()._shift(now, origin)
        self._levels = {key: level + moved for key, level in self._levels.items()}

    def _adopt(self, other: Counter) -> None:
        assert isinstance(other, IntervalBucket)
        units = (self._clock() + self._origin) // self._period
        moved = units * (self._amount - other._amount) + other._full - self._full
        self._levels = {key: level + moved for key, level in other._levels.items()}

    def _holds(self, key: str) -> bool:
        return key in self._levels

    def __len__(self) -> int:
        return len(self._levels)

    def _list_keys(self) -> Iterable[str]:
        return self._levels

    def _sweep(self, now: int) -> None:
        full = (now + self._origin) // self._period * self._amount - self._full
        self._levels = {key: level for key, level in self._levels.items() if level > full}

    def _drop_within(self, now: int) -> None:
        given = (now + self._origin) // self._period * self._amount
        want = self._wants.get
        self._levels = {key: level for key, level in self._levels.items() if level + want(hash(key), 1) > given}

    def _cut(self, shares: Shares, room: int) -> Mapping[str, Sequence[str]]:
        return shares.cut(self._levels, room)

    def _merge(self, keys: Sequence[str], crowd: str) -> None:
        levels = [self._levels.pop(key) for key in keys]
        self._levels[crowd] = max(self._levels.get(crowd, levels[0]), *levels)
