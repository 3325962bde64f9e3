"""The algorithms by their definitions, slow and plain: what the counters are compared with.

A model says whether so many hits fit at a moment, and counts them; whatever else a decision tells follows from that.
Moments are in nanoseconds since 1970.
"""

from __future__ import annotations

from fractions import Fraction
from math import floor
from typing import Protocol

from netlimit.l7.limit import Algorithm, Limit, Refill
from tests.l7.counting import SECOND


class Model(Protocol):
    """One key of one limit."""

    def fits(self, now: int, hits: int) -> bool: ...

    def count(self, now: int, hits: int) -> None: ...

    def delay(self, now: int) -> Fraction:
        """Nanoseconds that a hit waits which comes now."""
        return Fraction(0)


class FixedWindow(Model):
    """All hits, by the number of their window."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.hits: list[int] = []

    def fits(self, now: int, hits: int) -> bool:
        return self._count(self._number(now)) + hits <= self.limit.amount

    def count(self, now: int, hits: int) -> None:
        self.hits += [self._number(now)] * hits

    def _number(self, now: int) -> int:
        return now // (self.limit.seconds * SECOND)

    def _count(self, number: int) -> int:
        return self.hits.count(number)


class SlidingWindowCounter(FixedWindow):
    """The previous window counts as far as it is covered by the one that ends now."""

    def fits(self, now: int, hits: int) -> bool:
        period = self.limit.seconds * SECOND
        covered = 1 - Fraction(now % period, period)
        number = self._number(now)
        return floor(self._count(number) + self._count(number - 1) * covered) + hits <= self.limit.amount


class SlidingWindowLog(Model):
    """All hits, by their time."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.hits: list[int] = []

    def fits(self, now: int, hits: int) -> bool:
        begin = now - self.limit.seconds * SECOND
        return sum(begin < each <= now for each in self.hits) + hits <= self.limit.amount

    def count(self, now: int, hits: int) -> None:
        self.hits += [now] * hits


class LeakyBucket(Model):
    """What is in the bucket runs out at the rate; it owes as much as it holds at most."""

    def __init__(self, limit: Limit) -> None:
        self.rate = Fraction(limit.amount, limit.seconds * SECOND)
        self.capacity = limit.capacity
        self.queues = limit.algorithm is Algorithm.LEAKY_BUCKET
        self.used, self.at = Fraction(0), 0

    def fits(self, now: int, hits: int) -> bool:
        return self._used(now) + hits <= self.capacity

    def count(self, now: int, hits: int) -> None:
        self.used, self.at = min(self._used(now) + hits, Fraction(2 * self.capacity)), now

    def delay(self, now: int) -> Fraction:
        return self._used(now) / self.rate if self.queues else Fraction(0)

    def _used(self, now: int) -> Fraction:
        return max(Fraction(0), self.used - (now - self.at) * self.rate)


class Gcra(Model):
    """The theoretical arrival time; ITU-T I.371, annex A, with weights."""

    def __init__(self, limit: Limit) -> None:
        self.interval = Fraction(limit.seconds * SECOND, limit.amount) if limit.amount else None
        self.burst = limit.capacity
        self.arrival = Fraction(0)

    def fits(self, now: int, hits: int) -> bool:
        if self.interval is None:
            return hits <= 0
        return max(self.arrival, Fraction(now)) + hits * self.interval <= now + self.burst * self.interval

    def count(self, now: int, hits: int) -> None:
        if self.interval is not None:
            latest = now + 2 * self.burst * self.interval
            self.arrival = min(max(self.arrival, Fraction(now)) + hits * self.interval, latest)


class IntervalBucket(Model):
    """Tokens, of which the whole amount comes whenever a unit begins."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.tokens, self.at = limit.capacity, 0

    def fits(self, now: int, hits: int) -> bool:
        return hits <= self._tokens(now)

    def count(self, now: int, hits: int) -> None:
        self.tokens, self.at = max(self._tokens(now) - hits, -self.limit.capacity), now

    def _tokens(self, now: int) -> int:
        period = self.limit.seconds * SECOND
        begun = now // period - self.at // period
        return min(self.limit.capacity, self.tokens + begun * self.limit.amount)


class Leases(SlidingWindowLog):
    """A lease that nobody ends counts for as long as a hit does in the log."""


def make_model(limit: Limit) -> Model:
    """The model of a limit's algorithm."""
    if limit.refill is Refill.INTERVAL:
        return IntervalBucket(limit)
    kinds: dict[Algorithm, type[FixedWindow | SlidingWindowLog | LeakyBucket | Gcra]] = {
        Algorithm.FIXED_WINDOW: FixedWindow,
        Algorithm.SLIDING_WINDOW_COUNTER: SlidingWindowCounter,
        Algorithm.SLIDING_WINDOW_LOG: SlidingWindowLog,
        Algorithm.TOKEN_BUCKET: LeakyBucket,
        Algorithm.LEAKY_BUCKET: LeakyBucket,
        Algorithm.GCRA: Gcra,
        Algorithm.CONCURRENCY: Leases,
    }
    return kinds[limit.algorithm](limit)
