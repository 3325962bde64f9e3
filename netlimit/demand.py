"""What each child HTB wants of what the class above it has: by who sends in it, not by who is there.

Guaranteed by those who are there, a full child HTB would hold nearly all of a budget for the few in it that send, and
who lies in a sparse one (the 1,001st host, the first with IPv6) would have next to nothing, though nobody else sends.

So a child HTB wants what its hosts have sent between two looks, with as much again to grow; of a host never more than
it is promised, and all of that if it has packets waiting. A packet now and then counts as what it is. What one
host in it is promised is put aside for who begins, before anybody has looked, as far as those leave it who send. In the
same way a class of the root HTB wants that hosts share (those who have just appeared, what no rule in a budget names),
and a budget wants what those in it want, up to its rate.

Wants are rounded up, at once when they grow, and down when they have halved: the edge of a step costs nothing. Where
they do not fit, they are rounded finely instead, and go down at once. They are kept with the other numbers: whoever
compiles the same rules finds the same sizes. Where all that is promised fits, nobody goes by them, and none is kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from netlimit.numbers import Numbers
from netlimit.tree import Usage, classid

SHORTEST_LOOK = 1.0
"""Seconds; what was counted in less says nothing of a rate."""
_GROWTH = 2
"""Who sends half of what it is promised, wants all of it."""
_NOTHING = 64
"""A crowd that wants less than this part of what one in it is promised, wants nothing: a packet now and then."""
_KEPT = "tc demand"
_FINE, _COARSE, _LEFT, _EDGE = 128, 32, 4, 4
_SIZES = [(_FINE + step % _FINE) << step // _FINE for step in range(_FINE * 43)]
"""Bytes a second: 128 steps to each power of two, up to more than 1,000 hosts can be promised. What may grow takes
every 32nd of them, and what is left to others every fourth, or 32nd. Four make no difference where all goes down at
once."""


class Crowd(NamedTuple):
    """The hosts of a child HTB, or a class that hosts share: a number of its own, the handle of the qdisc, and what
    each minor is promised (bytes a second)."""

    number: int
    handle: int
    hosts: Mapping[int, int]


class Claim(NamedTuple):
    """What somebody may have of the class above it, bytes a second: `wants` by what is sent, `least` so that who begins
    has it at once, and `hopes`, no less than either, if there is room."""

    wants: int
    least: int
    hopes: int


class Demand:
    """What those on one device want who are in a crowd. What it was rounded to is kept in `numbers`, of those that it
    is gone by."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._steps: dict[int, int] = {}
        self._followed: set[int] = set()
        self._seen: dict[int, int] = {}
        self._usages: Mapping[int, Usage] | None = None
        self._looked = 0.0

    def find(self, number: int, least: int = 0) -> int:
        """What a crowd was seen to want, bytes a second. Of what may be as much as `least`, no more than that."""
        step = self._steps.get(number, 0)
        return least if step and _size(step - 1) < least < _size(step) else _size(step)

    def recall(self, number: int) -> None:
        """Go on with what is kept of a crowd that is new here."""
        step = self._numbers.kept.get((f"{_KEPT} {number:x}", ""), 0)
        self._note(number, step if 0 < step <= len(_SIZES) else 0)

    def forget(self, number: int) -> None:
        """A crowd has gone."""
        self._note(number, 0)
        self._followed.discard(number)
        self._seen.pop(number, None)

    def follow(self, numbers: Collection[int]) -> None:
        """From now on, sizes go by what these want, and by nobody else."""
        changed = self._followed.symmetric_difference(numbers)
        self._followed = set(numbers)
        for number in changed:
            self._note(number, self._steps.get(number, 0))

    def look(self, crowds: Iterable[Crowd], usages: Mapping[int, Usage], at: float) -> list[int]:
        """Take in what the classes of the device have counted, at a time in seconds; returns the numbers of those that
        want something else than before. What the first look finds was counted nobody knows since when: it tells only
        who has packets waiting, and nobody wants less for it."""
        self._seen.clear()
        passed = at - self._looked if self._usages is not None else None
        if passed is not None and passed < SHORTEST_LOOK:
            return []
        changed = [crowd.number for crowd in crowds if self._take_in(crowd, usages, passed)]
        self._usages, self._looked = usages, at
        return changed

    def sharpen(self, number: int) -> bool:
        """What a crowd wants does not fit: have it want no more than it did in this look; whether that is less."""
        step, known = self._seen.get(number), self._steps.get(number, 0)
        if step is None or step + (_EDGE if step else 0) >= known:
            return False
        self._note(number, step)
        return True

    def _take_in(self, crowd: Crowd, usages: Mapping[int, Usage], passed: float | None) -> bool:
        known, wanted = self._steps.get(crowd.number, 0), self._add_up(crowd, usages, passed)
        most = max(crowd.hosts.values(), default=0)
        step = _round(wanted) if wanted * _NOTHING >= most else 0
        if passed is not None:
            self._seen[crowd.number] = step
        if step <= known and (passed is None or _size(known) < 2 * _size(step)):
            return False
        # Who is promised as much anyway has no use for more.
        self._note(crowd.number, _coarsen(step) if wanted > most else step)
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

    def _note(self, number: int, step: int) -> None:
        group = f"{_KEPT} {number:x}"
        if step:
            self._steps[number] = step
        else:
            self._steps.pop(number, None)
        if step and number in self._followed:
            self._numbers.keep((group, ""), step)
        else:
            self._numbers.release(group, "")


