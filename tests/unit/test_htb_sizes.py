"""What a rate takes to be held by HTB."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlimit.htb import LONGEST_BURST, MTU, SLOWEST, size_beside, size_class, size_leaf, size_services
from netlimit.tree import BESIDE, LINE, MANAGEMENT, Leaf, LeafKind

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


@given(RATES, CLOCKS)
def test_what_stands_beside_a_cap_is_sure_of_its_rate_and_small(cap: int, hz: int) -> None:
    made = size_beside(7, cap, hz, "bfifo")
    assert made.keys() == set(BESIDE)
    for each in made.values():
        assert (each.parent, each.ceil) == (7, each.rate)
        assert each.leaf
    assert made[MANAGEMENT].rate >= 125_000
    assert 1000 * sum(each.rate for each in made.values()) <= max(175 * cap, 218_750_000)


@given(RATES, CLOCKS)
def test_what_else_goes_to_who_is_safe_is_sure_of_a_little_of_the_cap_and_may_have_all_of_it(cap: int, hz: int) -> None:
    made = size_services(7, cap, hz, "bfifo")
    assert (made.parent, made.rate, made.ceil) == (7, max(cap // 40, SLOWEST), cap)
    assert made.rate <= cap
    assert made.leaf == size_leaf("bfifo", cap)


@given(RATES, CLOCKS, st.integers(1, 2**33))
def test_a_burst_raises_the_bucket_and_never_lowers_it(rate: int, hz: int, burst: int) -> None:
    plain, raised = size_class(7, rate, rate, hz), size_class(7, rate, rate, hz, burst)
    assert raised.burst >= plain.burst
    assert raised._replace(burst=plain.burst, cburst=plain.cburst) == plain
    if burst <= min(LONGEST_BURST * rate, 2**32 - 1):
        assert raised.burst == max(plain.burst, burst)


@pytest.mark.parametrize(
    ("ceil", "bfifo", "fq_codel"),
    [
        (SLOWEST, 80_000, 1024),
        (125_000, 80_000, 1024),
        (1_250_000, 250_000, 1024),
        (12_500_000, 2_500_000, 1651),
        (LINE, 15_140_000, 10_000),
    ],
)
def test_a_queue_holds_a_fifth_of_a_second(ceil: int, bfifo: int, fq_codel: int) -> None:
    assert (size_leaf("bfifo", ceil).limit, size_leaf("fq_codel", ceil).limit) == (bfifo, fq_codel)


@given(RATES)
def test_a_merged_packet_fits_into_every_queue(ceil: int) -> None:
    """It counts with the headers of all that it will be cut into; one that never fits is lost each time."""
    assert size_leaf("bfifo", ceil).limit >= 2**16 + 2**16 // 536 * (14 + 20 + 32)


@pytest.mark.parametrize(
    ("share", "fifo", "fq_codel"),
    [
        (4_750_000, Leaf("bfifo", 475_000), 1024),
        (296_875, Leaf("bfifo", 296_875), 196),
        (80_000, Leaf("bfifo", 80_000), 52),
        (79_999, Leaf("pfifo", 52), 52),
        (18_554, Leaf("pfifo", 12), 12),
        (1_159, Leaf("pfifo", 2), 2),
        (0, Leaf("pfifo", 2), 2),
    ],
)
def test_who_shares_room_with_many_has_less_of_it(share: int, fifo: Leaf, fq_codel: int) -> None:
    assert size_leaf("bfifo", 19_000_000 // 8, share) == fifo
    assert size_leaf("fq_codel", 19_000_000 // 8, share) == Leaf("fq_codel", fq_codel)


@given(RATES, st.integers(0, 2**35), st.sampled_from(["bfifo", "fq_codel"]))
def test_room_that_is_shared_is_never_more_than_one_would_have_alone(ceil: int, share: int, kind: LeafKind) -> None:
    alone, shared = size_leaf(kind, ceil), size_leaf(kind, ceil, share)
    assert shared.kind == alone.kind or shared.limit * MTU < 80_000, "only what is small is counted in packets"
    if shared.kind == alone.kind:
        assert shared.limit <= alone.limit
    held = shared.limit if shared.kind == "bfifo" else shared.limit * MTU
    assert held <= max(share, 2 * MTU)
