"""Revisions that can be returned to: every change keeps what it replaced, in its own transaction.

What the rules were at a revision are the present ones, with every change after it undone, the newest first.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    ScalarSelect,
    Select,
    and_,
    delete,
    func,
    insert,
    select,
    tuple_,
    update,
)

from netlimit.records import LIMITER, Actor, Comparison, Difference, Revision
from netlimit.rules import Rule
from netlimit.store.bulk import write
from netlimit.store.clock import stamp
from netlimit.store.columns import EPOCH, Unreadable, to_microseconds
from netlimit.store.errors import NoSuchRevision
from netlimit.store.room import NoRoom, read_pragma
from netlimit.store.rows import (
    RULE_COLUMNS,
    WRITTEN_COLUMNS,
    Kept,
    from_row,
    kept_from_row,
    to_fields,
    to_row,
    with_number,
)
from netlimit.store.tables import clock, revisions, rules, undo, windows

KEPT_REVISIONS = 1000
"""How many changes can be undone, unless the settings say otherwise; of the limiter's own, as many again."""

MOST_BYTES = 256 * 2**20
"""What the changes that can be undone may take in all; 300,000 replaced rules of the usual kind. Of one that is larger
alone, the last is kept all the same. The limiter's own are as small as they are few, and do not count. While a window
of confirmation is open all are kept; but who is no admin makes no more when they take twice as much."""

_COMES, _GOES = 10, 4
"""How many bytes the end of a window takes at most for each byte, as JSON, of what comes back and of what goes: 8 and 3
were measured of rules with as many labels and gateways as there can be."""
_ROW, _LETTER = 500, 12
"""Bytes of a rule as JSON without its texts, and of a letter in it."""
_PAGES = 16
"""Pages that a rule touches in a large file at most, where all others stay as they are."""

_AT_ONCE = 500
_MOST_AT_ONCE = 10_000_000
"""No change has added so many rules."""
_BY_LIMITER = and_(revisions.c.actor == LIMITER.name, revisions.c.request.is_(None))
"""A token, whose requests have numbers, may have that name as well."""
_TOLD = [column for column in revisions.c if column.name not in ("stamp", "size")]
_NAMES = [column.name for column in WRITTEN_COLUMNS]
_READ = [column.name for column in RULE_COLUMNS]
Row = Mapping[str, Any]
"""A rule as a change keeps it: the values of its row by column, times as microseconds."""


def note_added(connection: Connection, batch: Sequence[Rule], actor: Actor, now: datetime) -> None:
    """Keep that rules were added, whose ids follow each other."""
    revision = batch[0].revision
    _note(connection, revision, "add", len(batch), 0, actor, now)
    absent = {"revision": revision, "first_rule": batch[0].id, "last_rule": batch[-1].id, "before": None}
    connection.execute(insert(undo), [absent])


def note_changed(connection: Connection, revision: int, action: str, before: Kept, actor: Actor, now: datetime) -> None:
    """Keep what a rule was before it was replaced or removed."""
    rule_id, written = before.rule.id, _write_row(before)
    _note(connection, revision, action, 1, len(json.dumps(written)), actor, now)
    row = {"revision": revision, "first_rule": rule_id, "last_rule": rule_id, "before": written}
    connection.execute(insert(undo), [row])


def note_rollback(
    connection: Connection,
    revision: int,
    before: Mapping[int, Kept | None],
    returned_to: int,
    actor: Actor,
    now: datetime,
) -> None:
    """Keep what each of these rules was before a rollback; None for one that was not there."""
    size = _write_rows(connection, revision, before)
    _note(connection, revision, "rollback", len(before), size, actor, now, returned_to)


def note_restore(
    connection: Connection, revision: int, before: Mapping[int, Kept | None], actor: Actor, now: datetime
) -> None:
    """Keep what each of these rules was before a backup was brought back; None for one that was not there."""
    size = _write_rows(connection, revision, before)
    _note(connection, revision, "restore", len(before), size, actor, now)


def check(connection: Connection, revision: int) -> None:
    """Raise NoSuchRevision unless the rules of a revision are known."""
    newest, oldest = connection.execute(select(clock.c.revision, clock.c.oldest)).one()
    if revision > newest:
        raise NoSuchRevision(revision, f"There is no revision {revision} yet; the newest is {newest}.")
    if revision < oldest:
        raise NoSuchRevision(
            revision,
            f"Revision {revision} is not known any more; the oldest that can be returned to is {oldest}. "
            f"The setting NETLIMIT_REVISIONS says how many are kept, of {MOST_BYTES >> 20} MiB at most.",
        )


def past(connection: Connection, revision: int) -> dict[int, Kept | None]:
    """The rules that have changed after a revision, as they were then; None for one that was not there.

    Raises NoSuchRevision.
    """
    return dict(_read_past(connection, revision, list_past(connection, revision).items()))


