"""Going back to the rules of a revision. It is a change like any other: it makes a new revision, and can be undone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace as with_changes
from datetime import datetime

from sqlalchemy import Connection

from netlimit.judgement import Change, Judge, comes_forced
from netlimit.lockout import HARMLESS
from netlimit.records import Actor
from netlimit.rules import Action, Rule
from netlimit.store import audit, history, tombstones, weight
from netlimit.store.clock import lock, take_revision
from netlimit.store.clock import revision as newest_revision
from netlimit.store.conflicts import find_twins
from netlimit.store.rows import Kept, with_number
from netlimit.store.rules import erase, forget, write_kept
from netlimit.store.standing import Standing, judged


def roll_back(connection: Connection, revision: int, actor: Actor, now: datetime, judge: Judge | None = None) -> int:
    """Bring back the rules of a revision, under their ids; the new revision, or the present one if they are the same.

    Raises NoSuchRevision, TooMuchAtOnce, and what `judge` raises.
    """
    lock(connection)
    weight.check(connection, revision, actor)
    return bring_back(connection, revision, history.past(connection, revision), actor, now, judge)


def bring_back(
    connection: Connection,
    revision: int,
    then: Mapping[int, Kept | None],
    actor: Actor,
    now: datetime,
    judge: Judge | None = None,
) -> int:
    """The same with the rules that have changed since the revision as they are to come, by id."""
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


def withhold_forced(connection: Connection, then: Mapping[int, Kept | None], now: datetime) -> dict[int, Kept | None]:
    """What comes in place of the rules that would come back into force and were forced: one that is gone stays away,
    one that is held stays as it is, any other is disabled. So no two of them get the same name. While any rule is in
    force that was forced, what has been allowed since stays: that may be what it spares."""
    barred, present = _find_forced(connection, then, now)
    disabled = {
        rule_id: Kept(with_changes(kept.rule, enabled=False), kept.created_at, now) if rule_id in present else None
        for rule_id, kept in barred.items()
    }
    held = _hold(barred, present, then, now)
    come = {**then, **disabled, **held}
    return disabled | held | (_keep_allows(connection, come, now) if _is_forced_on(connection, come, now) else {})


def _is_forced_on(connection: Connection, come: Mapping[int, Kept | None], now: datetime) -> bool:
    """Whether a rule that was forced limits or blocks, once these have come."""
    kept = Standing(connection, come).forced()
    return any(
        rule.forced_by is not None and rule.action not in HARMLESS and rule.in_force(now)
        for rule in (*kept, *(each.rule for each in come.values() if each))
    )


def _keep_allows(connection: Connection, then: Mapping[int, Kept | None], now: datetime) -> dict[int, Kept]:
    """Every `allow` in force that is another one, or none, by what is to come; without its name where that is somebody
    else's."""
    present = history.present(connection, then)
    allows = {
        rule_id: kept for rule_id, kept in present.items()
        if kept.rule.action is Action.ALLOW and kept.rule.in_force(now) and not history.same(kept, then[rule_id])
    }  # fmt: skip
    others = [kept.rule for rule_id, kept in then.items() if kept and rule_id not in allows]
    batch = [*others, *(kept.rule for kept in allows.values())]
    twins = {batch[index].id for index, _ in find_twins(batch, [rule.identity for rule in batch], now)}
    names = {rule.name for rule in others}
    return {
        rule_id: with_changes(kept, rule=with_changes(kept.rule, name=None)) if kept.rule.name in names else kept
        for rule_id, kept in allows.items()
        if rule_id not in twins
    }


def hold_forced(connection: Connection, then: Mapping[int, Kept | None], now: datetime) -> dict[int, Kept]:
    """Those of the rules that would come back into force and were forced that stay as they are, for they are forced
    and in force now, too: an admin has decided that. Their names alone come back, for others may get theirs."""
    return _hold(*_find_forced(connection, then, now), then, now)


def _find_forced(
    connection: Connection, then: Mapping[int, Kept | None], now: datetime
) -> tuple[dict[int, Kept], dict[int, Kept]]:
    """The rules that would come back into force and were forced, and those of them that are kept now as they are."""
    forced = {rule_id: kept for rule_id, kept in then.items() if kept and kept.rule.forced_by is not None}
    present = history.present(connection, forced)
    barred = {rule_id: kept for rule_id, kept in forced.items()
              if comes_forced(_rule_of(present.get(rule_id)), kept.rule)}  # fmt: skip
    return barred, present


def _hold(
    barred: Mapping[int, Kept], present: Mapping[int, Kept], then: Mapping[int, Kept | None], now: datetime
) -> dict[int, Kept]:
    """See `hold_forced`. None stays that limits what a rule limits that comes back."""
    held = [
        Kept(with_changes(old.rule, name=kept.rule.name), old.created_at, old.updated_at)
        for rule_id, kept in barred.items()
        if (old := present.get(rule_id)) and old.rule.forced_by is not None and old.rule.action not in HARMLESS
        and old.rule.in_force(now)
    ]  # fmt: skip
    back = [kept.rule for rule_id, kept in then.items() if kept and rule_id not in barred]
    batch = [*back, *(kept.rule for kept in held)]
    twins = {batch[index].id for index, _ in find_twins(batch, [rule.identity for rule in batch], now)}
    return {kept.rule.id: kept for kept in held if kept.rule.id not in twins}


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
