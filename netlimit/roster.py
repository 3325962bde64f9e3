"""Which rules are in force at the moment: until their ends, and by what they ask for when the database is gone."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from netlimit.rules import OnFailure, Rule
from netlimit.state import LONGEST_TIMEOUT

_MOST_STALE = 100
"""So many looks that are due no more are left to be, for rules whose end is put off again and again."""


class Roster:
    """The rules of one gateway whose standing can change though nobody changes them."""

    def __init__(self, host: str, lifted: set[int] | None = None) -> None:
        self._host = host
        self._looks: list[tuple[float, int]] = []
        self._ends: list[tuple[float, int]] = []
        self._next: dict[int, float] = {}
        self._ending: dict[int, Rule] = {}
        self._open: set[int] = set()
        self.lifted = lifted if lifted is None else set[int]()
        """The rules with `on_failure: open` that are out of force for the time being; None while none is to be."""

    @property
    def temporary(self) -> list[Rule]:
        """The rules that have an end."""
        return list(self._ending.values())

    @property
    def next_look(self) -> float | None:
        """When (Unix time) the next rule must be looked at again."""
        return self._looks[0][0] if self._looks else None

    @property
    def next_end(self) -> float | None:
        """When (Unix time) the next rule ends of which `ending` has not told."""
        return self._ends[0][0] if self._ends else None

    def admit(self, rule: Rule, now: datetime) -> Rule | None:
        """Take note of a rule. As the kernel can hold it, or None if it is not in force now."""
        self.forget(rule.id)
        if rule.expires_at is not None and rule.enabled:
            self._ending[rule.id] = rule
        if rule.on_failure is OnFailure.OPEN:
            self._open.add(rule.id)
        if not rule.in_force(now, self._host):
            return None
        if self.lifted is not None and rule.id in self._open:
            self.lifted.add(rule.id)
            return None
        return rule if rule.expires_at is None else self._schedule(rule, rule.expires_at, now)

    def forget(self, rule_id: int) -> None:
        """The rule is gone, or is another."""
        self._ending.pop(rule_id, None)
        self._next.pop(rule_id, None)
        self._open.discard(rule_id)
        if self.lifted is not None:
            self.lifted.discard(rule_id)

    def due(self, now: datetime) -> Iterator[Rule]:
        """The rules that must be looked at again by now, each once."""
        while self._looks and self._looks[0][0] <= now.timestamp():
            moment, rule_id = heapq.heappop(self._looks)
            if self._next.get(rule_id) == moment:  # else it has another end, or none any more, or is gone
                yield self._ending[rule_id]

    def ending(self, until: float) -> Iterator[int]:
        """The rules that are looked at again before a moment (Unix time), each told once."""
        while self._ends and self._ends[0][0] <= until:
            moment, rule_id = heapq.heappop(self._ends)
            if self._next.get(rule_id) == moment:
                yield rule_id

    def lift(self, in_force: Callable[[int], bool]) -> set[int]:
        """Take those that ask for it out of force, of those that are in it; their ids."""
        self.lifted = {rule_id for rule_id in self._open if in_force(rule_id)}
        return self.lifted

    def _schedule(self, rule: Rule, end: datetime, now: datetime) -> Rule:
        """Note when the rule must be looked at again. The kernel cannot hold an end that is too far away: until it
        is near, the entry has none."""
        far = (end - now).total_seconds() > LONGEST_TIMEOUT
        look = end - timedelta(seconds=LONGEST_TIMEOUT) if far else end
        self._next[rule.id] = look.timestamp()
        heapq.heappush(self._looks, (look.timestamp(), rule.id))
        heapq.heappush(self._ends, (look.timestamp(), rule.id))
        most = 2 * len(self._next) + _MOST_STALE
        if len(self._looks) > most:
            self._looks = sorted((moment, rule_id) for rule_id, moment in self._next.items())
        if len(self._ends) > most:
            self._ends = sorted(each for each in {*self._ends} if self._next.get(each[1]) == each[0])
        return replace(rule, expires_at=None) if far else rule
