"""The rules that a change leaves as they are, as far as what the change needs force for depends on them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, literal_column, or_, select

from netlimit.closure import LONGEST, may_close
from netlimit.judgement import Change, Judge
from netlimit.rules import Action, Rule
from netlimit.store.census import sample_meters
from netlimit.store.rows import RULE_COLUMNS, from_row
from netlimit.store.tables import rule_hosts, rules

_COLUMNS = [literal_column("''").label(column.name) if column.name in ("labels", "comment") else column
            for column in RULE_COLUMNS]  # fmt: skip
"""Without what nothing depends on, and may be forty kilobytes of each rule."""


class Standing:
    """See `judgement.Standing`. Looks at the table before the change is made."""

    def __init__(self, connection: Connection, changing: Iterable[int]) -> None:
        """`changing` are the ids of the rules that do not stay."""
        self._connection = connection
        self._changing = frozenset(changing)

    def forced(self) -> list[Rule]:
        """Those that were forced."""
        return self._select(rules.c.forced_by.is_not(None))

    def allowing(self) -> list[Rule]:
        """Those that allow."""
        return self._select(rules.c.action == Action.ALLOW.value)

    def blocking(self) -> list[Rule]:
        """Those that block."""
        return self._select(rules.c.action == Action.BLOCK.value)

    def closing(self, places: Collection[str]) -> list[Rule]:
        """Those that can close a gateway, alone or together: wide ones, and those for one of these targets."""
        wide = [rules.c.target.like(f"%/{length}") for length in range(max(LONGEST.values()) + 1)]
        harsh = rules.c.action.in_([each.value for each in (Action.BLOCK, Action.DROP, Action.REJECT, Action.SHAPE)])
        wanted = or_(*wide, rules.c.target.in_(sorted(places)))
        return [rule for rule in self._select(harsh, wanted) if may_close(rule, places)]

    def named(self) -> list[str]:
        """The gateways that they name."""
        wanted = rule_hosts.c.rule_id.not_in(sorted(self._changing))
        return list(self._connection.execute(select(rule_hosts.c.host).where(wanted).distinct()).scalars())

    def metering(self, now: datetime) -> list[tuple[Rule, int]]:
        """Those in force that have a rate, and may have many buckets: one of each kind, rate and length of the target,
        with how many there are."""
        return sample_meters(self._connection, now, rules.c.id.not_in(sorted(self._changing)))

    def metering_since(self, revision: int, now: datetime) -> list[tuple[Rule, int]]:
        """The same of those that were made or changed after a revision."""
        wanted = (rules.c.revision > revision, rules.c.id.not_in(sorted(self._changing)))
        return sample_meters(self._connection, now, *wanted)

    def _select(self, *wanted: ColumnElement[bool]) -> list[Rule]:
        rows = self._connection.execute(select(*_COLUMNS).where(rules.c.enabled, *wanted))
        return [from_row(row) for row in rows if row.id not in self._changing]


def judged(connection: Connection, judge: Judge, changes: Sequence[Change]) -> list[Rule | None]:
    """Have changes judged before they are made: what is to be kept after each. Raises NeedsForce."""
    known = {rule.id for change in changes for rule in change if rule is not None}
    forced = judge(changes, Standing(connection, known))
    return [forced.get(place, change.after) for place, change in enumerate(changes)]
