"""In which order packets meet limits: by where they are asked about, and there by precedence.

`chains` builds what the kernel does by it, and `explain` tells it. Limits are asked behind routing and translation, in
one row for both directions; but where a packet may not be by then what it was sent as, as it comes in, if nothing makes
that wait. Connections at once are counted in tables behind that row: those that reject in filter, the others in
security.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from netlimit.limits import Facts, Group, VerdictGroup
from netlimit.rates import Kind
from netlimit.rules import HOST, PEER, Action, Direction
from netlimit.state import Table

_TABLES: tuple[Table, ...] = ("raw", "mangle", "filter", "security")


@dataclass(frozen=True)
class Sequence:
    """The order of the limits of a family. `waits`: none is asked before routing and translation; `rejecting` are the
    groups of which a limit rejects."""

    facts: Facts
    waits: bool
    rejecting: Collection[Group]

    def is_early(self, group: Group) -> bool:
        """Whether packets are asked about as they come in."""
        if self.waits or group.direction is Direction.TO or self.find_table(group) != "mangle":
            return False
        device = group.selector.interface
        return (group.scope == PEER or device in self.facts.ports_of_vrfs) and device not in self.facts.vrfs

    def find_table(self, group: Group) -> Table:
        """Connections at once are counted where little is written, for every commit to a table begins the count anew;
        but only the filter table can reject."""
        if group.kind is not Kind.CONCURRENT:
            return "mangle"
        return "filter" if group in self.rejecting else "security"

    def rank(self, group: Group, sent_here: bool = False) -> tuple[object, ...]:
        """What groups are sorted by for a packet; `sent_here`: this host itself sends it."""
        late = sent_here or not self.is_early(group)
        return late, _TABLES.index(self.find_table(group)), not group.exact, precedence(group)


def find_longest_exemption(verdicts: Iterable[VerdictGroup], answered: bool) -> int:
    """The longest prefix of an `allow` of which only routing and translation tell whether it applies; -1 if there is
    none: any `to`, and where the `answered` come back through a masquerade, and so to other ports, those `from` with
    ports."""
    exempt = (
        verdict
        for verdict in verdicts
        if verdict.action is Action.ALLOW
        and (verdict.direction is Direction.TO or (answered and verdict.selector.ports))
    )
    return max((verdict.length for verdict in exempt), default=-1)


def precedence(group: Group) -> tuple[bool, int, int, int, str]:
    """Watchers see everything; then hosts and peers, then shared budgets from the smallest to the largest."""
    rank = {HOST: 0, PEER: 1}.get(group.scope, 2)
    return not group.watch, rank, -group.bucket_length, -group.target_length, group.key
