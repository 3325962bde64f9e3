"""Who changed what and when. Written in the transaction of the change itself.

The database refuses to change a line of it, and to delete one that `prune` has not given up (triggers of the schema).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from secrets import randbelow, token_hex
from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, cast, delete, false, func, insert, select, update

from netlimit.origins import Trace, may_lack
from netlimit.records import Actor, Pause
from netlimit.rules import Rule
from netlimit.store import clock, homes
from netlimit.store.rows import Kept, to_fields
from netlimit.store.tables import LARGEST, audit
from netlimit.store.tables import clock as clock_table

MOST_ROWS = 1000
"""A batch larger than this leaves one line in the audit instead of one for each rule."""
MOST_BYTES = 256 * 2**20
"""What all lines may quote together, as JSON, or a little more; 100,000 of the usual kind are less."""
_SLACK = 10
"""Pruning waits until the audit is a tenth too long: it is dear, and need not be exact."""
_GRAIN = 1000
"""After so many lines it is looked again how much all of them are."""
_MOST_LOOKED_AT = 1000
"""Lines, for that; or nearly twice as many."""
_MOST_AT_ONCE = 4 * _GRAIN
"""Lines that are given up at a time because all are too much. Others wait meanwhile."""
_LONGEST = 1024
"""Bytes, as JSON, of a field that is quoted. A rule may have 40 kB of labels, gateways and comment."""

PAUSE, RESUME = "pause", "resume"
"""What the audit calls a pause of a gateway, by a teardown or by a window's end, and its end. `pause` holds the word of
that pause, by which it is told from one that has ended."""
_LONGEST_WORD = 64
_MOST_PAUSES = 100
"""So many of a gateway are listed."""
EXPIRED, ABANDONED = "expire-window", "abandon-window"
"""What it calls the ends of a window of confirmation that undo it."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change: `action` is "add", "replace" or "remove" for a rule, whose fields `before` and `after` are; for
    anything else `rule_id` is None, and they say what there is to say. `revision` is that of the rules after it.
    `address` and `request` say where the change came from and the id of its request, None for one made on this host.

    A field of a rule that is longer than 1,024 bytes is told by its length and digest (`bytes`, `sha256`, of its JSON),
    a document of limits that is long or goes by those of its text (`letters`, `sha256`).
    A large batch is one line: `rule_id` is None, and `after` holds `rules` (how many), `first_id` and `last_id`.
    """

    id: int
    at: datetime
    actor: str
    revision: int
    action: str
    rule_id: int | None
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    address: str | None
    request: str | None


def as_actor(actor: Actor | str) -> Actor:
    """Who it is; a plain name is somebody on this host."""
    return Actor(actor) if isinstance(actor, str) else actor


def note(
    connection: Connection,
    action: str,
    revision: int,
    before: Rule | None,
    after: Rule | None,
    actor: Actor,
    now: datetime,
) -> None:
    """Write down one change of one rule."""
    connection.execute(insert(audit), [_line(action, revision, before, after, actor, now)])


def note_added(connection: Connection, batch: Sequence[Rule], actor: Actor, now: datetime) -> None:
    """Write down the rules added by one batch."""
    revision = batch[0].revision
    if len(batch) <= MOST_ROWS:
        connection.execute(insert(audit), [_line("add", revision, None, rule, actor, now) for rule in batch])
        return
    summary = {"rules": len(batch), "first_id": batch[0].id, "last_id": batch[-1].id}
    line = _line("add", revision, None, None, actor, now) | {"after": summary}
    connection.execute(insert(audit), [line])


def note_other(
    connection: Connection,
    action: str,
    actor: Actor,
    now: datetime,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Write down something that is no change of a rule."""
    line = _line(action, clock.revision(connection), None, None, actor, now)
    connection.execute(insert(audit), [line | {"before": before, "after": after}])


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which entries are wanted: all members that are not None must match. `since` is included, `until` is not."""

    actor: str | None = None
    action: str | None = None
    rule_id: int | None = None
    request: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        """The same for the database."""
        rule_id = None if self.rule_id is None else min(self.rule_id, LARGEST)
        equal = ((audit.c.actor, self.actor), (audit.c.action, self.action), (audit.c.request, self.request))
        wanted = [column == value for column, value in (*equal, (audit.c.rule_id, rule_id)) if value is not None]
        if any("\0" in (value or "") for _, value in equal):
            return [false()]  # PostgreSQL has no such text, and would not even compare it
        wanted += [audit.c.at >= self.since] if self.since else []
        return wanted + ([audit.c.at < self.until] if self.until else [])


def note_rollback(
    connection: Connection,
    revision: int,
    returned_to: int,
    before: Mapping[int, Kept | None],
    after: Mapping[int, Kept | None],
    actor: Actor,
    now: datetime,
) -> None:
    """Write down a return to an earlier revision: one line for it, and one for each rule unless they are many."""
    line = _line("rollback", revision, None, None, actor, now)
    connection.execute(insert(audit), [line | {"after": {"revision": returned_to, "rules": len(before)}}])
    note_exchanged(connection, revision, before, after, actor, now)


def note_exchanged(
    connection: Connection,
    revision: int,
    before: Mapping[int, Kept | None],
    after: Mapping[int, Kept | None],
    actor: Actor,
    now: datetime,
) -> None:
    """Write down what became of each of these rules, unless they are many; None for one that is not there."""
    if not 0 < len(before) <= MOST_ROWS:
        return
    lines = []
    for rule_id, old in before.items():
        new = after[rule_id]
        action = "replace" if old and new else "add" if new else "remove"
        lines.append(_line(action, revision, old.rule if old else None, new.rule if new else None, actor, now))
    connection.execute(insert(audit), lines)


def entries(connection: Connection, limit: int, after: int | None, which: AuditFilter) -> list[AuditEntry]:
    """The newest entries first; `after` is the id of the last one already seen."""
    wanted = select(audit).where(*which.conditions()).order_by(audit.c.id.desc()).limit(limit)
    if after is not None:
        wanted = wanted.where(audit.c.id < after)
    return [AuditEntry(**row) for row in connection.execute(wanted).mappings()]


def make_pause(now: datetime) -> Pause:
    """A pause that begins now, with a word that no other has."""
    return Pause(token_hex(8), now)


def note_pause(connection: Connection, host: str, actor: Actor, pause: Pause) -> None:
    """Write down that a gateway is paused, with the word of that."""
    note_other(connection, PAUSE, actor, pause.at, after={"host": host, PAUSE: pause.word})


def last_pause(connection: Connection, host: str) -> Pause | None:
    """The last pause of a gateway; None where none is told, or an older version's is the last, which has no word: then
    a window's end that names the gateway has no line of the pause after it."""
    told = (PAUSE, EXPIRED, ABANDONED)
    wanted = select(audit.c.after, audit.c.at).where(audit.c.action.in_(told)).order_by(audit.c.id.desc())
    for after, at in connection.execute(wanted):
        if not isinstance(after, Mapping):
            continue
        if after.get("host") == host:
            return _read_pause(after, at)
        paused = after.get("paused")
        if isinstance(paused, list) and host in paused:
            return None
    return None


