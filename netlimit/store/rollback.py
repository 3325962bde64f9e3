"""Going back to the rules of a revision. It is a change like any other: it makes a new revision, and can be undone."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import Connection

from netlimit.judgement import Change, Judge
from netlimit.records import Actor
from netlimit.rules import Rule
from netlimit.store import audit, history, tombstones
from netlimit.store.clock import lock, take_revision
from netlimit.store.clock import revision as newest_revision
from netlimit.store.rows import Kept, with_number
from netlimit.store.rules import erase, forget, write_kept
from netlimit.store.standing import judged


def roll_back(connection: Connection, revision: int, actor: Actor, now: datetime, judge: Judge | None = None) -> int:
    """Bring back the rules of a revision, under their ids; the new revision, or the present one if they are the same.

    Raises NoSuchRevision, and what `judge` raises.
    """
    lock(connection)
    then = history.past(connection, revision)
    present = history.present(connection, then)
    before = {rule_id: present.get(rule_id) for rule_id in sorted(then)
              if not history.same(present.get(rule_id), then[rule_id])}  # fmt: skip
    if not before:
        return newest_revision(connection)
    if judge:
        then = judge_exchange(connection, judge, before, then)
    number, _ = take_revision(connection)
    history.note_rollback(connection, number, before, revision, actor, now)
    after = {rule_id: renew(then[rule_id], number, now) for rule_id in before}
    exchange(connection, before, after, number)
    audit.note_rollback(connection, number, revision, before, after, actor, now)
    return number


def judge_exchange(
    connection: Connection, judge: Judge, before: Mapping[int, Kept | None], after: Mapping[int, Kept | None]
) -> dict[int, Kept | None]:
    """Have it judged that rules take the place of others, by id: what comes in the end. Raises NeedsForce."""
    pairs = [(before[rule_id], after.get(rule_id)) for rule_id in before]
    rules = judged(connection, judge, [Change(_rule_of(old), _rule_of(new)) for old, new in pairs])
    found: dict[int, Kept | None] = {}
    for rule_id, rule, (_, new) in zip(before, rules, pairs, strict=True):
        found[rule_id] = Kept(rule, new.created_at, new.updated_at) if new and rule else None
    return found


def _rule_of(kept: Kept | None) -> Rule | None:
    return kept.rule if kept else None


def renew(kept: Kept | None, revision: int, now: datetime) -> Kept | None:
    """The rule as it comes back: controllers know by its revision that it has changed."""
    return kept and Kept(with_number(kept.rule, kept.rule.id, revision), kept.created_at, now)


def exchange(
    connection: Connection, before: Mapping[int, Kept | None], after: Mapping[int, Kept | None], revision: int
) -> None:
    """Put rules in the place of others, by id. All are taken away before any is written: they may have exchanged their
    names."""
    erase(connection, [rule_id for rule_id, kept in before.items() if kept])
    gone = [rule_id for rule_id, kept in after.items() if kept is None]
    forget(connection, gone)
    tombstones.put(connection, gone, revision)
    back = [kept for kept in after.values() if kept]
    tombstones.take(connection, [kept.rule.id for kept in back])
    write_kept(connection, back)
