"""What becomes of the requests that a rule sees."""

from __future__ import annotations

from dataclasses import dataclass

from netlimit.l7.rules import Rule

NEAR = 0.8
"""From so much of its limit on a key is near it, as in Envoy's ratelimit."""


@dataclass(slots=True)
class Counts:
    """Hits of one rule since the start. Each is in one of admitted, refused and observed."""

    admitted: int = 0
    refused: int = 0
    observed: int = 0
    """Admitted though the limit was reached, since the rule only observes."""
    over: int = 0
    """Of the admitted ones: beyond the limit, as a soft or elastic one tolerates."""
    near: int = 0
    """Of the admitted ones: with four fifths of the limit used."""
    queued: int = 0
    """Of the admitted ones: made to wait for their turn."""


class Usage:
    """Counts by rule."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], Counts] = {}

    def find_counts(self, rule: Rule) -> Counts:
        """The counts of a rule, by its domain and name."""
        place = (rule.domain, rule.name)
        counts = self.counts.get(place)
        if counts is None:
            counts = self.counts[place] = Counts()
        return counts
