"""Where counters are kept: in memory, or in Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlimit.errors import SettingsError
from netlimit.l7.failover import Failover
from netlimit.l7.memory.store import MEMORY, MemoryStore
from netlimit.l7.store import Store

if TYPE_CHECKING:  # an application that counts in memory needs no package redis
    from netlimit.l7.redis.policy import EvictionWatch


def open_counters(url: str, memory: int = MEMORY) -> Store:
    """The store of a `COUNTERS_URL`; nothing is asked yet. Raises SettingsError with what would be accepted.

    `memory://` is this process alone, with so many bytes of `memory` for all counters. One in Redis is a Failover,
    which answers also while Redis does not, and has half of that to count by itself; what is merged has the other half.
    """
    if url == "memory://":
        return MemoryStore(memory=memory)
    try:
        from netlimit.l7.redis.opening import open_store
        from netlimit.l7.redis.url import read_url
    except ImportError:
        raise SettingsError(
            "COUNTERS_URL", "Counters in Redis need the package redis: install netlimit[limiter], or use memory://."
        ) from None
    place = read_url(url)
    half, emergency = memory // 2, memory // 8
    local = MemoryStore(memory=half - emergency)
    return Failover(open_store(place, half), local, place.probe, emergency_memory=emergency)


def watch_eviction(url: str) -> EvictionWatch | None:
    """Whoever looks whether the Redis of a `COUNTERS_URL` may throw counters away; None where there is no Redis."""
    if url == "memory://":
        return None
    from netlimit.l7.redis.policy import EvictionWatch
    from netlimit.l7.redis.url import read_url

    return EvictionWatch(read_url(url))
