"""Bodies of requests on their way into a backlog."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from itertools import chain

from netlimit.l7.deferral.backlog import Backlog, BacklogFull, Load, Unkept
from netlimit.l7.deferral.request import Deferred, write_head
from netlimit.l7.listening import ClientGone, Receive

_SECONDS = 30.0
_Part = tuple[str | None, str | None]
"""Those of a key and a network; None for any."""


class BodyTooLarge(Unkept):
    """A body has more bytes than are kept of one."""

    status = 413

    def __init__(self, largest: int) -> None:
        super().__init__(f"The request is over its limit, and too large to be kept: {largest} bytes are the most.")


class BodyLate(Unkept):
    """A body has not come in time."""

    status = 408

    def __init__(self) -> None:
        super().__init__(f"The body has not come within {_SECONDS:g} seconds.")


class Intake:
    """Reads bodies, as far as there is room for them in the memory of this process: what is being read in it and what
    waits in the backlog are held together to the bounds of the backlog. For one event loop."""

    def __init__(self, backlog: Backlog, largest: int) -> None:
        self._backlog = backlog
        self._largest = largest
        self._requests, self._bytes = Counter[_Part](), Counter[_Part]()

    @asynccontextmanager
    async def read(self, request: Deferred, told: int, receive: Receive) -> AsyncIterator[bytes]:
        """The body of a request that is without it yet, and whose length has been `told` (0 if it has not). It has its
        room as long as the block lasts; one for which there is none is not read.

        Raises BodyTooLarge, BodyLate, BacklogFull, BacklogUnavailable, ClientGone.
        """
        if told > self._largest:
            raise BodyTooLarge(self._largest)
        place = _Place(request, await self._backlog.weigh(request.key, request.network))
        try:
            self._take_room(place, told)
            yield await self._read(place, receive)
        finally:
            self._give_back(place)

    async def _read(self, place: _Place, receive: Receive) -> bytes:
        body = BytesIO()  # whose bytes are handed out at its end without another copy
        try:
            async with asyncio.timeout(_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece: bytes = message.get("body", b"")
                    length = body.tell() + len(piece)
                    if length > self._largest:
                        raise BodyTooLarge(self._largest)
                    if length > place.room:
                        self._take_room(place, length)
                    body.write(piece)
                    if not message.get("more_body", False):
                        return body.getvalue()
        except TimeoutError as error:
            raise BodyLate from error

    def _take_room(self, place: _Place, length: int) -> None:
        """Have room for a body of so many bytes instead of what it had. Raises BacklogFull."""
        self._give_back(place)
        read = Load(*chain.from_iterable((self._requests[part], self._bytes[part]) for part in place.parts))
        size = place.head + length
        if not self._backlog.bounds.have_room(place.waiting.plus(read), size, place.shared):
            raise BacklogFull
        for part in place.parts:
            self._requests[part] += 1
            self._bytes[part] += size
        place.room = length

    def _give_back(self, place: _Place) -> None:
        if place.room < 0:
            return
        for part in place.parts:
            self._requests[part] -= 1
            self._bytes[part] -= place.head + place.room
            if not self._requests[part]:
                del self._requests[part], self._bytes[part]
        place.room = -1


class _Place:
    """What one request takes up while its body is read."""

    def __init__(self, request: Deferred, waiting: Load) -> None:
        key, network = request.key, request.network
        self.parts: tuple[_Part, ...] = (None, None), (key, None), (None, network), (key, network)
        self.shared = request.shared
        self.waiting = waiting
        """What waited when it came."""
        self.head = len(write_head(request))
        self.room = -1
        """Bytes of body for which it has room; -1 while it has no place at all."""
