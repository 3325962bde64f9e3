"""A request over HTTP/1.1, and its answer."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

from netlimit.l7.listening import Message
from netlimit.l7.service.answers import CLOSE, Answer

Scope = MutableMapping[str, Any]

AGE = "netlimit.age"
"""In a scope: tells how many seconds ago the request has come to this host."""
MOST_HELD = 64 * 2**10
"""Bytes of a body that are held for who is to read them; then the other end is left to push."""
_STATUS = {each.value: b"HTTP/1.1 %d %b\r\n" % (each.value, each.phrase.encode()) for each in HTTPStatus}
_CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

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
            self._go_on()
            self._waiting = asyncio.get_running_loop().create_future()
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
    fields = [b"%b: %b\r\n" % field for field in (*usual, *headers)]
    if status != HTTPStatus.NO_CONTENT:
        fields.append(b"content-length: %d\r\n" % len(body))
    if not keeps and CLOSE not in headers:
        fields.append(b"connection: close\r\n")
    head = b"".join(fields)
    if head.count(b"\n") != len(fields) or head.count(b"\r") != len(fields) or _CONTROLS.search(head):
        log.error("An answer has a control character in a header field; this is a fault of netlimit's own.")
        return write_answer(Answer(500, []), usual, False, bare)
    return b"%b%b\r\n%b" % (_STATUS[status], head, b"" if bare else body)
