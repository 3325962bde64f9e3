"""Who is measured: netlimit's counters in memory, and those of other libraries, as functions that ask about a key."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import pyrate_limiter
import throttled
from limits import RateLimitItemPerMinute, strategies
from limits.storage import MemoryStorage
from throttled.rate_limiter import per_min

from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.memory.store import make_counter

Hit: TypeAlias = Callable[[str], object]

OURS = "netlimit"
KEYS = 2**18
"""Keys that each may hold, where it has a bound at all."""


def make_contenders(algorithm: Algorithm, amount: int) -> dict[str, Hit]:
    """Everybody who has this algorithm, new, with a limit of so many a minute; ours first."""
    makers = {
        OURS: _make_ours,
        "limits": _make_limits,
        "throttled-py": _make_throttled,
        "pyrate-limiter": _make_pyrate,
    }
    made = {name: make(algorithm, amount) for name, make in makers.items()}
    return {name: hit for name, hit in made.items() if hit is not None}


def _make_ours(algorithm: Algorithm, amount: int) -> Hit:
    return make_counter(Limit(amount, 60, algorithm), keys=KEYS).hit


def _make_limits(algorithm: Algorithm, amount: int) -> Hit | None:
    kinds: dict[Algorithm, type[strategies.RateLimiter]] = {
        Algorithm.FIXED_WINDOW: strategies.FixedWindowRateLimiter,
        Algorithm.SLIDING_WINDOW_LOG: strategies.MovingWindowRateLimiter,
        Algorithm.SLIDING_WINDOW_COUNTER: strategies.SlidingWindowCounterRateLimiter,
    }
    if algorithm not in kinds:
        return None
    hit, item = kinds[algorithm](MemoryStorage()).hit, RateLimitItemPerMinute(amount)
    return lambda key: hit(item, key)


def _make_throttled(algorithm: Algorithm, amount: int) -> Hit | None:
    kinds = {
        Algorithm.FIXED_WINDOW: "fixed_window",
        Algorithm.SLIDING_WINDOW_COUNTER: "sliding_window",
        Algorithm.TOKEN_BUCKET: "token_bucket",
        Algorithm.LEAKY_BUCKET: "leaking_bucket",
        Algorithm.GCRA: "gcra",
    }
    if algorithm not in kinds:
        return None
    store = throttled.MemoryStore(options={"MAX_SIZE": KEYS})
    return throttled.Throttled(using=kinds[algorithm], quota=per_min(amount, burst=amount), store=store).limit


def _make_pyrate(algorithm: Algorithm, amount: int) -> Hit | None:
    """It has one bucket a limiter, so that a key needs a limiter; they are looked up as fast as Python can."""
    kinds: dict[Algorithm, Callable[[list[pyrate_limiter.Rate]], pyrate_limiter.AbstractBucket]] = {
        Algorithm.FIXED_WINDOW: lambda rates: pyrate_limiter.InMemoryBucket(rates, pyrate_limiter.FixedWindow()),
        Algorithm.SLIDING_WINDOW_LOG: pyrate_limiter.InMemoryBucket,
        Algorithm.TOKEN_BUCKET: lambda rates: pyrate_limiter.StateBucket(rates, pyrate_limiter.TokenBucket()),
        Algorithm.GCRA: lambda rates: pyrate_limiter.StateBucket(rates, pyrate_limiter.GCRA()),
    }
    if algorithm not in kinds:
        return None
    rate = pyrate_limiter.Rate(amount, pyrate_limiter.Duration.MINUTE)

    @cache
    def find(key: str) -> Callable[..., object]:
        bucket = kinds[algorithm]([rate])
        return pyrate_limiter.Limiter(pyrate_limiter.SingleBucketFactory(bucket, schedule_leak=False)).try_acquire

    return lambda key: find(key)(key, blocking=False)
