"""Races for one key in memory: what scripts/soak repeats by the thousand, and the tests a few times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from threading import Barrier

from netlimit.l7.limit import Algorithm, Limit, Refill
from netlimit.l7.limiter import Limiter
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import Descriptor, Entry, Node, Rule, RuleSet
from netlimit.l7.store import Ask

DAY = 86_400
TASKS, THREADS = 100, 16


def make_limits(amount: int, times: int) -> Iterator[Limit]:
    """Limits of so many a day, of all algorithms in turn."""
    limits = [Limit(amount, DAY, algorithm) for algorithm in Algorithm]
    limits.append(Limit(amount, DAY, Algorithm.TOKEN_BUCKET, refill=Refill.INTERVAL))
    return islice(cycle(limits), times)


def make_rule(limit: Limit) -> Rule:
    """A rule with this limit."""
    flying = limit.algorithm is Algorithm.CONCURRENCY
    return Rule("race", "key", None if flying else limit, limit if flying else None)


def race_tasks(limits: Iterable[Limit]) -> list[int]:
    """How many of a hundred tasks are allowed that all ask a limiter at once, for each limit."""
    return [asyncio.run(_race_tasks(limit)) for limit in limits]


async def _race_tasks(limit: Limit) -> int:
    rules = RuleSet({"race": Node(default={"key": Node(make_rule(limit))})})
    limiter = Limiter(lambda: rules, MemoryStore())
    asked = [Descriptor((Entry("key", "one"),))]
    verdicts = await asyncio.gather(*(limiter.decide("race", asked) for _ in range(TASKS)))
    return sum(verdict.allowed for verdict in verdicts)


class Yielding(str):
    """A key at which a thread lets others go first, whenever something is looked up or kept under it."""

    __slots__ = ()

    def __hash__(self) -> int:
        time.sleep(0)
        return super().__hash__()


def race_threads(limits: Iterable[Limit]) -> list[int]:
    """How often sixteen threads are admitted that all ask five times at once, for each limit."""
    with ThreadPoolExecutor(THREADS) as pool:
        return [_race_threads(pool, limit) for limit in limits]


def _race_threads(pool: ThreadPoolExecutor, limit: Limit) -> int:
    store, rule, start = MemoryStore(), make_rule(limit), Barrier(THREADS)

    def ask(thread: int) -> int:
        leases = [f"{thread} {number}" if rule.concurrency else "" for number in range(5)]
        start.wait()
        asks = [Ask(rule, limit, Yielding("key"), lease=lease) for lease in leases]
        return sum(store.decide_now([ask])[0].admitted for ask in asks)

    return sum(pool.map(ask, range(THREADS)))
