"""Requests that wait for their turn: rules with `on_limit: queue`, and what a leaky bucket delays.

A counter at which requests wait has a line, in the order in which they came, and who comes later does not get in before
those who wait. A request that several counters have wait stands in the line of each, and is decided about when it is
first in all of them: who came first of all is first everywhere, so no two wait for each other, and nobody starves.
Lines are those of this process; processes that share their counters in Redis take turns as it happens.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf

from netlimit.l7.limit import Algorithm, Limit, widen
from netlimit.l7.limiter import Limiter, Verdict
from netlimit.l7.rules import Descriptor, Mode, OnLimit, Rule, RuleSet

MOST = 1000
"""Requests that wait, of all together."""
MOST_OF_ONE = 100
"""Requests in one line."""
GLANCE = 0.5
"""Seconds after which whoever waits for another request to end looks again, if none has ended here meanwhile."""

Patience = Callable[[Awaitable[Verdict]], Awaitable[Verdict]]
"""How somebody waits: it awaits what it is given, or gives it up when waiting has lost its sense."""
_Place = tuple[str, str, str]
"""A counter: domain and name of the rule, and the key."""


@dataclass(eq=False, slots=True)
class _Line:
    """Those who wait at one counter."""

    rule: Rule
    limit: Limit
    opens: float = 0.0
    """When the first may get in, by the loop's clock, as far as is known."""
    waiters: list[_Waiter] = field(default_factory=list)

    @property
    def turn(self) -> float:
        """When one more would get in, at the earliest."""
        limit, hits = self.limit, sum(waiter.hits for waiter in self.waiters)
        if limit.algorithm is Algorithm.CONCURRENCY or self.rule.mode is Mode.ELASTIC or not limit.amount:
            return self.opens
        if limit.algorithm in (Algorithm.GCRA, Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET):
            return self.opens + hits * limit.seconds / limit.amount
        return self.opens + hits // (limit.amount + widen(limit, self.rule.overshoot or 0)) * limit.seconds


@dataclass(eq=False, slots=True)
class _Waiter:
    """A request in its lines."""

    number: int
    """By order of arrival."""
    domain: str
    descriptors: Sequence[Descriptor]
    hits: int
    client: str | None
    escalates: bool
    arrived: float
    longest: float
    """Seconds that whoever asks waits for the answer."""
    lines: dict[_Place, _Line]
    stirred: asyncio.Event = field(default_factory=asyncio.Event)

    def __lt__(self, other: _Waiter) -> bool:
        return self.number < other.number

    @property
    def deadline(self) -> float:
        return self.arrived + min(self.longest, *(line.rule.max_wait for line in self.lines.values()))

    @property
    def opens(self) -> float:
        """When it may get in: when all its lines open, once it is first in each; until then nobody knows."""
        lines = self.lines.values()
        return max(line.opens for line in lines) if all(line.waiters[0] is self for line in lines) else inf


async def _simply(waiting: Awaitable[Verdict]) -> Verdict:
    return await waiting


