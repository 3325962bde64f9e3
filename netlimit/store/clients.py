"""Who has spoken to a gateway's API lately, with a token that is good."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row, delete, or_, select

from netlimit.addresses import read_plain
from netlimit.clientele import Client, choose
from netlimit.liveness import AHEAD
from netlimit.roles import Role
from netlimit.safety import REMEMBERED_SECONDS
from netlimit.store.tables import clients, hosts
from netlimit.store.unread import read_address
from netlimit.store.upsert import upsert

_REMEMBERED = timedelta(seconds=REMEMBERED_SECONDS)


def saw(connection: Connection, host: str, client: Client) -> None:
    """Keep that a client was seen, if there is room for it; forget those of its gateway for which there is none any
    more, and who has not been seen for long."""
    rows = connection.execute(select(clients).where(clients.c.host == host)).all()
    client = client._replace(address=read_plain(client.address) or client.address)
    names = {row.address: _read_address(row) for row in rows}
    known = {name: _read(row, name) for row in rows if (name := names[row.address]) is not None}
    lately = {address: each for address, each in known.items() if abs(client.seen - each.seen) < _REMEMBERED}
    lately[client.address] = new = client.meet(lately.get(client.address))
    kept = {each.address for each in choose(lately.values())}
    gone = [written for written, name in names.items() if name not in kept]
    if gone:
        connection.execute(delete(clients).where(clients.c.host == host, clients.c.address.in_(gone)))
    if new.address in kept:
        row = {"host": host, "address": new.address, "seen_at": new.seen, "since": new.since}
        connection.execute(upsert(connection, clients), [{**row, "token": new.token, "role": new.role}])


def find_lately(connection: Connection, host: str, now: datetime) -> dict[str, float]:
    """The addresses that were seen at a gateway lately, and those of administrators at any, for the address by which
    they come may move, each with the seconds since: no more than count as safe, those that come before others first. A
    gateway's own address, from which somebody speaks to itself, is nobody's who comes to another. A time that is yet to
    come, as a clock that was ahead has left it, proves nothing: whoever is there is seen again within a minute."""
    here, administers = clients.c.host == host, clients.c.role == Role.ADMIN
    is_recent = clients.c.seen_at.between(now - _REMEMBERED, now + AHEAD)
    wanted = select(clients).where(or_(here, administers), is_recent).order_by(here)
    rows = [(row, name) for row in connection.execute(wanted) if (name := _read_address(row)) is not None]
    theirs = _read_own(connection, host) if any(row.host != host for row, _ in rows) else set()
    found = {name: _read(row, name) for row, name in rows if row.host == host or name not in theirs}
    return {each.address: max(0.0, (now - each.seen).total_seconds()) for each in choose(found.values())}


def _read_own(connection: Connection, host: str) -> set[str]:
    """The own addresses of the other gateways."""
    told = connection.execute(select(hosts.c.own).where(hosts.c.host != host)).scalars()
    return {address for own in told if isinstance(own, list) for address in own if isinstance(address, str)}


def _read_address(row: Row[Any]) -> str | None:
    return read_address(row.address, "among the clients of the API")


def _read(row: Row[Any], address: str) -> Client:
    """A client as it is kept, by its address as it is read; what of it cannot be read is as if it were not known."""
    role = Role(row.role) if row.role in {*Role} else None
    return Client(address, min(row.since or row.seen_at, row.seen_at), row.seen_at, row.token, role)
