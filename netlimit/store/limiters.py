"""What the limiters of a gateway are to enforce, and which of them run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from secrets import randbits

from sqlalchemy import Connection, bindparam, delete, select

from netlimit.records import Assigned, Duties, LimiterReport
from netlimit.store import changes, clock, hosts
from netlimit.store.tables import assignments, limiters
from netlimit.store.tables import hosts as host_rows
from netlimit.store.upsert import upsert

_SERIAL = 0
"""No rule's id: the serial of what is assigned stands there."""
_FORGOTTEN = timedelta(hours=1)
"""A limiter that was killed has not said that it ends; the next one of its gateway forgets it."""


def assign(connection: Connection, host: str, given: Mapping[int, int], taken: Iterable[int]) -> int:
    """Give rules, with their revisions, to the limiters of a gateway, and take others from them; the serial of what
    they are to enforce now."""
    gone = [{"number": number} for number in sorted(taken)]
    if gone:
        at = (assignments.c.host == host, assignments.c.rule_id == bindparam("number"))
        connection.execute(delete(assignments).where(*at), gone)
    serial = randbits(62) + 1
    rows = [{"host": host, "rule_id": number, "revision": revision} for number, revision in sorted(given.items())]
    serial_row = {"host": host, "rule_id": _SERIAL, "revision": serial}
    connection.execute(upsert(connection, assignments), [serial_row, *rows])
    return serial


def assigned(connection: Connection, host: str) -> Assigned:
    """What the limiters of a gateway are to enforce."""
    wanted = select(assignments.c.rule_id, assignments.c.revision).where(assignments.c.host == host)
    found: dict[int, int] = {row.rule_id: row.revision for row in connection.execute(wanted)}
    return Assigned(found.pop(_SERIAL, 0), found)


def serial(connection: Connection, host: str) -> int:
    """The serial of what the limiters of a gateway are to enforce; 0 if that is nothing yet."""
    at = (assignments.c.host == host, assignments.c.rule_id == _SERIAL)
    return connection.execute(select(assignments.c.revision).where(*at)).scalar_one_or_none() or 0


def duties(connection: Connection, host: str, since: int, known: int, stamp: int | None = None) -> Duties:
    """What a limiter enforces that knows the rules of revision `since` (-1: none) with its stamp, and what was assigned
    with the serial `known`."""
    found = _find_duties(connection, host, since, known, stamp)
    return replace(found, origin=changes.origin(connection, since), is_gone_by=hosts.goes_by(connection, host))


def _find_duties(connection: Connection, host: str, since: int, known: int, stamp: int | None) -> Duties:
    if hosts.paused(connection, host):
        return Duties()
    given = None if known and serial(connection, host) == known else assigned(connection, host)
    if (given is not None and not given.rules) or (given is None and since < 0):
        return Duties(given)
    row = connection.execute(select(host_rows.c.own, host_rows.c.safe).where(host_rows.c.host == host)).first()
    where = (hosts.read_own(row.own, host), hosts.read_prefixes(row.safe, host)) if row else ((), ())
    changed = changes.changes(connection, since, host, stamp) if since >= 0 else None
    if changed is not None:
        return Duties(given, changed.revision, changed.rules, changed.removed, *where, changed.stamp)
    every = tuple(changes.stream(connection, host))
    return Duties(given, clock.revision(connection), every, None, *where, clock.stamp(connection))


def report(connection: Connection, limiter: LimiterReport) -> None:
    """Keep that a limiter runs, and what it has loaded."""
    row = {
        "host": limiter.host,
        "process": limiter.process,
        "loaded": limiter.loaded,
        "since": limiter.since,
        "seen_at": limiter.seen_at,
    }
    connection.execute(upsert(connection, limiters), [row])
    old = limiters.c.seen_at < limiter.seen_at - _FORGOTTEN  # by this host's clock, which other hosts do not go by
    connection.execute(delete(limiters).where(limiters.c.host == limiter.host, old))


def gone(connection: Connection, host: str, process: str) -> None:
    """A limiter has ended."""
    connection.execute(delete(limiters).where(limiters.c.host == host, limiters.c.process == process))


def running(connection: Connection, host: str) -> list[LimiterReport]:
    """What the limiters of a gateway said last."""
    rows = connection.execute(select(limiters).where(limiters.c.host == host).order_by(limiters.c.process))
    return [LimiterReport(row.host, row.process, row.loaded, row.since, row.seen_at) for row in rows]
