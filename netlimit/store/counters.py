"""Counters of rules, on each gateway: the sum of what its kernel and its limiters have counted.

The two are kept apart, for who counts in the kernel writes totals, and who counts requests adds to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    Subquery,
    Table,
    delete,
    func,
    literal,
    select,
    union_all,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement
from sqlalchemy.types import NullType

from netlimit.plain import decode
from netlimit.records import Counts, RuleCounters
from netlimit.store.tables import counters, request_counters, rules
from netlimit.store.upsert import add_up, upsert

_AT_ONCE, _ASKED = 5000, 500
_GONE = 0
"""No rule's id: what rules have counted that are gone."""
_REQUESTS = ("matched_packets", "matched_bytes", "dropped_packets", "dropped_bytes")
_COUNTED = (*_REQUESTS, "delayed")
_SUMMED = (*_COUNTED, *(f"raw_{name}" for name in _COUNTED), "queued_packets", "queued_bytes")
Condition = Callable[[Table], ColumnElement[bool]]
"""Which rows are wanted, of either table."""


class _Total(FunctionElement[Any]):
    """A sum that no number makes fail: of whole ones that come to more than it can hold, SQLite's `sum` is an error for
    all who ask. Its `total` is exact as far as a float is, up to 2^53."""

    type = NullType()
    inherit_cache = True


@compiles(_Total, "sqlite")
def _total_in_sqlite(element: _Total, compiler: Any, **options: Any) -> str:
    return f"total({compiler.process(element.clauses, **options)})"


@compiles(_Total, "postgresql")
def _total_in_postgres(element: _Total, compiler: Any, **options: Any) -> str:
    return f"sum({compiler.process(element.clauses, **options)})"


def count(connection: Connection, host: str, readings: Sequence[RuleCounters]) -> None:
    """Keep the readings of a gateway in place of the former ones of the same rules, in the order of ids: see `mark`."""
    readings = sorted(readings, key=lambda reading: reading.rule_id)
    statement = upsert(connection, counters)
    for start in range(0, len(readings), _AT_ONCE):
        connection.execute(statement, [_to_row(host, reading) for reading in readings[start : start + _AT_ONCE]])


def add_requests(connection: Connection, host: str, counts: Mapping[int, Counts], now: datetime) -> None:
    """Add what a limiter of a gateway has counted since it said so last, in the order of ids."""
    rows = [
        {
            "host": host,
            "rule_id": number,
            "since": now,
            "as_of": now,
            **{name: getattr(gain, name) for name in _REQUESTS},
        }
        for number, gain in sorted(counts.items())
    ]
    if rows:
        connection.execute(add_up(connection, request_counters, _REQUESTS), rows)


def by_host(connection: Connection, rule_id: int) -> dict[str, RuleCounters]:
    """The counters of one rule on each gateway."""
    rows = connection.execute(_kept(lambda table: table.c.rule_id == rule_id)).mappings()
    return {row["host"]: _from_row(row) for row in rows}


def of_rules(connection: Connection, rule_ids: Sequence[int]) -> dict[int, dict[str, RuleCounters]]:
    """The counters of some rules, by rule and gateway."""
    found: dict[int, dict[str, RuleCounters]] = {}
    for start in range(0, len(rule_ids), _ASKED):
        some = rule_ids[start : start + _ASKED]
        for row in connection.execute(_kept(_is_one_of(some))).mappings():
            found.setdefault(row["rule_id"], {})[row["host"]] = _from_row(row)
    return found


def of_named(connection: Connection, most: int) -> list[tuple[str, str, RuleCounters]]:
    """The counters of rules that have a name, with name and gateway: at most so many, those of the oldest rules."""
    named = select(rules.c.id).where(rules.c.name.is_not(None))
    summed = _sum_up(lambda table: table.c.rule_id.in_(named)).subquery()
    wanted = select(summed, rules.c.name).join(rules, rules.c.id == summed.c.rule_id)
    rows = connection.execute(wanted.order_by(summed.c.rule_id, summed.c.host).limit(most)).mappings()
    return [(_read_name(row["name"]), row["host"], _from_row(row)) for row in rows]


