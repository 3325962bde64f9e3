"""What a rate takes to be held by HTB and TBF."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlimit.htb import LONGEST_BURST, MTU, SLOWEST, size_bucket, size_class, size_leaf
from netlimit.tree import LINE

RATES = st.integers(SLOWEST, LINE)
CLOCKS = st.sampled_from([100, 250, 300, 1000])
BURSTS = st.none() | st.integers(1, 2**33)
TICKS = 2**32
"""What tc writes the time of a burst as, in units of 64 ns, must stay below."""


def ticks(burst: int, rate: int) -> int:
    return burst * 10**9 // rate // 64


@given(RATES, RATES, CLOCKS, BURSTS)
def test_a_class_saves_up_a_clock_tick_and_a_packet_and_tc_can_say_it(
    one: int, other: int, hz: int, burst: int | None
) -> None:
    rate, ceil = sorted((one, other))
    made = size_class(7, rate, ceil, hz, burst)
    assert (made.parent, made.rate, made.ceil, made.leaf) == (7, rate, ceil, None)
    for held, each in ((made.burst, rate), (made.cburst, ceil)):
        assert held >= each / hz + MTU
        assert ticks(held, each) < TICKS
        assert held < 2**32
    assert MTU <= made.quantum <= 60_000


@given(RATES, CLOCKS, BURSTS)
def test_so_does_a_bucket(rate: int, hz: int, burst: int | None) -> None:
    bucket = size_bucket(rate, hz, burst)
    assert bucket.burst >= rate / hz + MTU
    assert ticks(bucket.burst, rate) < TICKS
    assert bucket.burst < 2**32
    assert bucket.limit >= 32 * MTU


@given(RATES, CLOCKS, st.integers(1, 2**33))
def test_a_burst_raises_the_bucket_and_never_lowers_it(rate: int, hz: int, burst: int) -> None:
    plain, raised = size_bucket(rate, hz), size_bucket(rate, hz, burst)
    assert raised.burst >= plain.burst
    assert raised._replace(burst=plain.burst) == plain
    if burst <= min(LONGEST_BURST * rate, 2**32 - 1):
        assert raised.burst == max(plain.burst, burst)


@pytest.mark.parametrize(
    ("ceil", "pfifo", "fq_codel"),
    [
        (SLOWEST, 32, 1024),
        (125_000, 32, 1024),
        (1_250_000, 165, 1024),
        (12_500_000, 1651, 1651),
        (LINE, 10_000, 10_000),
    ],
)
def test_a_queue_holds_a_fifth_of_a_second(ceil: int, pfifo: int, fq_codel: int) -> None:
    assert (size_leaf("pfifo", ceil).limit, size_leaf("fq_codel", ceil).limit) == (pfifo, fq_codel)
