"""Who has spoken to a gateway's API lately, with a token that is good."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, delete, select

from netlimit.rules import is_network
from netlimit.store.tables import clients
from netlimit.store.upsert import upsert

MOST = 256
"""So many addresses of each gateway are kept: those that were seen last."""


def saw(connection: Connection, host: str, address: str, now: datetime) -> None:
    """Keep that an address was seen, and forget those of its gateway that are too many."""
    connection.execute(upsert(connection, clients), [{"host": host, "address": address, "seen_at": now}])
    here = clients.c.host == host
    latest = select(clients.c.seen_at).where(here).order_by(clients.c.seen_at.desc()).limit(1).offset(MOST)
    connection.execute(delete(clients).where(here, clients.c.seen_at <= latest.scalar_subquery()))


def since(connection: Connection, host: str, moment: datetime) -> list[str]:
    """The addresses that were seen at a gateway at this moment or later, the latest first."""
    wanted = select(clients.c.address).where(clients.c.host == host, clients.c.seen_at >= moment)
    found = connection.execute(wanted.order_by(clients.c.seen_at.desc(), clients.c.address)).scalars()
    return [address for address in found if is_network(address)]
