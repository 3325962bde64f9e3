"""How many rules are in which state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from netlimit.records import HostStatus, State
from netlimit.store import Store

from .standing import find_state


def count_states(store: Store, hosts: Sequence[HostStatus], now: datetime) -> dict[str, int]:
    """The number of rules in each state, and in all."""
    counts: Counter[State] = Counter()
    for alike in store.census(now, [host.applied_revision for host in hosts]):
        counts[find_state(alike.example, hosts, alike.exceptional, now)] += alike.number
    return {**{state.value: counts[state] for state in State}, "total": counts.total()}
