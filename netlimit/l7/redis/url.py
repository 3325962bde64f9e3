"""What a `COUNTERS_URL` says of Redis."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from netlimit.errors import SettingsError
from netlimit.l7.redis.bounds import BoundedParser
from netlimit.l7.redis.cluster import Address
from netlimit.l7.redis.hosts import part_url

FORMS = (
    "memory:// (this process alone), redis://HOST:PORT/DB, rediss://HOST:PORT/DB (TLS), unix:///PATH?db=DB, "
    "redis+cluster://HOST:PORT,HOST:PORT or rediss+cluster://HOST:PORT,HOST:PORT"
)
PORT = 6379
_SCHEME = re.compile(r"[a-z+]{0,20}")
_ESCAPED = "in a password `/`, `?`, `#` and `@` are written %2F, %3F, %23 and %40"
_TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_MILLISECONDS = {"timeout_ms": 250.0, "probe_ms": 1000.0, "merge_ms": 0.0}


class Place(NamedTuple):
    """Where Redis is, and how it is asked. Times are in seconds."""

    addresses: tuple[Address, ...]
    """One server, the nodes of a cluster that are asked first, or none: a socket."""
    cluster: bool
    kind: type[AbstractConnection]
    options: Mapping[str, Any]
    """Of every connection; the password is among them."""
    timeout: float
    """An answer that takes longer is none."""
    probe: float
    """So often a server that does not answer is tried again."""
    merge: float
    """So often what is counted here is merged with Redis; 0: Redis decides each time."""

    def connect(self, address: Address | None = None) -> AbstractConnection:
        """A connection, not open yet. Waiting and trying again are the business of who uses it."""
        options = dict(self.options)
        if address:
            options |= {"host": address.host, "port": address.port}
        options |= {"socket_timeout": None, "socket_connect_timeout": self.timeout, "retry": Retry(NoBackoff(), 0)}
        options["parser_class"] = BoundedParser
        return self.kind(**options, protocol=2)  # of which nothing is pushed between two answers

    def __repr__(self) -> str:
        return f"Place({self})"  # without the password

    def __str__(self) -> str:
        return ", ".join(map(str, self.addresses)) or str(self.options["path"])


def read_url(url: str) -> Place:
    """Read a URL. Raises SettingsError with what would be accepted; the password is never part of that."""
    try:
        return _read(url)
    except ValueError as error:
        raise SettingsError("COUNTERS_URL", f"COUNTERS_URL cannot be used: {error}. Write {FORMS}.") from None


def _read(text: str) -> Place:
    """Raises ValueError. Whatever stands in the wrong place may be of the password, so no sentence repeats it."""
    if "#" in text:
        raise ValueError(f"a `#` has no meaning in it; {_ESCAPED}")
    scheme, login, hosts, rest = part_url(text)
    user, _, password = login.partition(":")
    url = urlsplit("//" + rest)
    base, _, cluster = scheme.partition("+")
    tls = base == "rediss"
    if base not in ("redis", "rediss", "unix") or cluster not in ("", "cluster") or (base == "unix" and cluster):
        raise ValueError(f"{scheme if _SCHEME.fullmatch(scheme) else ''!r} is no scheme of it")
    query = _read_query(url.query)
    times = {name: _read_milliseconds(name, query.pop(name, None)) for name in _MILLISECONDS}
    options: dict[str, Any] = {name: query.pop(name) for name in _TLS if tls and name in query}
    if user:
        options["username"] = unquote(user)
    if password:
        options["password"] = unquote(password)
    if base == "unix":
        options |= {"path": unquote(url.path), "db": _read_number("db", query.pop("db", "0"))}
    elif not cluster:
        options["db"] = _read_number("the database after the last /", url.path.strip("/") or "0")
    elif url.path.strip("/"):
        raise ValueError("a cluster has no databases")
    if query:
        known = [*_MILLISECONDS, *(_TLS if tls else ()), *(("db",) if base == "unix" else ())]
        other = next((repr(name) for name in query if name in (*_TLS, "db")), "what follows a `?`")
        raise ValueError(f"{other} is no option of it; there are {', '.join(known)}; {_ESCAPED}")
    addresses = () if base == "unix" else tuple(map(_read_address, hosts))
    if len(addresses) > 1 and not cluster:
        raise ValueError("several hosts are a cluster's")
    kind = UnixDomainSocketConnection if base == "unix" else SSLConnection if tls else Connection
    return Place(addresses, bool(cluster), kind, options, *times.values())


def _read_query(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text)))
    except ValueError:
        raise ValueError(f"behind the `?` there are no options such as timeout_ms=250; {_ESCAPED}") from None


def _read_address(text: str) -> Address:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"a host or its port cannot be read; {_ESCAPED}") from None
    if not host:
        raise ValueError("a host is missing")
    return Address(host, port or PORT)


def _read_milliseconds(name: str, text: str | None) -> float:
    """Seconds."""
    number = _MILLISECONDS[name] if text is None else _read_number(name, text)
    if text is not None and not 1 <= number <= 60_000:
        raise ValueError(f"{name} is not between 1 and 60000")
    return number / 1000


def _read_number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name} is no number")
    return int(text)
