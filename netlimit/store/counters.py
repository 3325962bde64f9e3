"""Counters of rules, on each gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, select

from netlimit.records import Counts, RuleCounters
from netlimit.store.tables import counters, rules
from netlimit.store.upsert import upsert

_AT_ONCE, _ASKED = 5000, 500
_KEPT = select(counters).join(rules, rules.c.id == counters.c.rule_id)


def count(connection: Connection, host: str, readings: Sequence[RuleCounters]) -> None:
    """Keep the readings of a gateway in place of the former ones of the same rules."""
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
