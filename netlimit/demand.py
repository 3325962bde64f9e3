"""What each child HTB wants of what the class above it has: by who sends in it, not by who is there.

Guaranteed by those who are there, a full child HTB would hold nearly all of a budget for the few in it that send, and
who lies in a sparse one (the 1,001st host, the first with IPv6) would have next to nothing, though nobody else sends.

So a child HTB wants what its hosts have sent between two looks, with as much again to grow; of a host never more than
it is promised, and all of that if it has packets waiting. A packet now and then counts as what it is. The least it
wants is what one host in it is promised: so who begins has that at once, before anybody has looked.

Wants are rounded up, at once when they grow, and down when they have halved: the edge of a step costs nothing. They are
kept with the other numbers: whoever compiles the same rules finds the same sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from netlimit.numbers import Numbers
from netlimit.tree import Usage, classid

SHORTEST_LOOK = 1.0
"""Seconds; what was counted in less says nothing of a rate."""
_GROWTH = 2
"""Who sends half of what it is promised, wants all of it."""
_KEPT = "tc demand"
_SIZES = [(4 + step % 4) << step // 4 for step in range(4 * 48)]
"""Bytes a second: four steps to each power of two, up to more than 1,000 hosts can be promised."""


class Crowd(NamedTuple):
    """The hosts of a child HTB: its number and handle, and what each minor is promised (bytes a second)."""

    number: int
    handle: int
    hosts: Mapping[int, int]


class Demand:
    """What the child HTBs of one device want. What they were rounded to is kept in `numbers`."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._steps: dict[int, int] = {}
        self._usages: Mapping[int, Usage] | None = None
        self._looked = 0.0

    def find(self, number: int) -> int:
        """What a child HTB was seen to want, bytes a second; 0: no more than the least."""
        return _size(self._steps.get(number, 0))

    def recall(self, number: int) -> None:
        """Go on with what is kept of a child HTB that is made."""
        step = self._numbers.kept.get((f"{_KEPT} {number:x}", ""), 0)
        self._keep(number, step if 0 < step <= len(_SIZES) else 0)

    def forget(self, number: int) -> None:
        """A child HTB has gone."""
        self._keep(number, 0)

    def look(self, crowds: Iterable[Crowd], usages: Mapping[int, Usage], at: float) -> list[int]:
        """Take in what the classes of the device have counted, at a time in seconds; returns the numbers of the child
        HTBs that want something else than before. What the first look finds was counted nobody knows since when: it
        tells only who has packets waiting, and nobody wants less for it."""
        passed = at - self._looked if self._usages is not None else None
        if passed is not None and passed < SHORTEST_LOOK:
            return []
        changed = [crowd.number for crowd in crowds if self._take_in(crowd, usages, passed)]
        self._usages, self._looked = usages, at
        return changed

    def _take_in(self, crowd: Crowd, usages: Mapping[int, Usage], passed: float | None) -> bool:
        known, wanted = self._steps.get(crowd.number, 0), self._add_up(crowd, usages, passed)
        step = _round(wanted)
        if step <= known and (passed is None or _size(known) < 2 * _size(step)):
            return False
        self._keep(crowd.number, step if wanted > max(crowd.hosts.values(), default=0) else 0)
        return self._steps.get(crowd.number, 0) != known

    def _add_up(self, crowd: Crowd, usages: Mapping[int, Usage], passed: float | None) -> int:
        """What the hosts want together, bytes a second. There may be 16,384, so this is written to be fast."""
        before, grown, total = self._usages or {}, _GROWTH / passed if passed else 0.0, 0.0
        base = classid(crowd.handle, 0)
        for minor, promised in crowd.hosts.items():
            usage = usages.get(base + minor)
            if usage is None:
                continue
            if usage.queued_packets:
                total += promised
                continue
            earlier = before.get(base + minor)
            sent = usage.bytes - (earlier.bytes if earlier is not None and earlier.bytes <= usage.bytes else 0)
            if sent:
                total += min(promised, sent * grown)
        return int(total)

    def _keep(self, number: int, step: int) -> None:
        group = f"{_KEPT} {number:x}"
        if step:
            self._steps[number] = step
            self._numbers.keep((group, ""), step)
        else:
            self._steps.pop(number, None)
            self._numbers.release(group, "")


def part(wants: Mapping[int, int], least: Mapping[int, int], room: int) -> dict[int, int]:
    """Part what a class has among those below it: bytes a second, by whom. Each gets what it wants, if that fits. If
    not, each gets its least first, or a part of it: together they have half at most, lest many that hardly anybody lies
    in leave nothing to those that many send in. The rest goes by what each wants besides."""
    if sum(wants.values()) <= room:
        return dict(wants)
    needed = sum(least.values())
    first = min(needed, room // 2)
    given = {each: least[each] * first // needed if needed else 0 for each in wants}
    rest, lacking = room - sum(given.values()), sum(wants.values()) - sum(given.values())
    return {each: had + rest * (wants[each] - had) // lacking for each, had in given.items()}


def _round(wanted: int) -> int:
    """The step that is no less; 0 for nothing."""
    return bisect_left(_SIZES, wanted, hi=len(_SIZES) - 1) + 1 if wanted > 0 else 0


def _size(step: int) -> int:
    return _SIZES[step - 1] if step else 0
