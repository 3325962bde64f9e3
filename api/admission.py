"""What the API limits of itself: how often, how many at once, how much and how slowly.

A limiter that can be flooded through its own door would be a poor one. Whoever is refused is told when to come back.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .buckets import Buckets
from .doorkeeper import Doorkeeper
from .origin import HEADER, find_origin
from .problems import Problem, say_ending
from .turns import TURN, Kind, Rank, Turn, Turns
from .waiting import CLIENT

MOST_AT_ONCE = 512
"""Requests under way, of all together; most of them wait for a controller, which costs next to nothing."""
MOST_OF_ONE = 256
"""Requests under way, of one token or address."""
MOST_UNKNOWN = 128
"""Requests under way, of all who have shown no good token yet, and are not on this host."""
MOST_LOCAL = 64
"""Requests under way that this host may have besides, when all others have taken all there are."""
MOST_BYTES = 256 * 2**20
"""Bodies that are held, of all together: four of the largest."""
HEAD_BYTES = 96 * 2**10
"""The most bytes of a head, query and header fields: a thousand rules may be asked for by name."""
BODY_SECONDS, LONGEST_SECONDS = 10.0, 600.0
"""A body has so long to come, and longer only as it does come; but never longer than ten minutes."""
SLOWEST = 64 * 2**10
"""Bytes a second: what came of a body gives it so much more time."""
LOOKING = ("GET", "HEAD")
_CLIENTS = 8192


class Admission:
    """ASGI middleware: gives each request its id, and lets it in if there is room for it.

    What is counted is the token, if it is known to be good, and else the address: nobody is kept out by what others
    send from the same address.
    """

    def __init__(self, app: ASGIApp, doorkeeper: Doorkeeper, rate: int) -> None:
        self._app, self._doorkeeper = app, doorkeeper
        self._buckets = Buckets(rate, 2 * rate, _CLIENTS)
        self._under_way: Counter[object] = Counter()
        self._turns = Turns()
        self._held = 0
        self._unknown = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        origin = find_origin(scope)
        scope.setdefault("state", {})["origin"] = origin

        turn: Turn | None = None
        answered = False

        async def send_with_id(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                if turn is not None:  # all is done: who takes his answer slowly keeps nobody's turn meanwhile
                    turn.lay_down()
                MutableHeaders(scope=message)[HEADER] = origin.request
            await send(message)

        client = scope["state"]["client"] = self._find_client(scope, origin.place)
        local = origin.address is not None and ip_address(origin.address).is_loopback
        unknown = isinstance(client, str) and not local
        refused = _refuse_head(scope) or self._refuse(client, local, unknown)
        if refused is not None:
            return await refused.response()(scope, receive, send_with_id)
        self._under_way[client] += 1
        self._unknown += unknown
        body = _Body(receive)
        CLIENT.set(client)
        # Whose it is, and of which rank, `api.auth` tells when it has looked at the token.
        turn = Turn(self._turns, client, Rank.UNKNOWN, Kind.LOOK if scope["method"] in LOOKING else Kind.CHANGE)
        scope["state"]["turn"] = turn
        TURN.set(turn)
        try:
            await self._app(scope, lambda: self._receive(body, turn), send_with_id)
        except asyncio.CancelledError:  # the server ends, and has waited long enough
            if answered:
                raise
            await say_ending().response()(scope, receive, send_with_id)
        finally:
            turn.lay_down()
            self._held -= body.size
            self._unknown -= unknown
            self._under_way[client] -= 1
            if not self._under_way[client]:
                del self._under_way[client]

    def _find_client(self, scope: Scope, place: str) -> object:
        scheme, _, text = Headers(scope=scope).get("authorization", "").partition(" ")
        token = self._doorkeeper.recall(text.strip()) if scheme.lower() == "bearer" else None
        return token.id if token else place

    def _refuse(self, client: object, local: bool, unknown: bool) -> Problem | None:
        most = MOST_AT_ONCE + (MOST_LOCAL if local else 0)
        if self._under_way.total() >= most or (unknown and self._unknown >= MOST_UNKNOWN):
            return _too_much(503, "The API has as many requests under way as it takes; try again.")
        if self._under_way[client] >= MOST_OF_ONE:
            return _too_much(429, f"You have {MOST_OF_ONE} requests under way, the most for one; await some answers.")
        wait = self._buckets.take(client)
        return _too_much(429, "You send more requests a second than the API takes from one.", wait) if wait else None

    async def _receive(self, body: _Body, turn: Turn) -> Message:
        if self._held > MOST_BYTES:
            raise _too_much(503, "The API holds as many large bodies as it can; try again.")
        message = await body.receive()
        self._held += len(message.get("body", b""))
        turn.read(body.size)
        return message


class _Body:
    """A body that must not take too long to come; `size` is what has come of it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._began: float | None = None
        self._ended = False
        self.size = 0

    async def receive(self) -> Message:
        """The next part. Raises Problem 408."""
        if self._ended:
            return await self._receive()
        now = asyncio.get_running_loop().time()
        self._began = self._began or now
        try:
            async with asyncio.timeout_at(self._began + min(BODY_SECONDS + self.size / SLOWEST, LONGEST_SECONDS)):
                message = await self._receive()
        except TimeoutError:
            raise Problem(
                408,
                f"The body comes too slowly: after {BODY_SECONDS:g} seconds, {SLOWEST} bytes a second are the least.",
                headers={"Connection": "close"},
            ) from None
        self.size += len(message.get("body", b""))
        self._ended = not message.get("more_body", False)
        return message


def _refuse_head(scope: Scope) -> Problem | None:
    """The server refuses by itself what comes in pieces and is too large."""
    size = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["query_string"])
    return Problem(431, f"The head is too large: at most {HEAD_BYTES} bytes are read.") if size > HEAD_BYTES else None


def _too_much(status: int, sentence: str, wait: float = 1.0) -> Problem:
    return Problem(status, sentence, headers={"Retry-After": str(max(1, math.ceil(wait)))})
