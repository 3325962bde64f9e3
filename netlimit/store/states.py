"""Rules that are not simply applied, on each gateway. A rule without a row here is applied where it concerns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, func, select

from netlimit.records import Exceptional, State
from netlimit.store.tables import rule_states, rules
from netlimit.store.upsert import upsert

_AT_ONCE = 500
_KEPT = rule_states.join(rules, rules.c.id == rule_states.c.rule_id)


def mark(connection: Connection, host: str, exceptional: Sequence[Exceptional], cleared: Iterable[int]) -> None:
    """Keep the states of `exceptional` on a gateway, and forget those of `cleared`: in the order of ids, for whoever
    locks rows in another order may wait for us while we wait for them."""
    gone = [{"number": number} for number in sorted(cleared)]
    if gone:
        at = (rule_states.c.host == host, rule_states.c.rule_id == bindparam("number"))
        connection.execute(delete(rule_states).where(*at), gone)
    ordered = sorted(exceptional, key=lambda each: each.rule_id)
    rows = [
        {"host": host, "rule_id": e.rule_id, "state": e.state.value, "message": e.message, "layer": e.layer}
        for e in ordered
    ]
    if rows:
        connection.execute(upsert(connection, rule_states), rows)


def exceptional(connection: Connection, rule_ids: Sequence[int]) -> dict[int, dict[str, Exceptional]]:
    """The exceptional states of these rules, by rule and gateway; rules that have none are left out."""
    found: dict[int, dict[str, Exceptional]] = {}
    for start in range(0, len(rule_ids), _AT_ONCE):
        asked = rule_states.c.rule_id.in_(rule_ids[start : start + _AT_ONCE])
        for row in connection.execute(select(rule_states).select_from(_KEPT).where(asked)):
            found.setdefault(row.rule_id, {})[row.host] = _from_row(row)
    return found


def marked(connection: Connection, host: str) -> dict[int, Exceptional]:
    """Every exceptional state on a gateway, by rule."""
    rows = connection.execute(select(rule_states).where(rule_states.c.host == host))
    return {row.rule_id: _from_row(row) for row in rows if isinstance(row.rule_id, int)}


def count_states(connection: Connection) -> dict[State, int]:
    """How many pairs of rule and gateway are in each exceptional state."""
    counted = select(rule_states.c.state, func.count()).select_from(_KEPT).group_by(rule_states.c.state)
    found: Counter[State] = Counter()
    for state, number in connection.execute(counted):
        found[read_state(state)] += number
    return dict(found)


def _from_row(row: Row[Any]) -> Exceptional:
    return Exceptional(row.rule_id, read_state(row.state), row.message, row.layer)


def read_state(text: str) -> State:
    """A state that cannot be read is told as an error until its gateway says it again."""
    try:
        return State(text)
    except ValueError:
        return State.ERROR
