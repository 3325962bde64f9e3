"""A circuit breaker: whether somebody who does not answer is asked at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from enum import StrEnum

RESTING = "they did not answer, and will be tried again soon"
"""What is said to those who are not let through. It tells nothing of why."""


class State(StrEnum):
    """What a breaker thinks of whom it guards."""

    CLOSED = "closed"
    """All is well: everybody asks."""
    HALF_OPEN = "half_open"
    """One asks, to find out; nobody else does meanwhile."""
    OPEN = "open"
    """Nobody asks for a while."""


def worst(states: Iterable[State]) -> State:
    """Of several breakers, what the one that has most against its charge thinks; of none, that all is well."""
    return max(states, key=[State.CLOSED, State.HALF_OPEN, State.OPEN].index, default=State.CLOSED)


class Breaker:
    """Opens at a failure; then one question every `rest` seconds is let through, until one succeeds.

    The clock is in seconds and never jumps.
    """

    def __init__(self, rest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rest = rest
        self.state = State.CLOSED
        self._clock = clock
        self._until = 0.0

    def admit(self) -> bool:
        """Whether to ask now. Who is told so is to report how it went; if nobody does, another may try after `rest`."""
        if self.state is State.CLOSED:
            return True
        if self._clock() < self._until:
            return False
        self.state = State.HALF_OPEN
        self._until = self._clock() + self.rest
        return True

    def succeed(self) -> None:
        """There was an answer."""
        self.state = State.CLOSED

    def fail(self) -> None:
        """There was none."""
        self.state = State.OPEN
        self._until = self._clock() + self.rest
