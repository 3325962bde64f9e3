"""What a controller reads: all rules of its gateway, or those that changed."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import ColumnElement, Connection, or_, select

from netlimit.records import Changes
from netlimit.rules import Rule
from netlimit.store.clock import revision
from netlimit.store.rows import RULE_COLUMNS, from_row
from netlimit.store.tables import rule_hosts, rules
from netlimit.store.tombstones import removed_since

_AT_ONCE = 2000


def stream(connection: Connection, host: str) -> Iterator[Rule]:
    """Every rule of a gateway, in no order; a few thousand rows are in memory at a time."""
    wanted = select(*RULE_COLUMNS).where(_concerns(host))
    with connection.execution_options(yield_per=_AT_ONCE).execute(wanted) as rows:
        yield from map(from_row, rows)


def changes(connection: Connection, since: int, host: str) -> Changes | None:
    """What changed after `since`; None when that is not known any more, or lies in the future (a restored backup)."""
    now = revision(connection)
    if since == now:
        return Changes(now, (), ())
    removed = removed_since(connection, since)
    if removed is None or since > now:
        return None
    changed = rules.c.revision > since
    elsewhere = connection.scalars(select(rules.c.id).where(changed, ~_concerns(host)))
    here = connection.execute(select(*RULE_COLUMNS).where(changed, _concerns(host)))
    return Changes(now, tuple(map(from_row, here)), (*removed, *elsewhere))


def _concerns(host: str) -> ColumnElement[bool]:
    named = select(rule_hosts.c.rule_id).where(rule_hosts.c.host == host)
    return or_(rules.c.hosts == "", rules.c.id.in_(named))
