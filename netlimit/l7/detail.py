"""Counts by value, for rules that want metrics of them."""

from __future__ import annotations

import logging
import re

from netlimit.l7.rules import Rule

MOST = 100
"""Values of a rule that are counted each by itself: Prometheus keeps a series of each for ever."""
MOST_OF_ALL = 10_000
"""The same of all rules together: Prometheus is to read what is told of them in a second."""
OTHERS = "(others)"
"""Where the rest is counted."""
_STEP = re.compile(r"(?:^|,)((?:[^,\\]|\\.)*)")
_VALUE = re.compile(r"(?:^|\|)((?:[^|\\]|\\.)*)")
_OPEN = re.compile(r"(?:[^=\\*]|\\.)*(?:$|=.*\*)")
"""A step of a rule's name that leaves its value open: a key alone, or a value with wildcards."""
log = logging.getLogger(__name__)


class Space:
    """Room for the values of all rules."""

    def __init__(self, left: int = MOST_OF_ALL) -> None:
        self.left = left
        self.troubles: tuple[str, ...] = ()
        """Whether it did not suffice, as a sentence."""

    def take(self) -> bool:
        """Take the room of one value, if there is any."""
        if not self.left:
            self._complain()
            return False
        self.left -= 1
        return True

    def _complain(self) -> None:
        if not self.troubles:
            sentence = (
                f"Metrics by value (detailed_metric, value_to_metric) tell apart {MOST_OF_ALL:,} values of all rules, "
                f"and there have been more: these are in {OTHERS}. Have fewer rules tell of values."
            )
            self.troubles = (sentence,)
            log.warning("%s", sentence)


class Detail:
    """What a rule admits and refuses, by the values that it leaves open: all (`detailed_metric`), or those of the
    entries that `value_to_metric` names.
    At most a hundred are told apart, and of all rules as many as there is space for."""

    def __init__(self, rule: Rule, space: Space) -> None:
        self._space = space
        self._taken = 0
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
        if values not in self.counts and not self._take():
            values = OTHERS
        self.counts.setdefault(values, [0, 0])[not admitted] += hits

    def leave(self) -> None:
        """Give its room back: nothing is recorded any more."""
        self._space.left += self._taken

    def _take(self) -> bool:
        """Take room for another value."""
        if self._taken >= MOST or not self._space.take():
            return False
        self._taken += 1
        return True

    def _choose(self, key: str) -> str:
        if self._chosen is None:
            return key
        values = _VALUE.findall(key)
        return "|".join(values[place] for place in self._chosen if place < len(values))
