"""A connection to a Redis server that takes commands and calls back with their replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hiredis import HiredisError, Reader
from redis.asyncio.connection import AbstractConnection

from netlimit.l7.redis.bounds import Bound, TooMuch

_MOST_BYTES, _MOST_ENTRIES = 2**20, 2**14
"""Of the answers to one batch: some thousand numbers, or so many errors."""


class Channel(asyncio.Protocol):
    """An open connection. redis-py opens it, with its names, passwords and TLS, and knows nothing of it afterwards:
    to be called back rather than to wait in a task takes half the time.
    """

    def __init__(self, received: Callable[[list[Any]], None], lost: Callable[[str], None]) -> None:
        self._received = received
        self._lost = lost
        self._reader = Reader()
        self._bound = Bound(_MOST_BYTES, _MOST_ENTRIES)
        self._replies: list[Any] = []
        self._expected = 0
        self._closed = False
        self._connection: Any  # of redis-py, whose asynchronous half has hardly any types
        self._transport: asyncio.Transport

    async def open(self, connection: AbstractConnection) -> None:
        """Connect; raises what redis-py does, and OSError."""
        self._connection = connection
        try:
            await self._connection.connect()
        except BaseException:
            await self._connection.disconnect(nowait=True)
            raise
        self._transport = self._connection._writer.transport
        self._transport.set_protocol(self)

    def send(self, command: bytes, replies: int) -> None:
        """Send commands that get so many replies, which are handed over together. One after the other."""
        self._expected = replies
        self._replies = []
        self._bound.begin()
        self._transport.write(command)

    def data_received(self, data: bytes) -> None:
        """What asyncio calls."""
        try:
            self._bound.take(data)
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                self._replies.append(reply)
        except (TooMuch, HiredisError) as error:
            return self._lost(str(error))
        if len(self._replies) > self._expected:  # the next answer would be taken for that to another question
            return self._lost("there are more answers than questions")
        if self._expected and len(self._replies) == self._expected:
            replies, self._replies, self._expected = self._replies, [], 0
            self._received(replies)
        return None

    def connection_lost(self, error: Exception | None) -> None:
        """What asyncio calls."""
        if not self._closed:
            self._lost(str(error or "the connection was closed"))

    def abort(self) -> None:
        """Close it at once. Nothing is called back after that."""
        self._closed = True
        self._expected = 0
        self._transport.abort()

    async def close(self) -> None:
        """Close it, and have redis-py know."""
        self.abort()
        await self._connection.disconnect(nowait=True)