def list_pauses(connection: Connection, host: str) -> list[Pause]:
    """The latest pauses of a gateway whose word is told, the last one first."""
    wanted = select(audit.c.after, audit.c.at).where(audit.c.action == PAUSE).order_by(audit.c.id.desc())
    told = ((after, at) for after, at in connection.execute(wanted) if isinstance(after, Mapping))
    pauses = (_read_pause(after, at) for after, at in told if after.get("host") == host)
    return list(islice(filter(None, pauses), _MOST_PAUSES))


def _read_pause(after: Mapping[str, Any], at: datetime) -> Pause | None:
    word = after.get(PAUSE)
    return Pause(word, at) if isinstance(word, str) and len(word) <= _LONGEST_WORD else None


def may_have_heard(connection: Connection, pause: Pause) -> bool:
    """Whether a pause is told; or it may have been, for all that is as old was given up."""
    as_old = select(audit.c.id).where(audit.c.at <= pause.at).limit(1)
    return _tells(connection, PAUSE, pause) or connection.execute(as_old).first() is None


def has_resumed(connection: Connection, pause: Pause) -> bool:
    """Whether it is told of this pause, by its word, that it was ended."""
    return _tells(connection, RESUME, pause)


def list_resumed(connection: Connection) -> set[str]:
    """The words of all pauses of which that is told."""
    return {word for word in _list_words(connection, RESUME) if isinstance(word, str)}


