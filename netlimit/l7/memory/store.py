"""The store of counters in this process's memory."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from netlimit.l7.decision import Decision
from netlimit.l7.forks import renew_after_fork
from netlimit.l7.limit import Algorithm, Limit, Refill
from netlimit.l7.memory.brought import Brought
from netlimit.l7.memory.bucket import Bucket, IntervalBucket
from netlimit.l7.memory.budget import Budget
from netlimit.l7.memory.counter import FEW, Clock, Counter, steady_clock
from netlimit.l7.memory.leases import Leases
from netlimit.l7.memory.log import SlidingWindowLog
from netlimit.l7.memory.shares import find_shares
from netlimit.l7.memory.windows import FixedWindow, SlidingWindowCounter
from netlimit.l7.rules import Rule
from netlimit.l7.store import Ask

KEYS = 2**18
"""Keys that a counter holds at most, by default."""
MEMORY = 256 * 2**20
"""Bytes that all counters take, by default."""
_MOST_ASIDE = 64
"""So many counters are kept of those in whose place others count by now."""
_Place = tuple[str, str, bool]
"""Domain and name of a rule, and whether it is its concurrency that is counted."""
_Manner = tuple[Algorithm, int, int | None, Refill, bool]
"""How a limit counts, whatever its amount."""
_COUNTERS: dict[Algorithm, type[Counter]] = {
    Algorithm.FIXED_WINDOW: FixedWindow,
    Algorithm.SLIDING_WINDOW_LOG: SlidingWindowLog,
    Algorithm.SLIDING_WINDOW_COUNTER: SlidingWindowCounter,
    Algorithm.TOKEN_BUCKET: Bucket,
    Algorithm.LEAKY_BUCKET: Bucket,
    Algorithm.GCRA: Bucket,
    Algorithm.CONCURRENCY: Leases,
}


def make_counter(limit: Limit, clock: Clock | None = None, keys: int = KEYS, budget: Budget | None = None) -> Counter:
    """A counter in memory for one limit, of at most so many keys, and what a budget has left."""
    kind = IntervalBucket if limit.refill is Refill.INTERVAL else _COUNTERS[limit.algorithm]
    return kind(limit, clock or steady_clock(), keys, budget)


class MemoryStore:
    """A counter a rule, and one for its concurrency. For threads as well as for tasks. Of limits that have one name and
    count in different ways (of two middlewares, say) each has its own, as in Redis."""

    def __init__(self, clock: Clock | None = None, keys: int = KEYS, memory: int = MEMORY) -> None:
        """Each counter has at most so many keys, and all together so many bytes of `memory`, nearly: of these a quarter
        is for limits that requests bring."""
        self._budget = Budget(memory - memory // 4)
        self._clock = clock or steady_clock()
        self._keys = keys
        self._counters: dict[_Place, Counter] = {}
        self._aside: dict[tuple[_Place, _Manner], Counter] = {}
        self._brought = Brought(self._make, self._clock.read, memory // 4)
        self._room = FEW
        self.start_anew()
        renew_after_fork(self)

    def start_anew(self) -> None:
        """Make the lock anew (see `netlimit.l7.forks`)."""
        self._lock = Lock()

    def decide_now(self, asks: Sequence[Ask]) -> list[Decision]:
        """Count and answer, in order."""
        return [self._decide(ask) for ask in asks]

    def has_place(self, ask: Ask) -> bool:
        """Whether the key is counted by itself, not with others for whom there is no room."""
        counter = self._find_counter(ask.rule, ask.limit)
        return self._brought.has_place(ask) if counter is None else counter.has_place(ask.key)

    def set_origin(self, origin: int) -> None:
        """The time of day was set: it is `origin` nanoseconds ahead of the clock's `read` by now."""
        with self._lock:
            self._clock = self._clock._replace(origin=origin)
            for counter in (*self._counters.values(), *self._aside.values()):
                counter.set_origin(origin)
        self._brought.set_origin(origin)

    async def decide(self, asks: Sequence[Ask]) -> list[Decision]:
        """As `decide_now`."""
        return self.decide_now(asks)

    def release_now(self, asks: Sequence[Ask]) -> None:
        """End the leases of these asks."""
        for ask in asks:
            if (leases := self._find_leases(ask)) is not None:
                leases.release(ask.key, ask.lease, ask.hits)

    def renew_now(self, asks: Sequence[Ask], anew: bool = False) -> bool:
        """Let the leases of these asks last their whole time from now, those that have ended too if `anew`; whether
        none had."""
        found = [
            (leases := self._find_leases(ask)) is not None and leases.renew(ask.key, ask.lease, ask.hits, anew)
            for ask in asks
        ]
        return all(found)

    async def release(self, asks: Sequence[Ask]) -> None:
        """End the leases of these asks."""
        self.release_now(asks)

    async def renew(self, asks: Sequence[Ask], anew: bool = False) -> bool:
        """As `renew_now`."""
        return self.renew_now(asks, anew)

    async def aclose(self) -> None:
        """Nothing is open."""

    def _decide(self, ask: Ask) -> Decision:
        rule, limit, key, hits, slack, lease, charge, longest, _ = ask
        counter = self._find_counter(rule, limit)
        if counter is None:
            return self._brought.decide(ask)
        if lease:
            assert isinstance(counter, Leases)
            return counter.take(key, lease, hits, slack)
        return counter.hit(key, hits, slack, charge, longest)

    def _find_leases(self, ask: Ask) -> Leases | None:
        """Those of the rule as it is by now: a request that came before it changed brings no old limit back."""
        counter = self._counters.get((ask.rule.domain, ask.rule.name, True))
        return counter if isinstance(counter, Leases) else None

    def _find_counter(self, rule: Rule, limit: Limit) -> Counter | None:
        """The rule's; None for a limit that a request has brought."""
        place = (rule.domain, rule.name, limit is rule.concurrency)
        counter = self._counters.get(place)
        if counter is not None and counter.limit is limit:
            return counter
        if rule.is_brought and not place[2]:
            return None
        with self._lock:
            return self._replace_counter(place, limit)

    def _make(self, limit: Limit, budget: Budget, keys: int | None = None) -> Counter:
        return make_counter(limit, self._clock, keys or self._keys, budget)

    def _replace_counter(self, place: _Place, limit: Limit) -> Counter:
        old = self._counters.get(place)
        if old is not None and not _differ_in_amount_alone(old.limit, limit):
            old = self._exchange(place, old, limit)
        if old is not None and old.limit == limit:
            old.limit = limit  # the same again, read anew
            self._counters[place] = old
            return old
        if len(self._counters) >= self._room:
            self._forget_idle()
        counter = self._make(limit, self._budget)
        counter.shares = find_shares(place[1])
        if old is not None:
            counter.adopt(old)
        self._counters[place] = counter
        return counter

    def _exchange(self, place: _Place, old: Counter, limit: Limit) -> Counter | None:
        """Put a counter aside for one that counts as this limit does, if there has been one: both may be asked."""
        found = self._aside.pop((place, _find_manner(limit)), None)
        if len(self._aside) >= _MOST_ASIDE:
            del self._aside[next(iter(self._aside))]
        self._aside[place, _find_manner(old.limit)] = old
        return found

    def _forget_idle(self) -> None:
        """Rules come and go; what counts nothing is not kept."""
        for counter in self._counters.values():
            counter.sweep()
        self._counters = {place: counter for place, counter in self._counters.items() if len(counter)}
        for counter in self._aside.values():
            counter.sweep()
        self._aside = {place: counter for place, counter in self._aside.items() if len(counter)}
        self._room = max(FEW, 2 * len(self._counters))


def _differ_in_amount_alone(one: Limit, other: Limit) -> bool:
    """What is in flight stays so, too, when leases last another time."""
    if one.algorithm is other.algorithm is Algorithm.CONCURRENCY:
        return True
    return _find_manner(one) == _find_manner(other)


def _find_manner(limit: Limit) -> _Manner:
    return limit.algorithm, limit.seconds, limit.burst, limit.refill, limit.count_refused
