"""Requests whose body is followed by fields (a trailer section, RFC 9112, 7.1.2), and uvicorn that reads them."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from tests.l7.served import serving

PAUSE = 0.1
"""Seconds between a head and what comes late."""
PATIENCE = 10


def write_request(trailer: str, head: Sequence[str] = (), announced: bool = False, closes: bool = True) -> list[bytes]:
    """The head of a POST in chunks, and all that follows."""
    fields = ["Host: host.example", *head, "Transfer-Encoding: chunked"]
    if announced:
        fields += ["TE: trailers", f"Trailer: {trailer.partition(':')[0]}"]
    if closes:
        fields.append("Connection: close")
    lines = "\r\n".join(fields)
    return [f"POST /x HTTP/1.1\r\n{lines}\r\n\r\n".encode(), f"2\r\n{{}}\r\n0\r\n{trailer}\r\n\r\n".encode()]


def send(place: str, parts: Sequence[bytes], late: bool, source: str = "127.0.0.1") -> list[int]:
    """The statuses of the answers, until the server closes, or says no more: Caddy leaves a connection open at times
    whose request it has answered before the body came. What is `late` comes part by part."""
    host, _, port = place.rpartition(":")
    answer = b""
    address = (host, int(port))
    with (
        suppress(ConnectionError),  # who has refused a request may not take the rest of it
        socket.create_connection(address, PATIENCE, source_address=(source, 0)) as connection,
    ):
        for part in parts if late else [b"".join(parts)]:
            connection.sendall(part)
            if late and select.select([connection], [], [], PAUSE)[0]:
                answer += connection.recv(65536)
        try:
            while got := connection.recv(65536):
                answer += got
        except TimeoutError:
            assert answer, "nothing was answered"
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def serving_by_httptools(app: Any, **settings: Any) -> AbstractContextManager[str]:
    """An application on uvicorn, which reads requests by httptools; where it is."""
    return serving(app, http="httptools", **{"proxy_headers": False, **settings})
