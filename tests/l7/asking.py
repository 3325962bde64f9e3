"""A client that speaks ASGI to an application in the same loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

_SENT = "/\\:;|[]{}!$&'()*+,=@"
"""What clients send as it is, besides letters and digits."""


class Answer:
    """What an application has sent."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    @property
    def status(self) -> int | None:
        return next((message["status"] for message in self.messages if "status" in message), None)

    @property
    def headers(self) -> dict[str, str]:
        pairs = next((message["headers"] for message in self.messages if "headers" in message), ())
        return {name.decode(): value.decode() for name, value in pairs}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    def json(self) -> Any:
        return json.loads(self.body)


class Asking:
    """A request under way. `hang_up` is a client that goes."""

    def __init__(self, app: Any, scope: dict[str, Any], messages: Iterable[dict[str, Any]]) -> None:
        self.answer = Answer()
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for message in messages:
            self._incoming.put_nowait(message)
        self.task = asyncio.create_task(app(scope, self._incoming.get, self._send))

    def hang_up(self, kind: str = "http") -> None:
        self._incoming.put_nowait({"type": f"{kind}.disconnect"})

    async def _send(self, message: dict[str, Any]) -> None:
        self.answer.messages.append(message)

    async def end(self) -> Answer:
        await self.task
        return self.answer


def make_scope(
    path: str = "/", method: str = "GET", peer: str = "192.0.2.1", headers: dict[str, str] | None = None, **others: Any
) -> dict[str, Any]:
    pairs = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": method,
        "path": path, "raw_path": quote(path, safe=_SENT).encode(), "query_string": b"", "root_path": "",
        "headers": pairs, "client": (peer, 1234), "server": ("127.0.0.1", 80), "state": {}, **others,
    }  # fmt: skip


def begin(app: Any, path: str = "/", body: bytes = b"", **others: Any) -> Asking:
    return Asking(app, make_scope(path, **others), [{"type": "http.request", "body": body, "more_body": False}])


async def ask(app: Any, path: str = "/", body: bytes = b"", **others: Any) -> Answer:
    return await begin(app, path, body, **others).end()


async def hello(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """An application."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"hello"})
