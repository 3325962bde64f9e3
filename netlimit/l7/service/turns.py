"""Turns of those who ask over gRPC, where one connection may hold any number of questions."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class Turns:
    """One question begins in each round of the event loop, so that HTTP is answered meanwhile; and of those who wait,
    one of each connection after the other. For one loop."""

    def __init__(self) -> None:
        self._waiting = OrderedDict[str, deque[asyncio.Future[None]]]()
        self._giving: asyncio.Task[None] | None = None

    async def take(self, peer: str) -> None:
        """Wait for the turn of a question of this connection."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, deque()).append(turn)
        if self._giving is None:
            self._giving = asyncio.create_task(self._give())
        await turn

    async def _give(self) -> None:
        while self._waiting:
            peer, line = self._waiting.popitem(last=False)
            turn = line.popleft()
            if line:
                self._waiting[peer] = line
            if not turn.done():
                turn.set_result(None)
            await asyncio.sleep(0)
        self._giving = None
