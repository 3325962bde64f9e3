"""What a limit is: so many requests in so long, by an algorithm."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from operator import index

from netlimit.errors import LimitError

LARGEST_AMOUNT = 2**32 - 1
"""The most requests that a limit may allow in its unit: the largest `requests_per_unit` of Envoy's protocol."""
BOUNDLESS = 2**62
"""So many hits beyond a limit are any number."""
UNITS = {
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 86_400,
    "week": 604_800,
    "month": 2_592_000,
    "year": 31_536_000,
}
"""Units and their seconds. A month has 30 days and a year 365, as in Envoy's ratelimit: windows of equal length."""
_TEXT = re.compile(r"\s*+(\d{1,10})(?:\s*+/\s*+|\s++per\s++)(\d{1,9}\s*+)?([a-z]+)\s*+", re.IGNORECASE)
_NAMES = {name: seconds for unit, seconds in UNITS.items() for name in (unit, f"{unit}s")}
_NAMES |= {"s": 1, "sec": 1, "secs": 1, "m": 60, "min": 60, "mins": 60, "h": 3600, "d": 86_400}


class Algorithm(StrEnum):
    """How requests are counted."""

    FIXED_WINDOW = "fixed_window"
    """A counter a window; windows begin at multiples of their length since 1970 (UTC)."""
    SLIDING_WINDOW_LOG = "sliding_window_log"
    """The times of the newest requests; exact for every window (now-w, now]."""
    SLIDING_WINDOW_COUNTER = "sliding_window_counter"
    """Two counters; the previous window weighs as much of it as the sliding one still covers."""
    TOKEN_BUCKET = "token_bucket"  # noqa: S105, not a password
    """A bucket of `burst` tokens, filled at the rate; a request takes one for each hit."""
    LEAKY_BUCKET = "leaky_bucket"
    """A queue of `burst` places that lets requests out one at a time, at the rate: they wait for their turn."""
    GCRA = "gcra"
    """The generic cell rate algorithm (ITU-T I.371) with a tolerance for `burst` requests at once."""
    CONCURRENCY = "concurrency"
    """Requests in flight, each with a lease that ends after `seconds` if nobody ends it before."""


_BURSTING = (Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET, Algorithm.GCRA)


class Refill(StrEnum):
    """How a token bucket is filled."""

    CONTINUOUS = "continuous"
    """A token as soon as its part of the unit has passed."""
    INTERVAL = "interval"
    """The whole amount at once, whenever a unit (by the clock, UTC) begins."""


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `amount` requests in `seconds` seconds.

    `burst` is how many a bucket holds, or a queue has waiting, or GCRA lets through at once (default: `amount`); the
    windows have none. `count_refused` is for the log alone: whether refused requests take up room in it too. For
    CONCURRENCY `amount` requests may be in flight, and `seconds` is how long a lease lasts.

    Raises LimitError for values that mean nothing.
    """

    amount: int
    seconds: int
    algorithm: Algorithm = Algorithm.FIXED_WINDOW
    burst: int | None = None
    refill: Refill = Refill.CONTINUOUS
    count_refused: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.amount <= LARGEST_AMOUNT:
            raise LimitError("requests_per_unit", f"{self.amount} is not between 0 and {LARGEST_AMOUNT}.")
        if not 1 <= self.seconds <= 100 * UNITS["year"]:
            raise LimitError("unit", f"{self.seconds} s is not between a second and a hundred years.")
        if self.burst is not None and self.algorithm not in _BURSTING:
            known = ", ".join(_BURSTING)
            raise LimitError("burst", f"{self.algorithm} has no burst; only {known} have one.")
        if self.burst is not None and not 1 <= self.burst <= LARGEST_AMOUNT:
            raise LimitError("burst", f"{self.burst} is not between 1 and {LARGEST_AMOUNT}.")
        if self.refill is not Refill.CONTINUOUS and self.algorithm is not Algorithm.TOKEN_BUCKET:
            raise LimitError("refill", f"{self.algorithm} is not refilled; only token_bucket is.")
        if not self.count_refused and self.algorithm is not Algorithm.SLIDING_WINDOW_LOG:
            raise LimitError("count_refused", f"{self.algorithm} never counts refused requests; the log alone does.")

    @property
    def capacity(self) -> int:
        """The most hits that can be admitted at once."""
        return self.amount if self.burst is None or not self.amount else self.burst

    def __str__(self) -> str:
        if self.algorithm is Algorithm.CONCURRENCY:
            return f"{self.amount} in flight"
        unit = next((name for name, seconds in UNITS.items() if seconds == self.seconds), f"{self.seconds} seconds")
        return f"{self.amount}/{unit}"


def parse_limit(text: str, algorithm: Algorithm = Algorithm.FIXED_WINDOW, burst: int | None = None) -> Limit:
    """Read "100/minute", "5 per 10 minutes", "1000/day". Raises LimitError with what would be accepted."""
    match = _TEXT.fullmatch(text)
    seconds = _NAMES.get(match[3].lower()) if match else None
    if match is None or seconds is None:
        raise LimitError(
            "limit", f'{text!r} is no limit; write for example "100/minute", "5 per 10 minutes" or "1000/day".'
        )
    return Limit(int(match[1]), int(match[2] or 1) * seconds, algorithm, burst)


def widen(limit: Limit, percent: int) -> int:
    """How many hits more than its capacity a limit admits when `percent` over it are tolerated, rounded down."""
    return limit.capacity * percent // 100


def bound_debt(slack: int, capacity: int) -> int:
    """How many hits a bucket owes at most: one more bucket, or as many as are tolerated if that is more.

    Tolerance without end must not become a debt without end: that, too, is one bucket. What holds nothing owes nothing,
    for it never gets anything.
    """
    return max(capacity, slack) if capacity and slack < BOUNDLESS else capacity


def read_weight(hits: object, what: str) -> int:
    """A weight as a number of Python's own, whoever else's it is (numpy's, say). Raises LimitError for what is none: a
    negative one would give back what others have used."""
    try:
        weight = index(hits)  # type: ignore[arg-type]
    except TypeError:
        weight = -1
    if weight < 0:
        raise LimitError("hits", f"{what} weighs {hits}; its weight is a whole number from 0, which only looks.")
    return weight
