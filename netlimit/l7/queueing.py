"""Requests that wait for their turn: rules with `on_limit: queue`, and what a leaky bucket delays.

A counter at which requests wait has a line, in the order in which they came, and who comes later does not get in before
those who wait. A request that several counters have wait stands in the line of each, and is decided about when it is
first in all of them: who came first of all is first everywhere, so no two wait for each other, and nobody starves.

While one of the counters does not let it in for longer than another takes to make up for its hits, it stands aside in
the other's line, and who comes later passes: a client that has used up its own limit does not close one that it shares.
It takes its place again in time for its turn, and from then on nobody passes until it has been decided about.
Lines are those of this process; processes that share their counters in Redis take turns as it happens.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf
from typing import Any

from netlimit.l7.decision import Unanswered
from netlimit.l7.gate import Client, find_client_network
from netlimit.l7.limit import Algorithm, Limit, widen
from netlimit.l7.limiter import Limiter, Verdict
from netlimit.l7.rules import Descriptor, Mode, OnLimit, Rule, RuleSet

MOST = 1000
"""Requests that wait, of all together."""
MOST_OF_ONE = 100
"""Requests in one line."""
GLANCE = 0.2
"""Seconds after which whoever waits for another request to end looks again, if none has ended here meanwhile."""
RULES_SECONDS = 1.0
"""How soon those who wait hear of other rules."""

Patience = Callable[[Awaitable[Verdict]], Awaitable[Verdict]]
"""How somebody waits: it awaits what it is given, or gives it up when waiting has lost its sense."""
Telling = Callable[[], Sequence[Descriptor]]
"""Makes the descriptors of a request, as the rules of the moment look at it."""
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
    def known(self) -> float:
        """Before this nobody gets in, for certain: a request in flight may end at any time."""
        return 0.0 if self.limit.algorithm is Algorithm.CONCURRENCY else self.opens

    @property
    def turn(self) -> float:
        """When one more would get in, at the earliest."""
        limit, hits = self.limit, sum(waiter.hits for waiter in self.waiters)
        if limit.algorithm is Algorithm.CONCURRENCY or self.rule.mode is Mode.ELASTIC or not limit.amount:
            return self.known
        if limit.algorithm in (Algorithm.GCRA, Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET):
            return self.opens + hits * limit.seconds / limit.amount
        return self.opens + hits // (limit.amount + widen(limit, self.rule.overshoot or 0)) * limit.seconds

    def find_recovery(self, hits: int) -> float:
        """Seconds in which the counter lets in so many hits again, as a rule; a request in flight takes its time."""
        if self.limit.algorithm is Algorithm.CONCURRENCY:
            return GLANCE
        return max(hits, 1) * self.limit.seconds / self.limit.amount if self.limit.amount else inf


@dataclass(eq=False, slots=True)
class _Waiter:
    """A request in its lines."""

    number: int
    """By order of arrival."""
    domain: str
    descriptors: Sequence[Descriptor]
    hits: int
    client: Client
    escalates: bool
    arrived: float
    longest: float
    """Seconds that whoever asks waits for the answer."""
    lines: dict[_Place, _Line]
    network: str
    """Whose share of the places it takes; empty where nobody knows."""
    rules: RuleSet
    """Those that the descriptors were made for."""
    tell: Telling | None
    aside: set[_Place] = field(default_factory=set)
    """Where it has left its place to those who come later, for the time being. It stands in one line at least."""
    stirred: asyncio.Event = field(default_factory=asyncio.Event)

    def __lt__(self, other: _Waiter) -> bool:
        return self.number < other.number

    @property
    def deadline(self) -> float:
        return self.arrived + min(self.longest, *(line.rule.max_wait for line in self.lines.values()))

    @property
    def known(self) -> float:
        """Before this it does not get in, for certain."""
        return max(line.known for line in self.lines.values())

    @property
    def opens(self) -> float:
        """When it may get in: when all its lines open, once it is first in each; until then nobody knows."""
        lines = [line for place, line in self.lines.items() if place not in self.aside]
        return max(line.opens for line in lines) if all(line.waiters[0] is self for line in lines) else inf

    def heed(self, rules: RuleSet) -> None:
        """Come under other rules, which may ask for what those before did not."""
        if rules is not self.rules:
            self.rules = rules
            if self.tell is not None:
                self.descriptors = self.tell()

    def find_return(self, place: _Place) -> float:
        """When it is to stand again where it stands aside."""
        return self.opens - self.lines[place].find_recovery(self.hits)


async def _simply(waiting: Awaitable[Verdict]) -> Verdict:
    return await waiting


class Queues:
    """A limiter that has requests wait instead of refusing them, where their rules say so. For one event loop.

    At most `most` wait in all and `most_of_one` in a line, and those of one network (a /24, of IPv6 a /48) are never
    more than the places that they leave free, of all and in a line that clients share, so that there is one for others;
    more are refused. (Of those about whom a leaky bucket in Redis is asked at the same time some more may wait.) Nobody
    waits longer than the least `max_wait` of the rules that have him wait: whose turn is known to come later is refused
    at once. A request that is given up (cancelled) leaves its place to the next.
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
        self._crowds: Counter[str] = Counter()  # how many wait of each network
        self._lines: dict[_Place, _Line] = {}
        self._heeded: RuleSet | None = None  # the rules of which the lines tell when they open
        self._numbers = count()

    def decide(
        self,
        domain: str,
        descriptors: Sequence[Descriptor],
        hits: int = 1,
        patience: Patience = _simply,
        client: Client = None,
        escalates: bool = True,
        longest: float = inf,
        tell: Telling | None = None,
    ) -> Coroutine[Any, Any, Verdict]:
        """As the limiter decides, once the request's turn has come; what an allowed one had to wait lies behind it. If
        its turn comes after `longest` seconds it is refused. Where the descriptors depend on the rules, `tell` makes
        them anew when those become others while it waits.

        IP rules are asked once, before it waits: whom they refuse takes nobody's place in a line.
        """
        asked = domain, descriptors, hits, patience, client, escalates, longest, tell
        if self._limiter.guarded:
            return self._decide_behind(partial(self._decide, *asked), descriptors, hits, client)
        return self._decide(*asked)

    async def _decide_behind(
        self,
        decide: Callable[[], Coroutine[Any, Any, Verdict]],
        descriptors: Sequence[Descriptor],
        hits: int,
        client: Client,
    ) -> Verdict:
        entry = await self._limiter.enter(descriptors, hits, client)
        if not entry.allowed:
            return entry
        try:
            verdict = await decide()
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
        client: Client,
        escalates: bool,
        longest: float,
        tell: Telling | None,
    ) -> Verdict:
        verdict, until = None, inf if longest == inf else _now() + longest
        number = next(self._numbers)  # before it is asked: answers may come in another order
        rules = self._rules()
        lines = {}
        if self._lines:
            self._heed_rules()
            lines = self._find_lines(domain, descriptors, hits)
        if not lines:
            left = until if until == inf else max(0.0, until - _now())
            if not self._has_room(client, descriptors):
                left = 0.0
            verdict = await self._limiter.decide(
                domain, descriptors, hits, client=client, entered=True, escalates=escalates, longest=left
            )
            if verdict.allowed:
                return await self._delay(verdict, patience, client, descriptors) if verdict.delay else verdict
            if not _is_worth_waiting(verdict) or _comes_too_late(verdict, left):
                return verdict
            lines = self._open_lines(verdict)
        network = find_client_network(client, descriptors)
        asked = domain, descriptors, hits, client, escalates
        waiter = _Waiter(number, *asked, _now(), longest, lines, network, rules, tell)
        turn = max(line.turn for line in lines.values())
        full = any(self._is_full(line, network) for line in lines.values())
        if full or not self._has_room(client, descriptors) or turn > waiter.deadline:
            return await self._refuse(waiter, turn, verdict)
        self._join(waiter, lines)
        for line in lines.values():
            self._limiter.usage.find_counts(line.rule, line.limit, line.limit is line.rule.concurrency).queued += hits
        try:
            with self._take_room(client, descriptors):
                verdict = await self._sit_through(waiter, patience)
        finally:
            self._leave(waiter)
        return await self._delay(verdict, patience, client, descriptors) if verdict.delay else verdict

    async def release(self, verdict: Verdict) -> None:
        """Say that the request has ended; if others wait for that, one of them is up."""
        await self._limiter.release(verdict)
        for ask in verdict.leases:
            line = self._lines.get((ask.rule.domain, ask.rule.name, ask.key))
            if line is not None and line.limit.algorithm is Algorithm.CONCURRENCY:
                line.opens = _now()
                line.waiters[0].stirred.set()

    async def _sit_through(self, waiter: _Waiter, patience: Patience) -> Verdict:
        """Wait as whoever asks does. Where he gives up just as he has been admitted, nobody takes what he got."""
        decided: list[Verdict] = []

        async def wait() -> Verdict:
            decided.append(await self._wait(waiter))
            return decided[0]

        try:
            return await patience(wait())
        except BaseException:
            for verdict in decided:
                await self.release(verdict)
            raise

    async def _wait(self, waiter: _Waiter) -> Verdict:
        while True:
            self._heed_rules()
            waiter.heed(self._rules())
            self._return(waiter)
            now, opens = _now(), waiter.opens
            if opens <= now:
                left = max(0.0, waiter.arrived + waiter.longest - now)
                verdict = await self._limiter.decide(
                    waiter.domain,
                    waiter.descriptors,
                    waiter.hits,
                    client=waiter.client,
                    entered=True,
                    escalates=waiter.escalates,
                    longest=left,
                )
                if _comes_too_late(verdict, left):
                    return verdict  # nothing that those behind him have to heed
                self._note(verdict)
                if verdict.allowed or not _is_worth_waiting(verdict):
                    return verdict
                self._join(waiter, self._open_lines(verdict))
            elif now >= waiter.deadline or (opens < inf and waiter.deadline < waiter.known):
                return await self._refuse(waiter, max(line.turn for line in waiter.lines.values()))
            else:
                alarm = min(opens, waiter.deadline, *map(waiter.find_return, waiter.aside))
                if opens < inf:  # others are stirred
                    alarm = min(alarm, now + RULES_SECONDS)
                waiter.stirred.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(alarm):
                        await waiter.stirred.wait()

    def _heed_rules(self) -> None:
        """Where the rules have become others, whoever is first in a line is decided about anew, by those."""
        rules = self._rules()
        if rules is not self._heeded:
            self._heeded = rules
            for line in self._lines.values():
                line.opens = 0.0
                for waiter in line.waiters:
                    waiter.stirred.set()

    async def _refuse(self, waiter: _Waiter, turn: float, verdict: Verdict | None = None) -> Verdict:
        """The verdict for a request whose turn comes too late: if it comes again then, it gets in."""
        if verdict is None:
            verdict = await self._limiter.decide(waiter.domain, waiter.descriptors, 0, entered=True)
            statuses = list(verdict.statuses)
            for index, (_, rule, limit, _, key) in enumerate(statuses):
                if (
                    rule is not None
                    and limit is not None
                    and _find_place(rule, key) in waiter.lines.keys() - waiter.aside
                ):
                    statuses[index] = statuses[index]._replace(allowed=False)
                    self._limiter.usage.find_counts(rule, limit, limit is rule.concurrency).refused += waiter.hits
            verdict = replace(verdict, allowed=False, delay=0.0, statuses=tuple(statuses))
        self._forget_empty(waiter.lines)
        return replace(verdict, retry_after=max(turn - _now(), verdict.retry_after))

    async def _delay(
        self, verdict: Verdict, patience: Patience, client: Client, descriptors: Sequence[Descriptor]
    ) -> Verdict:
        """Wait as a leaky bucket has said, which has given the request its place already."""
        with self._take_room(client, descriptors):
            try:
                return await patience(_sit_out(verdict))
            except BaseException:
                await self._limiter.release(verdict)
                raise

    def _is_full(self, line: _Line, network: str) -> bool:
        """Whether nobody, or nobody of this network, may stand in a line any more."""
        free = self._most_of_one - len(line.waiters)
        if free <= 0 or not line.waiters or not network or line.rule.is_of_clients:
            return free <= 0
        return sum(each.network == network for each in line.waiters) >= free

    def _has_room(self, client: Client, descriptors: Sequence[Descriptor]) -> bool:
        """Whether one more of this client's network may wait. Those without an address share all places."""
        free = self._most - self.waiting
        return free > 0 and (not self.waiting or self._crowds[find_client_network(client, descriptors)] < free)

    @contextmanager
    def _take_room(self, client: Client, descriptors: Sequence[Descriptor]) -> Iterator[None]:
        network = find_client_network(client, descriptors)
        self.waiting += 1
        if network:
            self._crowds[network] += 1
        try:
            yield
        finally:
            self.waiting -= 1
            if network:
                self._crowds[network] -= 1
                if not self._crowds[network]:
                    del self._crowds[network]

    def _find_lines(self, domain: str, descriptors: Sequence[Descriptor], hits: int) -> dict[_Place, _Line]:
        """The lines that there are at the counters of a request. None if one of its rules never admits it: it would
        keep out those behind it, and not get in."""
        lines = {}
        matches = self._rules().find_counting(domain, descriptors)
        for descriptor, match in zip(descriptors, matches, strict=True):
            if match is None:
                continue
            if _is_too_heavy(match.rule, hits if descriptor.hits is None else descriptor.hits):
                return {}
            place = _find_place(match.rule, match.key)
            if place in self._lines:
                lines[place] = self._lines[place]
        return lines

    def _open_lines(self, verdict: Verdict) -> dict[_Place, _Line]:
        """The lines at the counters that refuse, new ones where there are none."""
        if not self._lines:
            self._heeded = self._rules()
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
            if line is not None and rule is not None and limit is not None and decision is not None:
                wait = decision.retry_after
                line.rule, line.limit = rule, limit
                if wait == inf or isinstance(decision, Unanswered):
                    continue  # it is too heavy, and others are not; or nobody knows when they get in
                line.opens = now + (min(wait, GLANCE) if limit.algorithm is Algorithm.CONCURRENCY else wait)

    def _join(self, waiter: _Waiter, lines: dict[_Place, _Line]) -> None:
        """Stand in lines, before those who came later, or aside; the waiter may stand in some of them already."""
        waiter.lines |= lines
        now = _now()
        last = max(waiter.lines.values(), key=lambda line: line.opens)
        for place, line in waiter.lines.items():
            if line is not last and max(now, line.opens) + line.find_recovery(waiter.hits) <= last.opens:
                self._step_aside(waiter, place)
            else:
                self._take_place(waiter, place)
        self._forget_empty(waiter.lines)

    def _return(self, waiter: _Waiter) -> None:
        """Stand again where the turn is near."""
        if waiter.aside:
            now = _now()
            for place in [place for place in waiter.aside if waiter.find_return(place) <= now]:
                self._take_place(waiter, place)

    def _take_place(self, waiter: _Waiter, place: _Place) -> None:
        waiter.aside.discard(place)
        # Where all have stood aside, the line has ended, and there may be a new one.
        line = waiter.lines[place] = self._lines.setdefault(place, waiter.lines[place])
        if waiter not in line.waiters:
            insort(line.waiters, waiter)

    def _step_aside(self, waiter: _Waiter, place: _Place) -> None:
        waiter.aside.add(place)
        line = waiter.lines[place]
        if waiter in line.waiters:
            self._step_out(waiter, line)

    def _leave(self, waiter: _Waiter) -> None:
        for place, line in waiter.lines.items():
            if place not in waiter.aside:
                self._step_out(waiter, line)
        self._forget_empty(waiter.lines)

    def _step_out(self, waiter: _Waiter, line: _Line) -> None:
        line.waiters.remove(waiter)
        if line.waiters:
            line.waiters[0].stirred.set()

    def _forget_empty(self, lines: dict[_Place, _Line]) -> None:
        for place, line in lines.items():
            if not line.waiters and self._lines.get(place) is line:
                del self._lines[place]


