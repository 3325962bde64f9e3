"""Token buckets: how often each of many may do something."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable


class Buckets:
    """A bucket for each key: `burst` at once, and `rate` a second from then on.

    At most `most` keys are remembered; the one that came longest ago is forgotten first, and begins anew.
    """

    def __init__(self, rate: float, burst: float, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._most, self._clock = rate, burst, most, clock
        self._filled: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._filled)

    def take(self, key: Hashable) -> float:
        """Take one from the bucket of `key`: 0.0 if there was one, else the seconds until there will be."""
        now = self._clock()
        level = self._level(key, now)
        taken = level >= 1
        self._fill(key, level - 1 if taken else level, now)
        return 0.0 if taken else (1 - level) / self._rate

    def give_back(self, key: Hashable) -> None:
        """Put back what was taken: it shall not count."""
        now = self._clock()
        self._fill(key, min(self._burst, self._level(key, now) + 1), now)

    def _level(self, key: Hashable, now: float) -> float:
        level, since = self._filled.get(key, (self._burst, now))
        return min(self._burst, level + (now - since) * self._rate)

    def _fill(self, key: Hashable, level: float, now: float) -> None:
        self._filled[key] = (level, now)
        self._filled.move_to_end(key)
        if len(self._filled) > self._most:
            self._filled.popitem(last=False)
