"""A request over HTTP/1.1, and its answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

from netlimit.l7.listening import Message
from netlimit.l7.service.answers import CLOSE, Answer

Scope = MutableMapping[str, Any]

AGE = "netlimit.age"
"""In a scope: tells how many seconds ago the request has come to this host."""
LEFT = "netlimit.left"
"""In a scope: tells whether who asks has closed the connection, or his end of it, already."""
MOST_HELD = 64 * 2**10
"""Bytes of a body that are held for who is to read them; then the other end is left to push."""
_STATUS = {each.value: b"HTTP/1.1 %d %b" % (each.value, each.phrase.encode()) for each in HTTPStatus}
_NO_CONTENT = HTTPStatus.NO_CONTENT.value
"""Looked up once: that of a member of an Enum takes a while."""
_CONTROLS = bytes({*range(0x20), 0x7F} - {0x09})

log = logging.getLogger(__name__)


class Exchange:
    """What is read of a request, for who answers it."""

    __slots__ = (
        "_body", "_go_on", "_heard", "_waiting", "answered", "gone", "keeps", "more_body", "scope",
    )  # fmt: skip

    def __init__(self, scope: Scope, keeps: bool, go_on: Callable[[], None]) -> None:
        """`go_on` has the other end send more of the body."""
        self.scope = scope
        self.keeps = keeps
        """Whether another request may follow."""
        self.more_body = True
        self.answered = self.gone = False
        self._go_on = go_on
        self._body = b""
        self._heard = False
        self._waiting: asyncio.Future[None] | None = None

    def take(self, body: bytes) -> bool:
        """A part of the body has come; whether that is enough for now. What comes after the answer nobody reads."""
        if not self.answered:
            self._body += body
            self._wake()
        return self.is_full

    @property
    def is_full(self) -> bool:
        """Whether so much of the body is held that the rest has to wait."""
        return len(self._body) > MOST_HELD

    def end_body(self) -> None:
        """All of the body has come."""
        self.more_body = False
        self._wake()

    def lose(self) -> None:
        """The other end has gone."""
        self.gone = True
        self._wake()

    async def receive(self) -> Message:
        """The next part of the body, or that the other end has gone (ASGI)."""
        while not (self._body or self.gone or (not self.more_body and not self._heard)):
            self._waiting = asyncio.get_running_loop().create_future()
            self._go_on()
            await self._waiting
        if self.gone:
            return {"type": "http.disconnect"}
        body, self._body = self._body, b""
        self._heard = not self.more_body
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def write_answer(answer: Answer, usual: Iterable[tuple[bytes, bytes]], keeps: bool, bare: bool) -> bytes:
    """An answer as it is sent: one packet, if it is short. `usual` fields are part of all; a `bare` one has no body."""
    status, headers, body = answer
    fields = [_STATUS[status], *[b": ".join(field) for field in (*usual, *headers)]]
    if status != _NO_CONTENT:
        fields.append(b"content-length: %d" % len(body))
    if not keeps and CLOSE not in headers:
        fields.append(b"connection: close")
    head = b"\r\n".join(fields)
    if len(head) - len(head.translate(None, _CONTROLS)) != 2 * (len(fields) - 1):
        log.error("An answer has a control character in a header field; this is a fault of netlimit's own.")
        return write_answer(Answer(500, []), usual, False, bare)
    return b"%b\r\n\r\n%b" % (head, b"" if bare else body)
