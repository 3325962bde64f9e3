"""The revision: one number for all rules, one step for each change, however many rules it touches."""

from __future__ import annotations

from secrets import randbits

from sqlalchemy import Connection, select, update

from netlimit.origins import Origin, has_word, join
from netlimit.store.tables import clock


def revision(connection: Connection) -> int:
    """The revision of the last change; 0 when there was none yet."""
    number: int = connection.execute(select(clock.c.revision)).scalar_one()
    return number


def stamp(connection: Connection) -> int:
    """What tells the present revision from others of its number."""
    number: int = connection.execute(select(clock.c.stamp)).scalar_one()
    return number


def read(connection: Connection) -> tuple[int, int]:
    """The revision, with its stamp."""
    number, mark = connection.execute(select(clock.c.revision, clock.c.stamp)).one()
    return number, mark


def origin(connection: Connection) -> Origin:
    """Which database this is, and what is in it."""
    found = connection.execute(select(clock.c.identity, clock.c.revision, clock.c.limits)).one()
    return Origin(*found, is_server=connection.dialect.name != "sqlite")


def identify(connection: Connection, identity: str) -> str:
    """Name the database, unless it is named; how it is named then."""
    known = connection.execute(select(clock.c.identity)).scalar_one()
    if not has_word(known):
        unnamed = clock.c.identity.is_not_distinct_from(known)  # else another has named it meanwhile
        connection.execute(update(clock).where(unnamed).values(identity=join(identity, known)))
    named: str = connection.execute(select(clock.c.identity)).scalar_one()
    return named


def make_stamp() -> int:
    """A stamp that no other change has."""
    return randbits(62) + 1


def lock(connection: Connection) -> None:
    """Let no other change of rules begin until this transaction ends (in SQLite, its beginning did that already)."""
    connection.execute(select(clock.c.id).with_for_update())


def take_revision(connection: Connection, new_rules: int = 0) -> tuple[int, int]:
    """Begin a change: the next revision, and the first of `new_rules` ids never used before.

    Locks the clock until the transaction ends: what is read after this holds until the commit, and commits come in
    the order of revisions.
    """
    step = {
        "revision": clock.c.revision + 1,
        "last_rule": clock.c.last_rule + new_rules,
        "stamp": make_stamp(),
    }
    row = connection.execute(update(clock).values(step).returning(clock.c.revision, clock.c.last_rule)).one()
    return row.revision, row.last_rule - new_rules + 1
