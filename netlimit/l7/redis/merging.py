"""Counting here and merging with Redis now and then: for data centres that are far from each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

from netlimit.errors import CountersUnavailable
from netlimit.l7.breaker import State
from netlimit.l7.decision import Decision
from netlimit.l7.forks import renew_after_fork
from netlimit.l7.limit import Algorithm, Limit, Refill
from netlimit.l7.memory.counter import SECOND, Clock, steady_clock
from netlimit.l7.memory.store import MEMORY, MemoryStore
from netlimit.l7.redis.link import MOST, Answer
from netlimit.l7.redis.store import RedisStore, expect_decisions
from netlimit.l7.rules import Mode
from netlimit.l7.store import Ask

_WINDOWS = (Algorithm.FIXED_WINDOW, Algorithm.SLIDING_WINDOW_COUNTER)
_BUCKETS = (Algorithm.TOKEN_BUCKET, Algorithm.GCRA)
_SLACK = SECOND // 100
"""What the time of day may differ from the clock that is never set: two clocks are not read at the same moment."""
LEAST_UNMERGED = 1024
"""Counters that may wait to be merged, however little memory there is."""
_UNMERGED_BYTES = 1024
"""What one takes that waits (measured: 900)."""
_FULL = "More counters wait to be merged with Redis than there is memory for."
_TOLERANT = (Mode.SOFT, Mode.ELASTIC)


@dataclass
class _Spent:
    """Hits that count here and not yet in Redis."""

    ask: Ask
    hits: dict[int, int]
    """By the window in which they came; of a bucket, all in 0."""
    failure: str = ""
    """Why they could not be merged the last time."""


class MergingStore:
    """Decides by what this process knows, and merges that with Redis `interval` seconds after a hit, or earlier where a
    part of its memory is full of what waits for that. (If Redis does not keep up, a new key is not decided here.)

    A merge adds the hits of this process to the counter in Redis, and those of all others to the one here. So at most
    `limit + (n - 1) * min(limit, h)` hits are admitted where `limit` may be, if n processes ask and h is the most that
    reach one of them within two intervals (with the round trips, and what their clocks differ by): nobody admits what
    exceeds the limit with all that he knows, and of each other process he does not know what has reached it since its
    last merge before his own. What is merged when its window is over counts in that window, by the time of day of this
    machine. A bucket makes up for it later, up to one more bucket: then the rate holds in the long
    run.

    Only what is counted by a number can be merged: fixed windows, the sliding window counter, GCRA and token buckets
    that are filled continuously. Redis decides the rest each time: the log, leaky buckets, buckets filled by interval,
    leases, and windows that are soft or elastic, for no decision tells how far a window is over its limit. What cannot
    be merged is not decided here until it can: CountersUnavailable.
    """

    def __init__(
        self,
        remote: RedisStore,
        interval: float,
        find_clock: Callable[[], Clock] = steady_clock,
        memory: int = MEMORY,
    ) -> None:
        self._remote = remote
        self._interval = interval
        self._find_clock = find_clock
        self._clock = find_clock()
        self._local = MemoryStore(self._clock, memory=memory - memory // 4)
        self._most_unmerged = max(LEAST_UNMERGED, memory // 4 // _UNMERGED_BYTES)
        self._failure = ""
        """Why nothing could be merged the last time."""
        self._missed = False
        """Whether something could not be."""
        self.start_anew()
        renew_after_fork(self)

    def start_anew(self) -> None:
        """Begin anew (see `netlimit.l7.forks`): the parent merges what it has counted."""
        self._spent: dict[tuple[int, int, str], _Spent] = {}
        self._lock = Lock()
        self._merging: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    @property
    def state(self) -> State:
        """How well Redis answers."""
        return self._remote.state

    @property
    def losses(self) -> int:
        """Another number than before where Redis has closed a connection."""
        return self._remote.losses

    async def attempt(self, asks: Sequence[Ask]) -> list[Answer]:
        """Count and answer, in order, or say why not."""
        elsewhere = iter(await self._remote.attempt([ask for ask in asks if not _can_merge(ask)]))
        return [self._decide_here(ask) if _can_merge(ask) else next(elsewhere) for ask in asks]

    async def decide(self, asks: Sequence[Ask]) -> list[Decision]:
        """Count and answer, in order."""
        return expect_decisions(await self.attempt(asks))

    async def release(self, asks: Sequence[Ask]) -> None:
        """End the leases of these asks."""
        await self._remote.release(asks)

    async def renew(self, asks: Sequence[Ask], anew: bool = False) -> bool:
        """Let the leases of these asks last their whole time from now; whether all of them were still there."""
        return await self._remote.renew(asks, anew)

    async def merge(self) -> None:
        """Merge now what has been counted since the last time."""
        self._heed_clock()
        with self._lock:
            spent, self._spent = [*self._spent.values()], {}
        asks = [
            each.ask._replace(hits=hits, charge=True, window=window)
            for each in spent
            for window, hits in each.hits.items()
        ]
        self._missed = False
        for start in range(0, len(asks), MOST):  # each batch has a time-out of its own
            await self._merge_batch(asks[start : start + MOST])

    def _heed_clock(self) -> None:
        """Whose clock was wrong at the start, or stood while the machine did, is in the windows of all from now on."""
        clock = self._find_clock()
        if abs(clock.origin - self._clock.origin) > _SLACK:
            self._clock = clock
            self._local.set_origin(clock.origin)

    async def _merge_batch(self, asks: Sequence[Ask]) -> None:
        answers = await self._remote.attempt(asks)
        for ask, answer in zip(asks, answers, strict=True):
            if isinstance(answer, Decision):
                self._learn(ask, answer)
            else:
                self._missed = True
                self._note(ask, ask.window, str(answer))
        away = not any(isinstance(answer, Decision) for answer in answers)
        self._failure = str(answers[0]) if away else ""

    async def aclose(self) -> None:
        """Merge for the last time, and let go of connections."""
        if self._merging is not None and self._merging.get_loop() is asyncio.get_running_loop():
            self._merging.cancel()
        await self.merge()
        await self._remote.aclose()

    def _decide_here(self, ask: Ask) -> Answer:
        spent = self._spent.get(_identify(ask))
        full = "" if spent or len(self._spent) < self._most_unmerged else _FULL
        failure = self._failure or (spent.failure if spent else full)
        if failure:
            return CountersUnavailable(failure)
        window = _find_window(ask.limit)
        decision = self._local.decide_now([ask])[0]
        if ask.hits and (decision.admitted or ask.charge):
            self._note(ask, window)
        return decision

    def _note(self, ask: Ask, window: int, failure: str = "") -> None:
        with self._lock:
            spent = self._spent.setdefault(_identify(ask), _Spent(ask, {}))
            spent.hits[window] = spent.hits.get(window, 0) + ask.hits
            spent.failure = failure
            many = len(self._spent) >= self._most_unmerged // 4
        if self._merging is None or self._merging.done() or self._merging.get_loop().is_closed():
            self._hurry = asyncio.Event()
            self._merging = asyncio.create_task(self._keep_merging())
        elif many and not self._hurry.is_set():
            self._merging.get_loop().call_soon_threadsafe(self._hurry.set)

    async def _keep_merging(self) -> None:
        while self._spent:
            if self._missed:  # what could not be merged takes room that no hurry makes
                await asyncio.sleep(self._interval)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), self._interval)
            self._hurry.clear()
            await self.merge()

    def _learn(self, ask: Ask, there: Decision) -> None:
        """Count here what others have counted there."""
        later = self._spent.get(_identify(ask))
        here = self._local.decide_now([ask._replace(hits=0, charge=False)])[0]
        unmerged = later.hits.get(_find_window(ask.limit), 0) if later else 0
        if ask.limit.algorithm in _BUCKETS:
            foreign = round((there.reset_after - here.reset_after) * ask.limit.amount / ask.limit.seconds) + unmerged
        elif self._is_same_window(ask.limit, there):
            foreign = here.remaining + unmerged - there.remaining
        else:
            return
        if foreign > 0:
            self._local.decide_now([ask._replace(hits=foreign, charge=True)])

    def _is_same_window(self, limit: Limit, there: Decision) -> bool:
        """Whether a decision is about the window that our clock is in; it ends with a window, the next one perhaps."""
        period = limit.seconds * SECOND
        ends_here = period - (self._clock.read() + self._clock.origin) % period
        ends_there = int(there.reset_after * SECOND) % period
        return abs(ends_here - ends_there) * 2 < period


def _find_window(limit: Limit) -> int:
    """The number of the window by the time of day, which is that of Redis if both are right; 0 for what has none."""
    return int(time.time() // limit.seconds) if limit.algorithm in _WINDOWS else 0


def _identify(ask: Ask) -> tuple[int, int, str]:
    return id(ask.rule), id(ask.limit), ask.key  # as good as the objects, which the ask keeps alive


def _can_merge(ask: Ask) -> bool:
    algorithm = ask.limit.algorithm
    if algorithm in _WINDOWS:
        return ask.rule.mode not in _TOLERANT
    return algorithm in _BUCKETS and ask.limit.refill is Refill.CONTINUOUS
