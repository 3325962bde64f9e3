"""What becomes of decisions while the counters cannot be asked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

from netlimit.errors import CountersUnavailable
from netlimit.l7.breaker import RESTING, State
from netlimit.l7.decision import Decision, Unanswered
from netlimit.l7.leftovers import MOST, Leftovers
from netlimit.l7.limit import BOUNDLESS, Algorithm, Limit, Refill
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import OnFailure
from netlimit.l7.store import Ask, Store

log = logging.getLogger(__name__)

SETTLED = 5.0
"""Seconds without a failure after which an outage is over: one that comes and goes is told once."""
_MOST_TOLD = 32
"""So many different reasons of one outage are logged."""
EMERGENCY_MEMORY = 32 * 2**20
"""Bytes for counters of emergency limits, by default."""
_BUCKETS = (Algorithm.GCRA, Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET)


class Remote(Store, Protocol):
    """A store elsewhere. It has a breaker for each server, so that one which is dead costs no latency."""

    @property
    def state(self) -> State:
        """The worst that any of them thinks."""
        ...

    @property
    def losses(self) -> int:
        """Another number than before where a connection was closed there: what was counted may be forgotten."""
        ...

    async def attempt(self, asks: Sequence[Ask]) -> Sequence[Decision | CountersUnavailable]:
        """Count and answer, in order, or say why not: a part of the counters may be away."""
        ...


class Failover:
    """A store elsewhere, and what each rule wants while that cannot be asked.

    `on_failure` open: this process counts by itself, up to the rule's emergency limit (else its own). Closed: refused,
    with a retry_after of `probe` seconds, the time after which the store elsewhere is tried again. It is asked again as
    soon as it answers.

    What the store elsewhere admits is counted here as well. While it is away, and for one unit of the limit after that,
    nothing is admitted that would be too much by what is counted here: however often it comes and goes, and whatever it
    has forgotten, a process admits no more than the limit by itself, and n processes no more than n times as much. Keys
    for which there is no room here are not counted here: of them the word of the store elsewhere is enough.
    """

    def __init__(
        self,
        store: Remote,
        local: MemoryStore,
        probe: float,
        clock: Callable[[], float] = time.monotonic,
        emergency_memory: int = EMERGENCY_MEMORY,
    ) -> None:
        self.decided_here = 0
        """Decisions that this process has made by itself."""
        self.refused = 0
        """Decisions that have been refused because the rule is closed."""
        self._store = store
        self._local = local
        self._emergencies = MemoryStore(memory=emergency_memory)
        self._clock = clock
        self._failed_at = float("-inf")
        self._losses = 0
        self._trouble = ""
        self._told: set[str] = set()
        """The reasons of this outage that have been logged."""
        self._away_at = 0.0
        self._probe = probe
        self._leftovers = Leftovers(store, clock)
        self._late: set[str] = set()
        """Leases of requests in flight that the store elsewhere may take yet, though it has not said so in time."""

    @property
    def state(self) -> State:
        """Open: some counters or all cannot be asked at the moment; half open: that is being tried."""
        return self._store.state

    async def decide(self, asks: Sequence[Ask]) -> list[Decision]:
        """Count and answer, in order."""
        try:
            answers = await self._store.attempt(asks)
        except asyncio.CancelledError:
            self._leftovers.end_now(asks)
            raise
        failures = [answer for answer in answers if not isinstance(answer, Decision)]
        if failures:
            self._tell(*failures)
        elif self._trouble:
            self._settle()
        now, losses = self._clock(), self._store.losses
        if losses != self._losses or failures:
            self._failed_at, self._losses = now, losses
        doubtful = now - self._failed_at
        return [
            self._check(ask, answer, doubtful) if isinstance(answer, Decision) else self._decide_unanswered(ask)
            for ask, answer in zip(asks, answers, strict=True)
        ]

    async def release(self, asks: Sequence[Ask]) -> None:
        """End the leases of these asks."""
        self._local.release_now(asks)
        late = [ask for ask in asks if ask.lease in self._late]
        if late:  # where this comes there over a new connection before what was not answered in time
            self._late.difference_update(ask.lease for ask in late)
            self._leftovers.add(late)
        try:
            await self._store.release(asks)
        except CountersUnavailable as failure:
            self._leftovers.add(asks)
            self._tell(failure)
        except asyncio.CancelledError:
            self._leftovers.end_now(asks)
            raise

    async def renew(self, asks: Sequence[Ask], anew: bool = False) -> bool:
        """Let the leases of these asks last their whole time from now; whether none is known to have ended. One that
        has there, for it was away for longer, counts here as long as it lasts."""
        here = [ask for ask in asks if self._local.renew_now((ask,), anew)]
        elsewhere = [ask for ask in asks if ask not in here] if here else asks
        kept = True  # where nobody can be asked
        try:
            kept = await self._store.renew(elsewhere, anew)
            if not (await self._store.renew(here, anew) and kept):
                self._failed_at = self._clock()
        except CountersUnavailable as failure:
            self._failed_at = self._clock()
            self._tell(failure)
            if anew and len(self._late) < MOST:
                self._late.update(ask.lease for ask in asks)
        except asyncio.CancelledError:
            if anew:  # the request ends: its release may come there before this, which takes the place then
                self._leftovers.end_now(asks)
            raise
        return kept

    async def aclose(self) -> None:
        """Let go of connections."""
        await self._leftovers.aclose()
        await self._store.aclose()

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why the counters cannot be asked, as a sentence; nothing while they can."""
        self._settle()
        return (self._trouble,) if self._trouble else ()

    def _tell(self, *failures: CountersUnavailable) -> None:
        """Log why the counters cannot be asked, each reason once in an outage: what it begins with is seldom what keeps
        it going."""
        self._away_at = self._clock()
        for failure in failures:
            if self._trouble and RESTING in str(failure):
                continue
            self._trouble = f"{failure} Until they can, each rule says what happens (`on_failure`)."
            if self._trouble not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add(self._trouble)
                log.warning("%s", self._trouble)

    def _settle(self) -> None:
        """Log that an outage is over, if it is."""
        if self._trouble and self.state is State.CLOSED and self._clock() - self._away_at >= SETTLED:
            self._trouble = ""
            self._told.clear()
            log.info("The counters can be asked again.")

    def _check(self, ask: Ask, answer: Decision, doubtful: float) -> Decision:
        """Count here what was admitted elsewhere. Its word is not enough while what was admitted here, or elsewhere
        before it forgot, still counts."""
        if not ask.hits or not (answer.admitted or ask.charge) or not self._local.has_place(ask):
            return answer  # of whom there is no room for nothing is known here: others' counts are none of theirs
        if doubtful >= find_span(ask.limit):
            slack = BOUNDLESS if ask.limit.algorithm is Algorithm.CONCURRENCY else ask.slack
            self._local.decide_now([ask._replace(charge=True, slack=slack)])
            return answer
        (known,) = self._local.decide_now([ask])
        if known.admitted or not answer.admitted:
            return answer
        self._leftovers.add([ask])
        return known

    def _decide_unanswered(self, ask: Ask) -> Decision:
        decision = self._decide_here(ask)
        if not decision.admitted:  # there it may yet be: an answer that is late is one
            self._leftovers.add([ask])
        return decision

    def _decide_here(self, ask: Ask) -> Decision:
        if ask.rule.on_failure is OnFailure.CLOSED:
            self.refused += 1
            return Unanswered(False, 0, self._probe, self._probe)
        self.decided_here += 1
        emergency = ask.rule.emergency
        if emergency is None or ask.limit.algorithm is Algorithm.CONCURRENCY:
            return self._local.decide_now([ask])[0]
        (decision,) = self._emergencies.decide_now([ask._replace(limit=emergency, slack=0)])
        if not decision.admitted or not self._local.has_place(ask):
            return decision
        (known,) = self._local.decide_now([ask])
        return decision if known.admitted else known


def find_span(limit: Limit) -> float:
    """Seconds after which what was counted makes no difference any more."""
    if limit.refill is Refill.INTERVAL and limit.amount:  # nothing is given before a unit begins
        return float(-(-limit.capacity // limit.amount) * limit.seconds)
    if limit.algorithm in _BUCKETS:
        return limit.capacity * limit.seconds / limit.amount if limit.amount else inf
    return 2.0 * limit.seconds if limit.algorithm is Algorithm.SLIDING_WINDOW_COUNTER else float(limit.seconds)