def part(claims: Mapping[int, Claim], room: int) -> dict[int, int]:
    """Part what a class has among those below it: bytes a second, by whom. Each gets what it hopes for, if that fits.
    If not, those who send come first: each gets what it wants, then its least, then more, as far as there is room.

    Where not even wants fit, each gets its least first, or a part of it: together they have half at most, lest many
    that hardly anybody lies in leave nothing to those that many send in; and those where nobody sends have no more than
    others lack anyway, lest one who sends more cost all others half. The rest goes by what each wants besides."""
    wanted = sum(claim.wants for claim in claims.values())
    if sum(claim.hopes for claim in claims.values()) <= room:
        return {each: claim.hopes for each, claim in claims.items()}
    if wanted <= room:
        # In steps, lest all others change when one sends a little more.
        left = round_down(room - wanted, _LEFT) if wanted else room
        given = {each: claim.wants for each, claim in claims.items()}
        left -= _add(given, {each: claim.least for each, claim in claims.items()}, left)
        _add(given, {each: claim.hopes for each, claim in claims.items()}, round_down(left) if wanted else left)
        return given
    needed = {each: min(claim.least, claim.wants) for each, claim in claims.items()}
    first = min(sum(needed.values()), room // 2)
    given = {each: need * first // max(sum(needed.values()), 1) for each, need in needed.items()}
    missing = {each: given[each] + max(claim.least - claim.wants, 0) for each, claim in claims.items()}
    _add(given, missing, min(room // 2 - first, wanted - room))
    lacks = {each: max(claim.wants - given[each], 0) for each, claim in claims.items()}
    rest, lacking = room - sum(given.values()), sum(lacks.values())
    return {each: had + rest * lacks[each] // lacking for each, had in given.items()}


def _add(given: dict[int, int], wished: Mapping[int, int], room: int) -> int:
    """Give more, up to what is wished for, to all in proportion; returns how much at most."""
    lacks = {each: max(wish - given[each], 0) for each, wish in wished.items()}
    lacking = sum(lacks.values())
    more = min(lacking, room)
    for each, lack in lacks.items():
        given[each] += lack * more // max(lacking, 1)
    return more


def _round(wanted: int) -> int:
    """The step that is no less; 0 for nothing."""
    return bisect_left(_SIZES, wanted, hi=len(_SIZES) - 1) + 1 if wanted > 0 else 0


def _coarsen(step: int) -> int:
    """The coarse step that is no less."""
    return min(-(-(step - 1) // _COARSE) * _COARSE, len(_SIZES) - _COARSE) + 1 if step else 0


def round_down(room: int, steps: int = _COARSE) -> int:
    """Bytes a second, rounded to so many steps at a time (128 double it); 0 if there is none that is no more."""
    return _size((bisect_right(_SIZES, room) - 1) // steps * steps + 1) if room >= _FINE else 0


def _size(step: int) -> int:
    return _SIZES[step - 1] if step else 0
