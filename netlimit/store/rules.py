"""Rules kept: added, changed, removed, found. Functions of a connection; the Store gives them their transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as with_changes
from datetime import datetime
from itertools import repeat
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, or_, select

from netlimit.addresses import read_network
from netlimit.errors import NetlimitError, RuleError
from netlimit.judgement import Change, Judge
from netlimit.records import Actor
from netlimit.rules import Rule, Target, parse_target
from netlimit.store import audit, counters, history, tombstones
from netlimit.store.bulk import check_kept, write
from netlimit.store.clock import lock, take_revision
from netlimit.store.columns import to_microseconds
from netlimit.store.conflicts import find_conflicts, find_taken_names, find_twins
from netlimit.store.errors import ManyErrors, NotKept, Stale, limited_already, name_taken
from netlimit.store.rows import RULE_COLUMNS, WRITTEN_COLUMNS, Kept, kept_from_row, to_row, with_number
from netlimit.store.standing import judged
from netlimit.store.tables import LARGEST, rule_hosts, rule_labels, rule_states, rules

_KEPT_COLUMNS = (*RULE_COLUMNS, rules.c.created_at, rules.c.updated_at)
_AT_ONCE = 500


def add(
    connection: Connection, batch: Sequence[Rule], actor: Actor, now: datetime, judge: Judge | None = None
) -> list[Rule]:
    """Keep all rules of the batch, or none. Raises Conflict or NameTaken for one rule, ManyErrors for more, and
    NeedsForce as `judge` does."""
    if not batch:
        return []
    revision, first = take_revision(connection, len(batch))
    if judge:
        batch = [rule for rule in judged(connection, judge, [Change(None, rule) for rule in batch]) if rule]
    kept = [with_number(rule, first + index, revision) for index, rule in enumerate(batch)]
    wrong = find_taken_names(connection, kept)
    nameless = {index for index, _ in wrong}
    # A name that is taken must not hide what else is wrong with its rule: write it without, and roll all back.
    written = [with_changes(r, name=None) if i in nameless else r for i, r in enumerate(kept)] if wrong else kept
    identities = write_rules(connection, written, now, now)
    wrong += find_twins(kept, identities, now)
    for number, other in find_conflicts(connection, revision, now).items():
        wrong.append((number - first, limited_already(kept[number - first], *other)))
    _refuse(wrong, len(batch))
    history.note_added(connection, kept, actor, now)
    audit.note_added(connection, kept, actor, now)
    return kept


def change(
    connection: Connection,
    rule_id: int,
    alter: Callable[[Rule], Rule],
    actor: Actor,
    now: datetime,
    expected_revision: int | None,
    judge: Judge | None = None,
) -> Kept:
    """Put what `alter` makes of a kept rule in its place; the same rule again changes nothing, not even the revision.

    Nobody else can change it in between. Raises NotKept, Stale, Conflict, NameTaken, what `alter` raises, and `judge`.
    """
    lock(connection)
    before = _get(connection, rule_id, expected_revision)
    rule = with_number(alter(before.rule), rule_id, before.rule.revision)
    if judge:
        rule = judged(connection, judge, [Change(before.rule, rule)])[0] or rule
    if rule == before.rule:
        return before
    revision, _ = take_revision(connection)
    kept = with_number(rule, rule_id, revision)
    namesake = find(connection, rule.name) if rule.name else None
    if namesake and namesake.rule.id != rule_id:
        raise name_taken(namesake.rule.name or "", namesake.rule.id)
    gone = connection.execute(delete(rules).where(rules.c.id == rule_id))
    check_kept(rules.name, 1, gone.rowcount)
    write_rules(connection, [kept], before.created_at, now)
    for other in find_conflicts(connection, revision, now).values():
        raise limited_already(kept, *other)
    history.note_changed(connection, revision, "replace", before, actor, now)
    audit.note(connection, "replace", revision, before.rule, kept, actor, now)
    return Kept(kept, before.created_at, now)


def remove(
    connection: Connection,
    rule_id: int,
    actor: Actor,
    now: datetime,
    expected_revision: int | None,
    judge: Judge | None = None,
) -> None:
    """Forget a rule, with all that was known of it. Raises NotKept, Stale, NeedsForce."""
    lock(connection)
    before = _get(connection, rule_id, expected_revision)
    if judge:
        judged(connection, judge, [Change(before.rule, None)])
    revision, _ = take_revision(connection)
    gone = connection.execute(delete(rules).where(rules.c.id == rule_id))
    check_kept(rules.name, 1, gone.rowcount)
    forget(connection, [rule_id])
    tombstones.put(connection, [rule_id], revision)
    tombstones.prune(connection, now)
    history.note_changed(connection, revision, "remove", before, actor, now)
    audit.note(connection, "remove", revision, before.rule, None, actor, now)


def erase(connection: Connection, rule_ids: Sequence[int]) -> None:
    """Take rows of rules away, with the tables by which they are searched; nothing is noted."""
    for start in range(0, len(rule_ids), _AT_ONCE):
        connection.execute(delete(rules).where(rules.c.id.in_(rule_ids[start : start + _AT_ONCE])))


def forget(connection: Connection, rule_ids: Sequence[int]) -> None:
    """Forget what gateways have said of rules that are gone."""
    for start in range(0, len(rule_ids), _AT_ONCE):
        some = rule_ids[start : start + _AT_ONCE]
        connection.execute(delete(rule_states).where(rule_states.c.rule_id.in_(some)))
        counters.retire(connection, some)


def find(connection: Connection, key: int | str) -> Kept | None:
    """The rule of this id, or of this name; names never begin with a digit, so "7" is an id."""
    if isinstance(key, str) and not key.isdecimal():
        wanted = rules.c.name == key
    else:
        wanted = rules.c.id == min(int(key), LARGEST)
    row = connection.execute(select(*_KEPT_COLUMNS).where(wanted)).one_or_none()
    return kept_from_row(row) if row else None


def find_some(connection: Connection, keys: Sequence[str]) -> dict[str, Kept]:
    """The rules of these ids or names, by that, in their order; those that are not there are left out."""
    found: dict[str, Kept] = {}
    for start in range(0, len(keys), _AT_ONCE):
        some = keys[start : start + _AT_ONCE]
        ids = [min(int(key), LARGEST) for key in some if key.isdecimal()]
        wanted = or_(rules.c.id.in_(ids), rules.c.name.in_([key for key in some if not key.isdecimal()]))
        for row in connection.execute(select(*_KEPT_COLUMNS).where(wanted)):
            kept = kept_from_row(row)
            found |= {str(kept.rule.id): kept} | ({kept.rule.name: kept} if kept.rule.name else {})
    # An id may be written with noughts before it.
    plain = {key: str(int(key)) if key.isdecimal() else key for key in keys}
    return {key: found[short] for key, short in plain.items() if short in found}


def search(
    connection: Connection, wanted: Sequence[ColumnElement[bool]], after: int, limit: int
) -> tuple[list[Kept], int]:
    """A page of the rules that are `wanted`, by id, from the one `after` on; and how many there are in all."""
    total = connection.execute(select(func.count()).select_from(rules).where(*wanted)).scalar_one()
    page = select(*_KEPT_COLUMNS).where(*wanted, rules.c.id > min(after, LARGEST)).order_by(rules.c.id).limit(limit)
    return [kept_from_row(row) for row in connection.execute(page)], total


def conditions(
    contains: str | None, target: str | None, labels: Mapping[str, str], action: str | None
) -> list[ColumnElement[bool]]:
    """What `search` is to match. Raises RuleError for what is no address or CIDR."""
    wanted: list[ColumnElement[bool]] = []
    if contains is not None:
        wanted.append(rules.c.target.in_(_networks_around(contains)))
    if target is not None:
        wanted.append(rules.c.target == str(parse_target(target)))
    if action is not None:
        wanted.append(rules.c.action == action)
    for key, value in labels.items():
        labelled = select(rule_labels.c.rule_id).where(rule_labels.c.key == key, rule_labels.c.value == value)
        wanted.append(rules.c.id.in_(labelled))
    return wanted


def _networks_around(address: str) -> list[str]:
    """Every network that an address (or network) lies in, as text: 33 or 129 look-ups in the index, never a scan."""
    try:
        inner: Target = read_network(address)
    except ValueError:
        raise RuleError("contains", f'{address!r} is no address; write for example "10.1.2.3".') from None
    return [str(inner.supernet(new_prefix=length)) for length in range(inner.prefixlen + 1)]


def _get(connection: Connection, rule_id: int, expected_revision: int | None) -> Kept:
    kept = find(connection, rule_id)
    if kept is None:
        raise NotKept(rule_id)
    if expected_revision is not None and expected_revision != kept.rule.revision:
        raise Stale(rule_id, expected_revision, kept.rule.revision)
    return kept


def write_rules(connection: Connection, batch: Sequence[Rule], created: datetime, updated: datetime) -> list[str]:
    """Write rules that have their ids, with the tables by which they are searched; gives back their identities."""
    times = (to_microseconds(created), to_microseconds(updated))
    return _write(connection, batch, repeat(times))


def write_kept(connection: Connection, batch: Sequence[Kept]) -> None:
    """Write rules that have their ids and their times."""
    times = ((to_microseconds(kept.created_at), to_microseconds(kept.updated_at)) for kept in batch)
    _write(connection, [kept.rule for kept in batch], times)


def _write(connection: Connection, batch: Sequence[Rule], times: Iterable[tuple[int, int]]) -> list[str]:
    identities = []

    def rows() -> Iterator[tuple[Any, ...]]:
        for rule, moments in zip(batch, times, strict=False):
            row = to_row(rule)
            identities.append(row[-1])
            yield row + moments

    write(connection, (*WRITTEN_COLUMNS, rules.c.created_at, rules.c.updated_at), rows())
    hosts = [(host, rule.id) for rule in batch for host in rule.hosts]
    if hosts:
        write(connection, tuple(rule_hosts.c), hosts)
    labels = [(key, value, rule.id) for rule in batch for key, value in rule.labels]
    if labels:
        write(connection, tuple(rule_labels.c), labels)
    return identities


def _refuse(wrong: Sequence[tuple[int, NetlimitError]], size: int) -> None:
    if wrong and size == 1:
        raise wrong[0][1]
    if wrong:
        raise ManyErrors(wrong)
