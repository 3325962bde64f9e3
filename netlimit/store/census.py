"""Counting rules by all that decides how they stand, without loading any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_network

from sqlalchemy import Connection, Row, and_, case, exists, func, literal, select

from netlimit.records import Exceptional, State
from netlimit.rules import Rule
from netlimit.store.rows import read_hosts
from netlimit.store.tables import rule_states, rules

_ANY = ip_network("0.0.0.0/0")


@dataclass(frozen=True, slots=True)
class Alike:
    """`number` rules that cannot but stand alike: an example (target and rate mean nothing), and what is exceptional
    about them, by gateway."""

    example: Rule
    exceptional: Mapping[str, Exceptional]
    number: int


def take_census(connection: Connection, now: datetime, applied: Sequence[int]) -> list[Alike]:
    """Every rule, in groups; `applied` are the revisions between which rules stand differently."""
    over = (func.coalesce(rules.c.expires_at <= now, False)).label("over")
    later = sum((case((rules.c.revision > step, 1), else_=0) for step in sorted(set(applied))), literal(0))
    what = (rules.c.enabled, over, rules.c.hosts, later.label("later"))
    marked = exists().where(rule_states.c.rule_id == rules.c.id)
    counted = (
        select(*what, func.max(rules.c.revision).label("revision"), func.count().label("number"))
        .where(~marked)
        .group_by(*what)
    )
    groups = [Alike(_example(row, now), {}, row.number) for row in connection.execute(counted)]
    return groups + _count_marked(connection, now, (rules.c.id, rules.c.revision, *what))


def _count_marked(connection: Connection, now: datetime, columns: Sequence[object]) -> list[Alike]:
    """Those that are exceptional somewhere: told apart by where, and how."""
    kept = and_(rule_states.c.rule_id == rules.c.id)
    asked = select(*columns, rule_states.c.host, rule_states.c.state).join_from(rules, rule_states, kept)  # type: ignore[call-overload]
    rows: dict[int, Row[tuple[object, ...]]] = {}
    states: dict[int, list[tuple[str, str]]] = {}
    for row in connection.execute(asked):
        rows[row.id] = row
        states.setdefault(row.id, []).append((row.host, row.state))
    numbers: Counter[tuple[object, ...]] = Counter()
    examples: dict[tuple[object, ...], int] = {}
    for rule_id, row in rows.items():
        key = (row.enabled, row.over, row.hosts, row.later, *sorted(states[rule_id]))
        numbers[key] += 1
        examples[key] = rule_id
    return [
        Alike(
            _example(rows[rule_id], now),
            {host: Exceptional(rule_id, State(state), "") for host, state in states[rule_id]},
            numbers[key],
        )
        for key, rule_id in examples.items()
    ]


def _example(row: Row[tuple[object, ...]], now: datetime) -> Rule:
    end = now if row.over else now + timedelta(days=1)
    hosts = read_hosts(row.hosts) if row.hosts else ()
    return Rule(_ANY, enabled=row.enabled, expires_at=end, hosts=hosts, revision=row.revision)
