"""From the kernel's counters to a rule's: totals that survive a set that is made anew, and a controller that restarts.

The kernel counts since an entry was written; a rule counts since it was first enforced. What is added is the
difference to the last reading, or the whole reading if that has become smaller, for then the entry was written anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from datetime import datetime

from netlimit.compile import Compilation
from netlimit.kernel.base import Reading
from netlimit.limits import Fragment, Limit
from netlimit.plan import WriteTree
from netlimit.records import Counts, RuleCounters
from netlimit.rules import Action
from netlimit.tree import Usage

Readings = Mapping[str, Mapping[str, Reading]]


class Tally:
    """Every rule's counters, as far as they have been read."""

    def __init__(self, counters: Mapping[int, RuleCounters] | None = None) -> None:
        self._counters = dict(counters or {})
        self._usages: dict[str, dict[int, Usage]] = {}
        self._known: set[int] = set()
        self._classes: dict[int, list[tuple[str, int]]] = {}
        """The classes of each rule, when they were read last."""

    def forget(self, rule_id: int) -> None:
        """The rule is gone."""
        self._counters.pop(rule_id, None)
        self._classes.pop(rule_id, None)
        self._known.discard(rule_id)

    def restart(self, rule_id: int) -> None:
        """The rule's entries were written anew: the kernel counts from nothing again."""
        self._known.discard(rule_id)
        before = self._counters.get(rule_id)
        if before is not None:
            self._counters[rule_id] = replace(before, raw=Counts())

    def leave(self, step: WriteTree) -> None:
        """Queues were changed: classes that went with it count from nothing when their numbers are given out again."""
        if step.root is not None or step.drop:
            self._usages.pop(step.device, None)
        for number in step.gone:
            self._usages.get(step.device, {}).pop(number, None)

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

    def read_leaving(
        self, leaving: Iterable[tuple[Fragment, tuple[str, ...]]], readings: Readings, now: datetime
    ) -> list[RuleCounters]:
        """Add the last readings of rules that are about to leave the kernel, each with its sets; returns as `read`."""
        changed = (self._add(fragment, names, readings, now, False) for fragment, names in leaving)
        return [counters for counters in changed if counters is not None]

    def zero(self, rule_ids: Iterable[int]) -> list[RuleCounters]:
        """Rules have left the kernel: when they come back, it counts from nothing again. Returns the counters that
        changed."""
        changed = []
        for rule_id in rule_ids:
            before = self._counters.get(rule_id)
            if before is not None and before.raw != Counts():
                self.restart(rule_id)
                changed.append(self._counters[rule_id])
        return changed

    def read_usages(
        self,
        classes: Mapping[int, list[tuple[str, int]]],
        usages: Mapping[str, Mapping[int, Usage]],
        now: datetime,
        *,
        fresh: bool = False,
    ) -> list[RuleCounters]:
        """Add what the classes of rules (device and classid) have counted; returns as `read`.

        What a class has counted since it was read last, for whichever rule, is its rule's. Only at a rule's first
        reading after a start is it not known class by class.
        """
        changed = []
        for device, there in usages.items():
            before_it = self._usages.get(device, {})
            wanted = {number for held in classes.values() for where, number in held if where == device}
            self._usages[device] = {n: usage for n, usage in before_it.items() if n in there or n in wanted}
        for rule_id, held in classes.items():
            if not fresh and self._is_idle(rule_id, held, usages):
                continue
            self._classes[rule_id] = held
            found = {each: usage for each in held if (usage := self._find_usage(*each, usages)) is not None}
            raw = sum((_as_counts(usage) for usage in found.values()), Counts())
            before = self._counters.get(rule_id)
            if before is None or rule_id in self._known or before.raw == Counts():
                gain = sum((self._gain(*each, usage) for each, usage in found.items()), Counts())
            else:
                gain = _gain(raw, before.raw)
            self._known.add(rule_id)
            for (device, number), usage in found.items():
                self._usages[device][number] = usage
            queued = (sum(u.queued_packets for u in found.values()), sum(u.queued_bytes for u in found.values()))
            if before is None and not (gain.matched_packets or fresh):
                continue
            same = before is not None and (raw, *queued) == (before.raw, before.queued_packets, before.queued_bytes)
            if same and gain == Counts() and not fresh:
                continue
            total = (before.total if before else Counts()) + gain
            counters = RuleCounters(rule_id, total, raw, before.since if before else now, now, *queued)
            self._counters[rule_id] = counters
            changed.append(counters)
        return changed

    def _is_idle(self, rule_id: int, held: list[tuple[str, int]], usages: Mapping[str, Mapping[int, Usage]]) -> bool:
        """Whether none of a rule's classes has counted anything since they were read last, which is soon seen."""
        if rule_id not in self._known or self._classes.get(rule_id) != held:
            return False
        return all(usages.get(device, {}).get(n) == self._usages.get(device, {}).get(n) for device, n in held)

    def _find_usage(self, device: str, number: int, usages: Mapping[str, Mapping[int, Usage]]) -> Usage | None:
        """What a class has counted; where it was not seen, what it had last: a reading can miss some that are there."""
        return usages.get(device, {}).get(number) or self._usages.get(device, {}).get(number)

    def _gain(self, device: str, number: int, usage: Usage) -> Counts:
        """What a class has counted since it was read last; one that has counted less was made anew."""
        last = self._usages[device].get(number)
        if last is None or last.packets > usage.packets:
            return _as_counts(usage)
        return _less(_as_counts(usage), _as_counts(last))

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
        _grown(raw.delayed, last.delayed),
    )


def _as_counts(usage: Usage) -> Counts:
    """What was sent, waits or was dropped has matched."""
    packets = usage.packets + usage.queued_packets + usage.dropped
    return Counts(packets, usage.bytes + usage.queued_bytes, usage.dropped, 0, usage.overlimits)


def _less(counts: Counts, gone: Counts) -> Counts:
    return Counts(*(max(0, getattr(counts, f.name) - getattr(gone, f.name)) for f in fields(Counts)))


def _grown(now: int, last: int) -> int:
    return now - last if now >= last else now
