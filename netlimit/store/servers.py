"""Where the servers of a database are: as its URL says, as libpq's environment says, and as connections have found."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, NamedTuple

from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from netlimit.addresses import read_plain

MOST_REACHED = 16
"""Of so many servers that connections were made to, the last, the addresses are kept."""

_OWN = "SELECT host(inet_server_addr())"
_SESSION = "target_session_attrs"
_TAKES_CHANGES = ("read-write", "primary")
_PROVING_SINCE = 160000
"""The version of libpq from which on it can be told what a server must prove."""
_SCRAM, _NOT_IN_CLEAR = "scram-sha-256", "!password"


class Server(NamedTuple):
    """One of several that the driver is told."""

    host: str | None
    hostaddr: str | None
    port: str | None

    def __str__(self) -> str:
        return f"{self.host or self.hostaddr or 'this host'}{f':{self.port}' if self.port else ''}"

    @property
    def parameters(self) -> dict[str, str]:
        """What the driver is told to reach it and no other."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def find_servers(url: URL) -> tuple[str, ...]:
    """The hosts that the driver is told, by name or address: by the URL or, where that says nothing, by the environment
    (libpq, 34.15: PGHOST, PGHOSTADDR, PGSERVICE). None for SQLite, and for a socket in a directory."""
    said = _find_said(url)
    hosts = [each.strip() for name in ("hostaddr", "host") for each in str(said.get(name) or "").split(",")]
    return tuple(dict.fromkeys(each for each in hosts if each and not each.startswith(("/", "@"))))


def find_proof(url: URL) -> dict[str, str]:
    """What the driver is to ask of a server (libpq, 34.1.2: `require_auth`), for any local user may listen at a port
    that is free for a moment, and another host on the way: who has a password must have it proved that the server knows
    it (SCRAM, RFC 5802), and shows it nobody. Nothing where the URL or the environment says it, where a certificate
    tells whose the server is, or a directory whose the socket."""
    said = _find_said(url)
    if (
        not (find_servers(url) or said.get("service"))
        or said.get("require_auth")
        or said.get("sslmode") in ("verify-ca", "verify-full")
    ):
        return {}
    return {"require_auth": _SCRAM if said.get("password") else _NOT_IN_CLEAR} if _can_ask_for_proof() else {}


def find_primary(url: URL) -> dict[str, str]:
    """What the driver is to ask of a server where there are several (libpq, 34.1.2: `target_session_attrs`): that it
    takes changes. One that does not is a standby, which may lag; whoever was led to it would stay there when the
    primary is back. Nothing where the URL says it, or the environment something else than `any`, its default."""
    said = _find_said(url)
    several = any("," in str(said.get(name) or "") for name in ("host", "hostaddr"))
    is_told = _SESSION in url.query or said.get(_SESSION) not in (None, "any")
    return {_SESSION: "read-write"} if several and not is_told else {}


def split_servers(url: URL) -> tuple[Server, ...]:
    """The servers one by one, where there are several of which the one is wanted that takes changes; else none."""
    said = _find_said(url)
    if not find_primary(url) and said.get(_SESSION) not in _TAKES_CHANGES:
        return ()
    hosts, addresses, ports = (_split(said.get(name)) for name in ("host", "hostaddr", "port"))
    number = max(len(hosts), len(addresses))
    ports = ports * number if len(ports) == 1 else ports
    if number < 2 or any(len(each) not in (0, number) for each in (hosts, addresses, ports)):
        return ()  # the driver tells what does not fit
    nothing = [None] * number
    found = zip(hosts or nothing, addresses or nothing, ports or nothing, strict=True)
    return tuple(dict.fromkeys(Server(*each) for each in found))


def _split(said: object) -> list[str | None]:
    return [each.strip() for each in str(said).split(",")] if said else []


def _can_ask_for_proof() -> bool:
    try:
        from psycopg import pq  # not everywhere: it is an extra
    except ImportError:
        return False
    return pq.version() >= _PROVING_SINCE


def _find_said(url: URL) -> dict[str, Any]:
    """What libpq is told, by the environment and by the URL."""
    if url.get_backend_name() == "sqlite":
        return {}
    try:
        told = url.get_dialect()().create_connect_args(url)[1]
    except (SQLAlchemyError, ValueError):  # who opens it tells
        return {}
    return {**_read_environment(), **told}


def _read_environment() -> dict[str, str]:
    """What libpq does without being told."""
    try:
        from psycopg import pq  # not everywhere: it is an extra
    except ImportError:
        return {}
    known = pq.Conninfo.get_defaults()
    return {each.keyword.decode(): each.val.decode("utf-8", "replace") for each in known if each.val is not None}


class Names:
    """Names of servers, that are looked up before the driver does: it waits for a resolver that hangs as long as that
    likes, for no timeout of its own has begun."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._asking: threading.Thread | None = None

    def are_answered(self, seconds: float) -> bool:
        """Whether the resolver has said something of each within so long, be it that there is none. While it owes an
        answer it is not asked again."""
        if not self._names:
            return True
        asking = self._asking
        if asking is None or not asking.is_alive():
            asking = threading.Thread(target=self._look_up, name="looking up", daemon=True)
            asking.start()
            self._asking = asking
        asking.join(seconds)
        return not asking.is_alive()

    def _look_up(self) -> None:
        for name in self._names:
            with suppress(OSError, UnicodeError):
                socket.getaddrinfo(name, None)


class Reached:
    """The addresses of the servers that connections were made to, whatever they are called: a service file, or a name
    in the resolver, may say another one tomorrow. A file (`by_file`) is reached without."""

    def __init__(self, by_file: bool = False) -> None:
        self._servers = {"": ""} if by_file else {}

    def note(self, connection: Any, _entry: object = None) -> None:
        """Note where a connection leads, which is in no transaction, and which address its server has of its own: where
        a container publishes a port, or a proxy listens, it is another."""
        address = str(getattr(connection.info, "hostaddr", "")).partition("%")[0]
        said = _ask_address(connection)
        self._servers.pop(address, None)
        self._servers[address] = said
        for oldest in list(self._servers)[:-MOST_REACHED]:
            del self._servers[oldest]

    def servers(self) -> dict[str, str]:
        """All of them ("" for a socket or a file), each with what the server there called its own address last ("" if
        that was nothing that another host could have), the latest last. Before the first connection there is none."""
        return dict(self._servers)


def _ask_address(connection: Any) -> str:
    connection.autocommit = True
    try:
        row = connection.execute(_OWN).fetchone()
    except (connection.ProgrammingError, connection.NotSupportedError, ValueError):  # not every server knows it
        row = None
    connection.autocommit = False
    return _read_said(row[0] if row else None)


def _read_said(said: object) -> str:
    """What a server has said that its address is, if it is one by which some host can be reached."""
    plain = read_plain(said)
    if plain is None or "/" in plain:
        return ""
    address = ip_address(plain)
    is_nobody = address.is_loopback or address.is_multicast or address.is_unspecified
    return "" if is_nobody or (address.version == 4 and address.is_reserved) else plain
