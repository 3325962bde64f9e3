"""What hashlimit makes of a rate. That iptables agrees is proved in tests/kernel."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlimit.errors import RuleError
from netlimit.hashlimit import SLOWEST_HZ, TOLERANCE, default_burst, fit_bucket, smallest_burst
from netlimit.rates import parse_rate


@pytest.mark.parametrize(
    ("text", "above", "shown", "burst", "per_second"),
    [
        ("200 packets/s", "200/sec", "200/sec", "20", Fraction(200)),
        ("10000 packets/s", "10000/sec", "10000/sec", "1000", Fraction(10000)),
        ("7777 packets/s", "7812/sec", "7812/sec", "778", Fraction(15625, 2)),
        ("300 packets/s", "300/sec", "300/sec", "30", Fraction(10**6, 3333)),
        ("10 connections/min", "10/min", "10/min", "5", Fraction(1, 6)),
        ("30 packets/min", "30/min", "30/min", "5", Fraction(1, 2)),
        ("1 packets/day", "1/day", "1/day", "1", Fraction(1, 86400)),
        ("20 Mbit/s", "2499984b/s", "2500048b/s", None, Fraction(33554432000, 13421)),
        ("5 MB/s", "4999984b/s", "4883kb/s", None, Fraction(3355443200, 671)),
        ("12 kbit/s", "1488b/s", "1488b/s", None, Fraction(33554432000, 22310127)),
    ],
)
def test_known_buckets(text: str, above: str, shown: str, burst: str | None, per_second: Fraction) -> None:
    bucket = fit_bucket(parse_rate(text), None)
    assert (bucket.above, bucket.shown, bucket.burst, bucket.per_second) == (above, shown, burst, per_second)


@given(st.integers(1, 10**6), st.sampled_from(["s", "min", "h", "day"]))
def test_counts_are_held_within_the_tolerance_or_refused(amount: int, period: str) -> None:
    rate = parse_rate(f"{amount} packets/{period}")
    try:
        bucket = fit_bucket(rate, None)
    except RuleError as error:
        sentence = str(error)
        assert "within 1 %" in sentence or "the fastest that works" in sentence
        return
    assert abs(bucket.per_second / rate.per_second - 1) <= TOLERANCE
    assert bucket.depth == default_burst(rate) >= smallest_burst(rate)
    fill = bucket.depth / bucket.per_second
    assert bucket.expire_ms >= 1000 * fill + 1000, "a bucket that is forgotten before it is full comes back full"


@given(st.integers(1500, 2 * 10**9))
def test_bytes_are_held_within_the_tolerance_with_a_burst_of_one_second(amount: int) -> None:
    rate = parse_rate(f"{amount} B/s")
    try:
        bucket = fit_bucket(rate, None)
    except RuleError as error:
        sentence = str(error)
        assert "within 1 %" in sentence
        return
    assert abs(bucket.per_second / rate.per_second - 1) <= TOLERANCE
    assert bucket.burst is None
    assert bucket.depth == int(bucket.per_second)


HELD = st.integers(101, 10**4) | st.integers(1, 99).map(lambda period: 10**6 // period)
"""Packets a second that can be held: the time for one is at least 100 microseconds, or next to a whole number."""


@given(HELD, st.floats(0, 1, exclude_max=True))
def test_a_burst_below_what_flows_in_one_tick_is_refused(amount: int, part: float) -> None:
    rate = parse_rate(f"{amount} packets/s")
    enough = smallest_burst(rate)
    assert enough - 1 < amount / SLOWEST_HZ <= enough
    with pytest.raises(RuleError, match="too small") as error:
        fit_bucket(rate, 1 + int((enough - 1) * part))
    assert f"Use at least {enough}" in str(error.value)
    assert fit_bucket(rate, enough).depth == enough


def test_the_largest_burst_that_is_proposed_works() -> None:
    rate = parse_rate("1 packets/min")
    with pytest.raises(RuleError, match="the kernel holds at most 1440"):
        fit_bucket(rate, 1441)
    assert fit_bucket(rate, 1440).burst == "1440"


def test_concurrent_connections_have_no_bucket() -> None:
    with pytest.raises(ValueError, match="counted, not metered"):
        fit_bucket(parse_rate("5 connections"), None)
