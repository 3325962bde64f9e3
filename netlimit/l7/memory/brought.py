"""Counters of limits that questions bring. Whoever reaches the limiter may invent as many as he likes."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from netlimit.l7.decision import Crowded, Decision
from netlimit.l7.forks import renew_after_fork
from netlimit.l7.limit import LARGEST_AMOUNT, UNITS, Limit
from netlimit.l7.memory.budget import KEY_BYTES, LEAST, Budget, Reserve
from netlimit.l7.memory.counter import CROWD, SECOND, Counter
from netlimit.l7.memory.shares import find_shares
from netlimit.l7.store import Ask

COUNTER_BYTES = 2048
"""What a counter takes, without keys (measured: 1,500)."""
IDLE_SECONDS = 3600
"""So long a limit has its place after it was asked for last, also where it counts nothing any more."""
_LOOK_SECONDS = 1
"""It is looked for places that are free again no more often: that is a look at all of them."""
Make = Callable[[Limit, Budget, int | None], Counter]
"""Makes a counter with a budget, for so many keys at most, or as many as any has."""
_SPANS = (*sorted(UNITS.values()), 100 * UNITS["year"])
"""Windows of what is counted together; of a limit it is the shortest that is as long as its own."""


class _Place:
    """Of one limit."""

    __slots__ = ("asked", "counter", "full_until")

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self.asked = 0
        """When it was asked for last."""
        self.full_until = 0
        """Until then keys that it does not hold are counted elsewhere: here they would begin anew."""

    def has_room(self, key: str, now: int) -> bool:
        """Whether a key is counted here."""
        if now < self.full_until:
            return self.counter.holds(key)
        return self.counter.find_place(key) != CROWD


class Brought:
    """A counter for each limit, while there are places: who has come first has his as long as it counts something, and
    keeps what it has had of the memory. So nobody loses what he has counted to who comes later.

    Limits that find no place, and keys for which theirs has no room, are counted together, in so many cells: none
    admits more than it says, and what others have used of its cell counts, too. Until that window is over, no limit of
    its length gets a place, where it would begin anew. Any thread may call its methods.
    """

    def __init__(self, make: Make, now: Callable[[], int], memory: int) -> None:
        """Half of the `memory` is for places, with the least that each has, an eighth for what is counted together, and
        the rest for further keys."""
        self._make = make
        self._now = now
        self._most = max(1, memory // 2 // (LEAST + COUNTER_BYTES))
        self._cells = max(1, memory // 8 // len(_SPANS) // KEY_BYTES)
        self._reserve = Reserve(memory - memory // 2 - memory // 8)
        self._places: dict[tuple[str, str, Limit], _Place] = {}
        self._common: dict[int, Counter] = {}
        """What is counted together, by the window."""
        self._look_at = 0
        self.start_anew()
        renew_after_fork(self)

    def start_anew(self) -> None:
        """Make the lock anew (see `netlimit.l7.forks`)."""
        self._lock = Lock()

    def set_origin(self, origin: int) -> None:
        """As `Counter` has it."""
        with self._lock:
            for counter in (*(place.counter for place in self._places.values()), *self._common.values()):
                counter.set_origin(origin)

    def decide(self, ask: Ask) -> Decision:
        """Count and answer."""
        now = self._now()
        place = self._find_place(ask, now)
        if place is not None and place.has_room(ask.key, now):
            return place.counter.hit(ask.key, ask.hits, ask.slack, ask.charge, ask.longest)
        decision = self._decide_together(ask)
        if place is not None:
            place.full_until = now + int(decision.reset_after * SECOND)
        return decision

    def has_place(self, ask: Ask) -> bool:
        """Whether the key is counted by itself, not with others for whom there is no room."""
        now = self._now()
        place = self._find_place(ask, now)
        return place is not None and place.has_room(ask.key, now) and place.counter.has_place(ask.key)

    def _find_place(self, ask: Ask, now: int) -> _Place | None:
        """The limit's, made if there is one left."""
        identity = (ask.rule.domain, ask.rule.name, ask.limit)
        with self._lock:
            place = self._places.get(identity)
            if place is None:
                if len(self._places) >= self._most and now >= self._look_at:
                    self._look_at = now + _LOOK_SECONDS * SECOND
                    self._free_idle(now)
                if len(self._places) >= self._most or self._is_counted_together(ask.limit):
                    return None
                place = self._places[identity] = self._make_place(ask)
            place.asked = now
        return place

    def _make_place(self, ask: Ask) -> _Place:
        counter = self._make(ask.limit, self._reserve, None)
        counter.forgets = False
        counter.shares = find_shares(ask.rule.name)
        return _Place(counter)

    def _is_counted_together(self, limit: Limit) -> bool:
        common = self._common.get(_find_span(limit))
        if common is None:
            return False
        common.sweep()
        return len(common) > 0

    def _decide_together(self, ask: Ask) -> Decision:
        """Count and answer in the cell that Python's hash, which nobody foresees, gives the limit and the key."""
        span = _find_span(ask.limit)
        with self._lock:
            if span not in self._common:  # with room for twice as many, no cell is ever forgotten
                self._common[span] = self._make(Limit(LARGEST_AMOUNT, span), Budget(), 2 * self._cells)
            common = self._common[span]
        cell = hash((ask.rule.domain, ask.rule.name, ask.key)) % self._cells
        excess = ask.limit.amount + ask.slack - LARGEST_AMOUNT  # a counter's limit is one, and here each has his own
        told = common.hit(str(cell), ask.hits, excess, ask.charge)
        return Crowded(told.admitted, max(0, told.remaining + excess), told.retry_after, told.reset_after)

    def _free_idle(self, now: int) -> None:
        old = now - IDLE_SECONDS * SECOND
        for identity in [each for each, place in self._places.items() if place.asked <= old]:
            counter = self._places[identity].counter
            counter.sweep()
            if not len(counter):
                self._reserve.leave(counter)
                del self._places[identity]


def _find_span(limit: Limit) -> int:
    return next(each for each in _SPANS if limit.seconds <= each)
