"""Memory for all counters together."""

from __future__ import annotations

import time
from typing import Protocol
from weakref import WeakKeyDictionary

KEY_BYTES = 512
"""What a key takes, with its counter (measured: 300 to 460)."""
ENTRY_BYTES = 40
"""What a further time in a log takes."""
LEAST = 16 * KEY_BYTES
"""So much every counter has, however many there are."""
BOUNDLESS = 2**62
_REST_SECONDS, _REST = 1.0, 20
"""Nobody is to shrink again for so long, and so many times as long as it took, after who is the largest could not."""


class Holder(Protocol):
    """Something that takes memory."""

    def __hash__(self) -> int: ...

    def shrink(self) -> None:
        """Give back what can be forgotten. Does nothing if it is busy."""
        ...


class Budget:
    """Bytes that counters share. Who asks for more than is left gets what the largest can give back first, and else has
    to do with less."""

    def __init__(self, total: int = BOUNDLESS) -> None:
        self._total = total
        self._held: WeakKeyDictionary[Holder, int] = WeakKeyDictionary()
        self._shrink_at = 0.0

    def welcome(self, holder: Holder) -> int:
        """How much a new counter may hold before it asks: an eighth of all is for those that are small."""
        self._held[holder] = 0
        return max(self._total // 8 // len(self._held), LEAST)

    def offer(self, holder: Holder) -> int:
        """How much a counter may hold in all. Where that is less than an equal share, the largest is to shrink."""
        left = self._find_left(holder)
        if self._total < BOUNDLESS and left < self._total // (len(self._held) + 1):
            largest = max(list(self._held), key=lambda each: self._held.get(each, 0))
            if largest is not holder and time.monotonic() >= self._shrink_at:
                self._shrink(largest)
            left = self._find_left(holder)
        return max(left, LEAST)

    def hold(self, holder: Holder, size: int) -> None:
        """Note how much a counter may grow to."""
        self._held[holder] = size

    def _shrink(self, largest: Holder) -> None:
        """Have the largest shrink. It looks at all that it has: where it can give nothing back, most of the time goes
        to others."""
        began, held = time.monotonic(), self._held.get(largest, 0)
        largest.shrink()
        if self._held.get(largest, 0) > held * 3 // 4:
            now = time.monotonic()
            self._shrink_at = now + max(_REST_SECONDS, _REST * (now - began))

    def _find_left(self, holder: Holder) -> int:
        return self._total - sum(self._held.values()) + self._held.get(holder, 0)


class Reserve(Budget):
    """Of which nobody has to give back what he has had: who comes later gets what is left, and `LEAST` besides."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self._left = total

    def welcome(self, holder: Holder) -> int:
        """As `Budget` has it: the least."""
        self._held[holder] = 0
        return LEAST

    def offer(self, holder: Holder) -> int:
        """How much a counter may hold in all."""
        return LEAST + self._held[holder] + max(0, self._left)

    def hold(self, holder: Holder, size: int) -> None:
        """Note how much a counter may grow to, if it has not had as much yet."""
        further = size - LEAST - self._held[holder]
        if further > 0:
            self._left -= further
            self._held[holder] += further

    def leave(self, holder: Holder) -> None:
        """A counter is no more."""
        self._left += self._held[holder]
        self._held[holder] = 0
