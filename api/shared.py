"""What is read once for all who ask at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from fastapi.concurrency import run_in_threadpool

T = TypeVar("T")


class Shared(Generic[T]):
    """Something dear that many may ask for. It is read in a thread, once at a time, and whoever asks has what was read
    from then on: never what is older. After a reading there is a rest that is as long, so that asking without end
    takes half of a processor at most."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._coming: asyncio.Task[T] | None = None
        self._turn = asyncio.Lock()
        self._rested = 0.0

    async def find(self) -> T:
        """Read it, or wait for the reading that is about to begin."""
        if self._coming is None:
            self._coming = asyncio.create_task(self._find())
        return await asyncio.shield(self._coming)

    async def _find(self) -> T:
        async with self._turn:
            await asyncio.sleep(self._rested - time.monotonic())
            self._coming = None
            began = time.monotonic()
            try:
                return await run_in_threadpool(self._read)
            finally:
                self._rested = 2 * time.monotonic() - began
