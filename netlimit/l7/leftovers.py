"""Leases that a store elsewhere may hold though no request does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from netlimit.errors import CountersUnavailable
from netlimit.l7.forks import renew_after_fork
from netlimit.l7.limit import Algorithm
from netlimit.l7.store import Ask, Store

MOST = 65_536
"""So many are remembered, about 30 MB; those that come beyond end by themselves."""
_AT_ONCE = 256
SECONDS = 1.0
"""From one try to the next. What was asked last may arrive later than what is asked over a new connection."""


class Leftovers:
    """Ends leases in a store that did not answer when it was asked for them, or told that they have ended: it may have
    counted them all the same, only late. Each is tried until it ends by itself."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self.start_anew()
        renew_after_fork(self)

    def start_anew(self) -> None:
        """Begin anew (see `netlimit.l7.forks`): the parent ends its own."""
        self._held: dict[str, tuple[Ask, float]] = {}
        """By lease: what was asked, and when it ends by itself."""
        self._ending: asyncio.Task[None] | None = None
        self._trying: set[asyncio.Task[None]] = set()

    def add(self, asks: Iterable[Ask]) -> None:
        """End what these asks may have taken; those that take no lease are left out."""
        now = self._clock()
        for ask in asks:
            if ask.limit.algorithm is Algorithm.CONCURRENCY and ask.hits and len(self._held) < MOST:
                self._held[ask.lease] = ask, now + ask.limit.seconds
        ending = self._ending
        if self._held and (ending is None or ending.done() or ending.get_loop().is_closed()):
            self._ending = asyncio.get_running_loop().create_task(self._end_all())

    def end_now(self, asks: Sequence[Ask]) -> None:
        """Do so at once as well, for who asked does not wait any more: what is asked over the same connection arrives
        later than what was."""
        self.add(asks)
        leases = [ask for ask in asks if ask.lease in self._held]
        if leases:
            trying = asyncio.get_running_loop().create_task(self._try(leases))
            self._trying.add(trying)
            trying.add_done_callback(self._trying.discard)

    async def aclose(self) -> None:
        """Try for the last time, and no longer than a second."""
        here = asyncio.get_running_loop()
        trying = [each for each in self._trying if each.get_loop() is here]
        with suppress(TimeoutError):
            async with asyncio.timeout(SECONDS):
                await asyncio.gather(*trying)
                await self._end_some([ask for ask, _ in list(self._held.values())])
        if self._ending is not None and self._ending.get_loop() is asyncio.get_running_loop():
            self._ending.cancel()

    async def _end_all(self) -> None:
        while self._held:
            waiting = list(self._held.values())  # what comes meanwhile has its second, too
            await asyncio.sleep(SECONDS)
            now = self._clock()
            for ask, end in waiting:
                if end <= now:
                    self._held.pop(ask.lease, None)
            await self._end_some([ask for ask, end in waiting if end > now])

    async def _try(self, asks: Sequence[Ask]) -> None:
        with suppress(CountersUnavailable):
            await self._store.release(asks)

    async def _end_some(self, asks: Sequence[Ask]) -> None:
        for start in range(0, len(asks), _AT_ONCE):  # each batch has a time-out of its own
            some = asks[start : start + _AT_ONCE]
            with suppress(CountersUnavailable):  # of a part of them, perhaps
                await self._store.release(some)
                for ask in some:
                    self._held.pop(ask.lease, None)
