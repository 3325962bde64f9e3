"""What the HTTP service answers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

JSON = (b"content-type", b"application/json")
PROBLEM = (b"content-type", b"application/problem+json")
TEXT = (b"content-type", b"text/plain; charset=utf-8")
CLOSE = (b"Connection", b"close")
"""Has the connection end with the answer."""
Header = tuple[bytes, bytes]


class Answer(NamedTuple):
    """A status, headers, and a body."""

    status: int
    headers: list[Header]
    body: bytes = b""


@dataclasses.dataclass(eq=False)
class Problem(Exception):
    """An answer that is an error: its status, and a sentence (RFC 9457). `field` names what is wrong."""

    status: int
    detail: str
    field: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def answer(self) -> Answer:
        """The whole answer; in ASCII, so that whatever was sent can be quoted."""
        document: dict[str, object] = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
        }
        if self.field is not None:
            document["field"] = self.field
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        return Answer(self.status, [PROBLEM, *headers], json.dumps(document).encode())