def totals(connection: Connection) -> dict[str, Counts]:
    """What all rules of each gateway have counted, those that are gone too: no total ever becomes smaller."""
    every = select(rules.c.id)
    rows = connection.execute(_sum_up_hosts(lambda table: table.c.rule_id.in_(every) | (table.c.rule_id == _GONE)))
    return {row["host"]: _read_counts(row) for row in rows.mappings()}


def retire(connection: Connection, rule_ids: Sequence[int]) -> None:
    """Forget the counters of rules that are gone, all but their part in the totals."""
    gone = _is_one_of(rule_ids)
    for row in connection.execute(_sum_up_hosts(gone)).mappings().all():
        at = (counters.c.host == row["host"], counters.c.rule_id == _GONE)
        former = connection.execute(select(counters).where(*at)).mappings().first()
        total = _read_counts(row) + (_read_counts(former) if former else Counts())
        since = (former or row)["since"]
        count(connection, row["host"], [RuleCounters(_GONE, total, Counts(), since, row["as_of"])])
    for table in (counters, request_counters):
        connection.execute(delete(table).where(gone(table)))


def by_rule(connection: Connection, host: str) -> dict[int, RuleCounters]:
    """What the kernel of one gateway has counted, by rule."""
    kept = select(counters).join(rules, rules.c.id == counters.c.rule_id).where(counters.c.host == host)
    return {row["rule_id"]: _from_row(row) for row in connection.execute(kept).mappings()}


def _is_one_of(rule_ids: Sequence[int]) -> Condition:
    return lambda table: table.c.rule_id.in_(rule_ids)


def _kept(wanted: Condition) -> Select[Any]:
    """The counters of rules that are there."""
    summed = _sum_up(wanted).subquery()
    return select(summed).join(rules, rules.c.id == summed.c.rule_id)


def _sum_up(wanted: Condition) -> Select[Any]:
    """What kernel and limiters have counted together, by rule and gateway."""
    parts = []
    for table in (counters, request_counters):
        numbers = (table.c[name] if name in table.c else literal(0).label(name) for name in _SUMMED)
        where = (table.c.host, table.c.rule_id, table.c.since, table.c.as_of)
        parts.append(select(*where, *numbers).where(wanted(table)))
    return _group(union_all(*parts).subquery(), _SUMMED, "host", "rule_id")


def _sum_up_hosts(wanted: Condition) -> Select[Any]:
    """What rules of each gateway have counted together."""
    return _group(_sum_up(wanted).subquery(), _COUNTED, "host")


def _group(rows: Subquery, summed: Sequence[str], *by: str) -> Select[Any]:
    keys = [rows.c[name] for name in by]
    sums = [_Total(rows.c[name]).label(name) for name in summed]
    times = (func.min(rows.c.since).label("since"), func.max(rows.c.as_of).label("as_of"))
    return select(*keys, *sums, *times).group_by(*keys)


def _to_row(host: str, reading: RuleCounters) -> dict[str, Any]:
    total, raw = reading.total, reading.raw
    return {
        "host": host,
        "rule_id": reading.rule_id,
        "matched_packets": total.matched_packets,
        "matched_bytes": total.matched_bytes,
        "dropped_packets": total.dropped_packets,
        "dropped_bytes": total.dropped_bytes,
        "raw_matched_packets": raw.matched_packets,
        "raw_matched_bytes": raw.matched_bytes,
        "raw_dropped_packets": raw.dropped_packets,
        "raw_dropped_bytes": raw.dropped_bytes,
        "delayed": total.delayed,
        "raw_delayed": raw.delayed,
        "queued_packets": reading.queued_packets,
        "queued_bytes": reading.queued_bytes,
        "since": reading.since,
        "as_of": reading.as_of,
    }


def _from_row(row: RowMapping) -> RuleCounters:
    queued = _number(row["queued_packets"]), _number(row["queued_bytes"])
    total, raw = _read_counts(row), _read_counts(row, "raw_")
    return RuleCounters(row["rule_id"], total, raw, row["since"], row["as_of"], *queued)


def _read_counts(row: RowMapping, prefix: str = "") -> Counts:
    return Counts(**{name: _number(row[prefix + name]) for name in _COUNTED})


def _read_name(value: Any) -> str:
    return decode(value) if isinstance(value, bytes) else str(value)


def _number(value: Any) -> int:
    """Sums come as decimals from PostgreSQL, and as whatever there was from SQLite."""
    return int(value) if isinstance(value, int | float | Decimal) and math.isfinite(value) else 0
