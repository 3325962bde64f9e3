"""Which gateways have a guard: a process that undoes what is not confirmed."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Connection, delete, select

from netlimit.store import moments
from netlimit.store.tables import guards
from netlimit.store.upsert import upsert

ALIVE = timedelta(seconds=15)
"""A guard that was not seen for so long is none; it says every five seconds that it is there."""


def seen(connection: Connection, host: str) -> None:
    """Keep that a gateway's guard is there."""
    connection.execute(upsert(connection, guards), [{"host": host, "seen_at": moments.read(connection)}])


def gone(connection: Connection, host: str) -> None:
    """A gateway's guard has ended."""
    connection.execute(delete(guards).where(guards.c.host == host))


def alive(connection: Connection) -> list[str]:
    """The gateways that have a guard, by name."""
    lately = moments.is_recent(guards.c.seen_at, ALIVE)
    return list(connection.scalars(select(guards.c.host).where(lately).order_by(guards.c.host)))
