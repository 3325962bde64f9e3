"""Retry-After is true: whoever waits as long as he is told gets in, whatever limits there are together."""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from netlimit.l7.headers import Family, make_headers
from netlimit.l7.limit import Algorithm, Limit, Refill
from netlimit.l7.rules import Mode, Rule
from tests.l7.verdicts import Sandbox, make_rule

_BURSTING = (Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET, Algorithm.GCRA)


@st.composite
def limits(draw: st.DrawFn) -> Limit:
    algorithm = draw(st.sampled_from([each for each in Algorithm if each is not Algorithm.CONCURRENCY]))
    amount = draw(st.integers(1, 12))
    seconds = draw(st.sampled_from([1, 3, 60, 3600]))
    burst = draw(st.none() | st.integers(1, 12)) if algorithm in _BURSTING else None
    refill = draw(st.sampled_from(Refill)) if algorithm is Algorithm.TOKEN_BUCKET else Refill.CONTINUOUS
    return Limit(amount, seconds, algorithm, burst, refill, algorithm is not Algorithm.SLIDING_WINDOW_LOG)


@st.composite
def rules(draw: st.DrawFn, name: str) -> Rule:
    mode = draw(st.sampled_from([Mode.HARD, Mode.HARD, Mode.SOFT, Mode.OBSERVE]))
    overshoot = draw(st.integers(1, 100)) if mode is Mode.SOFT else None
    flying = draw(st.none() | st.just(Limit(draw(st.integers(1, 8)), 30, Algorithm.CONCURRENCY)))
    return make_rule(name, draw(limits()), flying, mode=mode, overshoot=overshoot)


STEPS = st.lists(st.tuples(st.sampled_from([0.0, 0.001, 0.3, 1.0, 7.0, 61.0]), st.integers(1, 4)), max_size=40)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4).flatmap(lambda size: st.tuples(*(rules(f"r{number}") for number in range(size)))), STEPS)
def test_a_client_that_waits_that_long_gets_in(together: tuple[Rule, ...], steps: list[tuple[float, int]]) -> None:
    sandbox = Sandbox(*together)
    for wait, hits in steps:
        verdict = sandbox.after(wait).ask(hits)
        if not verdict.allowed and verdict.retry_after < inf:
            assert verdict.retry_after > 0
            told = dict(make_headers(verdict, {Family.RETRY_AFTER}))
            assert sandbox.after(int(told[b"retry-after"])).ask(hits).allowed
            return


@settings(max_examples=60, deadline=None)
@given(st.tuples(rules("r0"), rules("r1")), STEPS, st.floats(0.01, 0.99))
def test_nobody_is_told_to_wait_who_could_have_come_sooner(
    together: tuple[Rule, ...], steps: list[tuple[float, int]], part: float
) -> None:
    sandbox = Sandbox(*together)
    for wait, hits in steps:
        verdict = sandbox.after(wait).ask(hits)
        if not verdict.allowed and 0.001 < verdict.retry_after < inf:  # the clock has whole nanoseconds
            assert not sandbox.after(verdict.retry_after * part).ask(hits).allowed
            return
