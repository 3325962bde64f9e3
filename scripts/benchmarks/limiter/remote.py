"""Counters in Redis: decisions that many tasks ask for at once, and what one costs that comes alone."""

from __future__ import annotations

import asyncio
from statistics import median
from time import perf_counter

import uvloop
from redis.asyncio import Redis

from netlimit.l7.limit import Algorithm
from netlimit.l7.redis.opening import open_store
from netlimit.l7.redis.url import read_url
from netlimit.l7.store import Store
from scripts.benchmarks.figures import Figure
from scripts.benchmarks.limiter.contenders import OURS, AsyncHit, make_remote_contenders
from scripts.benchmarks.limiter.memory import ALGORITHMS
from tests.l7.redis.servers import run_server

AMOUNT = 1_000_000
TASKS, EACH, ROUNDS = 64, 10, 20
ALONE_EACH, ALONE_ROUNDS = 10, 150
FASTER, SLOWER = 3.0, 1.3


def measure() -> list[Figure]:
    """A server of its own; all in one loop, in turns."""
    with run_server() as server:
        return uvloop.run(_measure(server.url))


async def _measure(url: str) -> list[Figure]:
    store = open_store(read_url(f"{url}?timeout_ms=20000"))
    client = Redis.from_url(url)
    try:
        figures = [await _compare_together(url, store, client, algorithm) for algorithm in ALGORITHMS]
        return [*figures, *[await _compare_alone(url, store, client, algorithm) for algorithm in ALGORITHMS]]
    finally:
        await store.aclose()
        await client.aclose()


async def _compare_together(url: str, store: Store, client: Redis, algorithm: Algorithm) -> Figure:
    contenders = make_remote_contenders(algorithm, AMOUNT, url, store, client)
    taken = await _time_each(contenders, algorithm, TASKS, EACH, ROUNDS)
    rates = {name: 1 / seconds for name, seconds in taken.items()}
    ours = rates.pop(OURS)
    value, met = f"{ours:,.0f} decisions/s", True
    for name, theirs in rates.items():
        value += f"\n{name}: {theirs:,.0f}, {ours / theirs:.1f} times"
        met = met and ours / theirs >= FASTER
    goal = f"{FASTER:g} times the fastest"
    return Figure(f"{algorithm}, {TASKS} tasks", value, goal if rates else "", met if rates else None)


async def _compare_alone(url: str, store: Store, client: Redis, algorithm: Algorithm) -> Figure:
    contenders = make_remote_contenders(algorithm, AMOUNT, url, store, client)
    taken = await _time_each({OURS: contenders[OURS], "INCR": client.incr}, "alone", 1, ALONE_EACH, ALONE_ROUNDS)
    ours, bare = taken[OURS], taken["INCR"]
    value = f"{1e6 * ours:.0f} µs, bare INCR {1e6 * bare:.0f}: {ours / bare:.2f} times"
    return Figure(f"{algorithm}, alone", value, f"{SLOWER:g} times", ours / bare <= SLOWER)


async def _time_each(
    contenders: dict[str, AsyncHit], keys: str, tasks: int, each: int, rounds: int
) -> dict[str, float]:
    """Seconds a decision: the median of rounds in which all take turns, so that a busy machine is busy for all."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-3, rounds):
        for name, hit in contenders.items():
            began = perf_counter()
            await asyncio.gather(*(_ask_often(hit, f"{keys} {number}", each) for number in range(tasks)))
            if turn >= 0:  # those before open connections and load scripts
                taken[name].append((perf_counter() - began) / (tasks * each))
    return {name: median(found) for name, found in taken.items()}


async def _ask_often(hit: AsyncHit, key: str, times: int) -> None:
    for _ in range(times):
        await hit(key)
