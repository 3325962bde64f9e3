"""What rules have counted that leave the kernel by themselves: read once more, for what has gone counts no more.

The kernel ends the entries of a rule at its end or within two seconds of it, and their counters go with them; the
controller takes them away at the end, and reads them then. It may come too late, so they are read a moment before, too.
Where rules end all the time in sets that are large, reading takes turns: what was counted since the last is lost then.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from netlimit.limits import Fragment

AHEAD_SECONDS = 0.25
"""How long before its end what a rule has counted is read."""
_SHARE = 0.1
"""So much of one core's time may be taken by reading last counters, in the long run."""
_MOST = 2.0
"""Seconds of processor time that may be taken at once, where little was taken before."""

Leaving = dict[int, tuple[Fragment, tuple[str, ...]]]
"""Rules that leave the kernel, with the sets in which they have their keys."""


class Endings:
    """The rules that have left what is desired and not yet the kernel, and how much time their last readings may take.
    `spent` tells seconds of processor time."""

    def __init__(self, spent: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._spent, self._clock = spent, clock
        self._left, self._at = _MOST, clock()
        self._last = 0.0
        self._leaving: Leaving = {}

    @property
    def ahead(self) -> float:
        """How long before its end a rule is read now: where reading rests, until after the rest."""
        return AHEAD_SECONDS + self._last / _SHARE

    @property
    def rest(self) -> float:
        """Seconds until there may be another reading."""
        now = self._clock()
        self._left, self._at = min(_MOST, self._left + _SHARE * (now - self._at)), now
        return max(0.0, -self._left / _SHARE)

    def note(self, rule_id: int, fragment: Fragment | None, names: tuple[str, ...]) -> None:
        """A rule leaves, of which the kernel holds this fragment in these sets (none: it holds nothing)."""
        if fragment is not None and names:
            self._leaving.setdefault(rule_id, (fragment, names))

    def forget(self, rule_id: int) -> None:
        """The rule is gone, or stays as it is."""
        self._leaving.pop(rule_id, None)

    def take(self) -> Leaving:
        """The rules that leave; from now on they have left."""
        leaving, self._leaving = self._leaving, {}
        return leaving

    def read(self, reading: Callable[[], None]) -> None:
        """Have something read, unless reading rests."""
        if self.rest:
            return
        before = self._spent()
        try:
            reading()
        finally:
            took = self._spent() - before
            self._left -= took
            self._last = took
