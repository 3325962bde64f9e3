"""Going back to the rules of a revision. It is a change like any other: it makes a new revision, and can be undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

from sqlalchemy import Connection

from netlimit.records import Actor
from netlimit.rules import Rule
from netlimit.store import audit, history, tombstones
from netlimit.store.clock import lock, take_revision
from netlimit.store.clock import revision as newest_revision
from netlimit.store.rows import Kept, with_number
from netlimit.store.rules import erase, forget, write_kept

Check = Callable[[Rule, Rule | None], None]
"""Raises something if a rule must not take the place of another, or of none."""


def roll_back(connection: Connection, revision: int, actor: Actor, now: datetime, check: Check | None = None) -> int:
    """Bring back the rules of a revision, under their ids; the new revision, or the present one if they are the same.

    `check` is asked of each rule that comes back. Raises NoSuchRevision, and what `check` raises.
    """
    lock(connection)
    then = history.past(connection, revision)
    present = history.present(connection, then)
    before = {rule_id: present.get(rule_id) for rule_id in sorted(then)
              if not history.same(present.get(rule_id), then[rule_id])}  # fmt: skip
    if not before:
        return newest_revision(connection)
    for rule_id, replaced in before.items():
        back = then[rule_id]
        if check and back:
            check(back.rule, replaced.rule if replaced else None)
    number, _ = take_revision(connection)
    history.note_rollback(connection, number, before, revision, actor, now)
    after = {rule_id: renew(then[rule_id], number, now) for rule_id in before}
    exchange(connection, before, after, number)
    audit.note_rollback(connection, number, revision, before, after, actor, now)
    return number


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
