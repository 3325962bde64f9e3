"""Counting locally and merging with Redis now and then: how much more is admitted than may be, and how fast it is."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from time import perf_counter

import uvloop

from netlimit.l7.limit import Limit
from netlimit.l7.redis.opening import open_store
from netlimit.l7.redis.url import read_url
from netlimit.l7.rules import Rule
from netlimit.l7.store import Ask, Store
from scripts.benchmarks.figures import Figure
from tests.l7.redis.servers import run_server

LIMIT = Limit(5000, 86_400)
STORES, INTERVALS = 4, (10, 100)
"""Data centres, and milliseconds between two merges."""
PAUSE = 0.001
"""Seconds between two requests in each of them."""


def measure() -> list[Figure]:
    """A server of its own; each data centre asks until it is refused for good."""
    with run_server() as server:
        return [uvloop.run(_measure(server.url, milliseconds)) for milliseconds in INTERVALS]


async def _measure(url: str, milliseconds: int) -> Figure:
    stores = [open_store(read_url(f"{url}?timeout_ms=20000&merge_ms={milliseconds}")) for _ in range(STORES)]
    rule = Rule("bench", f"merged {milliseconds}", LIMIT)
    admitted = await asyncio.gather(*(_use_up(store, rule) for store in stores))
    for store in stores:
        await store.aclose()
    over = sum(map(len, admitted)) - LIMIT.amount
    reach = max(_count_most(times, 2 * milliseconds / 1000) for times in admitted)
    bound = (STORES - 1) * min(reach, LIMIT.amount)
    value = f"{over:,} more than {LIMIT.amount:,} admitted ({100 * over / LIMIT.amount:.1f} %)"
    goal = f"{bound:,}: {STORES - 1} times the most in two intervals"
    return Figure(f"{STORES} data centres, merged every {milliseconds} ms", value, goal, over <= bound)


def _count_most(times: list[float], seconds: float) -> int:
    """How many of these times are so close together, at most."""
    return max(number - bisect_left(times, time - seconds) + 1 for number, time in enumerate(times))


async def _use_up(store: Store, rule: Rule) -> list[float]:
    """When requests are admitted, until no more are."""
    admitted: list[float] = []
    refused = 0
    while refused < 20:
        (decision,) = await store.decide([Ask(rule, LIMIT, "key")])
        if decision.admitted:
            admitted.append(perf_counter())
        refused += not decision.admitted
        await asyncio.sleep(PAUSE)
    return admitted
