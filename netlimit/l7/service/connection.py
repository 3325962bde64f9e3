"""Connections of the HTTP service."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_BEGINNING = b"HTTP/1.1 "
_INTERIM = b"HTTP/1.1 1"


class WholeResponses:
    """A transport that sends the head of a response together with its body: one system call, and one packet.

    uvicorn writes them one after the other. What it writes besides (100 Continue, or all of a 400 before it closes the
    connection) goes out as well. An application that has its body ready when it sends the head loses nothing.
    """

    def __init__(self, transport: asyncio.Transport, connection: HttpToolsProtocol) -> None:
        self._connection = connection
        self._write = transport.write
        self._close = transport.close
        self._head = b""
        self.get_extra_info = transport.get_extra_info
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def write(self, data: bytes) -> None:
        """Write, or wait for more."""
        if self._head:
            self._write(self._head + data)
            self._head = b""
        elif data.startswith(_BEGINNING) and not data.startswith(_INTERIM) and self._is_answering():
            self._head = data
        else:
            self._write(data)

    def close(self) -> None:
        """Close, once all is written."""
        if self._head:
            self._write(self._head)
            self._head = b""
        self._close()

    def _is_answering(self) -> bool:
        """Whether a body follows a head: there is a request, other than HEAD."""
        scope = self._connection.scope
        return scope is not None and scope.get("method", "HEAD") != "HEAD"


class Connection(HttpToolsProtocol):
    """A connection to a client."""

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        super().connection_made(cast(Any, WholeResponses(transport, self)))
