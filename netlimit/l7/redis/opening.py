"""Puts the parts of a store in Redis together."""

from __future__ import annotations

from functools import partial

from netlimit.l7.breaker import Breaker
from netlimit.l7.memory.store import MEMORY
from netlimit.l7.redis.cluster import Cluster
from netlimit.l7.redis.link import Link
from netlimit.l7.redis.merging import MergingStore
from netlimit.l7.redis.pair import Pair
from netlimit.l7.redis.store import RedisStore, Wire
from netlimit.l7.redis.url import Place


def open_store(place: Place, memory: int = MEMORY) -> RedisStore | MergingStore:
    """The store of a server or a cluster, decided by Redis each time or merged now and then; nothing is open yet. What
    is merged has so many bytes of `memory` for its counters here."""

    def open_wire() -> Wire:
        if place.cluster:
            return Cluster(place.addresses, place.connect, place.timeout, place.probe)
        breaker = Breaker(place.probe)
        one, other = (Link(partial(place.connect, *place.addresses), str(place), breaker) for _ in range(2))
        return Pair(one, other)

    store = RedisStore(open_wire, place.timeout)
    return MergingStore(store, place.merge, memory=memory) if place.merge else store