def _tells(connection: Connection, action: str, pause: Pause) -> bool:
    return pause.word in _list_words(connection, action)


def _list_words(connection: Connection, action: str) -> Iterator[object]:
    found = connection.execute(select(audit.c.after).where(audit.c.action == action)).scalars()
    return (each.get(PAUSE) for each in found if isinstance(each, Mapping))


def find_newest(connection: Connection) -> int:
    """The id of the newest entry; 0 before the first."""
    newest: int | None = connection.execute(select(func.max(audit.c.id))).scalar_one()
    return newest or 0


def trace(connection: Connection) -> Trace:
    """The newest entry."""
    identity = connection.execute(select(clock_table.c.identity)).scalar_one()
    newest = find_newest(connection)
    return Trace(identity, newest, _digest(connection, newest))


def has_lost(connection: Connection, known: Trace) -> bool:
    """Whether an entry that was the newest is not here, though nobody has given it up, or meant that."""
    if known.line <= _find_given_up(connection) or _digest(connection, known.line) == known.digest:
        return False
    return may_lack(known, connection.execute(select(clock_table.c.identity)).scalar_one())


def _digest(connection: Connection, line: int) -> str:
    """Of what an entry says; empty where there is none. Another server may have given its number to another."""
    row = connection.execute(select(audit).where(audit.c.id == line)).mappings().one_or_none()
    if row is None:
        return ""
    return hashlib.sha256(json.dumps(dict(row), sort_keys=True, default=str).encode()).hexdigest()


def prune(connection: Connection, most: int) -> None:
    """Forget the oldest entries when there are more than `most`."""
    newest, given_up = find_newest(connection), _find_given_up(connection)
    if newest - given_up > most + most // _SLACK:
        _give_up(connection, newest - most)


def prune_bytes(connection: Connection, former: int) -> None:
    """Forget the oldest entries, some at a time, when all together are more than MOST_BYTES. Looks only now and then:
    `former` is the newest entry before this change."""
    newest = find_newest(connection)
    if newest // _GRAIN == former // _GRAIN:
        return
    given_up = _find_given_up(connection)
    last = _find_too_much(connection, newest, given_up)
    if last is not None:
        _give_up(connection, min(last, given_up + _MOST_AT_ONCE))


def _find_too_much(connection: Connection, newest: int, given_up: int) -> int | None:
    """The newest entry that is to be forgotten, for those from it on are more than MOST_BYTES. Of many, some are looked
    at for all; which ones, nobody knows who writes them."""
    step = max(1, (newest - given_up) // _MOST_LOOKED_AT)
    looked_at = range(newest - randbelow(step), given_up, -step)
    before, after = (func.coalesce(func.length(cast(each, Text)), 0) for each in (audit.c.before, audit.c.after))
    wanted = select(audit.c.id, before + after).where(audit.c.id.in_(looked_at)).order_by(audit.c.id.desc())
    taken = 0
    for entry, size in connection.execute(wanted).all():
        taken += step * size
        if taken > MOST_BYTES:
            return int(entry)
    return None


def _find_given_up(connection: Connection) -> int:
    given_up: int = connection.execute(select(clock_table.c.audit_pruned)).scalar_one()
    return given_up


def _give_up(connection: Connection, last: int) -> None:
    """Forget the entries up to the last of these. The clock says so first: the database lets no others go."""
    connection.execute(update(clock_table).values(audit_pruned=last))
    with homes.by_name(connection):
        connection.execute(delete(audit).where(audit.c.id <= last))


def _line(
    action: str, revision: int, before: Rule | None, after: Rule | None, actor: Actor, now: datetime
) -> dict[str, Any]:
    rule = after or before
    return {
        "at": now,
        "actor": actor.name,
        "address": actor.address,
        "request": actor.request,
        "revision": revision,
        "action": action,
        "rule_id": rule.id if rule else None,
        "before": _quote(before) if before else None,
        "after": _quote(after) if after else None,
    }


def _quote(rule: Rule) -> dict[str, Any]:
    """The fields of a rule; of what is long, in its place, the digest."""
    return {name: _shorten(value) for name, value in to_fields(rule).items()}


def _shorten(value: Any) -> Any:
    written = json.dumps(value)
    if len(written) <= _LONGEST:
        return value
    digest = hashlib.sha256(written.encode()).hexdigest()
    return {"bytes": len(written), "sha256": digest}
