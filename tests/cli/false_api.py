"""A program in the API's place that answers what it likes: as whoever has taken over the API's user may."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests.cli.running import Netlimit

Answering = Callable[[socket.socket], None]
"""Answers one question, which has been read; ends with OSError when the other end is closed."""


def make_answer(body: bytes, *fields: str, status: str = "200 OK") -> bytes:
    """An answer with a body of JSON."""
    head = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join([*head, "Connection: close", "", ""]).encode("latin-1") + body


@contextmanager
def answering(netlimit: Netlimit, answer: bytes | Answering) -> Iterator[list[bytes]]:
    """Listen where the API should, for this user himself; the questions that came."""
    port = int(netlimit.environment["NETLIMIT_LISTEN"].rpartition(":")[2])
    asked: list[bytes] = []

    def answer_one(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked.append(connection.recv(65536))
            connection.sendall(answer) if isinstance(answer, bytes) else answer(connection)

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=answer_one, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", port)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield asked
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
