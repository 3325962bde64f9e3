"""Where deferred requests are replayed: the application in this process, or what else serves requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

from netlimit.errors import NetlimitError
from netlimit.l7.deferral.request import Deferred, Reply, keep_answered
from netlimit.l7.listening import Message, Receive

MOST_REPLY = 64 * 2**10
"""Bytes of an answer that are kept."""
SECONDS = 60.0
"""A try may take so long."""
_PATIENCE = 5.0
"""Seconds that an application has to end once it is cancelled."""
_UNSERVED = (429, 502, 503, 504)
"""What a server answers that has not dealt with the request: it is to be tried again."""
_WITH_BODIES = ("POST", "PUT", "PATCH")
"""Methods whose requests tell even that they have no body (RFC 9110, 8.6)."""

App = Callable[[Message, Receive, Callable[[Message], Awaitable[None]]], Awaitable[None]]

log = logging.getLogger(__name__)


class Unserved(NetlimitError):
    """A try has failed; the next one is to come after `retry_after` seconds at least."""

    def __init__(self, sentence: str, retry_after: float = 0.0) -> None:
        super().__init__(sentence)
        self.retry_after = retry_after


class Served(NamedTuple):
    """A request that has been dealt with."""

    reply: Reply
    rest: asyncio.Task[None] | None = None
    """What the application does after its answer, of which it tells the log itself what fails."""


class Upstream(Protocol):
    """Serves requests."""

    async def send(self, request: Deferred) -> Served:
        """Have a request served. Raises Unserved."""
        ...

    async def aclose(self) -> None:
        """Let go of connections."""
        ...


def tells_length(request: Deferred) -> bool:
    """Whether a Content-Length goes with a request. Others have no body, and say nothing of one."""
    return bool(request.body) or request.method in _WITH_BODIES


def make_scope(request: Deferred) -> dict[str, Any]:
    """A request as ASGI describes it, without what other middlewares have put there."""
    path, _, query = request.target.partition("?")
    host, _, port = (request.client or "").rpartition(" ")
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers]
    if tells_length(request):
        pairs.append((b"content-length", b"%d" % len(request.body)))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.scheme,
        "path": unquote(path) if request.path is None else request.path,
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": request.root_path,
        "headers": pairs,
        "client": (host, int(port)) if host else None,
        "server": None,
        "extensions": {},
    }


async def break_off(serving: asyncio.Task[None]) -> None:
    """Cancel what an application does. One that does not heed it is left alone: it would keep its place for ever, and
    its client's other requests waiting."""
    serving.cancel()
    _, going_on = await asyncio.wait([serving], timeout=_PATIENCE)
    if going_on:
        log.error(
            "An application has not ended within %g seconds of being cancelled: it is left alone, and may still be at "
            "work on a deferred request that is tried again.",
            _PATIENCE,
        )


class AppUpstream:
    """An ASGI application in this process. `state` is that of its lifespan, if it has one."""

    def __init__(self, app: App, state: MutableMapping[str, Any] | None = None) -> None:
        self.state = state
        self._app = app
        self._serving: set[asyncio.Task[None]] = set()

    async def send(self, request: Deferred) -> Served:
        """Have a request served, as if its client had sent it just now. A whole answer is the answer, whatever comes
        afterwards. Raises Unserved."""
        collected = Collected()
        serving = asyncio.create_task(self._serve(request, collected))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        serving.add_done_callback(lambda _: collected.whole.set())
        try:
            async with asyncio.timeout(SECONDS):
                await collected.whole.wait()
                if collected.is_served:
                    return Served(collected.conclude(), None if serving.done() else serving)
                await asyncio.wait([serving])
        except TimeoutError:
            if not collected.is_whole:
                raise Unserved(f"The application has not answered within {SECONDS:g} seconds.") from None
        finally:
            if not collected.is_served and not serving.done():
                await break_off(serving)
        return Served(collected.conclude())

    async def _serve(self, request: Deferred, collected: Collected) -> None:
        try:
            scope = make_scope(request) | {"state": dict(self.state or {})}
            await self._app(scope, collected.make_receive(request.body), collected.send)
        except Exception as error:
            if not collected.is_whole:
                collected.fault = error
            else:
                log.exception("The application has failed after its answer to a deferred request.")

    async def aclose(self) -> None:
        """Nothing is open."""


class Collected:
    """An answer as it comes in."""

    def __init__(self) -> None:
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()
        self._truncated = False
        self.whole = asyncio.Event()
        """Set once the answer is whole, or once no more comes."""
        self.is_whole = False
        self.fault: Exception | None = None
        """What the application has raised instead."""

    @property
    def is_served(self) -> bool:
        """Whether it is whole, and says that the request has been dealt with."""
        return self.is_whole and self._status not in _UNSERVED

    def make_receive(self, body: bytes) -> Receive:
        """The client's side of the connection: the body, and then nothing until it has the answer and goes."""
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await self.whole.wait()
            return {"type": "http.disconnect"}

        return receive

    async def send(self, message: Message) -> None:
        """Take a part of the answer."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.add(message.get("body", b""))
            if not message.get("more_body", False):
                self.is_whole = True
                self.whole.set()

    def add(self, chunk: bytes) -> None:
        """Take a part of the body, as far as it is kept."""
        room = MOST_REPLY - len(self._body)
        self._body += chunk[:room]
        self._truncated = self._truncated or len(chunk) > room

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Take the head."""
        self._status, self._headers = status, headers

    def conclude(self) -> Reply:
        """The answer. Raises Unserved for none, and for one that says that the request is to come again."""
        if self.fault is not None:
            raise Unserved(f"The application has failed: {type(self.fault).__name__}.") from self.fault
        if not self._status:
            raise Unserved("The application has ended without an answer.")
        if self._status in _UNSERVED:
            wait = next((value for name, value in self._headers if name.lower() == b"retry-after"), b"")
            raise Unserved(f"The upstream has answered {self._status}.", float(wait) if wait.isdigit() else 0.0)
        return Reply(self._status, keep_answered(self._headers), bytes(self._body), self._truncated)
