"""An event loop whose clock leaps: where there is nothing to do until a timer, it is that time at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from netlimit.l7.memory.counter import Clock

_MIDNIGHT = 1_800_057_600 * 10**9
_T = TypeVar("_T")


class _Selector(selectors.SelectSelector):
    leap: Callable[[float], None]

    def select(self, timeout: float | None = None) -> Any:
        if timeout:
            self.leap(timeout)
        return super().select(0)


class LeapingLoop(asyncio.SelectorEventLoop):
    """For what touches no socket."""

    def __init__(self) -> None:
        selector = _Selector()
        super().__init__(selector)
        self._now = 0.0
        selector.leap = self._leap

    def time(self) -> float:
        return self._now

    def _leap(self, seconds: float) -> None:
        self._now += seconds


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Run to the end, in no time."""
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        return runner.run(main)


def now() -> float:
    """Seconds since the loop began."""
    return asyncio.get_running_loop().time()


def leaping_clock() -> Clock:
    """The loop's time for counters in memory, in which a window of a minute has just begun at the start."""
    return Clock(lambda: round(asyncio.get_running_loop().time() * 1e9), _MIDNIGHT)
