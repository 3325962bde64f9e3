"""How fast requests begin: a crowd that comes at once keeps nobody from an answer whose time is over."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

IN_A_ROUND = 32
"""Requests that begin in a round of the event loop: some milliseconds."""
MORE_IN_A_ROUND = 8
"""What else is read in a round, of all connections: one piece at least, whoever asks."""
T = TypeVar("T")


class Pace:
    """So many requests begin in each round of the event loop, in the order in which they came; in between those are
    answered that have waited. What is long, or was sent ahead of an answer, is read after all else. For one loop."""

    def __init__(self) -> None:
        self._begun = 0
        self._coming = deque[Callable[[], object]]()
        self._more = deque[Callable[[], object]]()

    def begin(self, start: Callable[[T], object], request: T) -> None:
        """Have a request begin: now, or in one of the next rounds."""
        if self._begun >= IN_A_ROUND:
            self._coming.append(partial(start, request))
            return
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._go_on)
        self._begun += 1
        start(request)

    def follow(self, read: Callable[[], object]) -> None:
        """Have more of what a connection has sent be read in one of the next rounds, as far as others leave time."""
        self._more.append(read)
        if not self._begun:
            self._begun = 1
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        coming = min(len(self._coming), IN_A_ROUND)
        more = min(len(self._more), MORE_IN_A_ROUND, max(IN_A_ROUND - coming, 1))
        self._begun = coming + more
        if self._begun:
            asyncio.get_running_loop().call_soon(self._go_on)
        for _ in range(coming):
            self._coming.popleft()()
        for _ in range(more):
            self._more.popleft()()
