"""That whoever invents limits in his questions takes neither memory without end nor what others count."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterable, Sequence
from itertools import count

import pytest

from netlimit.l7.counters import open_counters
from netlimit.l7.decision import Crowded
from netlimit.l7.failover import Failover
from netlimit.l7.limit import UNITS, Algorithm, Limit
from netlimit.l7.limiter import Limiter, Verdict
from netlimit.l7.memory import brought
from netlimit.l7.memory.counter import Clock
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import LONGEST_KEY, Descriptor, Entry, Node, Rule, RuleSet
from netlimit.l7.store import Ask
from tests.l7.counting import SECOND, moment
from tests.ports import free_port

YEAR = UNITS["year"]
MEMORY = 8 * 2**20
HONEST = [Limit(3 + number, 60) for number in range(50)]


class Desk:
    """A limiter whose questions bring limits, and which has a rule of its own."""

    def __init__(self, memory: int = MEMORY) -> None:
        self.now = moment("1:00:00")
        self.store = MemoryStore(Clock(lambda: self.now, 0), memory=memory)
        rules = RuleSet({"web": Node(default={"user": Node(Rule("web", "user", Limit(5, 86_400)))})})
        self.limiter = Limiter(lambda: rules, self.store)
        self._numbers = count(1)

    def ask(self, *descriptors: Descriptor, hits: int = 1) -> Verdict:
        asking = self.limiter.decide("web", descriptors, hits, charge=True)
        try:
            asking.send(None)  # memory answers at once: a loop would take longer
        except StopIteration as answered:
            verdict: Verdict = answered.value
        return verdict

    def bring(self, limit: Limit, value: str = "alice", key: str = "route", hits: int = 1) -> bool:
        return self.ask(Descriptor((Entry(key, value),), limit=limit), hits=hits).allowed

    def invent(self, number: int, seconds: int = YEAR, keys: int = 1, amount: int = 1) -> None:
        """So many limits that nobody has brought before, each with so many keys."""
        for _ in range(number):
            limit = Limit(amount * 10**6 + next(self._numbers), seconds)
            for key in range(keys):
                self.bring(limit, f"{key}")

    def use_up(self, limits: Iterable[Limit]) -> list[int]:
        """How many are admitted of each."""
        return [sum(self.bring(limit) for _ in range(limit.amount + 2)) for limit in limits]


def amounts(limits: Sequence[Limit]) -> list[int]:
    return [limit.amount for limit in limits]


def test_thousands_of_limits_are_counted_each_by_itself() -> None:
    desk = Desk(256 * 2**20)
    limits = [Limit(number, 3600) for number in range(1, 3001)]
    for limit in limits:
        assert desk.bring(limit, hits=limit.amount)
    assert not any(desk.bring(limit) for limit in limits)


def test_inventing_limits_takes_no_memory_without_end() -> None:
    desk = Desk()
    desk.invent(100)
    tracemalloc.start()
    desk.invent(8000, keys=2)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < MEMORY


def test_nobody_waits_for_a_look_at_all_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    free = brought.Brought._free_idle

    def note(self: brought.Brought, now: int) -> None:
        looks.append(len(self._places))
        free(self, now)

    monkeypatch.setattr(brought.Brought, "_free_idle", note)
    desk = Desk()
    for _ in range(5000):
        desk.invent(1)
        desk.now += SECOND // 100
    assert len(looks) <= 51, "one a second"
    assert max(looks) < 200, "of a few"


def test_who_brought_a_limit_before_goes_on_counting() -> None:
    desk = Desk()
    assert [sum(desk.bring(limit) for _ in range(2)) for limit in HONEST] == [2] * len(HONEST)
    desk.invent(5000, keys=3)
    assert [2 + admitted for admitted in desk.use_up(HONEST)] == amounts(HONEST)
    desk.now += 60 * SECOND
    assert desk.use_up(HONEST) == amounts(HONEST)


def test_a_limit_of_a_second_keeps_its_place_while_it_counts_nothing() -> None:
    desk, limit = Desk(), Limit(4, 1)
    assert desk.use_up([limit]) == [4]
    for _ in range(300):
        desk.now += 10 * SECOND
        desk.invent(20, seconds=1)
        desk.invent(20)
        assert desk.use_up([limit]) == [4]


def test_the_keys_of_a_limit_that_was_there_before_stay_its_own() -> None:
    desk, limit = Desk(), Limit(3, 86_400)
    users = [f"user {number}" for number in range(1000)]
    assert all(desk.bring(limit, user) for user in users)
    desk.invent(40, keys=500)  # within their limits
    desk.invent(40, keys=500, amount=0)
    desk.invent(3000, keys=20)
    for user in users:
        assert [desk.bring(limit, user) for _ in range(3)] == [True, True, False]


def test_rules_notice_nothing() -> None:
    desk = Desk()
    users = [Descriptor((Entry("user", f"{number}"),)) for number in range(9000)]
    assert all(desk.ask(user, hits=4).allowed for user in users)
    desk.invent(3000, keys=20)
    assert all(desk.ask(user).allowed for user in users)
    assert not any(desk.ask(user).allowed for user in users)


def test_the_keys_of_a_limit_that_has_no_more_room_are_counted_together() -> None:
    """They are not forgotten, as those of rules are: nothing passes for free."""
    desk, limit = Desk(), Limit(4, 86_400)
    desk.invent(50, keys=40)
    users = [f"user {number}" for number in range(200)]
    passed = dict.fromkeys(users, 0)
    for _ in range(6):
        for user in users:
            passed[user] += desk.bring(limit, user)
    assert max(passed.values()) <= 4
    assert sum(number == 4 for number in passed.values()) >= 16
    desk.now += 86_400 * SECOND
    assert desk.use_up([limit]) == [4]


class TestBeyond:
    """What is brought when all places are taken."""

    @pytest.mark.parametrize("unit", UNITS)
    def test_nothing_passes_for_free(self, unit: str) -> None:
        desk = Desk()
        desk.invent(1000)
        limits = [Limit(amount, UNITS[unit]) for amount in (2, 30, 400)]
        for limit, admitted in zip(limits, desk.use_up(limits), strict=True):
            assert admitted <= limit.amount
            assert not desk.bring(limit)
            assert not desk.bring(limit, hits=limit.amount)

    def test_a_few_more_have_what_they_are_promised(self) -> None:
        desk = Desk(256 * 2**20)
        desk.invent(3500, seconds=86_400)
        assert sum(desk.use_up(HONEST)) > sum(amounts(HONEST)) * 0.8
        desk.now += 60 * SECOND
        assert sum(desk.use_up(HONEST)) > sum(amounts(HONEST)) * 0.8

    def test_a_limit_of_nothing_refuses_all_and_one_of_any_length_counts(self) -> None:
        desk = Desk()
        desk.invent(1000)
        assert not desk.bring(Limit(0, 60))
        assert desk.use_up([Limit(7, 100 * YEAR), Limit(7, 90)]) == [7, 7]

    def test_it_says_what_is_left_and_that_others_count_too(self) -> None:
        desk = Desk()
        desk.invent(1000)
        (status,) = desk.ask(Descriptor((Entry("route", "alice"),), limit=Limit(9, 60)), hits=4).statuses
        assert isinstance(status.decision, Crowded)
        assert (status.decision.admitted, status.decision.remaining, status.decision.over) == (True, 5, False)
        assert 0 < status.decision.reset_after <= 60
        (status,) = desk.ask(Descriptor((Entry("route", "alice"),), limit=Limit(9, 60)), hits=6).statuses
        assert status.decision is not None
        assert (status.decision.admitted, status.decision.remaining) == (False, 0)
        assert status.decision.retry_after > 0

    def test_there_is_place_again_when_others_count_nothing_and_have_not_been_asked_for_an_hour(self) -> None:
        desk = Desk()
        desk.invent(1000, seconds=60)
        desk.now += (brought.IDLE_SECONDS // 2) * SECOND
        assert self._is_crowded(desk)
        desk.now += (brought.IDLE_SECONDS // 2) * SECOND
        assert not self._is_crowded(desk)

    def test_a_place_that_is_free_again_lets_nothing_pass_twice(self) -> None:
        desk, limit = Desk(), Limit(6, 86_400)
        desk.invent(1000, seconds=60)
        assert desk.use_up([limit]) == [6]
        desk.now += brought.IDLE_SECONDS * SECOND
        assert desk.use_up([limit]) == [0]
        desk.now += 86_400 * SECOND
        assert desk.use_up([limit]) == [6]

    def _is_crowded(self, desk: Desk) -> bool:
        (status,) = desk.ask(Descriptor((Entry("route", "bob"),), limit=Limit(77, 60))).statuses
        return isinstance(status.decision, Crowded)

    def test_the_time_of_day_may_be_set(self) -> None:
        desk = Desk()
        desk.invent(1000)
        desk.use_up(HONEST)
        desk.store.set_origin(7 * 3600 * SECOND)
        assert not any(desk.bring(limit) for limit in HONEST)

    def test_where_redis_counts_its_word_is_enough(self) -> None:
        desk = Desk()
        rule = Rule("web", "override:5/year:route", Limit(5, YEAR))
        assert desk.store.has_place(Ask(rule, Limit(5, YEAR), "alice"))
        desk.invent(1000)
        assert desk.store.has_place(Ask(rule, Limit(5, YEAR), "alice"))
        other = Rule("web", "override:6/year:route", Limit(6, YEAR))
        assert not desk.store.has_place(Ask(other, Limit(6, YEAR), "alice"))


def test_algorithms_that_only_applications_bring_count_each_by_itself() -> None:
    desk = Desk()
    limits = [Limit(3, 60, each) for each in Algorithm if each is not Algorithm.CONCURRENCY]
    assert desk.use_up(limits) == [3] * len(limits)
    assert desk.use_up(limits) == [0] * len(limits)


@pytest.mark.parametrize("keys", [["k" * 60_000], ["remote_address", "k" * 60_000], ["key"] * 500])
def test_keys_without_end_make_no_names_without_end(keys: list[str]) -> None:
    entries = tuple(Entry(key, "192.0.2.1") for key in keys)
    rules = RuleSet({"web": Node()})
    (match,) = rules.find_all("web", [Descriptor(entries, limit=Limit(5, 60))])
    (other,) = rules.find_all("web", [Descriptor((*entries[:-1], Entry(keys[-1] + "x")), limit=Limit(5, 60))])
    assert match is not None
    assert other is not None
    assert len(match.rule.name) <= LONGEST_KEY + len("override:4294967295/3153600000 seconds:")
    assert match.rule.name != other.rule.name
    assert match.rule.name.startswith("override:5/minute:")


def test_the_same_limit_brought_again_is_the_same_rule() -> None:
    """By that Redis' scripts, and what waits to be merged, are found again."""
    rules = RuleSet({"web": Node()})
    one, two = (rules.find_all("web", [Descriptor((Entry("a", each),), limit=Limit(5, 60))])[0] for each in "xy")
    assert one is not None
    assert two is not None
    assert one.rule is two.rule
    assert one.rule.limit is two.rule.limit


def test_wants_of_what_was_refused_are_bounded_too() -> None:
    desk = Desk()
    tracemalloc.start()
    for turn in range(700):
        for amount in (2, 3, 4):
            desk.bring(Limit(amount, 1), f"{turn}", hits=amount)
            desk.bring(Limit(amount, 1), f"{turn}", hits=amount)
        desk.now += SECOND
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < 2**16


def test_with_redis_away_inventing_limits_takes_as_little() -> None:
    url = f"redis://127.0.0.1:{free_port()}?probe_ms=60000"

    async def flood() -> int:
        store = open_counters(url, MEMORY)
        assert isinstance(store, Failover)
        rules = RuleSet({"web": Node()})
        limiter = Limiter(lambda: rules, store)
        taken = 0
        for number in range(8000):
            if number == 100:
                tracemalloc.start()
            descriptor = Descriptor((Entry("route", "alice"),), limit=Limit(10**6 + number, YEAR))
            await limiter.decide("web", [descriptor], charge=True)
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        await store.aclose()
        return taken

    assert asyncio.run(flood()) < MEMORY + 8 * 2**20  # with the plans of 4,096 limits
