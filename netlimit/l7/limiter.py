"""The limiter: rules and counters make verdicts."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from netlimit.l7.breaker import State
from netlimit.l7.decision import Crowded, Decision, Unanswered, new
from netlimit.l7.failover import Failover
from netlimit.l7.gate import (
    Client,
    Gate,
    Passage,
    find_addresses,
    find_client,
    find_client_network,
    find_size,
    tells,
)
from netlimit.l7.identity import find_culprit
from netlimit.l7.limit import BOUNDLESS, Limit, widen
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.pressure import Pressure
from netlimit.l7.rules import Descriptor, Match, Mode, OnLimit, Rule, RuleSet, choose_counting, name_counter
from netlimit.l7.store import Ask, Store, name_lease
from netlimit.l7.usage import Usage
from netlimit.l7.whole import (
    can_charge_in_part,
    counts_arrivals,
    is_to_be_told,
    make_arrival,
    make_look,
    rejects,
    weigh,
)

if TYPE_CHECKING:
    from netlimit.l7.domains import UnknownDomains
    from netlimit.l7.escalation import Refusals

_HARD, _DEFER, _QUEUE = Mode.HARD, OnLimit.DEFER, OnLimit.QUEUE
_AT_ONCE = frozenset[OnLimit]()
"""Looked up once: that of a member of an Enum takes a while."""


class Status(NamedTuple):
    """How one descriptor stands."""

    allowed: bool
    """Whether the request may pass as far as this descriptor goes."""
    rule: Rule | None = None
    """The rule that it finds; None: nothing limits it."""
    limit: Limit | None = None
    """The one of the rule's limits that says the most: that refuses, or has the least left."""
    decision: Decision | None = None
    """What the counter of that limit says. It may refuse what is allowed: the rule then only observes."""
    key: str = ""
    """Whose counter it is."""


@dataclass(slots=True)  # frozen, it would take three times as long to make
class Verdict:
    """Whether a request may pass."""

    allowed: bool
    statuses: tuple[Status, ...]
    """One for each descriptor, in order."""
    retry_after: float
    """Seconds after which the same request is allowed if nobody else comes: 0 at once, `inf` never."""
    delay: float
    """Seconds that an allowed request is to wait for its turn."""
    leases: tuple[Ask, ...] = ()
    """What the request holds while it is in flight: to be released at its end."""
    blocked: bool = False
    """Whether it is refused because its client is blocked: that is answered by 403."""

    @property
    def refusing(self) -> Status | None:
        """The refusing status whose limit frees itself last."""
        return max(
            (status for status in self.statuses if not status.allowed),
            key=lambda status: status.decision.retry_after if status.decision else 0.0,
            default=None,
        )

    @property
    def on_limit(self) -> OnLimit:
        """What is to become of a refused request: rejected, unless all that refuse it agree on something else."""
        wishes = {status.rule.on_limit for status in self.statuses if not status.allowed and status.rule}
        return wishes.pop() if len(wishes) == 1 else OnLimit.REJECT


Judge = Callable[[Sequence[Status]], bool]
"""Whether a request may pass of which this is known, one status for each descriptor."""


