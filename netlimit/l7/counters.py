"""Where counters are kept: in memory, or in Redis."""

from __future__ import annotations

from netlimit.errors import SettingsError
from netlimit.l7.failover import Failover
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.store import Store


def open_counters(url: str) -> Store:
    """The store of a `COUNTERS_URL`; nothing is asked yet. Raises SettingsError with what would be accepted.

    `memory://` is this process alone. One in Redis is a Failover, which answers also while Redis does not.
    """
    if url == "memory://":
        return MemoryStore()
    try:
        from netlimit.l7.redis.opening import open_store
        from netlimit.l7.redis.url import read_url
    except ImportError:
        raise SettingsError(
            "COUNTERS_URL", "Counters in Redis need the package redis: install netlimit[limiter], or use memory://."
        ) from None
    place = read_url(url)
    return Failover(open_store(place), MemoryStore(), place.probe)
