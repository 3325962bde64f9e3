"""From the kernel's counters to a rule's: totals that survive a set that is made anew, and a controller that restarts.

The kernel counts since an entry was written; a rule counts since it was first enforced. What is added is the
difference to the last reading, or the whole reading if that has become smaller, for then the entry was written anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from netlimit.compile import Compilation
from netlimit.kernel.base import Reading
from netlimit.limits import Fragment, VerdictGroup
from netlimit.records import Counts, RuleCounters
from netlimit.rules import Action

Readings = Mapping[str, Mapping[str, Reading]]


class Tally:
    """Every rule's counters, as far as they have been read."""

    def __init__(self, counters: Mapping[int, RuleCounters] | None = None) -> None:
        self._counters = dict(counters or {})

    def forget(self, rule_id: int) -> None:
        """The rule is gone."""
        self._counters.pop(rule_id, None)

    def read(
        self, compilation: Compilation, rule_ids: Iterable[int], readings: Readings, now: datetime
    ) -> list[RuleCounters]:
        """Add the readings of the sets that these rules are in; returns the counters that changed."""
        changed = []
        for rule_id in rule_ids:
            fragment = compilation.fragments[rule_id]
            names = compilation.sets_of(fragment)
            if names and fragment.problem is None:
                counters = self._add(rule_id, fragment, names, readings, now)
                if counters is not None:
                    changed.append(counters)
        return changed

    def _add(
        self, rule_id: int, fragment: Fragment, names: tuple[str, ...], readings: Readings, now: datetime
    ) -> RuleCounters | None:
        before = self._counters.get(rule_id)
        last = before.raw if before else Counts()
        matched = _sum(fragment, readings.get(names[0])) or (last.matched_packets, last.matched_bytes)
        if len(names) > 1:
            dropped = _sum(fragment, readings.get(names[1])) or (last.dropped_packets, last.dropped_bytes)
        else:
            blocks = isinstance(fragment.purpose, VerdictGroup) and fragment.purpose.action is Action.BLOCK
            dropped = matched if blocks else (0, 0)
        raw = Counts(*matched, *dropped)
        if before is not None and raw == last:
            return None
        if before is None and raw == Counts():
            return None
        total = (before.total if before else Counts()) + _gain(raw, last)
        counters = RuleCounters(rule_id, total, raw, before.since if before else now, now)
        self._counters[rule_id] = counters
        return counters


def _sum(fragment: Fragment, held: Mapping[str, Reading] | None) -> tuple[int, int] | None:
    if held is None:
        return None
    found = [held[key] for key in fragment.keys if key in held]
    return sum(reading.packets for reading in found), sum(reading.bytes for reading in found)


def _gain(raw: Counts, last: Counts) -> Counts:
    return Counts(
        _grown(raw.matched_packets, last.matched_packets),
        _grown(raw.matched_bytes, last.matched_bytes),
        _grown(raw.dropped_packets, last.dropped_packets),
        _grown(raw.dropped_bytes, last.dropped_bytes),
    )


def _grown(now: int, last: int) -> int:
    return now - last if now >= last else now
