"""How many rules are in which state."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta

from api.standing import find_state
from netlimit.records import HostStatus, State
from netlimit.store import Store

_AT_ONCE = 1000
_FRESH = timedelta(seconds=5)
"""Rules expire without a change that anybody writes down."""


class Tally:
    """Counts rules by state, and counts again only when something has changed: it must look at every rule."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._counted: dict[str, int] = {}
        self._counted_at: datetime | None = None
        self._seen: object = None

    def count(self, hosts: Sequence[HostStatus], now: datetime) -> dict[str, int]:
        """The number of rules in each state, and in all."""
        with self._lock:
            seen = (
                self._store.revision(),
                [(host.host, host.applied_revision, host.paused) for host in hosts],
                self._store.exceptional_counts(),
            )
            if seen != self._seen or self._counted_at is None or now - self._counted_at > _FRESH:
                self._counted, self._seen, self._counted_at = count_states(self._store, hosts, now), seen, now
            return self._counted


def count_states(store: Store, hosts: Sequence[HostStatus], now: datetime) -> dict[str, int]:
    """Look at every rule."""
    counts: Counter[State] = Counter()
    last = 0
    while chunk := store.select(after=last, limit=_AT_ONCE)[0]:
        last = chunk[-1].rule.id
        exceptional = store.exceptional([kept.rule.id for kept in chunk])
        counts.update(find_state(kept.rule, hosts, exceptional.get(kept.rule.id, {}), now) for kept in chunk)
    return {**{state.value: counts[state] for state in State}, "total": counts.total()}
