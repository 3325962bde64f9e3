"""Counters of rules, on each gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, func, select

from netlimit.records import Counts, RuleCounters
from netlimit.store.tables import counters, rules
from netlimit.store.upsert import upsert

_AT_ONCE, _ASKED = 5000, 500
_GONE = 0
"""No rule's id: what rules have counted that are gone."""
_EVERY = select(counters)
_KEPT = _EVERY.join(rules, rules.c.id == counters.c.rule_id)
_COUNTED = ("matched_packets", "matched_bytes", "dropped_packets", "dropped_bytes", "delayed")
_SUM = select(counters.c.host, *(func.sum(counters.c[name]) for name in _COUNTED))


def count(connection: Connection, host: str, readings: Sequence[RuleCounters]) -> None:
    """Keep the readings of a gateway in place of the former ones of the same rules, in the order of ids: see `mark`."""
    readings = sorted(readings, key=lambda reading: reading.rule_id)
    statement = upsert(connection, counters)
    for start in range(0, len(readings), _AT_ONCE):
        connection.execute(statement, [_to_row(host, reading) for reading in readings[start : start + _AT_ONCE]])


def by_host(connection: Connection, rule_id: int) -> dict[str, RuleCounters]:
    """The counters of one rule on each gateway."""
    rows = connection.execute(_KEPT.where(counters.c.rule_id == rule_id)).mappings()
    return {row["host"]: _from_row(row) for row in rows}


def of_rules(connection: Connection, rule_ids: Sequence[int]) -> dict[int, dict[str, RuleCounters]]:
    """The counters of some rules, by rule and gateway."""
    found: dict[int, dict[str, RuleCounters]] = {}
    for start in range(0, len(rule_ids), _ASKED):
        asked = counters.c.rule_id.in_(rule_ids[start : start + _ASKED])
        for row in connection.execute(_KEPT.where(asked)).mappings():
            found.setdefault(row["rule_id"], {})[row["host"]] = _from_row(row)
    return found


def of_named(connection: Connection, most: int) -> list[tuple[str, str, RuleCounters]]:
    """The counters of rules that have a name, with name and gateway: at most so many, those of the oldest rules."""
    named = _KEPT.add_columns(rules.c.name).where(rules.c.name.is_not(None))
    rows = connection.execute(named.order_by(counters.c.rule_id, counters.c.host).limit(most)).mappings()
    return [(row["name"], row["host"], _from_row(row)) for row in rows]


def totals(connection: Connection) -> dict[str, Counts]:
    """What all rules of each gateway have counted, those that are gone too: no total ever becomes smaller."""
    kept = counters.c.rule_id.in_(select(rules.c.id)) | (counters.c.rule_id == _GONE)
    rows = connection.execute(_SUM.where(kept).group_by(counters.c.host))
    return {row.host: Counts(*map(int, row[1:])) for row in rows}


def retire(connection: Connection, rule_ids: Sequence[int]) -> None:
    """Forget the counters of rules that are gone, all but their part in the totals."""
    gone = counters.c.rule_id.in_(rule_ids)
    sums = _SUM.add_columns(func.min(counters.c.since), func.max(counters.c.as_of))
    for host, *numbers, since, as_of in connection.execute(sums.where(gone).group_by(counters.c.host)).all():
        former = (
            connection.execute(_EVERY.where(counters.c.host == host, counters.c.rule_id == _GONE)).mappings().first()
        )
        total = Counts(*map(int, numbers)) + (_from_row(former).total if former else Counts())
        count(connection, host, [RuleCounters(_GONE, total, Counts(), former["since"] if former else since, as_of)])
    connection.execute(delete(counters).where(gone))


def by_rule(connection: Connection, host: str) -> dict[int, RuleCounters]:
    """The counters of every rule on one gateway."""
    rows = connection.execute(_KEPT.where(counters.c.host == host)).mappings()
    return {row["rule_id"]: _from_row(row) for row in rows}


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
    total, raw = (
        Counts(
            row[f"{prefix}matched_packets"],
            row[f"{prefix}matched_bytes"],
            row[f"{prefix}dropped_packets"],
            row[f"{prefix}dropped_bytes"],
            row[f"{prefix}delayed"],
        )
        for prefix in ("", "raw_")
    )
    queued = row["queued_packets"], row["queued_bytes"]
    return RuleCounters(row["rule_id"], total, raw, row["since"], row["as_of"], *queued)