class Queues:
    """A limiter that has requests wait instead of refusing them, where their rules say so. For one event loop.

    At most `most` wait in all and `most_of_one` in a line; more are refused. Nobody waits longer than the least
    `max_wait` of the rules that have him wait: whose turn is known to come later is refused at once. A request that is
    given up (cancelled) leaves its place to the next.
    """

    def __init__(
        self, limiter: Limiter, rules: Callable[[], RuleSet], most: int = MOST, most_of_one: int = MOST_OF_ONE
    ) -> None:
        self.waiting = 0
        """How many wait at the moment."""
        self._limiter = limiter
        self._rules = rules
        self._most = most
        self._most_of_one = most_of_one
        self._lines: dict[_Place, _Line] = {}
        self._numbers = count()

    async def decide(
        self,
        domain: str,
        descriptors: Sequence[Descriptor],
        hits: int = 1,
        patience: Patience = _simply,
        client: str | None = None,
        escalates: bool = True,
        longest: float = inf,
    ) -> Verdict:
        """As the limiter decides, once the request's turn has come; what an allowed one had to wait lies behind it. If
        its turn comes after `longest` seconds it is refused.

        IP rules are asked once, before it waits: whom they refuse takes nobody's place in a line.
        """
        if not self._limiter.guarded:
            return await self._decide(domain, descriptors, hits, patience, client, escalates, longest)
        entry = await self._limiter.enter(descriptors, hits, client)
        if not entry.allowed:
            return entry
        try:
            verdict = await self._decide(domain, descriptors, hits, patience, client, escalates, longest)
        except BaseException:
            await self._limiter.release(entry)
            raise
        return await self._limiter.conclude(entry, verdict)

    async def _decide(
        self,
        domain: str,
        descriptors: Sequence[Descriptor],
        hits: int,
        patience: Patience,
        client: str | None,
        escalates: bool,
        longest: float,
    ) -> Verdict:
        verdict, until = None, _now() + longest
        number = next(self._numbers)  # before it is asked: answers may come in another order
        lines = self._find_lines(domain, descriptors) if self._lines else {}
        if not lines:
            verdict = await self._limiter.decide(
                domain, descriptors, hits, client=client, entered=True, escalates=escalates
            )
            if verdict.allowed:
                return await self._delay(verdict, patience, until) if verdict.delay else verdict
            if not _is_worth_waiting(verdict):
                return verdict
            lines = self._open_lines(verdict)
        waiter = _Waiter(number, domain, descriptors, hits, client, escalates, _now(), longest, lines)
        turn = max(line.turn for line in lines.values())
        full = self.waiting >= self._most or any(len(line.waiters) >= self._most_of_one for line in lines.values())
        if full or turn > waiter.deadline:
            return await self._refuse(waiter, turn, verdict)
        self._join(waiter, lines)
        self.waiting += 1
        for line in lines.values():
            self._limiter.usage.find_counts(line.rule, line.limit, line.limit is line.rule.concurrency).queued += hits
        try:
            verdict = await patience(self._wait(waiter))
        finally:
            self.waiting -= 1
            self._leave(waiter)
        return await self._delay(verdict, patience, until) if verdict.delay else verdict

    async def release(self, verdict: Verdict) -> None:
        """Say that the request has ended; if others wait for that, one of them is up."""
        await self._limiter.release(verdict)
        for ask in verdict.leases:
            line = self._lines.get((ask.rule.domain, ask.rule.name, ask.key))
            if line is not None and line.limit.algorithm is Algorithm.CONCURRENCY:
                line.opens = _now()
                line.waiters[0].stirred.set()

    async def _wait(self, waiter: _Waiter) -> Verdict:
        while True:
            now, opens = _now(), waiter.opens
            if opens <= now:
                verdict = await self._limiter.decide(
                    waiter.domain,
                    waiter.descriptors,
                    waiter.hits,
                    client=waiter.client,
                    entered=True,
                    escalates=waiter.escalates,
                )
                self._note(verdict)
                if verdict.allowed or not _is_worth_waiting(verdict):
                    return verdict
                self._join(waiter, self._open_lines(verdict))
            elif now >= waiter.deadline or waiter.deadline < opens < inf:
                return await self._refuse(waiter, max(line.turn for line in waiter.lines.values()))
            else:
                waiter.stirred.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(min(opens, waiter.deadline)):
                        await waiter.stirred.wait()

    async def _refuse(self, waiter: _Waiter, turn: float, verdict: Verdict | None = None) -> Verdict:
        """The verdict for a request whose turn comes too late: if it comes again then, it gets in."""
        if verdict is None:
            verdict = await self._limiter.decide(waiter.domain, waiter.descriptors, 0, entered=True)
            statuses = list(verdict.statuses)
            for index, (_, rule, limit, _, key) in enumerate(statuses):
                if rule is not None and limit is not None and _find_place(rule, key) in waiter.lines:
                    statuses[index] = statuses[index]._replace(allowed=False)
                    self._limiter.usage.find_counts(rule, limit, limit is rule.concurrency).refused += waiter.hits
            verdict = replace(verdict, allowed=False, delay=0.0, statuses=tuple(statuses))
        self._forget_empty(waiter.lines)
        return replace(verdict, retry_after=max(turn - _now(), verdict.retry_after))

    async def _delay(self, verdict: Verdict, patience: Patience, until: float) -> Verdict:
        """Wait as a leaky bucket has said, which has given the request its place already."""
        try:
            if self.waiting >= self._most or _now() + verdict.delay > until:
                await self._limiter.release(verdict)
                return replace(verdict, allowed=False, retry_after=verdict.delay, delay=0.0, leases=())
            self.waiting += 1
            try:
                return await patience(_sit_out(verdict))
            finally:
                self.waiting -= 1
        except BaseException:
            await self._limiter.release(verdict)
            raise

    def _find_lines(self, domain: str, descriptors: Sequence[Descriptor]) -> dict[_Place, _Line]:
        """The lines that there are at the counters of a request."""
        rules = self._rules()
        lines = {}
        for descriptor in descriptors:
            match = rules.find(domain, descriptor.entries)
            place = None if match is None or descriptor.limit else _find_place(match.rule, match.key)
            if place in self._lines:
                lines[place] = self._lines[place]
        return lines

    def _open_lines(self, verdict: Verdict) -> dict[_Place, _Line]:
        """The lines at the counters that refuse, new ones where there are none."""
        lines = {}
        for allowed, rule, limit, _, key in verdict.statuses:
            if not allowed and rule is not None and limit is not None:
                place = _find_place(rule, key)
                lines[place] = self._lines.setdefault(place, _Line(rule, limit))
        self._note(verdict)
        return lines

    def _note(self, verdict: Verdict) -> None:
        """Remember when the next get in."""
        now = _now()
        for _, rule, limit, decision, key in verdict.statuses:
            line = self._lines.get(_find_place(rule, key)) if rule is not None else None
            if line is not None and limit is not None and decision is not None:
                wait = decision.retry_after
                line.limit = limit
                line.opens = now + (min(wait, GLANCE) if limit.algorithm is Algorithm.CONCURRENCY else wait)

    def _join(self, waiter: _Waiter, lines: dict[_Place, _Line]) -> None:
        """Stand in lines, before those who came later; the waiter may stand in some of them already."""
        for line in lines.values():
            if waiter not in line.waiters:
                insort(line.waiters, waiter)
        waiter.lines |= lines

    def _leave(self, waiter: _Waiter) -> None:
        for line in waiter.lines.values():
            line.waiters.remove(waiter)
            if line.waiters:
                line.waiters[0].stirred.set()
        self._forget_empty(waiter.lines)

    def _forget_empty(self, lines: dict[_Place, _Line]) -> None:
        for place, line in lines.items():
            if not line.waiters and self._lines.get(place) is line:
                del self._lines[place]


def _now() -> float:
    return asyncio.get_running_loop().time()


def _find_place(rule: Rule, key: str) -> _Place:
    return rule.domain, rule.name, key


def _is_worth_waiting(verdict: Verdict) -> bool:
    """Whether a refused request is to wait, and would get in some time."""
    return verdict.on_limit is OnLimit.QUEUE and verdict.retry_after < inf


async def _sit_out(verdict: Verdict) -> Verdict:
    await asyncio.sleep(verdict.delay)
    return verdict
