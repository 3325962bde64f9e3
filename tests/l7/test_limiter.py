"""The limiter: what rules, modes and counters make of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from itertools import product
from math import inf
from typing import Any, TypeVar

import pytest

from netlimit.l7 import usage as usage_module
from netlimit.l7.decision import Decision, Unanswered
from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.limiter import Limiter, Status, Verdict
from netlimit.l7.memory.counter import Clock
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.pressure import Pressure
from netlimit.l7.rules import Descriptor, Entry, Mode, Node, OnLimit, Rule, RuleSet
from netlimit.l7.store import Ask
from tests.l7.counting import SECOND

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


class Desk:
    """A limiter over memory with a clock that stands, and one rule a key in the domain "api"."""

    def __init__(self, *rules: Rule) -> None:
        self.now = 1_000_000 * SECOND
        self.rules = RuleSet({"api": Node(default={rule.name: Node(rule) for rule in rules})})
        self.pressure = Pressure(read=lambda: 0.0)
        self.store = MemoryStore(Clock(lambda: self.now, 0))
        self.limiter = Limiter(lambda: self.rules, self.store, self.pressure)

    def decide(self, *keys: str, hits: int = 1, limits: Iterable[Limit | None] = (), value: str = "alice") -> Verdict:
        wanted = [*limits, *[None] * len(keys)]
        descriptors = [Descriptor((Entry(key, value),), limit=limit) for key, limit in zip(keys, wanted, strict=False)]
        return run(self.limiter.decide("api", descriptors, hits))

    def allowed(self, key: str, times: int) -> list[bool]:
        return [self.decide(key).allowed for _ in range(times)]


def rule(name: str, amount: int = 3, **fields: Any) -> Rule:
    return Rule("api", name, Limit(amount, 60), **fields)


def test_what_no_rule_names_passes() -> None:
    desk = Desk(rule("user"))
    verdict = desk.decide("stranger")
    assert verdict.allowed
    assert verdict.statuses[0].rule is None
    assert run(desk.limiter.decide("elsewhere", [Descriptor((Entry("user", "alice"),))])).allowed


def test_a_status_for_each_descriptor_in_order() -> None:
    desk = Desk(rule("user", 1), rule("path", 5))
    desk.decide("user")
    verdict = desk.decide("path", "stranger", "user")
    assert [status.allowed for status in verdict.statuses] == [True, True, False]
    assert not verdict.allowed
    assert verdict.refusing is not None
    assert verdict.refusing.rule is not None
    assert verdict.refusing.rule.name == "user"


def test_retry_after_is_true_though_a_refused_request_used_up_another_limit() -> None:
    desk = Desk(rule("user", 1), Rule("api", "path", Limit(2, 3600)))
    desk.decide("user", "path")
    refused = desk.decide("user", "path")  # `path` admits it, and is used up by it
    assert not refused.allowed
    desk.now += int(refused.retry_after * SECOND) + 1
    assert desk.decide("user", "path").allowed


def test_who_asks_for_shared_limits_by_a_second_question_uses_up_nothing_of_them_when_refused() -> None:
    """As docs/limits.md has it."""
    at_once, after = Desk(rule("user", 1), rule("path", 5)), Desk(rule("user", 1), rule("path", 5))
    for _ in range(5):
        at_once.decide("user", "path")
        if after.decide("user").allowed:
            after.decide("path")
    assert not at_once.decide("path").allowed
    assert after.allowed("path", 5) == [True] * 4 + [False]


def test_hits_weigh_and_nothing_is_counted_to_look() -> None:
    desk = Desk(rule("user", 10))
    assert desk.decide("user", hits=0).statuses[0].decision.remaining == 10
    assert desk.decide("user", hits=8).allowed
    assert not desk.decide("user", hits=3).allowed
    assert desk.decide("user", hits=11).retry_after == inf


def test_a_descriptor_may_weigh_something_else_than_the_request() -> None:
    desk = Desk(rule("user", 10), rule("bytes", 1000))
    both = [Descriptor((Entry("user", "alice"),)), Descriptor((Entry("bytes", "alice"),), hits=900)]
    assert run(desk.limiter.decide("api", both)).allowed
    verdict = run(desk.limiter.decide("api", both))
    assert [status.allowed for status in verdict.statuses] == [True, False]


@pytest.mark.parametrize(("percent", "admitted"), [(0, 10), (10, 11), (25, 12), (100, 20), (150, 25)])
def test_a_soft_limit_goes_over_by_its_percentage(percent: int, admitted: int) -> None:
    desk = Desk(rule("user", 10, mode=Mode.SOFT, overshoot=percent))
    assert sum(desk.allowed("user", 50)) == admitted


def test_an_elastic_limit_goes_over_while_there_is_room() -> None:
    desk = Desk(rule("user", 3, mode=Mode.ELASTIC))
    assert desk.allowed("user", 10) == [True] * 10
    desk.pressure.signal(0.9)
    assert desk.allowed("user", 3) == [False] * 3
    desk.pressure.signal(None)
    assert desk.allowed("user", 3) == [True] * 3


def test_an_elastic_limit_may_have_a_ceiling() -> None:
    desk = Desk(rule("user", 10, mode=Mode.ELASTIC, overshoot=50))
    assert sum(desk.allowed("user", 50)) == 15


def test_the_lowest_priority_is_refused_first() -> None:
    names = {"batch": 10, "usual": 50, "urgent": 90}
    desk = Desk(*(rule(name, 0, mode=Mode.ELASTIC, priority=priority) for name, priority in names.items()))
    refused = []
    for pressure in (0.0, 0.2, 0.6, 0.95):
        desk.pressure.signal(pressure)
        refused.append([name for name in names if not desk.decide(name).allowed])
    assert refused == [[], ["batch"], ["batch", "usual"], ["batch", "usual", "urgent"]]


@pytest.mark.parametrize("fields", [{"mode": Mode.OBSERVE}, {"on_limit": OnLimit.OBSERVE}])
def test_who_only_observes_refuses_nothing_and_counts(fields: dict[str, Any]) -> None:
    desk = Desk(rule("user", 3, **fields))
    verdicts = [desk.decide("user") for _ in range(5)]
    assert all(verdict.allowed and verdict.retry_after == 0 for verdict in verdicts)
    assert [verdict.statuses[0].decision.admitted for verdict in verdicts] == [True] * 3 + [False] * 2
    held = desk.decide("user").statuses[0].rule
    counts = desk.limiter.usage.find_counts(held, held.limit)
    assert (counts.admitted, counts.refused, counts.observed) == (3, 0, 3)


def test_a_rule_that_is_replaced_is_not_counted() -> None:
    desk = Desk(rule("read", 1, alias="reads"), rule("special", 5, replaces=("reads",)))
    for _ in range(3):
        verdict = desk.decide("read", "special")
        assert verdict.allowed
        assert verdict.statuses[0].decision is None
    assert desk.allowed("read", 2) == [True, False]


def test_unlimited_is_without_limit() -> None:
    desk = Desk(Rule("api", "user", unlimited=True))
    verdict = desk.decide("user")
    assert verdict.allowed
    assert verdict.statuses[0].rule is not None
    assert verdict.statuses[0].decision is None


def test_what_is_unlimited_by_rate_has_its_limit_of_requests_in_flight() -> None:
    flight = Limit(2, 60, Algorithm.CONCURRENCY)
    desk = Desk(Rule("api", "user", concurrency=flight, unlimited=True))
    held = [desk.decide("user") for _ in range(2)]
    assert [verdict.allowed for verdict in held] == [True, True]
    refused = desk.decide("user")
    assert (refused.allowed, refused.statuses[0].limit) == (False, flight)
    run(desk.limiter.release(held[0]))
    assert desk.decide("user").allowed


def test_who_only_observes_refuses_nothing_though_as_many_limits_as_there_is_room_for_have_been_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usage_module, "MOST", 1)
    desk = Desk(rule("first"), rule("shadow", 1, mode=Mode.OBSERVE), rule("user", 1))
    desk.decide("first")
    assert all(desk.decide("shadow").statuses[0].allowed for _ in range(3))
    assert not [desk.decide("user") for _ in range(2)][1].allowed
    others = desk.limiter.usage.others
    assert (others.admitted, others.observed, others.refused) == (2, 2, 1)


def test_a_rule_that_has_gone_leaves_its_room_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_module, "MOST", 2)
    desk = Desk(rule("one"), rule("two"))
    desk.decide("one", "two")
    stays = rule("two")
    desk.rules = RuleSet({"api": Node(default={each.name: Node(each) for each in (stays, rule("three"))})})
    desk.decide("three", "two")
    counted = {counts.rule.name: counts.admitted for _, counts in desk.limiter.usage}
    assert counted == {"two": 2, "three": 1}


def test_a_request_may_bring_its_own_limit() -> None:
    desk = Desk(rule("user", 1))
    own = [Limit(2, 60)]
    assert [desk.decide("user", limits=own).allowed for _ in range(3)] == [True, True, False]
    assert desk.allowed("user", 2) == [True, False]  # the rule's own counter is another
    assert desk.decide("stranger", limits=own).allowed
    # As in Envoy's ratelimit; else who invents domains would have counters made for each.
    assert run(desk.limiter.decide("nowhere", [Descriptor((Entry("a", "b"),), limit=Limit(0, 1))])).allowed


class TestInFlight:
    def make_desk(self, lease: int = 30) -> Desk:
        return Desk(Rule("api", "user", None, Limit(2, lease, Algorithm.CONCURRENCY)), rule("path", 3))

    def test_leases_are_held_until_they_are_released(self) -> None:
        desk = self.make_desk()
        held = [desk.decide("user") for _ in range(3)]
        assert [verdict.allowed for verdict in held] == [True, True, False]
        assert [len(verdict.leases) for verdict in held] == [1, 1, 0]
        run(desk.limiter.release(held[0]))
        assert desk.allowed("user", 2) == [True, False]

    def test_a_refused_request_holds_none(self) -> None:
        desk = self.make_desk()
        held = [desk.decide("path", "user") for _ in range(2)]
        for verdict in held:
            run(desk.limiter.release(verdict))
        desk.decide("path")
        assert desk.decide("user", "path").leases == ()  # `path` refuses
        assert desk.allowed("user", 3) == [True, True, False]

    def test_they_end_by_themselves(self) -> None:
        desk = self.make_desk()
        desk.decide("user")
        desk.decide("user")
        desk.now += 30 * SECOND
        assert desk.decide("user").allowed

    def test_they_are_renewed(self) -> None:
        desk = self.make_desk()
        held = [desk.decide("user"), desk.decide("user")]
        desk.now += 20 * SECOND
        run(desk.limiter.renew(held[0]))
        desk.now += 10 * SECOND
        assert desk.allowed("user", 2) == [True, False]

    def test_one_that_came_before_the_lease_was_changed_counts_until_its_end(self) -> None:
        desk = self.make_desk()
        old = desk.decide("user")
        desk.rules = self.make_desk(lease=60).rules
        assert desk.allowed("user", 2) == [True, False]
        run(desk.limiter.renew(old))
        assert desk.allowed("user", 1) == [False]
        run(desk.limiter.release(old))
        assert desk.allowed("user", 2) == [True, False]

    def test_a_look_holds_none(self) -> None:
        assert self.make_desk().decide("user", hits=0).leases == ()

    def test_a_rule_may_limit_both(self) -> None:
        desk = Desk(Rule("api", "user", Limit(3, 60), Limit(2, 30, Algorithm.CONCURRENCY)))
        first = desk.decide("user")
        assert desk.decide("user").allowed
        third = desk.decide("user")
        assert not third.allowed
        assert third.refusing is not None
        assert third.refusing.limit is not None
        assert third.refusing.limit.algorithm is Algorithm.CONCURRENCY
        run(desk.limiter.release(first))
        fourth = desk.decide("user")
        assert fourth.refusing is not None
        assert fourth.refusing.limit == Limit(3, 60)


class TestChangedRules:
    def test_a_changed_amount_goes_on_from_the_count(self) -> None:
        desk = Desk(rule("user", 3))
        desk.allowed("user", 3)
        desk.rules = RuleSet({"api": Node(default={"user": Node(rule("user", 5))})})
        assert desk.allowed("user", 3) == [True, True, False]

    @pytest.mark.parametrize("algorithm", [a for a in Algorithm if a is not Algorithm.CONCURRENCY])
    def test_so_it_does_for_every_algorithm(self, algorithm: Algorithm) -> None:
        desk = Desk(Rule("api", "user", Limit(3, 60, algorithm)))
        desk.allowed("user", 3)
        desk.rules = RuleSet({"api": Node(default={"user": Node(Rule("api", "user", Limit(5, 60, algorithm)))})})
        assert desk.allowed("user", 3) == [True, True, False]

    @pytest.mark.parametrize("algorithm", [a for a in Algorithm if a is not Algorithm.CONCURRENCY])
    def test_another_algorithm_begins_anew(self, algorithm: Algorithm) -> None:
        desk = Desk(Rule("api", "user", Limit(3, 3600, Algorithm.FIXED_WINDOW)))
        desk.allowed("user", 3)
        desk.rules = RuleSet({"api": Node(default={"user": Node(Rule("api", "user", Limit(3, 60, algorithm)))})})
        assert desk.allowed("user", 4) == [True] * 3 + [False]

    def test_the_same_rules_read_again_change_nothing(self) -> None:
        desk = Desk(rule("user", 3))
        desk.allowed("user", 2)
        desk.rules = RuleSet({"api": Node(default={"user": Node(rule("user", 3))})})
        assert desk.allowed("user", 2) == [True, False]


def test_a_leaky_bucket_tells_when_it_is_a_requests_turn() -> None:
    desk = Desk(Rule("api", "user", Limit(1, 1, Algorithm.LEAKY_BUCKET, burst=3)))
    assert [desk.decide("user").delay for _ in range(4)] == [0, 1, 2, 0]


def test_those_that_refuse_agree_on_what_becomes_of_a_request() -> None:
    desk = Desk(rule("user", 0, on_limit=OnLimit.QUEUE), rule("path", 0, on_limit=OnLimit.DEFER), rule("host", 9))
    assert desk.decide("user", "host").on_limit is OnLimit.QUEUE
    assert desk.decide("path", "host").on_limit is OnLimit.DEFER
    assert desk.decide("user", "path").on_limit is OnLimit.REJECT


class Told:
    """A store that says what it is told to say, of every counter."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.released: list[Ask] = []

    async def decide(self, asks: Sequence[Ask]) -> list[Decision]:
        return [self.decision] * len(asks)

    async def release(self, asks: Sequence[Ask]) -> None:
        self.released += asks

    async def renew(self, asks: Sequence[Ask], anew: bool = False) -> bool:
        return True

    async def aclose(self) -> None:
        pass


