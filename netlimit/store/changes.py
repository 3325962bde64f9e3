"""What a controller reads: all rules of its gateway, or those that changed."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import ColumnElement, Connection, or_, select

from netlimit.origins import Origin
from netlimit.records import Changes
from netlimit.rules import Rule
from netlimit.store import clock
from netlimit.store.rows import RULE_COLUMNS, from_row
from netlimit.store.tables import revisions, rule_hosts, rules
from netlimit.store.tombstones import removed_since

_AT_ONCE = 2000


def stream(connection: Connection, host: str) -> Iterator[Rule]:
    """Every rule of a gateway, in no order; a few thousand rows are in memory at a time."""
    wanted = select(*RULE_COLUMNS).where(_concerns(host))
    with connection.execution_options(yield_per=_AT_ONCE).execute(wanted) as rows:
        yield from map(from_row, rows)


def changes(connection: Connection, since: int, host: str, known: int | None = None) -> Changes | None:
    """What changed after `since`; None when that is not known any more, or lies in the future (a restored backup), or
    was another revision than the one with the stamp `known` (a server that lagged has taken another's place)."""
    now, mark = clock.read(connection)
    if known is not None and not is_known(connection, since, known):
        return None
    if since == now:
        return Changes(now, (), (), mark)
    removed = removed_since(connection, since)
    if removed is None or since > now:
        return None
    changed = rules.c.revision > since
    elsewhere = connection.scalars(select(rules.c.id).where(changed, ~_concerns(host)))
    here = connection.execute(select(*RULE_COLUMNS).where(changed, _concerns(host)))
    return Changes(now, tuple(map(from_row, here)), (*removed, *elsewhere), mark)


def is_known(connection: Connection, number: int, stamp: int) -> bool:
    """Whether a revision is the one with this stamp here."""
    return stamp == stamp_of(connection, number)


def stamp_of(connection: Connection, number: int) -> int | None:
    """The stamp of a revision; None when it is not kept any more. Before the first change there is none."""
    now, mark = clock.read(connection)
    if number == now:
        return mark
    if number == 0:
        return 0
    return connection.execute(select(revisions.c.stamp).where(revisions.c.revision == number)).scalar_one_or_none()


def origin(connection: Connection, since: int | None = None) -> Origin:
    """Which database this is, what is in it, and which revision it has of a number, or which is its newest."""
    found = clock.origin(connection)
    number = found.revision if since is None else since
    return found._replace(past=(number, stamp_of(connection, number) or 0))


def _concerns(host: str) -> ColumnElement[bool]:
    named = select(rule_hosts.c.rule_id).where(rule_hosts.c.host == host)
    return or_(rules.c.hosts == "", rules.c.id.in_(named))
