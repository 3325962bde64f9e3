"""Where a request comes from, and what it is called."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import Scope

from netlimit.l7.identity import find_block, read_address

HEADER = "X-Request-ID"
_NAME = re.compile(rb"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Origin:
    """The address that a request came from (the socket's peer, or whom a trusted proxy names), None where there is no
    such thing, and the request's id: the client's own, if it sent one that can be used. `neighbour` is the socket's
    peer."""

    address: str | None
    request: str
    neighbour: str | None = None

    @property
    def place(self) -> str:
        """Whom to count the request to: the address, or the /64 of an IPv6 one, in which a client may choose freely."""
        return "" if self.address is None else find_block(self.address)


def find_origin(scope: Scope) -> Origin:
    """The origin of a request that has just begun."""
    client = scope.get("client")
    sent = next((value for name, value in scope["headers"] if name == HEADER.lower().encode()), b"")
    request = sent.decode() if _NAME.fullmatch(sent) else secrets.token_hex(16)
    neighbour = scope.get("state", {}).get("neighbour")
    return Origin(read_address(client[0]) if client else None, request, read_address(neighbour) if neighbour else None)


def origin_of(connection: HTTPConnection) -> Origin:
    """The origin of a request that is under way."""
    origin: Origin | None = getattr(connection.state, "origin", None)
    return origin or find_origin(connection.scope)
