"""Forgetting a gateway that is gone: what it has said of itself, and what the database keeps for it to be told.

What belongs to its kernel stays, so that one that comes back under its name finds it: the numbers of its marks, root
qdiscs of others that ours took the place of, what its limiters are to enforce, and that a teardown has paused it. Rules
that name it stay as they are, for without the name they could hold everywhere. Clients that its API knew are safe on
other gateways for as long as they would have been. A window of confirmation goes on.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, delete, func, select

from netlimit.liveness import SILENCE, is_recent
from netlimit.records import Actor
from netlimit.store import audit, clock, guards, hosts, moments
from netlimit.store.errors import GatewayAlive, NoGateway
from netlimit.store.tables import counters, limiters, repairs, request_counters, requests, rule_hosts, rule_states
from netlimit.store.tables import guards as guard_rows
from netlimit.store.tables import hosts as host_rows

_ITS_OWN = (host_rows, guard_rows, limiters, rule_states, counters, request_counters, requests, repairs)


def forget(connection: Connection, host: str, actor: Actor, now: datetime) -> None:
    """Forget a gateway. Raises NoGateway, and GatewayAlive for one of which something still reports."""
    clock.lock(connection)
    known = {each.host: each for each in hosts.statuses(connection)}
    if host not in known:
        raise NoGateway(host, sorted(known))
    if is_recent(known[host].silence, SILENCE):
        raise GatewayAlive(host, "its controller")
    if host in guards.alive(connection):
        raise GatewayAlive(host, "its guard")
    lately = moments.is_recent(limiters.c.seen_at, SILENCE)
    if connection.execute(select(limiters.c.process).where(limiters.c.host == host, lately)).first() is not None:
        raise GatewayAlive(host, "a limiter there")
    for table in _ITS_OWN:
        connection.execute(delete(table).where(table.c.host == host))
    seen_at = known[host].seen_at
    said = {"host": host, "seen_at": seen_at.isoformat() if seen_at else None}
    audit.note_other(connection, "forget-gateway", actor, now, before=said)


def count_naming(connection: Connection) -> dict[str, int]:
    """How many rules name each gateway; those that none names are left out."""
    counted = select(rule_hosts.c.host, func.count().label("number")).group_by(rule_hosts.c.host)
    return {row.host: row.number for row in connection.execute(counted)}


def find_naming(connection: Connection, host: str, most: int) -> list[int]:
    """The rules that name a gateway, by id: at most so many, the oldest ones."""
    wanted = select(rule_hosts.c.rule_id).where(rule_hosts.c.host == host).order_by(rule_hosts.c.rule_id)
    return list(connection.scalars(wanted.limit(most)))