def present(connection: Connection, rule_ids: Iterable[int]) -> dict[int, Kept]:
    """Those of these rules that are kept now."""
    asked = list(rule_ids)
    found: dict[int, Kept] = {}
    for start in range(0, len(asked), _AT_ONCE):
        some = rules.c.id.in_(asked[start : start + _AT_ONCE])
        rows = connection.execute(select(*RULE_COLUMNS, rules.c.created_at, rules.c.updated_at).where(some))
        found.update((row.id, kept_from_row(row)) for row in rows)
    return found


def rules_at(connection: Connection, revision: int) -> Iterator[Kept]:
    """Every rule of a revision, in no order. Raises NoSuchRevision."""
    changed = past(connection, revision)
    wanted = select(*RULE_COLUMNS, rules.c.created_at, rules.c.updated_at)
    for row in connection.execute(wanted):
        if row.id not in changed:
            yield kept_from_row(row)
    yield from filter(None, changed.values())


def differences(connection: Connection, one: int, other: int) -> Iterator[Difference]:
    """The rules that two revisions do not have in common, by id: before is what `one` has. What they were is read as
    it is asked for, some hundred rules at a time: all of a long history would be gigabytes. Raises NoSuchRevision."""
    before, after = list_past(connection, one), list_past(connection, other)
    touched = sorted(before.keys() | after.keys())
    for start in range(0, len(touched), _AT_ONCE):
        some = touched[start : start + _AT_ONCE]
        unchanged = [rule_id for rule_id in some if rule_id not in before or rule_id not in after]
        now: dict[int, Kept | None] = {**present(connection, unchanged)}
        old, new = (
            now | dict(_read_past(connection, revision, [(each, past[each]) for each in some if each in past]))
            for revision, past in ((one, before), (other, after))
        )
        for rule_id in some:
            was, became = old.get(rule_id), new.get(rule_id)
            if not same(was, became):
                yield Difference(rule_id, was.rule if was else None, became.rule if became else None)


def compare(connection: Connection, one: int, other: int, most: int, after: int) -> Comparison:
    """How two revisions differ, with `most` of the rules that they do not have in common, after one of them by id.

    Raises NoSuchRevision."""
    kinds: Counter[str] = Counter()
    page: list[Difference] = []
    more = False
    for each in differences(connection, one, other):
        kinds[each.kind] += 1
        if each.rule_id > after:
            more = len(page) == most
            if not more:
                page.append(each)
    return Comparison(kinds["added"], kinds["removed"], kinds["changed"], tuple(page), more)


