"""Turns of those who ask: what one of them asks, however much and however dear, keeps nobody else from an answer."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class Turns:
    """One question begins in each round of the event loop, so that all else goes on meanwhile; and of those who wait,
    one of each connection after the other, first of those who have shown the limiter's token. For one loop."""

    def __init__(self) -> None:
        self._known = OrderedDict[object, deque[asyncio.Future[None]]]()
        self._others = OrderedDict[object, deque[asyncio.Future[None]]]()
        self._busy = False

    async def take(self, peer: object, known: bool = False) -> None:
        """Wait for the turn of a question of this connection."""
        loop = asyncio.get_running_loop()
        if not self._busy:
            self._busy = True
            loop.call_soon(self._give)
            return
        turn = loop.create_future()
        (self._known if known else self._others).setdefault(peer, deque()).append(turn)
        await turn

    def _give(self) -> None:
        self._busy = self._give_next()
        if self._busy:
            asyncio.get_running_loop().call_soon(self._give)

    def _give_next(self) -> bool:
        """Give whoever is next his turn; whether there is somebody. Those who have gone are passed over."""
        while lines := self._known or self._others:
            peer, line = lines.popitem(last=False)
            turn = line.popleft()
            if line:
                lines[peer] = line
            if not turn.done():
                turn.set_result(None)
                return True
        return False
