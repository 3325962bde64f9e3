"""Bringing back what a backup holds.

An empty database takes over all of it. In one that is in use the rules are what changes, under their ids, and it is a
change like any other: it makes a new revision, and can be undone. The limiter's documents change with them, and no
revision has those: what they were before is written to files beside the backup.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from secrets import token_hex

from sqlalchemy import Connection, delete, func, select, text, update

from netlimit.errors import NetlimitError
from netlimit.judgement import Change, find_harm
from netlimit.lockout import Havens
from netlimit.origins import join, mark
from netlimit.records import Actor, Window
from netlimit.several import say_more
from netlimit.store import audit, history, hosts, limits, windows
from netlimit.store.backup import Label, copy_rows
from netlimit.store.clock import lock, make_stamp
from netlimit.store.clock import revision as newest_revision
from netlimit.store.former import Former, keep_former
from netlimit.store.homes import name_tables
from netlimit.store.rollback import exchange, renew
from netlimit.store.rows import RULE_COLUMNS, Kept, from_row
from netlimit.store.standing import Standing
from netlimit.store.tables import clock, limit_documents, metadata, rules, tombstones

_PASSING = ("clock", "tombstones", "requests", "windows", "guards", "pauses", "clients", "assignments", "limiters")
"""What is not brought back: it means nothing at another time."""
_NUMBERED = ("audit", "repairs", "tokens")


@dataclass(frozen=True, slots=True)
class Restored:
    """What was brought back: the new revision, how many rules there are, and what the backup says of itself; where the
    limiter's documents are that are no more, if any are; where a damaged database is now, in whose place it came;
    and the window of confirmation that was open when the backup was made: what was changed in it comes back, too.
    """

    revision: int
    rules: int
    label: Label
    former: Former | None = None
    aside: Path | None = None
    unconfirmed: Window | None = None


class InUse(NetlimitError):
    """There is something that would be lost, or could not be undone."""


def restore(
    connection: Connection, backup: Connection, path: Path, label: Label, actor: Actor, now: datetime, force: bool
) -> Restored:
    """Bring the rules of a backup (a file, of this path) in the place of those that are there; every controller reads
    all of them anew.

    Raises InUse where there are rules, or a rule comes that was forced or would need it, unless this is; and where
    there is nothing but an open window of confirmation. StoreError where documents cannot be written beside the file.
    """
    lock(connection)
    newest, last_rule = connection.execute(select(clock.c.revision, clock.c.last_rule)).one()
    number = _count(connection)
    documents = connection.execute(select(func.count()).select_from(limit_documents)).scalar_one()
    if (number or documents) and not force:
        found = [f"{number} rules"] * bool(number) + [f"limits of {documents} domains"] * bool(documents)
        there = " and ".join(found)
        raise InUse(
            f"The database has {there}, which those of the backup would take the place of; use --force if they shall."
        )
    window = windows.last(connection)
    if newest == 0 and window is not None and window.outcome is None:
        raise InUse(
            "A window of confirmation is open, which could not undo what comes into an empty database: "
            "end it first, with `netlimit confirm`."
        )
    if not force:
        _refuse_forced(backup, now)
        _refuse_harmful(connection, backup, now)
    before = backup.execute(select(clock)).one()
    identity = before.identity
    if newest:  # gateways may go by this database, and others by that of the backup
        identity = join(connection.execute(select(clock.c.identity)).scalar_one(), identity)
    identity = mark(identity, token_hex(8))  # that these are older rules somebody has decided
    revision = max(newest, label.revision) + 1
    if newest == 0:
        filled = _take_over(connection, backup)
        pruned = {"audit_pruned": before.audit_pruned} if "audit" in filled else {}
        connection.execute(update(clock).values(oldest=before.oldest, **pruned))
    last_rule = max(last_rule, before.last_rule)
    values = {"revision": revision, "last_rule": last_rule, "pruned": revision, "stamp": make_stamp()}
    values["identity"] = identity
    connection.execute(update(clock).values(values))
    if newest == 0:
        history.note_restore(connection, revision, {}, actor, now)
    else:
        _exchange(connection, backup, revision, actor, now)
    connection.execute(delete(tombstones))
    lost = limits.find_lost(connection, backup)
    former = keep_former(path, lost, now) if lost else None
    limits.bring_back(connection, backup, actor, now)
    then = windows.last(backup)
    unconfirmed = then if then is not None and then.outcome is None else None
    restored = Restored(revision, _count(connection), label, former, unconfirmed=unconfirmed)
    audit.note_other(connection, "restore", actor, now, {"rules": number}, _describe(restored))
    return restored


def _refuse_forced(backup: Connection, now: datetime) -> None:
    """An empty database takes over a backup as it is, but not what comes before who is safe unless somebody says so."""
    wanted = select(*RULE_COLUMNS).where(rules.c.forced_by.is_not(None))
    forced = [rule for rule in map(from_row, backup.execute(wanted)) if rule.in_force(now)]
    if forced:
        first, more = forced[0], say_more(forced)
        raise InUse(
            f"The backup holds '{first}'{more} that {first.forced_by} has forced, and that would hit who is safe; use "
            "--force if they shall come back into force."
        )


def _refuse_harmful(connection: Connection, backup: Connection, now: datetime) -> None:
    """What was harmless where it was made may close a gateway of this database."""
    coming = [Change(None, kept.rule) for kept in _read_rules(backup).values()]
    harms = find_harm(coming, Standing(connection, ()), Havens(hosts.statuses(connection), now), now)
    if harms:
        raise InUse(f"The backup holds what needs force here. {harms[0].sentence}")


def _take_over(connection: Connection, backup: Connection) -> set[str]:
    """Fill the tables that hold nothing yet. What is there (a token, what a gateway holds) stays as it is."""
    wanted = [table for table in metadata.sorted_tables if table.name not in _PASSING]
    on_server = connection.dialect.name != "sqlite"
    if on_server:
        names = name_tables(connection, (table.name for table in wanted))
        connection.execute(text(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE"))
    empty = [table for table in wanted if connection.execute(select(table).limit(1)).first() is None]
    for table in empty:
        copy_rows(backup, connection, table)
        if on_server and table.name in _NUMBERED:
            last = select(func.max(table.c.id)).scalar_subquery()
            sequence = func.pg_get_serial_sequence(name_tables(connection, (table.name,)), "id")
            connection.execute(select(func.setval(sequence, func.coalesce(last, 1), last.is_not(None))))
    return {table.name for table in empty}


def _exchange(connection: Connection, backup: Connection, revision: int, actor: Actor, now: datetime) -> None:
    then, present = _read_rules(backup), _read_rules(connection)
    before = {number: present.get(number) for number in sorted(then.keys() | present.keys())
              if not history.same(present.get(number), then.get(number))}  # fmt: skip
    after = {number: renew(then.get(number), revision, now) for number in before}
    history.note_restore(connection, revision, before, actor, now)
    exchange(connection, before, after, revision)
    audit.note_exchanged(connection, revision, before, after, actor, now)


def _read_rules(connection: Connection) -> dict[int, Kept]:
    return {kept.rule.id: kept for kept in history.rules_at(connection, newest_revision(connection))}


def _count(connection: Connection) -> int:
    number: int = connection.execute(select(func.count()).select_from(rules)).scalar_one()
    return number


def _describe(restored: Restored) -> dict[str, object]:
    label = restored.label
    backup = {"made_at": label.made_at.isoformat(), "source": label.source, "revision": label.revision}
    return {"rules": restored.rules, "backup": backup}
