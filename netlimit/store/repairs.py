"""What controllers found changed in the kernel, and put right: the newest of each gateway."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert, select

from netlimit.records import Repair
from netlimit.store.tables import repairs

MOST = 200
"""So many of each gateway are kept."""


def note(connection: Connection, host: str, repair: Repair) -> None:
    """Keep a repair, and forget those of its gateway that are too many."""
    note_all(connection, host, [repair])


def note_all(connection: Connection, host: str, made: Sequence[Repair]) -> None:
    """The same with several, in their order."""
    rows = [{"host": host, "at": r.at, "kind": r.kind, "found": r.found, "took": r.took} for r in made]
    connection.execute(insert(repairs), rows)
    here = repairs.c.host == host
    newest = select(repairs.c.id).where(here).order_by(repairs.c.id.desc()).limit(1).offset(MOST)
    connection.execute(delete(repairs).where(here, repairs.c.id <= newest.scalar_subquery()))


def newest(connection: Connection, host: str, limit: int) -> list[Repair]:
    """The newest repairs of a gateway, the last one first."""
    wanted = select(repairs).where(repairs.c.host == host).order_by(repairs.c.id.desc()).limit(limit)
    return [Repair(row.kind, row.found, row.took, row.at) for row in connection.execute(wanted)]
