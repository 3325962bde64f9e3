"""What becomes of decisions while the counters cannot be asked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from netlimit.errors import CountersUnavailable
from netlimit.l7.breaker import State
from netlimit.l7.decision import Decision, Unanswered
from netlimit.l7.limit import Algorithm
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import OnFailure
from netlimit.l7.store import Ask, Store


class Remote(Store, Protocol):
    """A store elsewhere. It has a breaker for each server, so that one which is dead costs no latency."""

    @property
    def state(self) -> State:
        """The worst that any of them thinks."""
        ...

    async def attempt(self, asks: Sequence[Ask]) -> Sequence[Decision | CountersUnavailable]:
        """Count and answer, in order, or say why not: a part of the counters may be away."""
        ...


class Failover:
    """A store elsewhere, and what each rule wants while that cannot be asked.

    `on_failure` open: this process counts by itself, up to the rule's emergency limit (else its own). Closed: refused,
    with a retry_after of `probe` seconds, the time after which the store elsewhere is tried again. It is asked again as
    soon as it answers. Leases taken here end here, and those taken there end by themselves.
    """

    def __init__(self, store: Remote, local: MemoryStore, probe: float) -> None:
        self.decided_here = 0
        """Decisions that this process has made by itself."""
        self.refused = 0
        """Decisions that have been refused because the rule is closed."""
        self._store = store
        self._local = local
        self._probe = probe

    @property
    def state(self) -> State:
        """Open: some counters or all cannot be asked at the moment; half open: that is being tried."""
        return self._store.state

    async def decide(self, asks: Sequence[Ask]) -> list[Decision]:
        """Count and answer, in order."""
        answers = await self._store.attempt(asks)
        return [
            answer if isinstance(answer, Decision) else self._decide_here(ask)
            for ask, answer in zip(asks, answers, strict=True)
        ]

    async def release(self, asks: Sequence[Ask]) -> None:
        """End the leases of these asks."""
        self._local.release_now(asks)
        with suppress(CountersUnavailable):
            await self._store.release(asks)

    async def renew(self, asks: Sequence[Ask]) -> None:
        """Let the leases of these asks last their whole time from now."""
        self._local.renew_now(asks)
        with suppress(CountersUnavailable):
            await self._store.renew(asks)

    async def aclose(self) -> None:
        """Let go of connections."""
        await self._store.aclose()

    def _decide_here(self, ask: Ask) -> Decision:
        if ask.rule.on_failure is OnFailure.CLOSED:
            self.refused += 1
            return Unanswered(False, 0, self._probe, self._probe)
        self.decided_here += 1
        emergency = ask.rule.emergency
        if emergency is not None and ask.limit.algorithm is not Algorithm.CONCURRENCY:
            ask = ask._replace(limit=emergency, slack=0)
        return self._local.decide_now([ask])[0]