def changed_fields(difference: Difference) -> dict[str, tuple[Any, Any]]:
    """The fields in which a rule differs, as a client would write them: before and after; None for what is empty."""
    before, after = (to_fields(rule) if rule else {} for rule in (difference.before, difference.after))
    pairs = {name: (before.get(name), after.get(name)) for name in (*before, *after)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def same(one: Kept | None, other: Kept | None) -> bool:
    """Whether two states of a rule say the same; since which revision does not matter."""
    if one is None or other is None:
        return one is other
    return with_number(one.rule, 0, 0) == with_number(other.rule, 0, 0)


def listed(connection: Connection, limit: int, before: int | None) -> list[Revision]:
    """The changes that can be undone, the newest first; `before` is the revision of the last one already seen."""
    wanted = select(*_TOLD).order_by(revisions.c.revision.desc()).limit(limit)
    if before is not None:
        wanted = wanted.where(revisions.c.revision < before)
    return [Revision(**row) for row in connection.execute(wanted).mappings()]


def find(connection: Connection, revision: int) -> Revision:
    """Who made a revision, and what it was. Raises NoSuchRevision."""
    row = connection.execute(select(*_TOLD).where(revisions.c.revision == revision)).mappings().one_or_none()
    if row is None:
        check(connection, revision)
        raise NoSuchRevision(
            revision, f"Who made revision {revision} is not known any more; it can still be returned to."
        )
    return Revision(**row)


def prune(connection: Connection, most: int) -> None:
    """Forget all but the last `most` changes, or those of MOST_BYTES in all, and those since an open window of
    confirmation began. What the limiter does by itself counts apart: it makes more changes in an hour than operators in
    a year."""
    base = select(func.min(windows.c.base)).where(windows.c.outcome.is_(None)).scalar_subquery()
    past, past_of_limiter = _find_past(most, ~_BY_LIMITER), _find_past(most, _BY_LIMITER)
    wanted = select(past, past_of_limiter, clock.c.oldest, base)
    last, last_of_limiter, oldest, needed = connection.execute(wanted).one()
    last = max(filter(None, (last, _find_too_large(connection))), default=None)
    oldest_kept = last if needed is None or last is None else min(last, needed)
    if oldest_kept is not None and oldest_kept > oldest:
        connection.execute(update(clock).values(oldest=oldest_kept))
        for table in (undo, revisions):
            connection.execute(delete(table).where(table.c.revision <= oldest_kept))
    if last_of_limiter is not None:
        _forget_blocks(connection, last_of_limiter if needed is None else min(last_of_limiter, needed))


def check_window(connection: Connection) -> None:
    """Raise NoRoom where what has been changed in an open window of confirmation takes twice what is kept otherwise:
    nothing of that is forgotten until the window ends, and its end goes through all of it."""
    is_open = select(windows.c.base).where(windows.c.outcome.is_(None)).exists()
    if connection.execute(select(is_open)).scalar_one() and _find_size(connection) > 2 * MOST_BYTES:
        said = (
            f"What can be undone since a window of confirmation was opened takes more than {2 * MOST_BYTES >> 20} MiB, "
            "and is kept until it ends: this change was not made. Confirm or end the window first, or have an admin "
            "make the change."
        )
        raise NoRoom(said, said)


def find_due(connection: Connection) -> int:
    """How many bytes of the disk the end of an open window of confirmation takes of a SQLite file and its log together,
    should nobody confirm it; 0 where none is open. That is bounded, not measured: what was changed comes back and is
    kept once more, with its index entries, and each page of that stands in the log, too."""
    base = connection.execute(select(func.min(windows.c.base)).where(windows.c.outcome.is_(None))).scalar_one()
    if base is None:
        return 0
    back, count = func.coalesce(func.sum(revisions.c.size), 0), func.coalesce(func.sum(revisions.c.rules), 0)
    bytes_back, changed = connection.execute(select(back, count).where(revisions.c.revision > base)).one()
    letters = _LETTER * func.length(rules.c.comment) + 2 * func.length(rules.c.labels) + 2 * func.length(rules.c.hosts)
    present = select(func.coalesce(func.sum(_ROW + letters), 0)).where(rules.c.revision > base)
    bytes_gone = connection.execute(present).scalar_one()
    pages = min(_PAGES * changed, read_pragma(connection, "page_count")) * read_pragma(connection, "page_size")
    return int(_COMES * bytes_back + _GOES * bytes_gone + pages)


def _find_past(most: int, which: ColumnElement[bool]) -> ScalarSelect[int]:
    """The newest revision of some that is to be forgotten. Counted, for a restore leaves numbers out."""
    newest = select(revisions.c.revision).where(which).order_by(revisions.c.revision.desc())
    return newest.offset(most).limit(1).scalar_subquery()


def _find_too_large(connection: Connection) -> int | None:
    """The newest revision that is to be forgotten, for those from it on take more than MOST_BYTES; never the last."""
    if _find_size(connection) <= MOST_BYTES:
        return None
    sizes = select(revisions.c.revision, revisions.c.size).where(~_BY_LIMITER).order_by(revisions.c.revision.desc())
    taken = 0
    for place, (revision, size) in enumerate(connection.execute(sizes)):
        taken += size
        if place and taken > MOST_BYTES:
            return int(revision)
    return None


def _find_size(connection: Connection) -> int:
    """Bytes that what can be undone takes."""
    total = select(func.coalesce(func.sum(revisions.c.size), 0)).where(~_BY_LIMITER)
    return int(connection.execute(total).scalar_one())


def _forget_blocks(connection: Connection, last: int) -> None:
    """Forget what the limiter has done up to a revision, though operators' revisions from before it are kept: that
    blocks were there which are over by now, and until when others were to last. Of those that stand it stays known
    since when: whoever returns to an earlier revision takes them away."""
    forgotten = connection.scalars(select(revisions.c.revision).where(_BY_LIMITER, revisions.c.revision <= last)).all()
    ended: set[int] = set()
    for start in range(0, len(forgotten), _AT_ONCE):
        some = undo.c.revision.in_(forgotten[start : start + _AT_ONCE]), undo.c.before.is_not(None)
        ended.update(connection.scalars(select(undo.c.first_rule).where(*some)))
        connection.execute(delete(undo).where(*some))
    connection.execute(delete(revisions).where(_BY_LIMITER, revisions.c.revision <= last))
    if ended:
        _forget_absent(connection, ended - present(connection, ended).keys())


def _forget_absent(connection: Connection, rule_ids: Iterable[int]) -> None:
    """That a rule was not there at some time says nothing of one that is not there now, unless it was between."""
    gone = set(rule_ids)
    near = undo.c.last_rule >= min(gone, default=0), undo.c.first_rule <= max(gone, default=0)
    wanted = select(undo.c.revision, undo.c.first_rule, undo.c.last_rule, undo.c.before.is_(None)).where(*near)
    idle: list[tuple[int, int]] = []
    for revision, first, end, absent in connection.execute(wanted.order_by(undo.c.revision.desc())):
        if absent and first == end and first in gone:
            idle.append((revision, first))
        gone.difference_update([first] if first == end else [each for each in gone if first <= each <= end])
    for start in range(0, len(idle), _AT_ONCE):
        some = tuple_(undo.c.revision, undo.c.first_rule).in_(idle[start : start + _AT_ONCE])
        connection.execute(delete(undo).where(some))


def list_past(connection: Connection, revision: int, made: Select[tuple[int]] | None = None) -> dict[int, int | None]:
    """The rules that have changed after a revision, and which change has kept what they were then; None for one that
    was not there. With `made`, only by these changes. Raises NoSuchRevision."""
    check(connection, revision)
    kept = select(undo.c.revision, undo.c.first_rule, undo.c.last_rule, undo.c.before.is_(None))
    if made is not None:
        kept = kept.where(undo.c.revision.in_(made))
    found: dict[int, int | None] = {}
    changed = kept.where(undo.c.revision > revision).order_by(undo.c.revision.desc())
    for change, first, last, absent in connection.execute(changed):
        if not _is_range(first, last) or not (absent or first == last):
            raise _unreadable(revision)
        found.update(dict.fromkeys(range(first, last + 1), None if absent else change))
    return found


def _read_past(
    connection: Connection, revision: int, past: Iterable[tuple[int, int | None]]
) -> Iterator[tuple[int, Kept | None]]:
    """What rules were at a revision, each as the change has kept it that is told with it."""
    kept: defaultdict[int, list[int]] = defaultdict(list)
    for rule_id, change in past:
        if change is None:
            yield rule_id, None
        else:
            kept[change].append(rule_id)
    for change, rule_ids in kept.items():
        for start in range(0, len(rule_ids), _AT_ONCE):
            some = undo.c.first_rule.in_(rule_ids[start : start + _AT_ONCE])
            wanted = select(undo.c.first_rule, undo.c.before).where(undo.c.revision == change, some)
            for rule_id, before in connection.execute(wanted):
                if not isinstance(before, dict) or isinstance(before, Unreadable):
                    raise _unreadable(revision)
                yield rule_id, _read_row(before)


def _is_range(first: Any, last: Any) -> bool:
    return isinstance(first, int) and isinstance(last, int) and 0 <= last - first <= _MOST_AT_ONCE


def _unreadable(revision: int) -> NoSuchRevision:
    return NoSuchRevision(
        revision, f"Revision {revision} cannot be returned to: what has changed since then cannot be read."
    )


def _note(
    connection: Connection,
    revision: int,
    action: str,
    count: int,
    size: int,
    actor: Actor,
    now: datetime,
    returned_to: int | None = None,
) -> None:
    row = {
        "revision": revision,
        "at": now,
        "actor": actor.name,
        "address": actor.address,
        "request": actor.request,
        "action": action,
        "rules": count,
        "returned_to": returned_to,
        "stamp": stamp(connection),
        "size": size,
    }
    connection.execute(insert(revisions), [row])


def _write_rows(connection: Connection, revision: int, before: Mapping[int, Kept | None]) -> int:
    """Keep what each rule was; how many bytes that takes."""
    size = 0

    def rows() -> Iterator[tuple[int, int, int, str | None]]:
        nonlocal size
        for row in _rows(revision, before):
            size += len(row[-1] or "")
            yield row

    write(connection, tuple(undo.c), rows())
    return size


def _rows(revision: int, before: Mapping[int, Kept | None]) -> Iterator[tuple[int, int, int, str | None]]:
    """Rows of `undo`; rules that were not there and whose ids follow each other are one."""
    absent: list[int] = []
    for rule_id in [*sorted(before), -1]:
        missing = before.get(rule_id, True) is None
        if absent and not (missing and rule_id == absent[-1] + 1):
            yield revision, absent[0], absent[-1], None
            absent = []
        if missing:
            absent.append(rule_id)
        elif kept := before.get(rule_id):
            yield revision, rule_id, rule_id, json.dumps(_write_row(kept))


def _write_row(kept: Kept) -> Row:
    times = {"created_at": to_microseconds(kept.created_at), "updated_at": to_microseconds(kept.updated_at)}
    return dict(zip(_NAMES, to_row(kept.rule), strict=True)) | times


def _read_row(row: Row) -> Kept:
    moments = {name: _read_moment(row.get(name)) for name in ("expires_at", "created_at", "updated_at")}
    rule = from_row([moments[name] if name in moments else row.get(name) for name in _READ])
    return Kept(rule, moments["created_at"] or EPOCH, moments["updated_at"] or EPOCH)


def _read_moment(microseconds: Any) -> datetime | None:
    try:
        return None if microseconds is None else EPOCH + timedelta(microseconds=microseconds)
    except (TypeError, OverflowError):
        return EPOCH
