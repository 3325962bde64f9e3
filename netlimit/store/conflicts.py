"""Which rules cannot be kept together: two in force with one identity on one gateway, or two of one name."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, FromClause, and_, or_, select

from netlimit.errors import NetlimitError
from netlimit.rules import Rule
from netlimit.store.errors import limited_already, limited_twice, name_taken, name_twice
from netlimit.store.tables import rules

Wrong = list[tuple[int, NetlimitError]]
"""Errors, each with the index of its rule in the batch."""

_AT_ONCE = 500


def find_taken_names(connection: Connection, batch: Sequence[Rule]) -> Wrong:
    """Names of the batch that a kept rule bears, or an earlier rule of the batch."""
    taken = _ids_by_name(connection, [rule.name for rule in batch if rule.name is not None])
    wrong: Wrong = []
    first: dict[str, int] = {}
    for index, rule in enumerate(batch):
        name = rule.name
        if name is None:
            continue
        if name in taken:
            wrong.append((index, name_taken(name, taken[name])))
        elif first.setdefault(name, index) != index:
            wrong.append((index, name_twice(name, first[name])))
    return wrong


def _ids_by_name(connection: Connection, names: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for start in range(0, len(names), _AT_ONCE):
        asked = rules.c.name.in_(names[start : start + _AT_ONCE])
        found.update(
            (name, number) for name, number in connection.execute(select(rules.c.name, rules.c.id).where(asked))
        )
    return found


def find_twins(batch: Sequence[Rule], identities: Sequence[str], now: datetime) -> Wrong:
    """Rules of the batch that limit what an earlier one of it limits on the same gateway.

    For each identity the first rule of every gateway is remembered, so that a batch of equal rules costs no more
    than one of different rules.
    """
    if len(set(identities)) == len(identities):
        return []
    wrong: Wrong = []
    seen: dict[str, dict[str, int]] = {}
    for index, (rule, identity) in enumerate(zip(batch, identities, strict=True)):
        if not rule.in_force(now):
            continue
        others = seen.setdefault(identity, {})
        asked = (*rule.hosts, "") if rule.hosts else tuple(others)
        other = next((others[host] for host in asked if host in others), None)
        if other is not None:
            wrong.append((index, limited_twice(rule, other, batch[other].name)))
        for host in rule.hosts or ("",):
            others.setdefault(host, index)
    return wrong


def find_conflicts(connection: Connection, revision: int, now: datetime) -> dict[int, tuple[int, str | None]]:
    """Rules written at `revision` that limit what an older one limits already: id and name of that one, by rule id.

    Asked after the rows are written, for then one join answers for any number of them.
    """
    new, old = rules.alias("new"), rules.alias("old")
    pairs = connection.execute(
        select(new.c.id, new.c.hosts, old.c.id, old.c.name, old.c.hosts)
        .join(old, and_(old.c.identity == new.c.identity, old.c.revision < revision))
        .where(new.c.revision == revision, _in_force(new, now), _in_force(old, now))
        .order_by(new.c.id, old.c.id)
    )
    found: dict[int, tuple[int, str | None]] = {}
    for number, hosts, other, other_name, other_hosts in pairs:
        if _overlap(hosts, other_hosts):
            found.setdefault(number, (other, other_name))
    return found


def check(connection: Connection, rule: Rule, now: datetime) -> None:
    """Raise NameTaken or Conflict if a rule could not be kept beside the others; one with an id would take the place of
    that rule. Writes nothing."""
    taken = _ids_by_name(connection, [rule.name]) if rule.name is not None else {}
    for name, other in taken.items():
        if other != rule.id:
            raise name_taken(name, other)
    if not rule.in_force(now):
        return
    asked = select(rules.c.id, rules.c.name, rules.c.hosts).where(rules.c.identity == rule.identity)
    for other, other_name, hosts in connection.execute(asked.where(_in_force(rules, now)).order_by(rules.c.id)):
        if other != rule.id and _overlap(",".join(rule.hosts), hosts):
            raise limited_already(rule, other, other_name)


def _in_force(table: FromClause, now: datetime) -> ColumnElement[bool]:
    return and_(table.c.enabled, or_(table.c.expires_at.is_(None), table.c.expires_at > now))


def _overlap(hosts: str, others: str) -> bool:
    return not hosts or not others or not set(hosts.split(",")).isdisjoint(others.split(","))
