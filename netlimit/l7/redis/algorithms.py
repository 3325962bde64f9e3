"""What the scripts are told of a limit, and what their numbers mean.

The arithmetic is that of netlimit.l7.memory, in whole numbers that a double holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, inf
from secrets import token_hex
from typing import Protocol

from netlimit.l7.decision import Decision
from netlimit.l7.limit import BOUNDLESS, Algorithm, Limit, Refill, bound_debt
from netlimit.l7.redis.script import Script, pack, read_script
from netlimit.l7.store import Ask

SECOND = 10**6
"""Microseconds."""
LARGEST = 2**53
"""The scripts reckon in doubles: from here on whole numbers have gaps."""
HEAVIEST = 10_000
"""The heaviest request that a log admits, which has an entry for each hit, and the entries that one batch writes: while
a script does, Redis answers nobody, for some hundredths of a second."""
_MOST = 2**40
"""As many hits at once as anybody means; more are as good as that."""


class Counting(Protocol):
    """A limit as Redis counts it."""

    @property
    def script(self) -> Script:
        """What decides."""
        ...

    def pack(self, ask: Ask) -> bytes:
        """The script's arguments."""
        ...

    def read(self, ask: Ask, reply: Sequence[int], at: int) -> Decision:
        """The decision, from the script's numbers from `at` on."""
        ...


class FixedWindow:
    """A count a window."""

    script = read_script("fixed_window", arguments=5, width=3)

    def __init__(self, limit: Limit) -> None:
        self._amount = limit.amount
        self._packed = pack(limit.seconds)

    def pack(self, ask: Ask) -> bytes:
        """The script's arguments."""
        return self._packed + _pack_hits(self._amount + ask.slack, ask) + pack(ask.window)

    def read(self, ask: Ask, reply: Sequence[int], at: int) -> Decision:
        """The decision."""
        admitted, count = reply[at] == 1, reply[at + 1]
        rest = reply[at + 2] / SECOND
        weight = ask.hits or 1
        ceiling = self._amount + ask.slack
        wait = 0.0 if count + weight <= ceiling else inf if weight > ceiling else rest
        left = self._amount - count
        over = admitted and left < 0 < ask.hits
        return Decision(admitted, max(0, left), wait, rest if count else 0.0, 0.0, over)


class SlidingWindowCounter:
    """Two windows, of the previous one as large a part as the sliding one still covers."""

    script = read_script("sliding_window_counter", arguments=6, width=4)

    def __init__(self, limit: Limit) -> None:
        self._amount = limit.amount
        tick = _find_tick(4 * limit.amount, limit.seconds)
        self._second = SECOND // tick
        self._period = limit.seconds * self._second
        self._packed = pack(limit.seconds, tick)

    def pack(self, ask: Ask) -> bytes:
        """The script's arguments."""
        return self._packed + _pack_hits(self._amount + ask.slack, ask) + pack(ask.window)

    def read(self, ask: Ask, reply: Sequence[int], at: int) -> Decision:
        """The decision."""
        admitted, current, previous, rest = reply[at] == 1, *reply[at + 1 : at + 4]
        left = self._amount - current - previous * rest // self._period
        wait = self._wait(current, previous, ask.hits or 1, self._amount + ask.slack, rest)
        reset = rest + (self._period if current else 0) if current or previous else 0
        over = admitted and left < 0 < ask.hits
        return Decision(admitted, max(0, left), wait, reset / self._second, 0.0, over)

    def _wait(self, current: int, previous: int, hits: int, ceiling: int, rest: int) -> float:
        """Seconds until floor(current + previous * covered part) + hits <= ceiling, `rest` before the window ends."""
        if hits > ceiling:
            return inf
        if current + hits > ceiling:  # not in this window: in the next one it is the previous that counts
            rest, current, previous = rest + self._period, 0, current
        room = (ceiling - current - hits + 1) * self._period - 1
        covered = self._period if previous * self._period <= room else room // previous
        return max(0, rest - covered) / self._second


