"""What the memory store keeps, for how long, and what it forgets when there is no room."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from math import inf
from random import Random

import pytest

from netlimit.l7.decision import Decision
from netlimit.l7.limit import Algorithm, Limit, Refill
from netlimit.l7.memory.budget import KEY_BYTES, Budget
from netlimit.l7.memory.counter import FEW, Clock, Counter, steady_clock
from netlimit.l7.memory.leases import Leases
from netlimit.l7.memory.log import _FEW_ENTRIES, SlidingWindowLog
from netlimit.l7.memory.shares import find_shares
from netlimit.l7.memory.store import MemoryStore, make_counter
from netlimit.l7.rules import Rule
from netlimit.l7.store import Ask
from tests.l7.counting import SECOND, moment

LIMITS = [
    *(Limit(4, 60, algorithm) for algorithm in Algorithm),
    Limit(4, 60, Algorithm.TOKEN_BUCKET, refill=Refill.INTERVAL),
    Limit(4, 60, Algorithm.SLIDING_WINDOW_LOG, count_refused=False),
]
every = pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: f"{limit.algorithm}-{limit.refill}")


class Kept:
    """A counter with a clock that the test sets; its sweeps are counted."""

    def __init__(self, limit: Limit, keys: int = 100) -> None:
        self.now = moment("1:00:00")
        self.limit = limit
        self.counter: Counter = make_counter(limit, Clock(lambda: self.now, 0), keys)
        self.sweeps = 0
        sweep = self.counter._sweep

        def note(now: int) -> None:
            self.sweeps += 1
            sweep(now)

        self.counter._sweep = note  # type: ignore[method-assign]

    def hit(self, key: str) -> bool:
        return self.counter.hit(key).admitted

    def use_up(self, *keys: str) -> None:
        for key in keys:
            assert [self.hit(key) for _ in range(5)] == [True] * 4 + [False]

    def flood(self, newcomers: int, name: str = "newcomer") -> list[bool]:
        return [self.hit(f"{name} {number}") for number in range(newcomers)]


class TestRoom:
    @every
    def test_there_are_never_more_keys_than_there_may_be(self, limit: Limit) -> None:
        kept = Kept(limit)
        for number in range(1000):
            kept.hit(f"key {number}")
            assert len(kept.counter) <= 101  # one more is the crowd's

    @every
    def test_whoever_is_over_the_limit_stays_so_in_a_flood_of_new_keys(self, limit: Limit) -> None:
        kept = Kept(limit)
        greedy = [f"greedy {number}" for number in range(60)]
        kept.use_up(*greedy)
        assert all(kept.flood(2000))
        assert not any(kept.hit(key) for key in greedy)

    @every
    @pytest.mark.parametrize(("used", "weight"), [(1, 4), (2, 3), (3, 2)])
    def test_so_does_one_whose_requests_weigh_more_than_it_has_left(self, limit: Limit, used: int, weight: int) -> None:
        kept = Kept(limit)
        greedy = [f"greedy {number}" for number in range(60)]
        for key in greedy:
            assert [kept.hit(key) for _ in range(used)] == [True] * used
            assert not kept.counter.hit(key, weight).admitted
        assert all(kept.flood(2000))
        assert not any(kept.counter.hit(key, weight).admitted for key in greedy)

    @every
    def test_and_it_does_where_the_amount_is_another_by_then(self, limit: Limit) -> None:
        counters = Counters(keys=100)
        large = replace(limit, amount=8, seconds=86_400)
        assert counters.weigh(large, 5, 5) == [True, False]
        larger = replace(large, amount=9)
        for number in range(1000):
            counters.weigh(larger, 1, key=f"newcomer {number}")
        assert counters.weigh(larger, 5) == [False]

    @every
    def test_and_it_does_where_the_clock_is_set(self, limit: Limit) -> None:
        counters = Counters(keys=100)
        large = replace(limit, amount=8, seconds=86_400)
        assert counters.weigh(large, 5, 5) == [True, False]
        counters.store.set_origin(3 * SECOND)
        for number in range(1000):
            counters.weigh(large, 1, key=f"newcomer {number}")
        assert counters.weigh(large, 5) == [False]

    @every
    def test_who_asks_for_more_than_there_ever_is_takes_no_room_for_that(self, limit: Limit) -> None:
        kept = Kept(limit)
        for number in range(100):
            kept.hit(f"heavy {number}")
            assert not kept.counter.hit(f"heavy {number}", 5).admitted or limit.count_refused
        if limit.algorithm is not Algorithm.SLIDING_WINDOW_LOG:
            assert all(kept.flood(2000))

    @pytest.mark.parametrize("charged", [0, 20])
    def test_whose_turn_comes_too_late_in_a_leaky_bucket_stays_so(self, charged: int) -> None:
        """Also where what is refused counts, as Envoy wants it."""
        kept = Kept(Limit(100, 100, Algorithm.LEAKY_BUCKET))
        passed = [kept.counter.hit("greedy", longest=5.0).admitted for _ in range(20)]
        assert passed == [True] * 6 + [False] * 14
        assert not any(kept.counter.hit("greedy", charge=True, longest=5.0).admitted for _ in range(charged))
        assert all(kept.flood(2000))
        assert not kept.counter.hit("greedy", longest=5.0).admitted
        assert kept.counter.hit("greedy", longest=6.0 + charged).admitted
        kept.now += 50 * SECOND
        assert all(kept.flood(2000, "later"))
        assert len(kept.counter) <= 101

    @every
    @pytest.mark.parametrize("seed", range(20))
    def test_what_is_refused_stays_refused_whatever_comes_between(self, limit: Limit, seed: int) -> None:
        """Whatever it weighs, tolerates, or was charged before; and refusals of its own never look like a crowd's."""
        chance = Random(seed)
        kept = Kept(replace(limit, amount=chance.randrange(1, 30), seconds=3600))
        if seed % 2:
            kept.counter.shares = find_shares("remote_address,path")
        capacity, own = kept.counter.limit.capacity, "9.9.1.9|/mine"
        kept.hit(own)
        for _ in range(20):
            kept.now += chance.choice([0, SECOND, 60 * SECOND])
            weight, slack = chance.randrange(1, capacity + 1), chance.choice([0, 0, 3])
            longest = chance.choice([inf, chance.random() * 5000])
            answer = kept.counter.hit(own, weight, slack, chance.random() < 0.2, longest)
            has_place = kept.counter.has_place(own)
            for _ in range(chance.randrange(300)):
                network = chance.choice(["9.9.1", f"{chance.randrange(200)}.1.1"])
                kept.counter.hit(f"{network}.1|/{chance.random()}", chance.randrange(1, 4))
            if not answer.admitted and has_place:
                again = kept.counter.hit(own, weight, slack, longest=longest)
                assert (again.admitted, type(again)) == (False, Decision)

    @every
    def test_what_was_refused_is_noted_of_those_alone_that_are_kept(self, limit: Limit) -> None:
        kept = Kept(limit, keys=2000)
        for number in range(20_000):
            kept.hit(f"key {number}")
            kept.counter.hit(f"key {number}", 4)
            if number % 500 == 499:
                kept.now += 120 * SECOND
        assert len(kept.counter._wants) <= 2000 * 5 // 4 + FEW

    @every
    def test_newcomers_share_a_counter_when_nearly_all_are_over_the_limit(self, limit: Limit) -> None:
        kept = Kept(limit)
        kept.use_up(*(f"greedy {number}" for number in range(100)))
        assert kept.flood(20) == [True] * 4 + [False] * 16
        assert not any(kept.hit(f"greedy {number}") for number in range(100))

    @every
    def test_the_crowd_is_over_when_those_before_it_are(self, limit: Limit) -> None:
        kept = Kept(limit)
        kept.use_up(*(f"greedy {number}" for number in range(100)))
        assert kept.flood(20) == [True] * 4 + [False] * 16
        kept.now += 120 * SECOND
        assert all(kept.flood(20, "other"))
        assert len(kept.counter) <= 21


