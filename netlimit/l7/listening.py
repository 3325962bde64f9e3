"""Hears whether a client is still there while its request waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

EARFUL = 64 * 2**10
"""Bytes of a body that are taken in while its request waits; then the client is left to push."""
_T = TypeVar("_T")


class ClientGone(Exception):
    """The client has closed the connection."""


class Listener:
    """A connection's incoming messages (ASGI), those that came while the request waited first."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._heard: deque[Message] = deque()
        self._size = 0
        self._hearing: asyncio.Future[Message] | None = None

    async def wait(self, waiting: Awaitable[_T]) -> _T:
        """Await something, as long as the client is there. Raises ClientGone; what was awaited is cancelled then."""
        task = asyncio.ensure_future(waiting)
        try:
            while True:
                if self._hearing is None and self._size <= EARFUL:
                    self._hearing = asyncio.ensure_future(self._receive())
                both: list[asyncio.Future[Any]] = [task] if self._hearing is None else [task, self._hearing]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    return task.result()
                assert self._hearing is not None
                self._take(self._hearing.result())
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def receive(self) -> Message:
        """The next message."""
        if self._heard:
            return self._heard.popleft()
        if self._hearing is not None:
            hearing, self._hearing = self._hearing, None
            return await hearing
        return await self._receive()

    def hear_again(self, body: bytes) -> None:
        """Have a body that has been read to its end come again."""
        self._heard.appendleft({"type": "http.request", "body": body, "more_body": False})

    def close(self) -> None:
        """Listen no more."""
        if self._hearing is not None:
            self._hearing.cancel()

    def _take(self, message: Message) -> None:
        self._hearing = None
        self._heard.append(message)
        self._size += len(message.get("body", b""))
        if message["type"] in ("http.disconnect", "websocket.disconnect"):
            raise ClientGone
