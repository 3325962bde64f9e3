"""Who changed what and when. Written in the transaction of the change itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, select

from netlimit.records import Actor
from netlimit.rules import Rule
from netlimit.store.rows import to_fields
from netlimit.store.tables import audit

MOST_ROWS = 1000
"""A batch larger than this leaves one line in the audit instead of one for each rule."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change: `action` is "add", "replace" or "remove"; `before` and `after` are the fields of the rule;
    `address` and `request` say where the change came from and the id of its request, None for one made on this host.

    For a large batch `rule_id` is None, and `after` holds `rules` (how many), `first_id` and `last_id`.
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


def entries(connection: Connection, limit: int, after: int | None) -> list[AuditEntry]:
    """The newest entries first; `after` is the id of the last one already seen."""
    wanted = select(audit).order_by(audit.c.id.desc()).limit(limit)
    if after is not None:
        wanted = wanted.where(audit.c.id < after)
    return [AuditEntry(**row) for row in connection.execute(wanted).mappings()]


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
        "before": to_fields(before) if before else None,
        "after": to_fields(after) if after else None,
    }
