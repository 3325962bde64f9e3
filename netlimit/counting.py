"""From the kernel's counters to a rule's: totals that survive a set that is made anew, and a controller that restarts.

The kernel counts since an entry was written; a rule counts since it was first enforced. What is added is the
difference to the last reading, or the whole reading if that has become smaller, for then the entry was written anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime

from netlimit.compile import Compilation
from netlimit.kernel.base import Reading
from netlimit.limits import Fragment, Limit
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

    def restart(self, rule_id: int) -> None:
        """The rule's entries were written anew: the kernel counts from nothing again."""
        before = self._counters.get(rule_id)
        if before is not None:
            self._counters[rule_id] = replace(before, raw=Counts())

    def read(
        self,
        compilation: Compilation,
        rule_ids: Iterable[int],
        readings: Readings,
        now: datetime,
        *,
        fresh: bool = False,
    ) -> list[RuleCounters]:
        """Add the readings of the sets that these rules are in; returns the counters that changed, or all (`fresh`):
        that nothing has been counted since is news to somebody who asks."""
        changed = []
        for rule_id in rule_ids:
            names = compilation.sets_of(rule_id)
            if names:
                counters = self._add(compilation.fragments[rule_id], names, readings, now, fresh)
                if counters is not None:
                    changed.append(counters)
        return changed

    def _add(
        self, fragment: Fragment, names: tuple[str, ...], readings: Readings, now: datetime, fresh: bool
    ) -> RuleCounters | None:
        matched = _sum(fragment, readings.get(names[0]))
        dropped = _sum(fragment, readings.get(names[-1])) if _counts_drops(fragment) else (0, 0)
        before = self._counters.get(fragment.rule_id)
        if before is None and not (matched[0] or dropped[0] or fresh):
            return None
        raw, last = Counts(*matched, *dropped), before.raw if before else Counts()
        if raw == last and not fresh:
            return None
        total = (before.total if before else Counts()) + _gain(raw, last)
        counters = RuleCounters(fragment.rule_id, total, raw, before.since if before else now, now)
        self._counters[fragment.rule_id] = counters
        return counters


def _counts_drops(fragment: Fragment) -> bool:
    """Limits have a set that counts drops; what is blocked is dropped wherever it matched."""
    return isinstance(fragment.purpose, Limit) or fragment.purpose.action is Action.BLOCK


def _sum(fragment: Fragment, held: Mapping[str, Reading] | None) -> tuple[int, int]:
    packets = size = 0
    for key in fragment.keys:
        reading = held.get(key) if held else None
        if reading is not None:
            packets += reading.packets
            size += reading.bytes
    return packets, size


def _gain(raw: Counts, last: Counts) -> Counts:
    return Counts(
        _grown(raw.matched_packets, last.matched_packets),
        _grown(raw.matched_bytes, last.matched_bytes),
        _grown(raw.dropped_packets, last.dropped_packets),
        _grown(raw.dropped_bytes, last.dropped_bytes),
    )


def _grown(now: int, last: int) -> int:
    return now - last if now >= last else now
