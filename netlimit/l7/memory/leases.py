"""Requests in flight: a lease for each, which ends with the request or by itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice, takewhile
from math import inf
from operator import itemgetter

from netlimit.l7.decision import Crowded, Decision
from netlimit.l7.limit import BOUNDLESS, Limit
from netlimit.l7.memory.budget import Budget
from netlimit.l7.memory.counter import CROWD, SECOND, Clock, Counter
from netlimit.l7.memory.shares import Shares

_FEW = 64
"""So many leases of a key are in a plain dict, which is smaller; but its first is found only after all those that went
before."""
_COUNTED = 4096
"""So many leases at most are counted to tell when there is room again."""


class Leases(Counter):
    """Each key's leases: when they end, by name, the next to end first.

    Who dies without ending his holds it for `limit.seconds`, and no longer.
    """

    def __init__(self, limit: Limit, clock: Clock, keys: int, budget: Budget | None = None) -> None:
        super().__init__(limit, clock, keys, budget)
        self._amount = limit.amount
        self._period = limit.seconds * SECOND
        self._ends: dict[str, dict[str, int]] = {}
        self._nameless = count()

    def hit(self, key: str, hits: int = 1, slack: int = 0, charge: bool = False, longest: float = inf) -> Decision:
        """Take a lease that nobody can end."""
        return self.take(key, f"\0{next(self._nameless)}", hits, slack)

    def take(self, key: str, lease: str, hits: int = 1, slack: int = 0) -> Decision:
        """Take a lease, as heavy as the request, or see whether there is one to have (hits 0)."""
        with self._lock:
            now, asked = self._clock(), key
            if key not in self._ends and len(self._ends) >= self._room:
                key = self._admit_key(key)
            ends = self._find_flying(key, now)
            ceiling = self._amount + slack
            admitted = len(ends) + (hits or 1) <= ceiling
            if admitted:
                ends.update(dict.fromkeys(_name_parts(lease, hits), now + self._period))
            if ends:
                self._ends[key] = ends
            over = len(ends) + (hits or 1) - ceiling
            wait = 0.0
            if over > 0:
                wait = (_find_end(ends, over) - now) / SECOND if (hits or 1) <= ceiling else inf
            reset = (next(reversed(ends.values())) - now) / SECOND if ends else 0.0
            left = self._amount - len(ends)
            if not admitted and 1 < hits <= self._amount:
                self._note_want(key, hits)
            kind = Decision if key is asked else Crowded
            return kind(admitted, max(0, left), wait, reset, 0.0, admitted and left < 0 < hits)

    def release(self, key: str, lease: str, hits: int = 1) -> None:
        """End a lease."""
        with self._lock:
            for owner in self._find_owners(key):
                ends = self._ends.get(owner, {})
                if lease in ends:
                    for name in _name_parts(lease, hits):
                        ends.pop(name, None)
                    if not ends:
                        del self._ends[owner]
                    return

    def renew(self, key: str, lease: str, hits: int = 1, anew: bool = False) -> bool:
        """Let a lease last its whole time from now, if it has not ended; whether that is so. One that has is taken
        `anew`, whatever the limit."""
        with self._lock:
            now, found = self._clock(), False
            for owner in self._find_owners(key):
                ends = self._find_flying(owner, now)
                if ends.get(lease, now) > now:
                    found = True
                    for name in _name_parts(lease, hits):
                        ends.pop(name, None)
                        ends[name] = now + self._period
                    self._ends[owner] = ends
                    break
        if anew and not found:
            self.take(key, lease, hits, BOUNDLESS)
        return found

    def _find_flying(self, key: str, now: int) -> dict[str, int]:
        """The leases of a key that have not ended. What would last longer than a lease does lasts as long: leases were
        longer before, or the clock has been set back."""
        ends = self._ends.get(key, {})
        if len(ends) > _FEW and not isinstance(ends, OrderedDict):
            self._ends[key] = ends = OrderedDict(ends)
        latest = now + self._period
        if ends and next(reversed(ends.values())) > latest:
            self._ends[key] = ends = OrderedDict((name, min(end, latest)) for name, end in ends.items())
        for name in [name for name, _ in takewhile(lambda lease: lease[1] <= now, ends.items())]:
            del ends[name]
        if not ends:
            self._ends.pop(key, None)
        return ends

    def _find_owners(self, key: str) -> Iterator[str]:
        """The key, and those that its leases may have been counted with."""
        yield key
        yield CROWD
        if self.shares is not None:
            yield self.shares.name_crowd(key)

    def _adopt(self, other: Counter) -> None:
        assert isinstance(other, Leases)
        self._ends = other._ends

    def _holds(self, key: str) -> bool:
        return key in self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def _list_keys(self) -> Iterable[str]:
        return self._ends

    def _sweep(self, now: int) -> None:
        self._ends = {key: ends for key, ends in self._ends.items() if next(reversed(ends.values())) > now}

    def _drop_within(self, now: int) -> None:
        want = self._wants.get
        self._ends = {key: ends for key, ends in self._ends.items() if len(ends) + want(hash(key), 1) > self._amount}

    def _cut(self, shares: Shares, room: int) -> Mapping[str, Sequence[str]]:
        return shares.cut(self._ends, room)

    def _merge(self, keys: Sequence[str], crowd: str) -> None:
        """All of them: each ends by its name."""
        flying = self._ends.get(crowd, {})
        for key in keys:
            flying |= self._ends.pop(key)
        self._ends[crowd] = dict(sorted(flying.items(), key=itemgetter(1)))


def _find_end(ends: dict[str, int], number: int) -> int:
    """When so many of these, which end in this order, have ended; of very many, when all have: to count them would keep
    others waiting."""
    if number > _COUNTED:
        return next(reversed(ends.values()))
    return next(islice(ends.values(), number - 1, None))


def _name_parts(lease: str, hits: int) -> list[str]:
    """A lease of several hits is as many entries, of which the first bears its name."""
    return [lease, *(f"{lease}/{part}" for part in range(1, hits))] if hits else []