class Limiter:
    """Decides about requests. For tasks of one event loop; its store may be shared with other processes."""

    def __init__(
        self,
        rules: Callable[[], RuleSet],
        store: Store,
        pressure: Pressure | None = None,
        usage: Usage | None = None,
        gate: Gate | None = None,
        refusals: Refusals | None = None,
        unknown: UnknownDomains | None = None,
    ) -> None:
        """`gate` asks the IP rules first, `refusals` counts whom rules refuse that escalate, `unknown` is told of
        domains that there are not."""
        self._rules = rules
        self._store = store
        # Counters in memory answer at once: a coroutine more would take longer than most of them.
        self._decide_now = store.decide_now if type(store) is MemoryStore else None
        self._gate = gate
        self._refusals = refusals
        self._unknown = unknown
        self.pressure = pressure or Pressure()
        self.usage = usage or Usage()
        self._counted: RuleSet | None = None

    def decide(
        self,
        domain: str,
        descriptors: Sequence[Descriptor],
        hits: int = 1,
        charge: bool = False,
        client: Client = None,
        size: int = 0,
        entered: bool = False,
        escalates: bool = True,
        longest: float = inf,
        judge: Judge | None = None,
        line: str | None = None,
    ) -> Coroutine[Any, Any, Verdict]:
        """Count a request and say whether it may pass.

        `hits` is its weight, 0 to look only; `charge` counts it even where it is refused. IP rules are asked about
        `client`, of several addresses about each, with `size` bytes of body (by default what descriptors tell of both),
        unless it has `entered` already; if they refuse the request, no other rule is asked. `escalates` says whether a
        refusal may have the client blocked: whether who asks is known to tell its address truly. What a leaky bucket
        would have wait for more than `longest` seconds is refused. `judge` has the last word about the statuses. A
        refused request holds no leases. One that finds a rule with `on_limit: defer` or `queue` is charged by all its
        limits or, where one refuses it, by none (of several that are asked of Redis at the same time some may be
        charged in part).
        `line` is the counter for which it has been deferred, if it has: its arrival is not counted again, and no other
        limit has it wait for a turn.
        Raises CountersUnavailable when the store cannot be asked (a store behind `failover` never does).
        """
        if not entered and self.guarded:
            return self._decide_behind(domain, descriptors, hits, charge, client, size, escalates, longest, judge, line)
        return self._decide(domain, descriptors, hits, charge, client, escalates, longest, judge, line)

    @property
    def guarded(self) -> bool:
        """Whether there are IP rules to ask."""
        return self._gate is not None and self._gate.guards

    async def enter(
        self, descriptors: Sequence[Descriptor], hits: int = 1, client: Client = None, size: int = 0
    ) -> Verdict:
        """Ask the IP rules alone, as `decide` does: the verdict of the one that refuses the request, else an allowed
        one with what it holds. Raises as `decide`."""
        assert self._gate is not None
        size = size or find_size(descriptors)
        held: tuple[Ask, ...] = ()
        for address in find_addresses(client, descriptors):
            try:
                passage = await self._gate.ask(address, size, hits)
            except BaseException:  # who asked does not wait any more, say
                await self._store.release(held)
                raise
            if not passage.allowed:
                if held:
                    await self._store.release(held)
                return _refuse(passage, [isinstance(client, str) or tells(each, address) for each in descriptors])
            held += passage.leases
        return Verdict(True, (), 0.0, 0.0, held)

    async def _decide(
        self,
        domain: str,
        descriptors: Sequence[Descriptor],
        hits: int,
        charge: bool,
        client: Client,
        escalates: bool,
        longest: float,
        judge: Judge | None,
        line: str | None,
    ) -> Verdict:
        matches, asks, owners, delayed = self._list_asks(domain, descriptors, hits, charge, longest, line)
        if (delayed or line is not None) and hits and not charge and can_charge_in_part(asks):
            network = find_client_network(client, descriptors) if _DEFER in delayed else None
            verdict = await self._decide_wholly(matches, asks, owners, network, line is not None)
        else:
            decisions = await self._ask(asks) if self._decide_now is None else self._decide_now(asks)
            if len(matches) == len(asks) == 1:
                verdict = self._conclude_one(asks[0], decisions[0])
            else:
                verdict = self._conclude(matches, owners, asks, decisions)
        if judge is not None:
            verdict.allowed = judge(verdict.statuses)
        if verdict.allowed:
            return verdict
        if verdict.leases:  # a request that is refused holds nothing
            await self._store.release(verdict.leases)
            verdict.leases = ()
        if self._refusals is not None and hits and escalates:
            self._note_refusals(self._refusals, descriptors, client, verdict)
        return verdict

    def _list_asks(
        self,
        domain: str,
        descriptors: Sequence[Descriptor],
        hits: int,
        charge: bool = False,
        longest: float = inf,
        line: str | None = None,
    ) -> tuple[list[Match | None], list[Ask], list[int], frozenset[OnLimit]]:
        """What is found, what counters are asked, for which descriptor each, and whether rules defer or queue."""
        rules = self._rules()
        if rules is not self._counted:
            self._counted = rules
            self.usage.forget_gone(rules)
        matches = rules.find_all(domain, descriptors)
        counting = choose_counting(descriptors, matches)
        if line is not None and not any(match is not None and name_counter(*match) == line for match in counting):
            line = None  # the rules have become others
        asks: list[Ask] = []
        owners: list[int] = []
        delayed = _AT_ONCE
        for index, match in enumerate(counting):
            if match is None:
                continue
            weight = descriptors[index].hits
            patience = longest if line is None or name_counter(*match) == line else 0.0
            self._make_asks(asks, match, hits if weight is None else weight, charge, patience)
            wish = match.rule.on_limit
            if wish is _DEFER or wish is _QUEUE:
                delayed |= {wish}
            while len(owners) < len(asks):
                owners.append(index)
        if not asks and self._unknown is not None and domain not in rules.domains:
            self._unknown.note(domain, rules.domains)
        return matches, asks, owners, delayed

    async def _ask(self, asks: Sequence[Ask]) -> list[Decision]:
        if self._decide_now is not None:
            return self._decide_now(asks)
        return await self._store.decide(asks) if asks else []

    async def keep(
        self,
        domain: str,
        descriptors: Sequence[Descriptor],
        hits: int = 1,
        client: Client = None,
        counts: bool = False,
    ) -> Verdict:
        """Say whether a request may be kept for later: not if a limit refuses it that rejects, or one never admits it.
        If it may, `retry_after` tells when those that defer have room. `counts` is for one that is kept by now: its
        arrival is counted, and nothing else; if it is refused after all, it is not to be kept.

        Raises as `decide`."""
        if self.guarded:
            entry = await self.enter(descriptors, 0, client)
            if not entry.allowed:
                return entry
        matches, asks, owners, _ = self._list_asks(domain, descriptors, hits)
        arriving = [index for index, ask in enumerate(asks) if counts_arrivals(ask)]
        network = find_client_network(client, descriptors)
        arrivals = [make_arrival(asks[index], network) for index in arriving]
        looks = await self._look([*asks, *arrivals])
        concerned = [*asks, *(asks[index] for index in arriving)]
        refusing = [
            not look.admitted and (rejects(ask.rule) or (look.retry_after == inf and not ask.rule.observes))
            for ask, look in zip(concerned, looks, strict=True)
        ]
        if counts and not any(refusing):
            taken = await self._ask(arrivals)
            looks[len(asks) :] = taken
            refusing[len(asks) :] = [not decision.admitted for decision in taken]
        if any(refusing):
            return await self._refuse_wholly(matches, [*asks, *arrivals], owners, arriving, looks, False)
        verdict = self._conclude(matches, owners, [*map(make_look, asks)], looks[: len(asks)])
        return replace(verdict, allowed=True, leases=())

    async def _look(self, asks: Sequence[Ask]) -> list[Decision]:
        looks = await self._ask([*map(make_look, asks)])
        return [weigh(ask, look) for ask, look in zip(asks, looks, strict=True)]

    async def _decide_wholly(
        self, matches: list[Match | None], asks: list[Ask], owners: list[int], network: str | None, waiting: bool
    ) -> Verdict:
        """Charge all limits, or none. Where it may be kept for later, that it has come counts for its `network`."""
        arriving = [index for index, ask in enumerate(asks) if counts_arrivals(ask)]
        if waiting or network is None:
            arriving = []
        everything = [*asks, *(make_arrival(asks[index], network or "") for index in arriving)]
        looks = await self._look(everything)
        if not all(look.admitted or ask.rule.observes for ask, look in zip(everything, looks, strict=True)):
            return await self._refuse_wholly(matches, everything, owners, arriving, looks, waiting)
        decisions = await self._ask(everything)
        return self._conclude_wholly(matches, asks, owners, arriving, decisions)

    async def _refuse_wholly(
        self,
        matches: list[Match | None],
        asks: Sequence[Ask],
        owners: list[int],
        arriving: list[int],
        looks: list[Decision],
        waiting: bool,
    ) -> Verdict:
        """The verdict about a request that was only looked at. Limits that refuse it are asked in earnest: that takes
        nothing of them, and they count it as refused."""
        refused = [index for index, look in enumerate(looks) if not look.admitted and not asks[index].rule.observes]
        earnest = [index for index in refused if is_to_be_told(asks[index], waiting)]
        decisions = [*looks]
        for index, decision in zip(earnest, await self._ask([asks[index] for index in earnest]), strict=True):
            if not decision.admitted:  # else there is room since just now, and for the next one
                decisions[index] = decision
        counted = () if waiting else refused
        told = [ask if index in counted else make_look(ask) for index, ask in enumerate(asks[: len(owners)])]
        return self._conclude_wholly(matches, told, owners, arriving, decisions)

    def _conclude_wholly(
        self,
        matches: list[Match | None],
        asks: Sequence[Ask],
        owners: list[int],
        arriving: list[int],
        decisions: list[Decision],
    ) -> Verdict:
        """As `_conclude`; what is said of arrivals is said of their limits, and counted where nothing else is."""
        told = [*asks]
        for index, decision in zip(arriving, decisions[len(asks) :], strict=True):
            counted = not decision.admitted and decisions[index].admitted
            told.append(asks[index]._replace(hits=max(asks[index].hits, 1) if counted else 0))
        freed = [decision._replace(delay=0.0) for decision in decisions[len(asks) :]]
        owning = [*owners, *(owners[index] for index in arriving)]
        return self._conclude(matches, owning, told, [*decisions[: len(asks)], *freed])

    async def _decide_behind(
        self,
        domain: str,
        descriptors: Sequence[Descriptor],
        hits: int,
        charge: bool,
        client: Client,
        size: int,
        escalates: bool,
        longest: float,
        judge: Judge | None,
        line: str | None,
    ) -> Verdict:
        entry = await self.enter(descriptors, hits, client, size)
        if not entry.allowed:
            return entry
        try:
            verdict = await self._decide(domain, descriptors, hits, charge, client, escalates, longest, judge, line)
        except BaseException:
            await self.release(entry)
            raise
        return await self.conclude(entry, verdict)

    async def conclude(self, entry: Verdict, verdict: Verdict) -> Verdict:
        """What is decided about a request that has entered: if it is allowed, it holds what both hold."""
        if not entry.leases:
            return verdict
        if verdict.allowed:
            return replace(verdict, leases=verdict.leases + entry.leases)
        await self.release(entry)
        return verdict

    @staticmethod
    def _note_refusals(refusals: Refusals, descriptors: Sequence[Descriptor], client: Client, verdict: Verdict) -> None:
        for descriptor, status in zip(descriptors, verdict.statuses, strict=True):
            rule = status.rule
            # Who waits for his turn instead is not refused; of whom no counter could be asked, or only one that many
            # share, nobody knows what he did.
            if status.allowed or rule is None or not rule.escalate or rule.on_limit is not OnLimit.REJECT:
                continue
            if isinstance(status.decision, Unanswered | Crowded):
                continue
            # Of other entries nobody vouches that they are an address because they look like one: a client writes its
            # key or header as it likes, and a limit that many share says nothing of any one of them.
            told = find_client(descriptor)
            if told is not None:
                refusals.note(rule, client if isinstance(client, str) else _find_whole(client or (), told))

    def find_flight(self, name: str) -> Rule | None:
        """The IP rule of this name that limits requests in flight."""
        return None if self._gate is None else self._gate.find_flight(name)

    @property
    def counts_well(self) -> bool:
        """Whether its counters can be asked; if not, each rule says what happens."""
        return not isinstance(self._store, Failover) or self._store.state is State.CLOSED

    async def release(self, verdict: Verdict) -> None:
        """Say that the request has ended."""
        if verdict.leases:
            await self._store.release(verdict.leases)

    async def renew(self, verdict: Verdict, anew: bool = False) -> bool:
        """Say that the request is still in flight; whether it had lost no place. Who knows for sure that it is has it
        take such a place `anew`."""
        return not verdict.leases or await self._store.renew(verdict.leases, anew)

    def count_deferred(self, verdict: Verdict) -> None:
        """Say that a request which was refused is kept, to be replayed."""
        for allowed, rule, limit, _, _ in verdict.statuses:
            if not allowed and rule is not None and limit is not None:
                self.usage.find_counts(rule, limit, limit is rule.concurrency).deferred += 1

    def _make_asks(self, asks: list[Ask], match: Match, hits: int, charge: bool, longest: float) -> None:
        rule, key = match
        if rule.limit is not None:
            slack = self._find_slack(rule, rule.limit)
            asks.append(new(Ask, (rule, rule.limit, key, hits, slack, "", charge, longest, 0)))
        if rule.concurrency is not None:
            lease = name_lease()
            slack = self._find_slack(rule, rule.concurrency)
            asks.append(Ask(rule, rule.concurrency, key, min(hits, 1), slack, lease))

    def _find_slack(self, rule: Rule, limit: Limit) -> int:
        """How many hits beyond the limit are tolerated now."""
        if rule.mode is _HARD:
            return 0
        if rule.mode is Mode.SOFT:
            return widen(limit, rule.overshoot or 0)
        if rule.mode is Mode.ELASTIC and self.pressure.has_room(rule.priority):
            return BOUNDLESS if rule.overshoot is None else widen(limit, rule.overshoot)
        return 0

    def _conclude_one(self, ask: Ask, decision: Decision) -> Verdict:
        """As `_conclude` does for one descriptor and one of its limits, which is what most requests ask."""
        status = self._judge(ask, decision)
        rule, _, _, hits, _, lease, _, _, _ = ask
        admitted, _, wait, _, turn, _ = decision
        held = (ask,) if admitted and lease and hits > 0 else ()
        if rule.observes:
            return Verdict(True, (status,), 0.0, 0.0, held)
        return Verdict(True, (status,), 0.0, turn, held) if admitted else Verdict(False, (status,), wait, 0.0, held)

    def _conclude(
        self, matches: list[Match | None], owners: list[int], asks: list[Ask], decisions: list[Decision]
    ) -> Verdict:
        statuses = [new(Status, (True, None if match is None else match.rule, None, None, "")) for match in matches]
        allowed, retry_after, delay = True, 0.0, 0.0
        held: list[Ask] = []
        for position, decision in enumerate(decisions):
            index, ask = owners[position], asks[position]
            status = self._judge(ask, decision)
            if statuses[index].decision is None or _says_more(status, statuses[index]):
                statuses[index] = status
            admitted, _, wait, _, turn, _ = decision
            taken = admitted and ask.lease != "" and ask.hits > 0
            if taken:
                held.append(ask)
            if (admitted and not wait and not turn) or ask.rule.observes:
                continue
            allowed = allowed and admitted
            if not taken:  # a place that a refused request has got is given back
                retry_after = max(retry_after, wait)
            delay = max(delay, turn)
        if allowed:
            return Verdict(True, tuple(statuses), 0.0, delay, tuple(held))
        return Verdict(False, tuple(statuses), retry_after, 0.0, tuple(held))

    def _judge(self, ask: Ask, decision: Decision) -> Status:
        rule, limit, key, hits, _, lease, _, _, _ = ask
        counts = self.usage.find_counts(rule, limit, lease != "")
        counts.record(key, hits, decision)
        return new(Status, (decision.admitted or rule.observes, rule, limit, decision, key))


