"""Every algorithm in memory against its definition, on random courses of time."""

from __future__ import annotations

from math import ceil, floor, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlimit.l7.decision import Decision
from netlimit.l7.limit import Algorithm, Limit, Refill
from netlimit.l7.memory.counter import Clock
from netlimit.l7.memory.store import make_counter
from tests.l7.counting import SECOND, moment
from tests.l7.models import Model, make_model

BURSTING = {Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET, Algorithm.GCRA}
BEGIN = moment("1:00:13.7")
BLUR = 4
"""Nanoseconds that a time in seconds may be off, as a float."""


@st.composite
def limits(draw: st.DrawFn, algorithm: Algorithm, refill: Refill) -> Limit:
    burst = draw(st.none() | st.integers(1, 8)) if algorithm in BURSTING else None
    counts = algorithm is not Algorithm.SLIDING_WINDOW_LOG or draw(st.booleans())
    return Limit(draw(st.integers(0, 7)), draw(st.sampled_from([1, 7, 60])), algorithm, burst, refill, counts)


steps = st.tuples(
    st.integers(0, 20).map(lambda part: part * part) | st.just(0),  # of 160 in a unit
    st.sampled_from([-1, 0, 0, 1]),  # and so many nanoseconds
    st.sampled_from([0, 1, 1, 1, 2, 3, 8]),
    st.booleans() | st.just(False),
    st.sampled_from("ab"),
)


@pytest.mark.parametrize(
    ("algorithm", "refill"),
    [*((algorithm, Refill.CONTINUOUS) for algorithm in Algorithm), (Algorithm.TOKEN_BUCKET, Refill.INTERVAL)],
)
@settings(max_examples=40)
@given(st.data())
def test_decisions_are_as_defined(algorithm: Algorithm, refill: Refill, data: st.DataObject) -> None:
    limit = data.draw(limits(algorithm, refill))
    now = BEGIN
    origin = BEGIN - 5 * SECOND  # the clock is a young one
    counter = make_counter(limit, Clock(lambda: now - origin, origin))
    models = {key: make_model(limit) for key in "ab"}
    for part, nanoseconds, hits, charge, key in data.draw(st.lists(steps, max_size=25)):
        now += max(0, part * limit.seconds * SECOND // 160 + nanoseconds)
        model = models[key]
        admitted = model.fits(now, hits or 1)
        delay = float(model.delay(now)) / SECOND if admitted and hits else 0.0
        if hits and (admitted or _counts_refused(limit, charge)):
            model.count(now, hits)
        decision = counter.hit(key, hits, 0, charge)
        assert (decision.admitted, decision.over) == (admitted, False)
        assert decision.delay == pytest.approx(delay, abs=1e-8)
        check_rest(decision, limit, model, now, hits or 1)


def _counts_refused(limit: Limit, charge: bool) -> bool:
    if limit.algorithm is Algorithm.SLIDING_WINDOW_LOG and limit.count_refused:
        return True
    return charge and limit.algorithm is not Algorithm.CONCURRENCY  # whoever is refused holds no lease


def check_rest(decision: Decision, limit: Limit, model: Model, now: int, weight: int) -> None:
    """What a decision says of later is what the model would say then."""
    left = decision.remaining
    assert left == 0 or model.fits(now, left)
    assert not model.fits(now, left + 1)
    if decision.retry_after == inf:
        assert weight > limit.capacity or not limit.amount
    else:
        wait = decision.retry_after * SECOND
        assert model.fits(now + ceil(wait) + BLUR * (wait > 0), weight)
        assert wait == 0 or not model.fits(now + floor(wait) - BLUR, weight)
    if limit.capacity and decision.reset_after != inf:
        assert model.fits(now + ceil(decision.reset_after * SECOND) + BLUR, limit.capacity)
