"""Requests in flight keep their places, whatever happens to the process meanwhile."""

from __future__ import annotations

import asyncio
import time

import pytest

from netlimit.l7.counters import open_counters
from netlimit.l7.holding import Holding
from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.limiter import Limiter
from netlimit.l7.rules import Descriptor, Entry, Node, Rule, RuleSet
from tests.l7.redis.servers import Server

FLIGHT = Limit(2, 1, Algorithm.CONCURRENCY)


@pytest.fixture(params=["memory", "redis"])
def limiter(request: pytest.FixtureRequest, server: Server) -> Limiter:
    rule = Rule("app", f"user of {request.node.name}", concurrency=FLIGHT)
    rules = RuleSet({"app": Node(default={"user": Node(rule)})})
    url = "memory://" if request.param == "memory" else server.url + "?timeout_ms=60000"
    return Limiter(lambda: rules, open_counters(url))


def test_a_place_that_was_lost_while_the_process_stood_still_is_taken_anew(limiter: Limiter) -> None:
    async def live() -> None:
        user = [Descriptor((Entry("user", "alice"),))]
        held = [await limiter.decide("app", user) for _ in range(2)]
        holdings = [Holding(limiter, verdict) for verdict in held]
        assert not (await limiter.decide("app", user)).allowed
        time.sleep(FLIGHT.seconds + 0.2)
        await asyncio.sleep(FLIGHT.seconds * 0.7)
        assert not (await limiter.decide("app", user)).allowed
        for holding in holdings:
            holding.end()
        await limiter.release(held[0])
        assert [(await limiter.decide("app", user)).allowed for _ in range(2)] == [True, False]
        await limiter._store.aclose()

    asyncio.run(live())


def test_a_place_that_was_given_back_is_not_renewed(limiter: Limiter) -> None:
    async def live() -> None:
        user = [Descriptor((Entry("user", "alice"),))]
        held = [await limiter.decide("app", user) for _ in range(2)]
        await limiter.release(held[0])
        await limiter.renew(held[0])
        assert (await limiter.decide("app", user)).allowed
        await limiter._store.aclose()

    asyncio.run(live())