def _find_whole(addresses: tuple[str, ...], told: str) -> str:
    """The one address that is told as this block; the block where there are several, or none."""
    whole = {each for each in addresses if each != told and find_culprit(each) == find_culprit(told)}
    return whole.pop() if len(whole) == 1 else told


def _refuse(passage: Passage, concerned: Sequence[bool]) -> Verdict:
    """The verdict about a request that IP rules refuse: by those descriptors that tell of the client."""
    assert passage.decision is not None
    refusing = Status(False, passage.rule, passage.limit, passage.decision, passage.key)
    statuses = tuple(refusing if each else Status(True) for each in concerned)
    return Verdict(False, statuses, passage.decision.retry_after, 0.0, blocked=passage.blocked)


def _says_more(one: Status, other: Status) -> bool:
    """Whether a status is worth more to who asked: a refusal first, of these one that is his own doing, the longest of
    them; then what is nearly used."""
    assert one.decision is not None
    assert other.decision is not None
    if one.allowed != other.allowed:
        return not one.allowed
    if not one.allowed:
        crowded = isinstance(one.decision, Crowded)
        if crowded is not isinstance(other.decision, Crowded):
            return not crowded
        return one.decision.retry_after > other.decision.retry_after
    return one.decision.remaining < other.decision.remaining
