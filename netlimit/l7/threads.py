"""How many threads wait for their turn. Servers and frameworks have few of them, which serve all other functions, too:
AnyIO 40 for all `def` routes of an application. Were all of them to wait for one limit, nothing else would be served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Coroutine

from netlimit.l7.limiter import Verdict

MOST = 8
"""So many threads of a process wait at most, a fifth of AnyIO's."""


class NoRoom(Exception):
    """As many threads wait as may."""


class Threads:
    """The threads that wait. Those of one caller (whatever tells him) are never more than the places that they leave
    free, so that there is one for another; those of nobody in particular may have all. For one event loop."""

    def __init__(self) -> None:
        self._waiting = 0
        self._callers: Counter[object] = Counter()

    def has_room(self, caller: object | None) -> bool:
        """Whether one more may wait."""
        left = MOST - self._waiting
        return left > (0 if caller is None else self._callers[caller])

    async def wait(self, caller: object | None, waiting: Awaitable[Verdict]) -> Verdict:
        """Wait with one of them. Raises NoRoom."""
        if not self.has_room(caller):
            if isinstance(waiting, Coroutine):
                waiting.close()
            raise NoRoom
        self._waiting += 1
        self._callers[caller] += 1
        try:
            return await waiting
        finally:
            self._waiting -= 1
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller]
