"""Where deferred requests are replayed: the application in this process, or what else serves requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol
from urllib.parse import unquote

from netlimit.errors import NetlimitError
from netlimit.l7.deferral.request import Deferred, Reply, keep_answered
from netlimit.l7.listening import Message, Receive

MOST_REPLY = 64 * 2**10
"""Bytes of an answer that are kept."""
SECONDS = 60.0
"""A try may take so long."""
_UNSERVED = (429, 502, 503, 504)
"""What a server answers that has not dealt with the request: it is to be tried again."""

App = Callable[[Message, Receive, Callable[[Message], Awaitable[None]]], Awaitable[None]]


class Unserved(NetlimitError):
    """A try has failed; the next one is to come after `retry_after` seconds at least."""

    def __init__(self, sentence: str, retry_after: float = 0.0) -> None:
        super().__init__(sentence)
        self.retry_after = retry_after


class Upstream(Protocol):
    """Serves requests."""

    async def send(self, request: Deferred) -> Reply:
        """Have a request served. Raises Unserved."""
        ...

    async def aclose(self) -> None:
        """Let go of connections."""
        ...


class AppUpstream:
    """An ASGI application in this process. `state` is that of its lifespan, if it has one."""

    def __init__(self, app: App, state: MutableMapping[str, Any] | None = None) -> None:
        self.state = state
        self._app = app

    async def send(self, request: Deferred) -> Reply:
        """Have a request served, as if its client had sent it just now. Raises Unserved."""
        collected = Collected()
        try:
            async with asyncio.timeout(SECONDS):
                await self._app(self._make_scope(request), collected.make_receive(request.body), collected.send)
        except TimeoutError:
            raise Unserved(f"The application has not answered within {SECONDS:g} seconds.") from None
        except Exception as error:
            raise Unserved(f"The application has failed: {type(error).__name__}.") from error
        return collected.conclude()

    async def aclose(self) -> None:
        """Nothing is open."""

    def _make_scope(self, request: Deferred) -> dict[str, Any]:
        path, _, query = request.target.partition("?")
        host, _, port = (request.client or "").rpartition(" ")
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers]
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.scheme,
            "path": unquote(path),
            "raw_path": path.encode("latin-1"),
            "query_string": query.encode("latin-1"),
            "root_path": "",
            "headers": [*pairs, (b"content-length", b"%d" % len(request.body))],
            "client": (host, int(port)) if host else None,
            "server": None,
            "state": dict(self.state or {}),
            "extensions": {},
        }


class Collected:
    """An answer as it comes in."""

    def __init__(self) -> None:
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()
        self._truncated = False

    def make_receive(self, body: bytes) -> Receive:
        """The client's side of the connection: the body, and then nothing for ever."""
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not messages:
                await asyncio.Future()
            return messages.pop()

        return receive

    async def send(self, message: Message) -> None:
        """Take a part of the answer."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.add(message.get("body", b""))

    def add(self, chunk: bytes) -> None:
        """Take a part of the body, as far as it is kept."""
        room = MOST_REPLY - len(self._body)
        self._body += chunk[:room]
        self._truncated = self._truncated or len(chunk) > room

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Take the head."""
        self._status, self._headers = status, headers

    def conclude(self) -> Reply:
        """The answer. Raises Unserved for one that says that the request is to come again."""
        if not self._status:
            raise Unserved("The application has ended without an answer.")
        if self._status in _UNSERVED:
            wait = next((value for name, value in self._headers if name.lower() == b"retry-after"), b"")
            raise Unserved(f"The upstream has answered {self._status}.", float(wait) if wait.isdigit() else 0.0)
        return Reply(self._status, keep_answered(self._headers), bytes(self._body), self._truncated)