class TestTime:
    @pytest.mark.parametrize("lasting", [0, 1, 25_000], ids=["all have ended", "all but one", "half of them"])
    def test_leases_that_have_ended_go_in_less_time_than_they_took_to_come(self, lasting: int) -> None:
        """However many end at once: who asks next waits for it, and everybody with him."""
        number = 50_000
        kept = Kept(Limit(number, 30, Algorithm.CONCURRENCY))
        coming = self._take(kept, number - lasting)
        kept.now += SECOND
        coming += self._take(kept, lasting)
        kept.now += 29 * SECOND
        assert self._take(kept, 1) < coming
        assert self._take(kept, number - lasting - 1) < 5 * coming

    def test_one_of_a_heavy_request_neither(self) -> None:
        kept = Kept(Limit(50_000, 30, Algorithm.CONCURRENCY))
        coming = self._take(kept, 50_000)
        kept.now += 30 * SECOND
        assert kept.counter.hit("many", 50_000).admitted
        kept.now += 30 * SECOND
        assert self._take(kept, 1) < coming

    def test_leases_that_end_one_by_one_take_no_longer(self) -> None:
        number = 50_000
        kept = Kept(Limit(number, 30, Algorithm.CONCURRENCY))
        step = 30 * SECOND // number
        coming = self._take(kept, number, step)
        assert self._take(kept, number, step) < 5 * coming

    def _take(self, kept: Kept, number: int, step: int = 0) -> float:
        """The seconds in which so many leases come, and whatever has ended goes."""
        began = time.perf_counter()
        for _ in range(number):
            kept.now += step
            assert kept.hit("many")
        return time.perf_counter() - began

    @every
    def test_what_makes_no_difference_is_swept(self, limit: Limit) -> None:
        kept = Kept(limit)
        kept.use_up(*(f"key {number}" for number in range(50)))
        kept.counter.sweep()
        assert len(kept.counter) >= 50
        kept.now += 120 * SECOND
        kept.counter.sweep()
        assert len(kept.counter) == 0

    @every
    def test_what_makes_a_difference_is_not(self, limit: Limit) -> None:
        kept = Kept(limit)
        kept.use_up("greedy")
        kept.now += 14 * SECOND
        kept.counter.sweep()
        assert kept.hit("greedy") is False

    @every
    def test_while_keys_come_and_go_few_are_kept(self, limit: Limit) -> None:
        kept = Kept(limit, keys=2**18)
        for number in range(8 * FEW):
            kept.now += SECOND // 2
            kept.hit(f"key {number}")
        assert len(kept.counter) <= 2 * FEW

    @every
    def test_growing_to_many_keys_takes_few_sweeps(self, limit: Limit) -> None:
        kept = Kept(limit, keys=2**18)
        kept.flood(16 * FEW)
        assert len(kept.counter) == 16 * FEW
        assert kept.sweeps <= 5

    @every
    @pytest.mark.parametrize("greedy", [0, 70, 76, 99, 100])
    def test_in_a_flood_a_sweep_makes_room_for_many(self, limit: Limit, greedy: int) -> None:
        kept = Kept(limit)
        kept.use_up(*(f"greedy {number}" for number in range(greedy)))
        kept.sweeps = 0
        kept.flood(2500)
        assert kept.sweeps <= 2500 / 25 + 1

    @pytest.mark.parametrize("hits", [1, 3, 100])
    def test_a_log_is_no_longer_than_its_limit_however_much_is_refused(self, hits: int) -> None:
        log = SlidingWindowLog(Limit(4, 60, Algorithm.SLIDING_WINDOW_LOG), steady_clock(), 100)
        for _ in range(50):
            log.hit("greedy", hits)
        assert log._logs["greedy"].size == 4

    @pytest.mark.parametrize("amount", [20_000, 20_000_000])
    def test_a_heavy_request_takes_no_more_than_a_light_one(self, amount: int) -> None:
        """Whoever may ask says how much his requests weigh, and while one is counted nobody else is answered."""
        log = SlidingWindowLog(Limit(amount, 60, Algorithm.SLIDING_WINDOW_LOG), steady_clock(), 100)
        assert log.hit("heavy", amount - 5).admitted
        for _ in range(5):
            assert log.hit("heavy").admitted
        for _ in range(100):
            assert not log.hit("heavy", 2**32 - 1).admitted
            assert not log.hit("heavy", amount // 2).admitted
        assert log._logs["heavy"].cost <= 10


class TestClock:
    @every
    def test_a_clock_set_back_keeps_nobody_for_ever(self, limit: Limit) -> None:
        kept = Kept(limit)
        kept.use_up(*(f"greedy {number}" for number in range(100)))
        kept.flood(3)
        kept.now -= 3600 * SECOND
        for number in range(100):
            kept.hit(f"greedy {number}")
        kept.now += 121 * SECOND
        assert all(kept.hit(f"greedy {number}") for number in range(100))

    def test_nobody_sets_the_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = steady_clock()
        before = clock.read() + clock.origin
        assert abs(before - time.time_ns()) < 60 * SECOND
        monkeypatch.setattr(time, "time_ns", lambda: 0)
        monkeypatch.setattr(time, "time", lambda: 0.0)
        assert 0 <= clock.read() + clock.origin - before < 60 * SECOND


class Counters:
    """A memory store whose rules change."""

    def __init__(self, keys: int = 2**18) -> None:
        self.now = moment("1:00:00")
        self.store = MemoryStore(Clock(lambda: self.now, 0), keys)
        self._leases = count()

    def weigh(self, limit: Limit, *weights: int, key: str = "key") -> list[bool]:
        flying = limit.algorithm is Algorithm.CONCURRENCY
        rule = Rule("test", "weighed", None if flying else limit, limit if flying else None)
        asks = [Ask(rule, limit, key, weight, lease=f"{next(self._leases)}" * flying) for weight in weights]
        return [decision.admitted for decision in self.store.decide_now(asks)]

    def hits(self, limit: Limit, number: int, name: str = "rule") -> list[bool]:
        flying = limit.algorithm is Algorithm.CONCURRENCY
        rule = Rule("test", name, None if flying else limit, limit if flying else None)
        asks = [Ask(rule, limit, "key", lease=f"{next(self._leases)}" * flying) for _ in range(number)]
        return [decision.admitted for decision in self.store.decide_now(asks)]


class TestChanges:
    @every
    def test_a_limit_that_is_raised_goes_on(self, limit: Limit) -> None:
        counters = Counters()
        assert counters.hits(limit, 3) == [True] * 3
        assert counters.hits(replace(limit, amount=9), 7) == [True] * 6 + [False]

    @every
    def test_a_limit_that_is_lowered_goes_on(self, limit: Limit) -> None:
        counters = Counters()
        assert counters.hits(limit, 3) == [True] * 3
        assert counters.hits(replace(limit, amount=2), 1) == [False]

    @every
    def test_a_limit_that_goes_down_and_up_gives_nothing_anew(self, limit: Limit) -> None:
        counters, long = Counters(), replace(limit, seconds=86_400)
        admitted = 0
        for turn in range(10):
            admitted += sum(counters.hits(replace(long, amount=3 if turn % 2 else 6), 9))
            counters.now += SECOND
        assert admitted == 6

    @every
    def test_the_same_limit_read_again_goes_on(self, limit: Limit) -> None:
        counters = Counters()
        assert counters.hits(limit, 3) == [True] * 3
        assert counters.hits(replace(limit), 3) == [True, False, False]

    @every
    def test_another_unit_begins_anew(self, limit: Limit) -> None:
        if limit.algorithm is Algorithm.CONCURRENCY:
            return  # how long a lease lasts changes nothing of what is in flight
        counters = Counters()
        assert counters.hits(limit, 5) == [True] * 4 + [False]
        assert counters.hits(replace(limit, seconds=61), 5) == [True] * 4 + [False]

    def test_another_algorithm_begins_anew_under_the_same_name(self) -> None:
        counters = Counters()
        rates = [limit for limit in LIMITS if limit.algorithm is not Algorithm.CONCURRENCY]
        for limit in rates:
            assert counters.hits(limit, 5) == [True] * 4 + [False], limit
        for limit in rates:
            assert counters.hits(limit, 1) == [False], "what it has counted it goes on from"

    def test_another_burst_begins_anew(self) -> None:
        counters = Counters()
        bucket = Limit(4, 60, Algorithm.TOKEN_BUCKET, burst=2)
        assert counters.hits(bucket, 3) == [True] * 2 + [False]
        assert counters.hits(replace(bucket, burst=3), 4) == [True] * 3 + [False]

    def test_a_full_burst_stays_used_up_when_the_rate_changes(self) -> None:
        counters = Counters()
        bucket = Limit(60, 60, Algorithm.GCRA, burst=5)
        assert counters.hits(bucket, 6) == [True] * 5 + [False]
        faster = replace(bucket, amount=120)
        assert counters.hits(faster, 1) == [False]
        counters.now += SECOND // 2
        assert counters.hits(faster, 2) == [True, False]


@pytest.mark.parametrize(
    "other", [Limit(100, 3600), Limit(3, 60, Algorithm.GCRA), Limit(4, 60, Algorithm.GCRA, burst=2)]
)
def test_limits_of_one_name_that_count_in_different_ways_hold_all(other: Limit) -> None:
    """Of two middlewares, one inside the other, that have one store."""
    now = moment("1:00:00")
    store = MemoryStore(Clock(lambda: now, 0))
    first, second = Rule("app", "user", Limit(3, 60)), Rule("app", "user", other)
    admitted = 0
    for _ in range(50):
        inner = store.decide_now([Ask(first, first.limit or other, "ann", 1)])
        outer = store.decide_now([Ask(second, other, "ann", 1)])
        admitted += inner[0].admitted and outer[0].admitted
    assert admitted == min(3, other.burst or other.amount)


def test_what_counts_in_former_ways_takes_no_room_for_ever() -> None:
    store = MemoryStore()
    for seconds in range(1, 300):
        rule = Rule("app", "user", Limit(3, seconds))
        assert rule.limit is not None
        store.decide_now([Ask(rule, rule.limit, "ann", 1)])
    assert len(store._aside) <= 64


def test_a_lease_that_has_ended_leaves_nothing_where_it_is_renewed() -> None:
    kept = Kept(Limit(4, 60, Algorithm.CONCURRENCY))
    assert kept.hit("key")
    kept.now += 61 * SECOND
    assert isinstance(kept.counter, Leases)
    assert not kept.counter.renew("key", "\0000")
    kept.counter.sweep()
    assert len(kept.counter) == 0


def test_many_leases_that_have_ended_hold_up_nobody() -> None:
    kept = Kept(Limit(100_000, 60, Algorithm.CONCURRENCY))
    for _ in range(100_000):
        assert kept.hit("key")
    kept.now += 61 * SECOND
    before = time.thread_time()
    assert kept.hit("key")
    assert time.thread_time() - before < 2  # it took ten times as much


class TestForgetting:
    def _names(self, count: int) -> list[str]:
        return [f"rule {number}" for number in range(count)]

    def test_counters_that_count_nothing_are_forgotten(self) -> None:
        counters = Counters()
        for name in self._names(2 * FEW):
            counters.hits(LIMITS[0], 1, name)
        assert len(counters.store._counters) == 2 * FEW
        counters.now += 120 * SECOND
        counters.hits(LIMITS[0], 1, "another")
        assert len(counters.store._counters) == 1

    def test_those_that_count_something_are_not(self) -> None:
        counters = Counters()
        for name in self._names(3 * FEW):
            counters.hits(LIMITS[0], 4, name)
        assert all(counters.hits(LIMITS[0], 1, name) == [False] for name in self._names(3 * FEW))

    def test_many_counters_take_few_looks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looks = []
        forget: Callable[[MemoryStore], None] = MemoryStore._forget_idle
        monkeypatch.setattr(MemoryStore, "_forget_idle", lambda self: looks.append(forget(self)))
        counters = Counters()
        for name in self._names(8 * FEW):
            counters.hits(LIMITS[0], 1, name)
        assert len(looks) <= 4


class TestBudget:
    @pytest.mark.parametrize("limit", [Limit(3, 3600, each) for each in Algorithm], ids=str)
    def test_all_counters_together_have_so_much(self, limit: Limit) -> None:
        budget = Budget(4 * 2**20)
        counters = [make_counter(limit, keys=2**18, budget=budget) for _ in range(8)]
        for number in range(20_000):
            for counter in counters:
                counter.hit(f"key {number}")
        assert sum(map(len, counters)) * KEY_BYTES <= 1.5 * 4 * 2**20

    def test_who_is_over_its_limit_stays_so(self) -> None:
        budget = Budget(2**20)
        greedy, flooded = (make_counter(Limit(3, 3600), budget=budget) for _ in range(2))
        for _ in range(3):
            assert greedy.hit("greedy").admitted
        for number in range(50_000):
            flooded.hit(f"key {number}")
            greedy.hit(f"key {number}")
        assert not greedy.hit("greedy").admitted

    def test_a_small_counter_gets_its_share_of_what_a_large_one_holds(self) -> None:
        budget = Budget(2**20)
        large, small = (make_counter(Limit(3, 3600), budget=budget) for _ in range(2))
        for number in range(50_000):
            large.hit(f"key {number}")
        for number in range(800):
            small.hit(f"key {number}")
        assert len(small) == 800

    def test_the_times_of_logs_count_too(self) -> None:
        budget = Budget(2**20)
        log = make_counter(Limit(1000, 3600, Algorithm.SLIDING_WINDOW_LOG), budget=budget)
        assert isinstance(log, SlidingWindowLog)
        for number in range(200_000):
            log.hit(f"key {number % 400}")
        assert sum(map(len, log._logs.values())) <= _FEW_ENTRIES + 1000

    def test_where_all_is_taken_by_who_is_over_a_new_key_takes_no_look_at_all_others(self) -> None:
        budget = Budget(24 * 2**20)
        algorithms = Algorithm.SLIDING_WINDOW_LOG, Algorithm.GCRA, Algorithm.LEAKY_BUCKET, Algorithm.FIXED_WINDOW
        flooded = [make_counter(Limit(5, 86_400, each), budget=budget) for each in algorithms]
        for number in range(100_000):
            flooded[number % 4].hit(f"key {number}", 5, charge=True)
        late = make_counter(Limit(5, 86_400, Algorithm.CONCURRENCY), budget=budget)
        before = time.thread_time()
        for number in range(4000):
            for counter in (*flooded, late):
                counter.hit(f"other {number}")
        assert (
            time.thread_time() - before < 0.5
        )  # it took 0.9 s, and hundreds of times as much with ten times the memory

    def test_who_can_give_nothing_back_gets_no_more_for_it(self) -> None:
        budget = Budget(2**20)
        large, small = (make_counter(Limit(1, 3600), budget=budget, keys=1000) for _ in range(2))
        for number in range(1000):
            large.hit(f"key {number}")
        for number in range(2000):
            large.hit(f"other {number}")
            large.shrink()
        assert len(large) <= 1001
        assert small.hit("key").admitted
