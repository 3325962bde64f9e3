"""Counting rules by all that decides how they stand, without loading any."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from ipaddress import ip_network
from operator import add
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Text, case, cast, exists, func, literal, or_, select, type_coerce

from netlimit.records import Exceptional
from netlimit.rules import HOST, TARGET, Action, Rule
from netlimit.store.columns import Whole
from netlimit.store.rows import RULE_COLUMNS, from_row, read_hosts
from netlimit.store.states import read_state
from netlimit.store.tables import rule_states, rules

_ANY = ip_network("0.0.0.0/0")
_REVISION = type_coerce(rules.c.revision, Whole)
"""Here alone by that type: it takes time, and who reads whole rules is told by them what is none."""


@dataclass(frozen=True, slots=True)
class Alike:
    """`number` rules that cannot but stand alike: an example (target and rate mean nothing), and what is exceptional
    about them, by gateway."""

    example: Rule
    exceptional: Mapping[str, Exceptional]
    number: int


def take_census(connection: Connection, now: datetime, applied: Sequence[int]) -> list[Alike]:
    """Every rule, in groups; `applied` are the revisions between which rules stand differently."""
    over = _is_over(now)
    later = sum((case((rules.c.revision > step, 1), else_=0) for step in sorted(set(applied))), literal(0))
    what = (rules.c.enabled, over, rules.c.hosts, later.label("later"))
    marked = exists().where(rule_states.c.rule_id == rules.c.id).correlate(rules)
    counted = (
        select(*what, func.max(_REVISION).label("revision"), func.count().label("number"))
        .where(~marked)
        .group_by(*what)
    )
    groups = [Alike(_example(row, now), {}, row.number) for row in connection.execute(counted)]
    return groups + [alike for alike, _ in sort_out(connection, now, applied, [marked])]


def sample_selectors(connection: Connection) -> list[Rule]:
    """One rule of each selector with ports or an interface that rules in force have, by family, direction and hosts."""
    family = case((rules.c.target.contains(":"), 6), else_=4)
    selector = (rules.c.direction, rules.c.protocol, rules.c.ports, rules.c.source_ports, rules.c.interface)
    particular = or_(rules.c.ports != "", rules.c.source_ports != "", rules.c.interface.is_not(None))
    wanted = rules.c.enabled & (rules.c.action != Action.SHAPE.value) & particular
    first = select(func.min(rules.c.id)).where(wanted).group_by(family, rules.c.hosts, *selector)
    return [from_row(row) for row in connection.execute(select(*RULE_COLUMNS).where(rules.c.id.in_(first)))]


def sample_meters(connection: Connection, now: datetime, *wanted: ColumnElement[bool]) -> list[tuple[Rule, int]]:
    """One rule of those in force that have a rate, and may have many buckets, of each kind, rate and length of the
    target, with how many there are; if they are `wanted`."""
    family = case((rules.c.target.contains(":"), "6"), else_="4")
    # What stands behind the last character that is no digit.
    length = func.substr(rules.c.target, func.length(func.rtrim(rules.c.target, "0123456789")) + 1)
    selector = (rules.c.direction, rules.c.protocol, rules.c.ports, rules.c.source_ports)
    present = (rules.c.hosts, *selector, rules.c.action, rules.c.per)
    single = (rules.c.per == HOST) & or_(rules.c.target.like("%/32"), rules.c.target.like("%/128"))
    many = rules.c.rate.is_not(None) & (rules.c.action != Action.SHAPE.value) & (rules.c.per != TARGET) & ~single
    held = rules.c.enabled & ~_is_over(now) & many
    # As one text: what is sorted has one column then, not twelve.
    absent = (func.coalesce(rules.c.interface, ""), func.coalesce(cast(rules.c.burst, Text), ""))
    decisive = (rules.c.rate, family, length, *present, *absent)
    counted = (
        select(func.min(rules.c.id).label("id"), func.count().label("number"))
        .where(held, *wanted)
        .group_by(reduce(add, (type_coerce(each, Text) + "|" for each in decisive)))
        .subquery()
    )
    found = connection.execute(select(counted.c.number, *RULE_COLUMNS).join(counted, counted.c.id == rules.c.id))
    return [(from_row(row), number) for number, *row in found]


def sort_out(
    connection: Connection, now: datetime, applied: Sequence[int], wanted: Sequence[ColumnElement[bool]]
) -> list[tuple[Alike, list[int]]]:
    """The same of the rules that are `wanted`, each group with the ids of its rules."""
    steps = sorted(set(applied))
    states: dict[int, list[tuple[str, str]]] = {}
    exceptional = select(rule_states.c.rule_id, rule_states.c.host, rule_states.c.state)
    of_rule = rules.c.id == rule_states.c.rule_id
    for rule_id, host, state in connection.execute(exceptional.join(rules, of_rule).where(*wanted)):
        states.setdefault(rule_id, []).append((host, state))
    groups: dict[tuple[object, ...], tuple[Row[Any], list[int]]] = {}
    what_decides = (_REVISION.label("revision"), rules.c.enabled, _is_over(now), rules.c.hosts)
    for row in connection.execute(select(rules.c.id, *what_decides).where(*wanted)):
        rule_id, revision, *what = row
        key = (*what, bisect_left(steps, revision), *sorted(states.get(rule_id, ())))
        groups.setdefault(key, (row, []))[1].append(rule_id)
    return [(_describe(row, states.get(row.id, ()), len(ids), now), ids) for row, ids in groups.values()]


def _describe(row: Row[Any], states: Iterable[tuple[str, str]], number: int, now: datetime) -> Alike:
    exceptional = {host: Exceptional(row.id, read_state(state), "") for host, state in states}
    return Alike(_example(row, now), exceptional, number)


def _is_over(now: datetime) -> ColumnElement[bool]:
    return func.coalesce(rules.c.expires_at <= now, False).label("over")


def _example(row: Row[Any], now: datetime) -> Rule:
    end = now if row.over else now + timedelta(days=1)
    hosts = read_hosts(row.hosts) if row.hosts and isinstance(row.hosts, str) else ()
    return Rule(_ANY, enabled=row.enabled, expires_at=end, hosts=hosts, revision=row.revision)
