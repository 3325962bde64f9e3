"""Counts by value, for rules that want metrics of them."""

from __future__ import annotations

import re

from netlimit.l7.rules import Rule

MOST = 100
"""Values of a rule that are counted each by itself: Prometheus keeps a series of each for ever."""
OTHERS = "(others)"
"""Where the rest is counted."""
_STEP = re.compile(r"(?:^|,)((?:[^,\\]|\\.)*)")
_VALUE = re.compile(r"(?:^|\|)((?:[^|\\]|\\.)*)")
_OPEN = re.compile(r"(?:[^=\\*]|\\.)*(?:$|=.*\*)")
"""A step of a rule's name that leaves its value open: a key alone, or a value with wildcards."""


class Detail:
    """What a rule admits and refuses, by the values that it leaves open: all (`detailed_metric`), or those of the
    entries that `value_to_metric` names. At most a hundred are told apart."""

    def __init__(self, rule: Rule) -> None:
        self.counts: dict[str, list[int]] = {}
        """Admitted and refused hits."""
        self._chosen: list[int] | None = None
        if not rule.detailed_metric:
            steps = enumerate(_STEP.findall(rule.name))
            left_open = [number for number, step in steps if _OPEN.fullmatch(step)]
            self._chosen = [left_open.index(number) for number in rule.value_to_metric if number in left_open]

    def record(self, key: str, hits: int, admitted: bool) -> None:
        """Count hits of a key."""
        values = self._choose(key).encode(errors="backslashreplace").decode()  # JSON can tell what is no text
        if values not in self.counts and len(self.counts) >= MOST:
            values = OTHERS
        self.counts.setdefault(values, [0, 0])[not admitted] += hits

    def _choose(self, key: str) -> str:
        if self._chosen is None:
            return key
        values = _VALUE.findall(key)
        return "|".join(values[place] for place in self._chosen if place < len(values))
