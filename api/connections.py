"""Connections to the API: how many there may be, and how long each may keep it waiting."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from netlimit.l7.identity import read_address
from netlimit.rules import Target

MOST = 512
"""Connections, of all together."""
MOST_OF_ONE = 256
"""Connections from one address; a trusted proxy may have all."""
HEAD_SECONDS = 10.0
"""The head of a request must be complete so long after the connection was made, or after its first byte came."""
SEND_SECONDS = 30.0
"""Whoever reads nothing of an answer for so long is cut off."""
IDLE_SECONDS = 5
"""A connection is kept so long for another request."""


class Door(socket.socket):
    """A listening socket that lets in so many connections as there may be: a `Connection` begins only when TLS has been
    agreed on, and whoever never agrees would else hold as many as the system has."""

    def __init__(self, listening: socket.socket, proxies: Sequence[Target] = ()) -> None:
        """Take the place of `listening`."""
        super().__init__(fileno=listening.detach())
        self._proxies = proxies
        self._inside: dict[socket.socket, str | None] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. Raises ConnectionAbortedError for one too many."""
        connection, address = super().accept()
        place = read_address(address[0])
        self._inside = {each: where for each, where in self._inside.items() if each.fileno() >= 0}
        same = sum(where == place for where in self._inside.values())
        if len(self._inside) >= MOST or (same >= MOST_OF_ONE and not _is_among(place, self._proxies)):
            connection.close()
            raise ConnectionAbortedError
        self._inside[connection] = place
        return connection, address


class Connection(H11Protocol):
    """One connection, which is cut off when it keeps the API waiting. Bodies are timed by `api.admission`."""

    def __init__(self, *arguments: Any, proxies: Sequence[Target] = (), **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._proxies = proxies
        self._patience: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None

    @property
    def place(self) -> str | None:
        """The address of the other end."""
        return read_address(self.client[0]) if self.client else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MOST or self._are_too_many():
            transport.abort()
            return
        self._expect_something()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_waiting()
        self._stop_sending()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Go on after an answer."""
        super().on_response_complete()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self.pause_writing()
        self._look()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also when the other end does not take the rest of the answer."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def pause_writing(self) -> None:
        """The other end takes nothing for now."""
        super().pause_writing()
        self._sending = self._sending or self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The other end takes something again."""
        super().resume_writing()
        self._stop_sending()

    def _are_too_many(self) -> bool:
        place = self.place
        if place is None or _is_among(place, self._proxies):
            return False
        same = [each for each in self.connections if isinstance(each, Connection) and each.place == place]
        return len(same) > MOST_OF_ONE

    def _look(self) -> None:
        """Wait patiently while a request is under way, or nothing has begun; else only so long."""
        answering = self.cycle is not None and not self.cycle.response_complete
        idle = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if answering or idle or self.transport.is_closing():
            self._stop_waiting()
        else:
            self._expect_something()

    def _expect_something(self) -> None:
        """The rest of a head, or of a body that nobody reads any more."""
        self._patience = self._patience or self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None


def _is_among(place: str | None, proxies: Sequence[Target]) -> bool:
    return place is not None and any(ip_address(place) in proxy for proxy in proxies)