class Forbidden(Limiter):
    """One that is to conclude in one of the two ways only."""

    def __init__(self, way: str, *args: Any) -> None:
        super().__init__(*args)
        setattr(self, way, self._refuse)

    def _refuse(self, *_: object) -> Verdict:
        raise AssertionError("This way is not to be taken.")


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine that waits for nothing returns; an event loop for each would take most of the time."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("It waits.")


DECISIONS = [
    kind(admitted, remaining, retry_after, 60.0, delay, over)
    for kind, admitted, remaining, retry_after, delay, over in product(
        (Decision, Unanswered), (True, False), (0, 3), (0.0, 5.0, inf), (0.0, 2.0), (False, True)
    )
]
COUNTED = ("admitted", "refused", "observed", "over", "near", "queued", "least", "keys")
BOUNDS: list[dict[str, Any]] = [{"limit": Limit(3, 60)}, {"concurrency": Limit(3, 60, Algorithm.CONCURRENCY)}]


@pytest.mark.parametrize("bound", BOUNDS, ids=["rate", "in flight"])
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("on_limit", list(OnLimit))
def test_one_limit_of_one_descriptor_is_concluded_as_several_are(
    bound: dict[str, Any], mode: Mode, on_limit: OnLimit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that finds nothing has the general way taken, and changes nothing else."""
    monkeypatch.setattr("netlimit.l7.limiter.name_lease", lambda: "a lease")
    held = Rule("api", "user", mode=mode, overshoot=50 if mode is Mode.SOFT else None, on_limit=on_limit, **bound)
    rules = RuleSet({"api": Node(default={"user": Node(held)})})
    calm = Pressure(read=lambda: 0.0)
    one, nothing = Descriptor((Entry("user", "alice"),)), Descriptor((Entry("stranger", "x"),))
    for decision, hits, judge in product(DECISIONS, (0, 2), (None, lambda _: False)):
        stores = Told(decision), Told(decision)
        alone = Forbidden("_conclude", lambda: rules, stores[0], calm)
        general = Forbidden("_conclude_one", lambda: rules, stores[1], calm)
        fast = finish(alone.decide("api", [one], hits, judge=judge))
        slow = finish(general.decide("api", [one, nothing], hits, judge=judge))
        assert slow.statuses[1:] == (Status(True),)
        slow.statuses = slow.statuses[:1]
        assert fast == slow, (decision, hits)
        assert fast.on_limit is slow.on_limit
        assert stores[0].released == stores[1].released
        counted = [
            [(name, [getattr(counts, each) for each in COUNTED]) for name, counts in limiter.usage]
            for limiter in (alone, general)
        ]
        assert counted[0] == counted[1]
