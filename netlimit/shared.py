"""What is made once for all who ask at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


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
