"""Targets that come and go, and the buckets that they leave behind.

hashlimit keeps the buckets of a target that has gone until they expire, up to a day, and a table that is full of them
drops whoever is new to it. So the name of a table tells the wide targets of its limit: when one of them goes, or comes,
the limit takes another table, which is empty. Narrow targets leave few buckets; they are not told, so that rules for
thousands of hosts may come and go while all others' buckets stay.
"""

from __future__ import annotations

from collections.abc import Mapping

from netlimit.hashlimit import WIDE
from netlimit.limits import Fragment, Group, Limit, Profile, digest
from netlimit.rates import Kind
from netlimit.state import SLOT_ROOM

Told = dict[Group, dict[Profile, int]]
"""A number for each limit that has wide targets, by which those can be told from others."""


class Turnover:
    """Notes the wide targets of limits in force; `touched` says whether they may be others than when they were told."""

    def __init__(self) -> None:
        # A sum of digests is the same in whatever order targets came, and is no longer for thousands of them.
        self._sums: dict[Limit, int] = {}
        self.touched = False

    def add(self, fragment: Fragment) -> None:
        """A rule is in force."""
        self._count(fragment, 1)

    def remove(self, fragment: Fragment) -> None:
        """A rule is no longer in force."""
        self._count(fragment, -1)

    def tell(self, slots: Mapping[Group, int]) -> Told:
        """What the names of tables must tell, by group and profile; `slots` are the sizes of sets of peers."""
        self.touched = False
        told: Told = {}
        for limit, number in self._sums.items():
            group = limit.group
            if not group.gated or slots.get(group, 0) * SLOT_ROOM >= WIDE:
                told.setdefault(group, {})[limit.profile] = number
        return told

    def _count(self, fragment: Fragment, sign: int) -> None:
        limit = fragment.purpose
        if not isinstance(limit, Limit):
            return
        number = sum(int(digest(key), 16) for key in fragment.keys if _can_be_wide(limit.group, key))
        if number:
            self.touched = True
            self._sums[limit] = self._sums.get(limit, 0) + sign * number
            if not self._sums[limit]:
                del self._sums[limit]


def _can_be_wide(group: Group, key: str) -> bool:
    """How many buckets the peers of a target can have, hangs on how many targets share their set."""
    return group.gated or (group.kind is not Kind.CONCURRENT and group.count_places(key) >= WIDE)
