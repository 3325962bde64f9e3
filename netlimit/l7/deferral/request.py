"""A request as it is kept, and what has become of it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from netlimit.errors import NetlimitError
from netlimit.l7.gate import find_client
from netlimit.l7.identity import find_network, hash_key, read_address
from netlimit.l7.rules import Descriptor, Entry

Headers = tuple[tuple[str, str], ...]
"""Names in lower case and values; bytes beyond ASCII as Latin-1."""
_HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip
"""Fields of one connection (RFC 9110, 7.6.1)."""
_RECOMPUTED = frozenset({"content-length", "expect"})
_ANSWERED = frozenset(
    {"content-type", "content-language", "content-encoding", "etag", "last-modified", "location", "retry-after"}
)
_IDEMPOTENCY_KEY = "idempotency-key"
_APART = frozenset({"body", "descriptors", "others", "shared"})
"""What is not in the head of a request as it is kept, or otherwise."""


class UnreadableRequest(NetlimitError):
    """What is kept of a request is none that this version knows."""

    def __init__(self) -> None:
        super().__init__(
            "A deferred request cannot be read, and is dropped: it is damaged, or of another version of netlimit."
        )


class State(StrEnum):
    """What has become of a request."""

    WAITING = "waiting"
    DONE = "done"
    """The upstream has answered, whatever it was."""
    FAILED = "failed"
    """It has been tried as often as may be."""
    EXPIRED = "expired"
    """It has waited too long."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """A request that is kept."""

    id: str
    """Nobody can guess it: whoever knows it may read what has become of the request."""
    key: str
    """Those of one key are replayed in order, one after the other."""
    domain: str
    descriptors: tuple[Descriptor, ...]
    """By which the limiter is asked whether it may be replayed now."""
    hits: int
    method: str
    target: str
    """Path and query, as they were sent."""
    headers: Headers
    body: bytes
    client: str | None
    scheme: str
    accepted: float
    """Seconds since 1970."""
    expires: float
    address: str | None = None
    """Whom IP rules are asked about, where descriptors do not tell him himself but his /64."""
    root_path: str = ""
    """Below which the application was when it was accepted (ASGI)."""
    path: str | None = None
    """The path that the application saw, where it is another than that of the target."""
    others: str = field(default="", compare=False)
    """The same for those of its line who stand under the same other limits: if one of them refuses the first, they all
    stand aside. Of what a backlog hands out it is empty, and `shared` not told."""
    shared: bool = field(default=False, compare=False)
    """Whether several clients share its line."""

    @property
    def network(self) -> str:
        """Whose share of the room and the places it takes: the network of its client, for the keys of one client may be
        many. Of a client without an address it is the key."""
        peer, _, _ = (self.client or "").rpartition(" ")
        blocks = (find_client(descriptor) or "" for descriptor in self.descriptors)
        told = (self.address or "", *(block.partition("/")[0] for block in blocks), peer)
        address = next(filter(None, map(read_address, told)), None)
        return self.key if address is None else find_network(address)


class Reply(NamedTuple):
    """What the upstream has answered."""

    status: int
    headers: Headers
    """Those that tell what the body is; no cookies."""
    body: bytes
    """Its beginning, if it is `truncated`."""
    truncated: bool = False


class Report(NamedTuple):
    """What has become of a request."""

    state: State
    accepted: float
    expires: float
    tries: int
    reply: Reply | None = None
    reason: str = ""
    """Why it has failed, as a sentence."""


def make_id() -> str:
    """24 random bytes."""
    return secrets.token_urlsafe(24)


def keep_headers(pairs: Iterable[tuple[bytes, bytes]], identity: str) -> Headers:
    """The fields of a request that go on to the upstream, and an Idempotency-Key, since it may be sent twice. The
    client's own key stays; ours is made of the id and does not give it away.

    What a client names in `Connection` goes on, too: the proxy before has set fields by now, and he would choose which
    of them are heeded.
    """
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in pairs]
    kept = [(name, value) for name, value in headers if name not in _HOP_BY_HOP | _RECOMPUTED]
    if not any(name == _IDEMPOTENCY_KEY for name, _ in kept):
        kept.append((_IDEMPOTENCY_KEY, make_idempotency_key(identity)))
    return tuple(kept)


def make_idempotency_key(identity: str) -> str:
    """That of a request whose client has sent none."""
    return f'"{hash_key(identity)}"'


def keep_answered(pairs: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The fields of an answer that are kept."""
    headers = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in pairs)
    return tuple((name, value) for name, value in headers if name in _ANSWERED)


def write_head(request: Deferred) -> str:
    """All of a request but its body, to be kept."""
    fields = {name: getattr(request, name) for name in Deferred.__slots__ if name not in _APART}
    for name, usual in (("address", None), ("root_path", ""), ("path", None)):
        if fields[name] == usual:  # as former versions write and read it
            del fields[name]
    return json.dumps(fields | {"descriptors": [*map(_write_descriptor, request.descriptors)]})


def read_head(identity: str, text: str | bytes, body: bytes) -> Deferred:
    """The other way round. Raises UnreadableRequest."""
    try:
        fields: dict[str, Any] = json.loads(text)
        told = [_read_descriptor(*each) for each in fields["descriptors"]]
        headers = tuple((name, value) for name, value in fields["headers"])
        request = Deferred(**fields | {"headers": headers, "descriptors": tuple(told)}, body=body)
        legible = request.id == identity and isinstance(request.network, str)
    except Exception as error:  # whatever bytes that nobody here has written may lead to
        raise UnreadableRequest from error
    if not legible:
        raise UnreadableRequest
    return request


def _write_descriptor(descriptor: Descriptor) -> list[object]:
    """Of which reading of the path it is stands only where that is not the first: former versions read two parts."""
    return [descriptor.entries, descriptor.hits, *([descriptor.besides] if descriptor.besides else [])]


def _read_descriptor(entries: Iterable[tuple[str, str]], hits: int | None, besides: int = 0) -> Descriptor:
    return Descriptor(tuple(Entry(*pair) for pair in entries), hits, besides=besides)
