"""What takes long to make is made in pieces, with the event loop in between: nobody who asks about a request waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from itertools import islice
from typing import Generic, TypeVar

PIECE = 100
"""Things that are told in one piece: some milliseconds."""
T = TypeVar("T")


async def in_pieces(things: Iterable[T]) -> AsyncIterator[list[T]]:
    """All of them, some at a time; after each time there is a round of the event loop."""
    rest = iter(things)
    while piece := list(islice(rest, PIECE)):
        yield piece
        await asyncio.sleep(0)


class Shared(Generic[T]):
    """Something that takes long to make. It is made once at a time for all who ask for it, and whoever asks has what
    was begun from then on: never what is older. After each time there is a rest that is as long, so that asking
    without end takes half of the processor at most. For one event loop."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._coming: asyncio.Task[T] | None = None
        self._turn = asyncio.Lock()
        self._rested = 0.0

    async def find(self) -> T:
        """Make it, or wait for what is about to begin."""
        if self._coming is None:
            self._coming = asyncio.create_task(self._find())
        return await asyncio.shield(self._coming)  # for the others, if this one goes

    async def _find(self) -> T:
        async with self._turn:
            await asyncio.sleep(self._rested - time.monotonic())
            self._coming = None
            began = time.monotonic()
            try:
                return await self._make()
            finally:
                self._rested = 2 * time.monotonic() - began