def _now() -> float:
    return asyncio.get_running_loop().time()


def _find_place(rule: Rule, key: str) -> _Place:
    return rule.domain, rule.name, key


def _is_too_heavy(rule: Rule, hits: int) -> bool:
    """Whether a rule refuses so many hits whenever they come."""
    if rule.limit is None or rule.observes or rule.mode is Mode.ELASTIC:
        return False
    return hits > rule.limit.capacity + widen(rule.limit, rule.overshoot or 0)


def _is_worth_waiting(verdict: Verdict) -> bool:
    """Whether a refused request is to wait, and would get in some time; where no counter can be asked nobody knows."""
    answered = not any(isinstance(status.decision, Unanswered) for status in verdict.statuses if not status.allowed)
    return answered and verdict.on_limit is OnLimit.QUEUE and verdict.retry_after < inf


def _comes_too_late(verdict: Verdict, longest: float) -> bool:
    """Whether a leaky bucket has refused a request only because whoever asks does not wait until its turn."""
    return any(
        not status.allowed
        and status.limit is not None
        and status.limit.algorithm is Algorithm.LEAKY_BUCKET
        and status.decision is not None
        and status.decision.reset_after > longest
        for status in verdict.statuses
    )


async def _sit_out(verdict: Verdict) -> Verdict:
    await asyncio.sleep(verdict.delay)
    return verdict
