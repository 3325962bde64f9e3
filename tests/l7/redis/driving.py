"""Stores that tests open in the event loop of the test, and rules for them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from netlimit.errors import CountersUnavailable
from netlimit.l7.counters import open_counters
from netlimit.l7.decision import Decision
from netlimit.l7.failover import Failover
from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.redis.opening import open_store
from netlimit.l7.redis.url import read_url
from netlimit.l7.rules import Rule
from netlimit.l7.store import Ask, Store

_names = itertools.count()
PATIENT = "?timeout_ms=60000&probe_ms=50"
"""For tests of anything but time: the machine may be slow."""


def make_rule(limit: Limit, **other: Any) -> Rule:
    return Rule("test", f"rule {next(_names)}", limit, **other)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    """A store that asks Redis and nobody else."""
    store = open_store(read_url(url))
    try:
        yield store
    finally:
        await store.aclose()


@asynccontextmanager
async def guarded(url: str) -> AsyncIterator[Failover]:
    """A store as the limiter has it."""
    store = open_counters(url)
    assert isinstance(store, Failover)
    try:
        yield store
    finally:
        await store.aclose()


async def hit(store: Store, rule: Rule, key: str = "alice", hits: int = 1, **other: Any) -> Decision:
    assert rule.limit
    (decision,) = await store.decide([Ask(rule, rule.limit, key, hits, **other)])
    return decision


async def wait_until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


async def ask_until_answered(store: Store, rule: Rule) -> None:
    """The first answer counts too."""
    async with asyncio.timeout(120):
        while True:
            try:
                await hit(store, rule)
                return
            except CountersUnavailable:
                await asyncio.sleep(0.01)


EVERY = [
    *(Limit(5, 60, algorithm) for algorithm in Algorithm),
    Limit(5, 60, Algorithm.SLIDING_WINDOW_LOG, count_refused=False),
    Limit(100, 1, Algorithm.GCRA, burst=10),
]