class SlidingWindowLog:
    """The times of the newest hits."""

    script = read_script("sliding_window_log", arguments=6, width=4, lists=True)

    def __init__(self, limit: Limit) -> None:
        self._amount = limit.amount
        self._count_refused = limit.count_refused
        self._packed = pack(limit.seconds)

    def pack(self, ask: Ask) -> bytes:
        """The script's arguments."""
        charge = ask.charge or self._count_refused
        kept = self._amount + (ask.slack if ask.slack < BOUNDLESS else self._amount)
        return self._packed + _pack_hits(self._amount + ask.slack, ask._replace(charge=charge)) + pack(kept, HEAVIEST)

    def read(self, ask: Ask, reply: Sequence[int], at: int) -> Decision:
        """The decision."""
        decision = _read_entries(self._amount, ask, reply, at)
        return decision if ask.hits <= HEAVIEST else decision._replace(retry_after=inf)


class Bucket:
    """What a full bucket lacks. Of a leaky bucket's requests each waits until those before it have had their time."""

    script = read_script("bucket", arguments=9, width=2)

    def __init__(self, limit: Limit) -> None:
        tick = _find_tick(12 * limit.capacity // gcd(limit.amount, limit.seconds * SECOND), limit.seconds)
        period = limit.seconds * SECOND // tick
        common = gcd(limit.amount, period)
        self._given = limit.amount // common
        self._cost = period // common
        self._capacity = limit.capacity
        self._full = limit.capacity * self._cost
        self._second = (self._given or 1) * (SECOND // tick)
        self._queues = limit.algorithm is Algorithm.LEAKY_BUCKET
        self._packed = pack(tick, self._given, self._cost, self._full)

    def pack(self, ask: Ask) -> bytes:
        """The script's arguments."""
        return self._packed + _pack_hits(ask.slack, ask) + pack(self._find_most(ask), self._find_longest(ask))

    def read(self, ask: Ask, reply: Sequence[int], at: int) -> Decision:
        """The decision."""
        admitted, before = reply[at] == 1, reply[at + 1]
        used = before
        if ask.hits and (admitted or ask.charge):
            used = min(before + ask.hits * self._cost, self._find_most(ask))
        ceiling = self._full + ask.slack * self._cost
        cost = (ask.hits or 1) * self._cost
        over = used + cost - ceiling
        wait = 0.0 if over <= 0 else inf if cost > ceiling or not self._given else self._wait(over)
        late = ask.hits > 0 and before > self._find_longest(ask)
        if late:
            wait = max(wait, self._wait(used))
        return Decision(
            admitted,
            0 if late else max(0, self._full - used) // self._cost,
            wait,
            used / self._second,
            before / self._second if self._queues and admitted and ask.hits else 0.0,
            admitted and used > self._full and ask.hits > 0,
        )

    def _find_most(self, ask: Ask) -> int:
        """So much is used at most."""
        return self._full + bound_debt(ask.slack, self._capacity) * self._cost

    def _find_longest(self, ask: Ask) -> int:
        """So much may be used before a request that waits until it is given back."""
        return int(min(ask.longest * self._second, LARGEST)) if self._queues else LARGEST

    def _wait(self, over: int) -> float:
        """Seconds until so much has been given, in whole ticks: the server's clock knows no parts of them."""
        return -(-over // self._given) * self._given / self._second


class IntervalBucket:
    """What a full bucket lacks, filled when a unit begins."""

    script = read_script("interval_bucket", arguments=7, width=3)

    def __init__(self, limit: Limit) -> None:
        self._amount = limit.amount
        self._full = limit.capacity
        self._period = limit.seconds * SECOND
        self._packed = pack(limit.seconds, limit.amount, limit.capacity)

    def pack(self, ask: Ask) -> bytes:
        """The script's arguments."""
        return self._packed + _pack_hits(ask.slack, ask) + pack(self._find_most(ask))

    def read(self, ask: Ask, reply: Sequence[int], at: int) -> Decision:
        """The decision."""
        admitted, before, rest = reply[at] == 1, reply[at + 1], reply[at + 2]
        used = before
        if ask.hits and (admitted or ask.charge):
            used = min(before + ask.hits, self._find_most(ask))
        weight = ask.hits or 1
        ceiling = self._full + ask.slack
        over = used + weight - ceiling
        wait = 0.0 if over <= 0 else inf if weight > ceiling else self._until(over, rest)
        left = self._full - used
        return Decision(admitted, max(0, left), wait, self._until(used, rest), 0.0, admitted and left < 0 < ask.hits)

    def _find_most(self, ask: Ask) -> int:
        """So many tokens are used at most."""
        return self._full + bound_debt(ask.slack, self._full)

    def _until(self, tokens: int, rest: int) -> float:
        """Seconds until so many more have been given."""
        if not tokens:
            return 0.0
        if not self._amount:
            return inf
        return ((-(-tokens // self._amount) - 1) * self._period + rest) / SECOND


class Leases:
    """Requests in flight."""

    script = read_script("take_lease", arguments=4, width=4)

    def __init__(self, limit: Limit) -> None:
        self._amount = limit.amount
        self._packed = pack(limit.seconds)

    def pack(self, ask: Ask) -> bytes:
        """The script's arguments."""
        lease = (ask.lease or token_hex(8)).encode("utf-8", "surrogatepass")
        return self._packed + pack(min(self._amount + ask.slack, LARGEST), min(ask.hits, _MOST), lease)

    def read(self, ask: Ask, reply: Sequence[int], at: int) -> Decision:
        """The decision."""
        return _read_entries(self._amount, ask, reply, at)


class LeaseMove:
    """The end of a lease (`seconds` 0), or so many more seconds for it, though it may have ended if it is `anew`."""

    script = read_script("move_lease", arguments=4, width=1)

    def __init__(self, seconds: int, anew: bool = False) -> None:
        self._packed = pack(seconds, int(anew))

    def pack(self, ask: Ask) -> bytes:
        """The script's arguments."""
        return self._packed + pack(min(ask.hits, _MOST), ask.lease.encode("utf-8", "surrogatepass"))

    def read(self, ask: Ask, reply: Sequence[int], at: int) -> Decision:
        """Whether it was still there, as a decision that says no more than that."""
        return Decision(reply[at] > 0, 0, 0.0, 0.0)


_COUNTINGS: dict[Algorithm, type[FixedWindow | SlidingWindowCounter | SlidingWindowLog | Bucket | Leases]] = {
    Algorithm.FIXED_WINDOW: FixedWindow,
    Algorithm.SLIDING_WINDOW_LOG: SlidingWindowLog,
    Algorithm.SLIDING_WINDOW_COUNTER: SlidingWindowCounter,
    Algorithm.TOKEN_BUCKET: Bucket,
    Algorithm.LEAKY_BUCKET: Bucket,
    Algorithm.GCRA: Bucket,
    Algorithm.CONCURRENCY: Leases,
}


def make_counting(limit: Limit) -> Counting:
    """How Redis counts for a limit."""
    return IntervalBucket(limit) if limit.refill is Refill.INTERVAL else _COUNTINGS[limit.algorithm](limit)


def _find_tick(hits: int, seconds: int) -> int:
    """The shortest of 1 µs, 10 µs, … 1 s in which hits times the ticks of a period are whole numbers in a double.

    1 µs unless the limit times its seconds is more than seven hundred millions.
    """
    return next((tick for tick in (10**n for n in range(6)) if hits * seconds * SECOND // tick < LARGEST), SECOND)


def _pack_hits(ceiling: int, ask: Ask) -> bytes:
    """What all scripts are told: the ceiling (or what is tolerated), the weight, and whether it counts in any case."""
    return pack(min(ceiling, _MOST), min(ask.hits, _MOST), int(ask.charge))


def _read_entries(amount: int, ask: Ask, reply: Sequence[int], at: int) -> Decision:
    """The decision on what is kept entry by entry."""
    admitted, size = reply[at] == 1, reply[at + 1]
    never = (ask.hits or 1) > amount + ask.slack
    left = amount - size
    wait = inf if never else reply[at + 2] / SECOND
    return Decision(admitted, max(0, left), wait, reply[at + 3] / SECOND, 0.0, admitted and left < 0 < ask.hits)
