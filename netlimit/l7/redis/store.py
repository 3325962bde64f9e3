"""The store of counters in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

from netlimit.errors import CountersUnavailable
from netlimit.l7.breaker import State, worst
from netlimit.l7.decision import Decision
from netlimit.l7.limit import Limit
from netlimit.l7.redis.algorithms import Counting, LeaseMove, make_counting
from netlimit.l7.redis.key import make_name, make_prefix
from netlimit.l7.redis.link import Answer, Question, Ticket
from netlimit.l7.rules import Rule
from netlimit.l7.store import Ask

_PLANS = 4096
"""Pairs of rules and limits whose scripts and prefixes are remembered."""


class Wire(Protocol):
    """What carries the questions of one event loop: a link, or a cluster's links."""

    def ask(self, question: Question) -> None:
        """Have a question answered; its ticket fails if it cannot be."""
        ...

    @property
    def state(self) -> State:
        """How well that goes."""
        ...

    @property
    def losses(self) -> int:
        """How many connections have been closed by the other end while nothing was asked."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


class _Plan(NamedTuple):
    """How Redis counts for a rule and a limit."""

    rule: Rule
    limit: Limit
    prefix: bytes
    counting: Counting


def expect_decisions(answers: Sequence[Answer]) -> list[Decision]:
    """The decisions. Raises the error that there is instead of one."""
    for answer in answers:
        if isinstance(answer, CountersUnavailable):
            raise answer
    return cast(list[Decision], answers)


class RedisStore:
    """Counters in Redis, each decision by a script of its own algorithm and by the server's clock.

    Every event loop that asks has its own connections. Whatever is not answered within `timeout` seconds raises
    CountersUnavailable.
    """

    def __init__(self, open_wire: Callable[[], Wire], timeout: float) -> None:
        self._open_wire = open_wire
        self._timeout = timeout
        self._wires: dict[asyncio.AbstractEventLoop, Wire] = {}
        self._plans: dict[tuple[int, int], _Plan] = {}

    @property
    def state(self) -> State:
        """How well Redis answers, by the worst of all connections."""
        return worst(wire.state for wire in self._wires.values())

    @property
    def losses(self) -> int:
        """Another number than before where a server has closed a connection: it may have forgotten what it counted."""
        return sum(wire.losses for wire in self._wires.values())

    async def attempt(self, asks: Sequence[Ask]) -> list[Answer]:
        """Count and answer, in order, or say why not: of a cluster a part may be away."""
        return await self._send(asks, [self._find_plan(ask).counting for ask in asks])

    async def decide(self, asks: Sequence[Ask]) -> list[Decision]:
        """Count and answer, in order."""
        return expect_decisions(await self.attempt(asks))

    async def release(self, asks: Sequence[Ask]) -> None:
        """End the leases of these asks."""
        expect_decisions(await self._send(asks, [LeaseMove(0)] * len(asks)))

    async def renew(self, asks: Sequence[Ask], anew: bool = False) -> bool:
        """Let the leases of these asks last their whole time from now; whether all of them were still there."""
        found = expect_decisions(await self._send(asks, [LeaseMove(ask.limit.seconds, anew) for ask in asks]))
        return all(each.admitted for each in found)

    async def aclose(self) -> None:
        """Close this event loop's connections; each other one closes its own."""
        wire = self._wires.pop(asyncio.get_running_loop(), None)
        if wire is not None:
            await wire.aclose()

    async def _send(self, asks: Sequence[Ask], countings: Sequence[Counting]) -> list[Answer]:
        if not asks:
            return []
        loop = asyncio.get_running_loop()
        wire = self._wires.get(loop) or self._open(loop)
        ticket = Ticket(len(asks), loop.time() + self._timeout, loop.create_future())
        for position, (ask, counting) in enumerate(zip(asks, countings, strict=True)):
            name = make_name(self._find_plan(ask).prefix, ask.key)
            wire.ask(Question(ask, counting, name, ticket, position))
        return await ticket.future

    def _open(self, loop: asyncio.AbstractEventLoop) -> Wire:
        self._wires = {other: wire for other, wire in self._wires.items() if not other.is_closed()}
        wire = self._wires[loop] = self._open_wire()
        return wire

    def _find_plan(self, ask: Ask) -> _Plan:
        identity = id(ask.rule), id(ask.limit)  # as good as the objects, which a plan keeps alive
        plan = self._plans.get(identity)
        if plan is None:
            if len(self._plans) >= _PLANS:  # rules come and go, and requests may bring limits of their own
                self._plans.clear()
            plan = _Plan(ask.rule, ask.limit, make_prefix(ask.rule, ask.limit), make_counting(ask.limit))
            self._plans[identity] = plan
        return plan
