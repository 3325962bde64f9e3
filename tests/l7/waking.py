"""A clock of counters that stands still until a test lets it go on: what is asked before is asked at once, however long
that takes."""

from __future__ import annotations

import time

from netlimit.l7.memory.counter import Clock


class Waking:
    """Time since 1970, which stands still at first."""

    def __init__(self) -> None:
        self._stood_still = time.monotonic_ns()
        self._origin = time.time_ns() - self._stood_still
        self._skipped: int | None = None

    def go_on(self) -> None:
        """Let time pass, as it does."""
        self._skipped = time.monotonic_ns() - self._stood_still

    @property
    def clock(self) -> Clock:
        """For counters."""
        return Clock(self._read, self._origin)

    def _read(self) -> int:
        return self._stood_still if self._skipped is None else time.monotonic_ns() - self._skipped
