"""Mark numbers that must stay put: the kernel's sets hold them, also while no controller runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import Connection, bindparam, delete, select

from netlimit.store.tables import numbers
from netlimit.store.upsert import upsert


def numbering(connection: Connection, host: str) -> dict[tuple[str, str], int]:
    """The number of each (group, profile) on a gateway."""
    rows = connection.execute(
        select(numbers.c.limit_group, numbers.c.profile, numbers.c.number).where(numbers.c.host == host)
    )
    return {(group, profile): number for group, profile, number in rows if number >= 0}


def number(
    connection: Connection, host: str, added: Mapping[tuple[str, str], int], removed: Iterable[tuple[str, str]]
) -> None:
    """Forget the numbers of `removed`, then keep those of `added`."""
    gone = [{"of_group": group, "of_profile": profile} for group, profile in removed]
    if gone:
        at = (numbers.c.limit_group == bindparam("of_group"), numbers.c.profile == bindparam("of_profile"))
        connection.execute(delete(numbers).where(numbers.c.host == host, *at), gone)
    rows = [
        {"host": host, "limit_group": group, "profile": profile, "number": value}
        for (group, profile), value in added.items()
    ]
    if rows:
        connection.execute(upsert(connection, numbers), rows)
