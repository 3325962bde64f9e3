"""Who is measured: netlimit's counters and those of other libraries, in memory and in Redis, as functions of a key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, TypeAlias

import limits.aio.storage
import limits.aio.strategies
import limits.storage
import limits.strategies
import pyrate_limiter
import throttled
import throttled.asyncio
from limits import RateLimitItemPerMinute
from redis.asyncio import Redis
from throttled.rate_limiter import per_min

from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.memory.store import make_counter
from netlimit.l7.rules import Rule
from netlimit.l7.store import Ask, Store

Hit: TypeAlias = Callable[[str], object]
AsyncHit: TypeAlias = Callable[[str], Awaitable[object]]

OURS = "netlimit"
KEYS = 2**18
"""Keys that each may hold in memory, where it has a bound at all."""
_LIMITS = {
    Algorithm.FIXED_WINDOW: "FixedWindowRateLimiter",
    Algorithm.SLIDING_WINDOW_LOG: "MovingWindowRateLimiter",
    Algorithm.SLIDING_WINDOW_COUNTER: "SlidingWindowCounterRateLimiter",
}
_THROTTLED = {
    Algorithm.FIXED_WINDOW: "fixed_window",
    Algorithm.SLIDING_WINDOW_COUNTER: "sliding_window",
    Algorithm.TOKEN_BUCKET: "token_bucket",
    Algorithm.LEAKY_BUCKET: "leaking_bucket",
    Algorithm.GCRA: "gcra",
}
_PYRATE: dict[Algorithm, type[pyrate_limiter.LogAlgorithm | pyrate_limiter.StateAlgorithm]] = {
    Algorithm.FIXED_WINDOW: pyrate_limiter.FixedWindow,
    Algorithm.SLIDING_WINDOW_LOG: pyrate_limiter.SlidingWindowLog,
    Algorithm.TOKEN_BUCKET: pyrate_limiter.TokenBucket,
    Algorithm.GCRA: pyrate_limiter.GCRA,
}


def make_contenders(algorithm: Algorithm, amount: int) -> dict[str, Hit]:
    """Everybody who has this algorithm in memory, new, with a limit of so many a minute."""
    made: dict[str, Hit] = {OURS: make_counter(Limit(amount, 60, algorithm), keys=KEYS).hit}
    if algorithm in _LIMITS:
        hit = getattr(limits.strategies, _LIMITS[algorithm])(limits.storage.MemoryStorage()).hit
        item = RateLimitItemPerMinute(amount)
        made["limits"] = lambda key: hit(item, key)
    if algorithm in _THROTTLED:
        quota, store = per_min(amount, burst=amount), throttled.MemoryStore(options={"MAX_SIZE": KEYS})
        made["throttled-py"] = throttled.Throttled(using=_THROTTLED[algorithm], quota=quota, store=store).limit
    if algorithm in _PYRATE:
        made["pyrate-limiter"] = _hit_pyrate(algorithm, amount)
    return made


def _hit_pyrate(algorithm: Algorithm, amount: int) -> Hit:
    """It has one bucket a limiter, so that each key has a limiter: looked up as fast as Python can."""
    kind, rates = _PYRATE[algorithm](), [pyrate_limiter.Rate(amount, pyrate_limiter.Duration.MINUTE)]

    @cache
    def find(key: str) -> pyrate_limiter.Limiter:
        if isinstance(kind, pyrate_limiter.StateAlgorithm):
            return _make_limiter(pyrate_limiter.StateBucket(rates, kind))
        return _make_limiter(pyrate_limiter.InMemoryBucket(rates, kind))

    return lambda key: find(key).try_acquire(key, blocking=False)


def _make_limiter(bucket: pyrate_limiter.AbstractBucket) -> pyrate_limiter.Limiter:
    return pyrate_limiter.Limiter(pyrate_limiter.SingleBucketFactory(bucket, schedule_leak=False))


def make_remote_contenders(
    algorithm: Algorithm, amount: int, url: str, store: Store, client: Redis
) -> dict[str, AsyncHit]:
    """Everybody who has this algorithm in Redis: `store` is ours, `client` one of redis-py for who needs one."""
    limit = Limit(amount, 60, algorithm)
    rule = Rule("bench", algorithm, limit)
    made: dict[str, AsyncHit] = {OURS: lambda key: store.decide([Ask(rule, limit, key)])}
    if algorithm in _LIMITS:
        storage = limits.aio.storage.RedisStorage(f"async+{url}", implementation="redispy")
        hit = getattr(limits.aio.strategies, _LIMITS[algorithm])(storage).hit
        item = RateLimitItemPerMinute(amount)
        made["limits"] = lambda key: hit(item, key)
    if algorithm in _THROTTLED:
        quota, remote = per_min(amount, burst=amount), throttled.asyncio.RedisStore(server=url)
        using = _THROTTLED[algorithm]
        made["throttled-py"] = throttled.asyncio.Throttled(using=using, quota=quota, store=remote).limit
    if algorithm in _PYRATE:
        made["pyrate-limiter"] = _hit_remote_pyrate(algorithm, amount, client)
    return made


def _hit_remote_pyrate(algorithm: Algorithm, amount: int, client: Redis) -> AsyncHit:
    kind, rates = _PYRATE[algorithm](), [pyrate_limiter.Rate(amount, pyrate_limiter.Duration.MINUTE)]
    limiters: dict[str, pyrate_limiter.Limiter] = {}

    async def make_bucket(key: str) -> pyrate_limiter.AbstractBucket:
        if isinstance(kind, pyrate_limiter.StateAlgorithm):
            return pyrate_limiter.StateBucket(rates, kind, pyrate_limiter.RedisStateStore(client, f"{algorithm}{key}"))
        made: Any = pyrate_limiter.RedisBucket.init(rates, client, f"{algorithm}{key}", kind)
        bucket: pyrate_limiter.RedisBucket = await made
        return bucket

    async def hit(key: str) -> object:
        if key not in limiters:
            limiters[key] = _make_limiter(await make_bucket(key))
        return await limiters[key].try_acquire_async(key, blocking=False)

    return hit
