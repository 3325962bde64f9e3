"""Counters in memory: what a decision costs beside the same of other libraries, and what a key takes up."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter_ns

from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.limiter import Limiter
from netlimit.l7.memory.store import MemoryStore, make_counter
from netlimit.l7.rules import Descriptor, Entry, Node, Rule, RuleSet
from netlimit.l7.store import Ask
from scripts.benchmarks.figures import Figure
from scripts.benchmarks.limiter.contenders import OURS, Hit, make_contenders

ALGORITHMS = [algorithm for algorithm in Algorithm if algorithm is not Algorithm.CONCURRENCY]
GOALS_NS = {Algorithm.FIXED_WINDOW: 1000, Algorithm.GCRA: 1000}
OTHERS_GOAL_NS = 1500
FASTER = 2.5
BYTES = 200
AMPLE, SCARCE = 1_000_000, 10
"""Limits a minute: one that is never reached, and one that is at once."""
ROUNDS, DECISIONS, MANY = 100, 500, 20_000
KEYS_HELD = 100_000


def measure() -> list[Figure]:
    """Each algorithm in three situations, all libraries taking turns; then layers above, then memory."""
    figures = [figure for algorithm in ALGORITHMS for figure in _measure_algorithm(algorithm)]
    return [*figures, *_measure_layers(), *map(_measure_size, ALGORITHMS)]


def _measure_algorithm(algorithm: Algorithm) -> list[Figure]:
    return [
        _compare(f"{algorithm}, one hot key", algorithm, AMPLE, lambda turn: [f"key{turn}"] * DECISIONS),
        _compare(f"{algorithm}, {MANY:,} keys", algorithm, AMPLE, _take_turns),
        _compare(f"{algorithm}, refused", algorithm, SCARCE, lambda turn: ["key"] * DECISIONS),
    ]


def _take_turns(turn: int) -> list[str]:
    return [f"key{(turn * DECISIONS + number) * 7919 % MANY}" for number in range(DECISIONS)]


def _compare(what: str, algorithm: Algorithm, amount: int, keys: Callable[[int], Sequence[str]]) -> Figure:
    contenders = make_contenders(algorithm, amount)
    taken = time_each({name: partial(_ask_all, hit) for name, hit in contenders.items()}, keys)
    ours = taken.pop(OURS)
    goal = GOALS_NS.get(algorithm, OTHERS_GOAL_NS)
    value, wanted, met = f"{ours:,.0f} ns", f"{goal:,} ns", ours <= goal
    for name, theirs in taken.items():
        value += f"\n{name}: {theirs:,.0f} ns, {theirs / ours:.1f} times"
        met = met and theirs / ours >= FASTER
    if taken:
        wanted += f"\n{FASTER:g} times the fastest"
    return Figure(what, value, wanted, met)


def _ask_all(hit: Hit, keys: Iterable[str]) -> None:
    for key in keys:
        hit(key)


def time_each(
    works: dict[str, Callable[[Sequence[str]], object]], keys: Callable[[int], Sequence[str]], rounds: int = ROUNDS
) -> dict[str, float]:
    """Nanoseconds a key in the fastest of many short rounds, in which all take turns: what others take more is due to
    whatever else the machine does."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(-rounds // 3, rounds):
        asked = keys(turn)
        for name, work in works.items():
            began = perf_counter_ns()
            work(asked)
            if turn >= 0:  # those before let every key be seen once
                taken[name].append((perf_counter_ns() - began) / len(asked))
    return {name: min(each) for name, each in taken.items()}


def _measure_layers() -> list[Figure]:
    """What is around a counter: the store that finds it, and the limiter that finds the rule and makes a verdict."""
    limit = Limit(AMPLE, 60)
    rule = Rule("bench", "client", limit)
    store, counter = MemoryStore(), make_counter(limit)
    rules = RuleSet({"bench": Node(default={"client": Node(rule)})})
    limiter = Limiter(lambda: rules, MemoryStore())

    def ask_store(keys: Iterable[str]) -> None:
        for key in keys:
            store.decide_now([Ask(rule, limit, key)])

    async def decide(keys: Iterable[str]) -> None:
        for key in keys:
            await limiter.decide("bench", [Descriptor((Entry("client", key),))])

    loop = asyncio.new_event_loop()
    taken = time_each(
        {
            "the counter itself": partial(_ask_all, counter.hit),
            "an Ask of the memory store": ask_store,
            "Limiter.decide, a descriptor of one entry": lambda keys: loop.run_until_complete(decide(keys)),
        },
        _take_turns,
    )
    loop.close()
    return [Figure(f"fixed_window, {what}", f"{each:,.0f} ns") for what, each in taken.items()]


def _measure_size(algorithm: Algorithm) -> Figure:
    """With the keys' own texts, which the counter holds on to."""
    counter = make_counter(Limit(SCARCE, 3600, algorithm))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(KEYS_HELD):
        counter.hit(f"192.0.2.{number}")
    size = (tracemalloc.get_traced_memory()[0] - before) / KEYS_HELD
    tracemalloc.stop()
    what = f"{algorithm}, a key of {KEYS_HELD:,}"
    if algorithm is Algorithm.SLIDING_WINDOW_LOG:
        return Figure(what, f"{size:.0f} bytes with one hit in its log")
    return Figure(what, f"{size:.0f} bytes", f"{BYTES} bytes", size <= BYTES)
