"""How often windows that are counted decide otherwise than the log, which remembers every request.

A million requests, of sources by Zipf's law, come at random in an hour. As in Cloudflare's comparison what is refused
counts too, in the log as well as in the counters (which charge for it).
"""

from __future__ import annotations

import random
from itertools import accumulate

from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.memory.counter import SECOND, Clock
from netlimit.l7.memory.store import make_counter
from scripts.benchmarks.figures import Figure

REQUESTS, SOURCES, HOUR = 1_000_000, 10_000, 3600
LIMITS = (200, 1000)
"""A minute. The busiest source sends about 1,700, the tenth 170."""
CLOUDFLARE = "Cloudflare: 0.003 %"
"""Of 400 million requests of 270,000 sources ("How we built rate limiting capable of scaling to millions of domains",
2017)."""
Request = tuple[int, str]


def measure() -> list[Figure]:
    """Both algorithms that only count, over the same requests."""
    requests = _make_requests()
    return [
        _compare(requests, algorithm, amount)
        for algorithm in (Algorithm.SLIDING_WINDOW_COUNTER, Algorithm.FIXED_WINDOW)
        for amount in LIMITS
    ]


def _make_requests() -> list[Request]:
    """When, in nanoseconds, and who."""
    chance = random.Random(20260304)
    names = [f"source{number}" for number in range(SOURCES)]
    shares = list(accumulate(1 / rank for rank in range(1, SOURCES + 1)))
    times = sorted(chance.randrange(HOUR * SECOND) for _ in range(REQUESTS))
    return list(zip(times, chance.choices(names, cum_weights=shares, k=REQUESTS), strict=True))


def _compare(requests: list[Request], algorithm: Algorithm, amount: int) -> Figure:
    now, allowed, refused, beyond = 0, 0, 0, 0
    clock = Clock(lambda: now, 0)
    counter = make_counter(Limit(amount, 60, algorithm), clock)
    log = make_counter(Limit(amount, 60, Algorithm.SLIDING_WINDOW_LOG), clock)
    for now, source in requests:  # noqa: B007  # the clock reads it
        admitted, within = counter.hit(source, charge=True).admitted, log.hit(source).admitted
        beyond += not within
        allowed += admitted and not within
        refused += within and not admitted
    value = f"{100 * (allowed + refused) / REQUESTS:.3f} % wrong: {allowed:,} allowed, {refused:,} refused"
    value += f"\nof {REQUESTS:,}, {beyond:,} of them beyond the limit"
    goal = CLOUDFLARE if algorithm is Algorithm.SLIDING_WINDOW_COUNTER else ""
    return Figure(f"{algorithm}, {amount:,} a minute", value, goal)
