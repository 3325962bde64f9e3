"""What `xt_hashlimit` makes of a rate: the token bucket that the kernel really holds.

The kernel knows no rates, only what one packet costs, in whole numbers: microseconds for packets, 2^32 over the
chunks of 16 bytes a second for bytes. The formulas are those of `net/netfilter/xt_hashlimit.c` (user2credits,
user2credits_byte, hashlimit_byte_cost) and of iptables' `libxt_hashlimit.c` (print_rate, print_bytes).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from netlimit.errors import RuleError
from netlimit.rates import Kind, Rate, format_rate

TOLERANCE = Fraction(1, 100)
"""The largest difference between the rate asked for and the rate held that is accepted."""
TABLE_MAX = 2**20
"""`htable-max` silently ends here, and a full table drops every address that is new to it."""
WIDE = 2**16
"""A target that can have so many buckets is wide: sixteen of them fill a table."""
TABLE_SIZES = (64, 1024, 8192)
"""Slots, of 8 bytes each."""
SLOWEST_HZ = 100
"""The lowest clock tick in use; a burst that suffices here suffices everywhere."""

_MICROSECONDS = {"sec": 10**6, "min": 60 * 10**6, "hour": 3600 * 10**6, "day": 86400 * 10**6}
_U32 = 2**32 - 1
_CHUNK = 16
# Credits a second in byte mode, at 250 and at 1000 ticks a second; other ticks differ by the last digit of the scale.
_CREDITS = 250 * 2**24
_SMALLEST_BYTE_RATE = 1500
_LONGEST_FILL = 86400
_MOST_BURST = 10**6
"""Of packets and connections: iptables writes no larger one (libxt_hashlimit.c, HASHLIMIT_BURST_MAX), and refuses
whatever it is written with."""
_FASTEST_BYTES = 20 * 10**9 // 8


@dataclass(frozen=True, slots=True)
class Bucket:
    """A token bucket as hashlimit holds it.

    `above` sets it, `shown` is how iptables prints it. `burst` is None for bytes, where it is always one second.
    `per_second` is the rate held, in packets, connections or bytes a second; `depth` the burst held, in the same
    unit; `expire_ms` how long an idle bucket must be remembered: longer than it takes to fill.
    """

    above: str
    shown: str
    burst: str | None
    per_second: Fraction
    depth: int
    expire_ms: int


@lru_cache(maxsize=4096)
def fit_bucket(rate: Rate, burst: int | None) -> Bucket:
    """Find the bucket that holds `rate`, at most 1 % off.

    `burst` is in packets, connections or bytes (None: the default). Raises RuleError with the nearest rates that work.
    """
    if rate.kind is Kind.CONCURRENT:
        raise ValueError("concurrent connections are counted, not metered")
    return _fit_bytes(rate, burst) if rate.kind is Kind.BYTES else _fit_count(rate, burst)


def find_table_size(most: int | None) -> int:
    """How many slots a table shall have in which `most` buckets can be (None: that is not known).

    A table of another size is another table, whose buckets are full: sizes are few, so that hosts that come and go
    hardly ever change it.
    """
    if most is None:
        return TABLE_SIZES[-1]
    return next((size for size in TABLE_SIZES if most <= 4 * size), TABLE_SIZES[-1])


def default_burst(rate: Rate) -> int:
    """A tenth of a second of the rate, but at least 5 and never more than the amount in the period, if that is less.

    For bytes it is one second of the rate: the kernel's byte bucket is never smaller.
    """
    if rate.kind is Kind.BYTES:
        return math.ceil(rate.per_second)
    return max(math.ceil(rate.per_second / 10), min(5, rate.amount))


def smallest_burst(rate: Rate) -> int:
    """The bucket refills once a tick: what flows in one tick of the slowest clock must fit in it."""
    return max(1, math.ceil(rate.per_second / SLOWEST_HZ))


def _fit_count(rate: Rate, burst: int | None) -> Bucket:
    if rate.per_second > 10**6:
        raise RuleError("rate", f"The kernel cannot hold {rate.text}: the fastest that works is 1000000 {rate.unit}/s.")
    exact = 10**6 / rate.per_second
    # The shorter period lets slightly more through than was asked for; it comes first, so that nobody gets less
    # than configured unless only the longer one is within the tolerance.
    period = _choose(rate, [math.floor(exact), math.ceil(exact)], lambda p: Fraction(10**6, p))
    depth = default_burst(rate) if burst is None else burst
    if depth < smallest_burst(rate):
        raise RuleError(
            "burst",
            f"A burst of {depth} is too small for {rate.text}: the kernel refills once a clock tick, and the rate "
            f"would be cut without a word. Use at least {smallest_burst(rate)}.",
        )
    fill = Fraction(depth * period, 10**6)
    most = min(max(1, _LONGEST_FILL * 10**6 // period), _MOST_BURST)
    if fill > _LONGEST_FILL:
        raise RuleError(
            "burst",
            f"A burst of {depth} takes more than a day to fill at {rate.text}; the kernel holds at most {most}.",
        )
    if depth > most:
        raise RuleError("burst", f"A burst of {depth} is more than the kernel can be told; use {most} at most.")
    return Bucket(
        above=_write_period(period),
        shown=_show_period(period),
        burst=str(depth),
        per_second=Fraction(10**6, period),
        depth=depth,
        expire_ms=_outlast(fill),
    )


def _fit_bytes(rate: Rate, burst: int | None) -> Bucket:
    if rate.per_second < _SMALLEST_BYTE_RATE:
        raise RuleError(
            "rate",
            f"The kernel cannot police {rate.text}: in bytes it lets at least one packet a second through, and one "
            "may have 1500 bytes. The slowest that works is 12 kbit/s; below, limit packets.",
        )
    if rate.per_second > _FASTEST_BYTES:
        raise RuleError("rate", f"The kernel cannot hold {rate.text}: the fastest that works is about 20 Gbit/s.")
    chunks = rate.per_second / _CHUNK
    faster = math.ceil(chunks)
    slower = _U32 // (_U32 // faster + 1)
    share = _choose(rate, [faster, math.floor(chunks), slower], lambda n: _bytes_per_second(_U32 // n))
    cost = _U32 // share
    if burst is not None and abs(burst / rate.per_second - 1) > TOLERANCE:
        wrong = "small" if burst < rate.per_second else "large"
        raise RuleError(
            "burst",
            f"A burst of {burst} bytes is too {wrong} for {rate.text}: the kernel's byte bucket holds exactly one "
            f"second of the rate, here {math.ceil(rate.per_second)} bytes. Leave the burst out.",
        )
    held = _bytes_per_second(cost)
    assert held is not None
    return Bucket(
        above=f"{(share - 1) * _CHUNK}b/s",
        shown=_show_bytes(cost),
        burst=None,
        per_second=held,
        depth=math.floor(held),
        expire_ms=_outlast(Fraction(1)),
    )


def _choose(rate: Rate, candidates: list[int], held: Callable[[int], Fraction | None]) -> int:
    """The first candidate that is near enough; a refusal names the two nearest rates that work."""
    rates = {c: value for c in candidates if c >= 1 and (value := held(c)) is not None}
    for candidate, value in rates.items():
        if abs(value / rate.per_second - 1) <= TOLERANCE:
            return candidate
    unit, factor = ("bits", 8) if rate.kind is Kind.BYTES else (rate.unit, 1)
    fastest = _FASTEST_BYTES if rate.kind is Kind.BYTES else 10**6
    work = sorted({value for value in rates.values() if value <= fastest})
    nearest = " or ".join(_write_rate(value * factor, unit) for value in work)
    raise RuleError(
        "rate",
        f"The kernel cannot hold {rate.text} within 1 %: it counts in whole numbers. The nearest that work: {nearest}.",
    )


def _write_rate(value: Fraction, unit: str) -> str:
    """A rate that is accepted when it is typed in again."""
    return format_rate(math.floor(value), unit, 1)


def _bytes_per_second(cost: int) -> Fraction | None:
    """What a chunk's cost comes to, after the kernel has scaled it to its credits; None if it comes to nothing."""
    chunk = cost * _CREDITS >> 32
    return Fraction(_CREDITS * _CHUNK, chunk) if chunk else None


def _write_period(period: int) -> str:
    """`amount/unit` which iptables reads back as exactly this many microseconds."""
    for unit, length in _MICROSECONDS.items():
        amount = length // period
        if amount and length // amount == period:
            return f"{amount}/{unit}"
    raise AssertionError(f"no amount a day has a period of {period} microseconds")


def _show_period(period: int) -> str:
    """The rate as iptables prints it: in the longest unit up to which it has still been exact."""
    lengths = list(reversed(_MICROSECONDS.items()))
    shown = lengths[-1]
    for longer, shorter in pairwise(lengths):
        if period > shorter[1] or shorter[1] // period < shorter[1] % period:
            shown = longer
            break
    return f"{shown[1] // period}/{shown[0]}"


def _show_bytes(cost: int) -> str:
    held = (_U32 // cost - 1) * _CHUNK
    for name, size in (("m", 2**20), ("k", 2**10)):
        if held >= size and _U32 // ((held - held % size) // _CHUNK + 1) == cost:
            return f"{held // size}{name}b/s"
    return f"{held}b/s"


def _outlast(fill: Fraction) -> int:
    """Milliseconds for which an idle bucket is kept: one that is forgotten would come back full."""
    return max(10_000, math.ceil(fill * 1000) + 1000)
