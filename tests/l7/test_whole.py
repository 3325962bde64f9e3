"""Requests that all of their limits count, or none: what a look foretells, and what a refused one leaves as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import inf
from random import Random

import pytest

from netlimit.l7.counters import open_counters
from netlimit.l7.escalation import Refusals
from netlimit.l7.limit import Algorithm, Limit, Refill
from netlimit.l7.limiter import Limiter, Verdict
from netlimit.l7.memory.shares import find_shares
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import Descriptor, Entry, Node, OnLimit, Rule, RuleSet
from netlimit.l7.store import Ask, Store
from netlimit.l7.whole import make_arrival, make_look, weigh
from tests.l7.waking import Waking

pytestmark = pytest.mark.anyio
DAY = 86_400
LIMITS = [
    Limit(7, DAY),
    Limit(7, DAY, Algorithm.SLIDING_WINDOW_LOG),
    Limit(7, DAY, Algorithm.SLIDING_WINDOW_LOG, count_refused=False),
    Limit(7, DAY, Algorithm.SLIDING_WINDOW_COUNTER),
    Limit(7, DAY, Algorithm.TOKEN_BUCKET, burst=5),
    Limit(7, DAY, Algorithm.TOKEN_BUCKET, refill=Refill.INTERVAL),
    Limit(7, DAY, Algorithm.LEAKY_BUCKET, burst=5),
    Limit(7, DAY, Algorithm.GCRA, burst=5),
    Limit(0, DAY),
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore(Waking().clock)
        return
    server = request.getfixturevalue("server")
    server.client.flushall()
    opened = open_counters(server.url)
    yield opened
    await opened.aclose()


@pytest.mark.parametrize("longest", [inf, 0.0])
@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: f"{limit.algorithm} {limit.amount} {limit.refill}")
async def test_a_look_foretells_what_a_counter_says(store: Store, limit: Limit, longest: float) -> None:
    random, rule = Random(1), Rule("app", "user", limit)
    outcomes = set()
    for key in range(20):
        for _ in range(8):
            ask = Ask(rule, limit, str(key), random.choice((1, 1, 2, 3, 9)), longest=longest)
            (look,) = await store.decide([make_look(ask)])
            foretold = weigh(ask, look)
            (decision,) = await store.decide([ask])
            assert foretold.admitted == decision.admitted
            if not decision.admitted:
                assert (foretold.retry_after == inf) == (decision.retry_after == inf)
                assert foretold.retry_after > 0
            outcomes.add(decision.admitted)
    assert outcomes == ({True, False} if limit.amount else {False})


JOBS = Rule("app", "path=/jobs", Limit(2, DAY), on_limit=OnLimit.DEFER)
OWN = Rule("app", "user", Limit(5, DAY))
REQUEST = [Descriptor((Entry("path", "/jobs"),)), Descriptor((Entry("user", "ann"),))]


def make_limiter(store: Store, *others: Rule, refusals: Refusals | None = None) -> Limiter:
    rules = {rule.name: rule for rule in (JOBS, OWN, *others)}
    node = Node(exact={Entry("path", "/jobs"): Node(rules["path=/jobs"])}, default={"user": Node(rules["user"])})
    known = RuleSet({"app": node})
    return Limiter(lambda: known, store, refusals=refusals)


async def count_left(limiter: Limiter) -> list[int]:
    verdict = await limiter.decide("app", REQUEST, 0)
    return [status.decision.remaining for status in verdict.statuses if status.decision is not None]


def list_refusing(verdict: Verdict) -> list[str]:
    return [status.rule.name for status in verdict.statuses if not status.allowed and status.rule is not None]


async def test_what_one_limit_refuses_is_charged_by_none(store: Store) -> None:
    limiter = make_limiter(store)
    assert [(await limiter.decide("app", REQUEST)).allowed for _ in range(4)] == [True, True, False, False]
    assert await count_left(limiter) == [0, 3]
    for _ in range(3):
        assert (await limiter.decide("app", REQUEST[1:])).allowed
    limiter = make_limiter(store, Rule("app", "path=/jobs", Limit(9, DAY), on_limit=OnLimit.DEFER))
    assert list_refusing(await limiter.decide("app", REQUEST)) == ["user"]
    assert await count_left(limiter) == [7, 0]


async def test_what_is_kept_is_counted_as_it_comes_and_charged_as_it_is_served(store: Store) -> None:
    limiter = make_limiter(store)
    for _ in range(2):
        assert (await limiter.decide("app", REQUEST)).allowed
    kept = [await limiter.keep("app", REQUEST, counts=True) for _ in range(4)]
    assert [verdict.allowed for verdict in kept] == [True, True, True, False]
    assert (kept[0].retry_after > 0, kept[0].leases) == (True, ())
    assert list_refusing(kept[3]) == ["path=/jobs", "user"]
    assert kept[3].on_limit is OnLimit.REJECT
    assert await count_left(limiter) == [0, 3]
    assert (await limiter.decide("app", REQUEST[1:])).allowed, "elsewhere nothing is counted as it comes"


async def test_who_has_come_as_often_as_he_may_does_not_pass_either(store: Store) -> None:
    limiter = make_limiter(store)
    assert [(await limiter.keep("app", REQUEST, counts=True)).allowed for _ in range(6)] == [True] * 5 + [False]
    verdict = await limiter.decide("app", REQUEST)
    assert (verdict.allowed, list_refusing(verdict)) == (False, ["user"])
    assert verdict.retry_after > 0
    assert await count_left(limiter) == [2, 5]


async def test_tries_of_what_waits_charge_nothing_and_count_nothing(store: Store) -> None:
    log = Limit(5, DAY, Algorithm.SLIDING_WINDOW_LOG)
    limiter = make_limiter(store, Rule("app", "user", log))
    line = "app|path=/jobs|"
    for _ in range(2):
        assert (await limiter.decide("app", REQUEST, line=line)).allowed
    for _ in range(5):
        assert not (await limiter.decide("app", REQUEST, line=line)).allowed
    assert await count_left(limiter) == [0, 3]
    assert sum(counts.refused for _, counts in limiter.usage) == 0
    assert [(await limiter.keep("app", REQUEST, counts=True)).allowed for _ in range(6)] == [True] * 5 + [False]


async def test_refusals_of_others_are_counted_as_ever(store: Store) -> None:
    limiter = make_limiter(store, Rule("app", "user", Limit(1, DAY, Algorithm.SLIDING_WINDOW_LOG)))
    assert (await limiter.decide("app", REQUEST)).allowed
    for _ in range(3):
        assert not (await limiter.decide("app", REQUEST)).allowed
    assert not (await limiter.keep("app", REQUEST, counts=True)).allowed
    counts = limiter.usage.get(Rule("app", "user"))
    assert counts is not None
    assert (counts.admitted, counts.refused) == (1, 4)
    counts = limiter.usage.get(Rule("app", "path=/jobs"))
    assert counts is not None
    assert (counts.admitted, counts.refused) == (1, 0)


async def test_what_never_fits_is_not_kept(store: Store) -> None:
    limiter = make_limiter(store)
    verdict = await limiter.keep("app", REQUEST, 3)
    assert (verdict.allowed, verdict.retry_after, list_refusing(verdict)) == (False, inf, ["path=/jobs"])


async def test_a_place_in_flight_is_held_by_none_that_is_refused(store: Store) -> None:
    flying = Limit(1, 60, Algorithm.CONCURRENCY)
    limiter = make_limiter(store, Rule("app", "user", Limit(5, DAY), concurrency=flying))
    first = await limiter.decide("app", REQUEST)
    assert (first.allowed, len(first.leases)) == (True, 1)
    second = await limiter.decide("app", REQUEST)
    assert (second.allowed, second.leases, list_refusing(second)) == (False, (), ["user"])
    await limiter.release(first)
    third = await limiter.decide("app", REQUEST)
    assert third.allowed
    await limiter.release(third)
    assert await count_left(limiter) == [0, 3] or await count_left(limiter) == [0, 1]


@pytest.mark.parametrize(
    ("name", "apart"),
    [("remote_address", False), ("path,remote_address", False), ("remote_address=10.*", True), ("path", True),
     ("plan", True), ("user", True)],
)  # fmt: skip
async def test_who_comes_to_a_counter_that_others_may_have_is_counted_with_his_network(
    store: Store, name: str, apart: bool
) -> None:
    ask = Ask(Rule("app", name, Limit(2, DAY)), Limit(2, DAY), "a")
    coming = [make_arrival(ask, network) for network in ("192.0.2", "192.0.2", "198.51.100")]
    assert [decision.admitted for decision in await store.decide(coming)] == [True, True, apart]


@pytest.mark.parametrize("name", ["remote_address,path", "override:5/second:remote_address,path"])
def test_networks_have_shares_of_what_is_counted_as_it_comes_too(name: str) -> None:
    ask = Ask(Rule("app", name, Limit(5, DAY)), Limit(5, DAY), "a")
    assert find_shares(make_arrival(ask, "192.0.2").rule.name) is not None
