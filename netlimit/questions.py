"""Questions of the API, in turns: what asks must not keep what enforces waiting."""

from __future__ import annotations

from collections.abc import Sequence

from netlimit.records import Request

LONGEST_REST = 1.0
"""After a question's work the controller has as much time for other things, up to so many seconds."""


class Questions:
    """Chooses what to answer next: the oldest question with all that ask the same, for one answer is good for all of
    them. Times are of a clock that nobody sets."""

    def __init__(self) -> None:
        self.due: float | None = None
        """When the next is to be answered, None if nobody waits."""
        self._rested = 0.0

    def choose(self, waiting: Sequence[Request], now: float) -> list[Request]:
        """Those that are to be answered now, by one answer."""
        chosen: list[Request] = []
        if waiting and now >= self._rested:
            first = waiting[0]
            chosen = [each for each in waiting if (each.kind, each.argument) == (first.kind, first.argument)]
        self.due = self._rested if len(chosen) < len(waiting) else None
        return chosen

    def rest(self, began: float, now: float) -> None:
        """Note that an answer took from `began` until now."""
        self._rested = now + min(now - began, LONGEST_REST)
        self.due = None if self.due is None else self._rested
