"""What is left of removed rules, until every gateway has heard of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from sqlalchemy import Connection, case, delete, exists, func, insert, select, update

from netlimit.store.tables import (
    assignments,
    clock,
    counters,
    hosts,
    pauses,
    request_counters,
    rule_states,
    tombstones,
)

_FORGOTTEN = timedelta(days=1)
"""A gateway not seen for this long reads all rules anew when it comes back."""
_AT_ONCE = 500


def put(connection: Connection, rule_ids: Iterable[int], revision: int) -> None:
    """Remember that rules were removed at a revision."""
    rows = [{"rule_id": rule_id, "revision": revision} for rule_id in rule_ids]
    if rows:
        connection.execute(insert(tombstones), rows)


def take(connection: Connection, rule_ids: Sequence[int]) -> None:
    """Take tombstones away: these rules are back."""
    for start in range(0, len(rule_ids), _AT_ONCE):
        some = tombstones.c.rule_id.in_(rule_ids[start : start + _AT_ONCE])
        connection.execute(delete(tombstones).where(some))


def prune(connection: Connection, now: datetime) -> None:
    """Drop the tombstones that every gateway seen in the last day has applied. With none seen, nothing is dropped.
    One that is paused needs none: whoever goes on there reads all rules anew.

    With them goes what a gateway said of those rules while it did not know yet that they were removed.
    """
    is_paused = exists().where(pauses.c.host == hosts.c.host)
    newest = select(clock.c.revision).scalar_subquery()
    applied = case((is_paused, newest), else_=hosts.c.applied_revision)
    heard = select(func.min(applied)).where(hosts.c.seen_at > now - _FORGOTTEN)
    revision = connection.execute(heard).scalar_one_or_none()
    if not revision:
        return
    old = tombstones.c.revision <= revision
    for table in (rule_states, counters, request_counters, assignments):
        connection.execute(delete(table).where(table.c.rule_id.in_(select(tombstones.c.rule_id).where(old))))
    if connection.execute(delete(tombstones).where(old)).rowcount:
        connection.execute(update(clock).where(clock.c.pruned < revision).values(pruned=revision))


def removed_since(connection: Connection, since: int) -> list[int] | None:
    """Ids of the rules removed after a revision; None when some of those tombstones are gone already."""
    if since < connection.execute(select(clock.c.pruned)).scalar_one():
        return None
    return list(connection.scalars(select(tombstones.c.rule_id).where(tombstones.c.revision > since)))
