"""Requests that wait for their turn. Time leaps here: nothing takes as long as it says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from math import inf
from typing import Any

import pytest

from netlimit.errors import CountersUnavailable
from netlimit.l7.addresses import AddressRules
from netlimit.l7.breaker import State
from netlimit.l7.counters import open_counters
from netlimit.l7.decision import Decision
from netlimit.l7.failover import Failover
from netlimit.l7.gate import Gate
from netlimit.l7.limit import Algorithm, Limit, parse_limit
from netlimit.l7.limiter import Limiter, Verdict
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.queueing import Queues
from netlimit.l7.rules import Descriptor, Entry, OnFailure, OnLimit, Rule
from netlimit.l7.store import Ask
from netlimit.rules import parse_rule
from tests.l7.leaping import leaping_clock, now, run
from tests.l7.redis.servers import Server
from tests.l7.verdicts import describe, make_rule, make_rules
from tests.ports import free_port
from tests.unit.strategies import NOW, keep

TEN_A_SECOND = Limit(10, 1, Algorithm.GCRA, burst=1)


class Leaving:
    """Counters elsewhere that may go away."""

    state = State.CLOSED
    losses = 0
    away = False

    def __init__(self) -> None:
        self.store = MemoryStore(leaping_clock())

    async def attempt(self, asks: Sequence[Ask]) -> Sequence[Decision | CountersUnavailable]:
        return [CountersUnavailable("They are away.") for _ in asks] if self.away else await self.store.decide(asks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def queue(name: str, limit: Limit | None, max_wait: float = 30.0, **others: object) -> Rule:
    return make_rule(name, limit, on_limit=OnLimit.QUEUE, max_wait=max_wait, **others)


class Door:
    """Queues before rules, and a record of who got in when."""

    def __init__(self, *rules: Rule, most: int = 1000, most_of_one: int = 100) -> None:
        self.rules = make_rules(*rules)
        self.addresses = AddressRules()
        store = MemoryStore(leaping_clock())
        self.limiter = Limiter(lambda: self.rules, store, gate=Gate(lambda: self.addresses, store))
        self.queues = Queues(self.limiter, lambda: self.rules, most, most_of_one)
        self.names = [rule.name for rule in rules]
        self.entered: list[tuple[float, object]] = []
        self.refused: list[tuple[float, object]] = []

    async def ask(
        self,
        label: object = None,
        hits: int = 1,
        who: str = "alice",
        names: str = "",
        client: str | None = None,
        longest: float = inf,
    ) -> Verdict:
        named = names.split() or self.names
        # What is called `all` counts everybody together.
        descriptors = [Descriptor((Entry(name, "everybody" if name == "all" else who),)) for name in named]
        verdict = await self.queues.decide("test", descriptors, hits, client=client, longest=longest)
        (self.entered if verdict.allowed else self.refused).append((round(now(), 6), label))
        return verdict

    def start(self, *labels: object, **others: object) -> list[asyncio.Task[Verdict]]:
        return [asyncio.create_task(self.ask(label, **others)) for label in labels]  # type: ignore[arg-type]

    def has_forgotten_all(self) -> bool:
        return self.queues.waiting == 0 and not self.queues._lines


class TestOutflow:
    def test_in_order_and_at_the_rate(self) -> None:
        async def main() -> None:
            door = Door(queue("user", TEN_A_SECOND))
            await asyncio.gather(*door.start(*range(50)))
            assert door.entered == [(pytest.approx(number / 10, abs=1e-4), number) for number in range(50)]
            assert door.has_forgotten_all()

        run(main())

    @pytest.mark.parametrize("algorithm", [algorithm for algorithm in Algorithm if algorithm != "concurrency"])
    def test_never_over_the_limit_whatever_the_algorithm_and_no_slower(self, algorithm: Algorithm) -> None:
        async def main() -> None:
            burst = 4 if algorithm in ("token_bucket", "leaky_bucket", "gcra") else None
            counts = algorithm is not Algorithm.SLIDING_WINDOW_LOG
            door = Door(queue("user", Limit(4, 1, algorithm, burst, count_refused=counts), 60))
            tasks = []
            for number in range(60):
                tasks += door.start(number)
                await asyncio.sleep(0.01)
            await asyncio.gather(*tasks)
            times = [time for time, _ in door.entered]
            assert [number for _, number in door.entered] == [*range(60)]
            most = 8 if algorithm is Algorithm.FIXED_WINDOW or burst else 4  # a burst, or two windows, meet a second
            assert all(times[index + most] - times[index] >= 0.999 for index in range(60 - most))
            assert 13 <= times[-1] <= 19 if algorithm is Algorithm.SLIDING_WINDOW_COUNTER else 13 <= times[-1] <= 15.1

        run(main())

    @pytest.mark.parametrize("algorithm", [Algorithm.GCRA, Algorithm.LEAKY_BUCKET])
    def test_nobody_waits_for_longer_than_who_asks_does(self, algorithm: Algorithm) -> None:
        async def main() -> None:
            limit = Limit(1, 1, algorithm, burst=5 if algorithm is Algorithm.LEAKY_BUCKET else 1)
            door = Door(queue("line", limit))
            verdicts = await asyncio.gather(*door.start(1, 2, 3, 4, longest=1.5))
            assert [verdict.allowed for verdict in verdicts] == [True, True, False, False]
            assert now() < 2
            assert all(verdict.retry_after > 1 for verdict in verdicts[2:])
            assert door.has_forgotten_all()

        run(main())

    def test_a_leaky_bucket_delays_each_to_its_turn(self) -> None:
        async def main() -> None:
            door = Door(make_rule("user", Limit(4, 60, Algorithm.LEAKY_BUCKET)))
            await asyncio.gather(*door.start(*range(5)))
            assert door.entered == [(15 * number, number) for number in range(4)]
            assert door.refused == [(0, 4)]
            assert door.queues.waiting == 0

        run(main())

    def test_who_cannot_wait_for_the_bucket_leaves_its_rate_to_others(self) -> None:
        async def main() -> None:
            door = Door(make_rule("line", Limit(10, 1, Algorithm.LEAKY_BUCKET, burst=60)))
            tasks = []
            for number in range(300):
                tasks += door.start(number, longest=0.5)
                await asyncio.sleep(1 / 15)
            await asyncio.gather(*tasks)
            times = [time for time, _ in door.entered]
            for second in range(20):
                assert 9 <= sum(second <= time < second + 1 for time in times) <= 11

        run(main())

    @pytest.mark.parametrize("longest", [0.0, -0.001])
    def test_who_need_not_wait_passes_though_he_cannot(self, longest: float) -> None:
        """By a clock that goes on meanwhile: nothing is left when the bucket is asked."""

        async def main() -> None:
            rules = make_rules(make_rule("line", Limit(10, 1, Algorithm.LEAKY_BUCKET, burst=60)))
            queues = Queues(Limiter(lambda: rules, MemoryStore()), lambda: rules)
            verdict = await queues.decide("test", describe("line"), longest=longest)
            assert verdict.allowed
            assert not (await queues.decide("test", describe("line"), longest=longest)).allowed

        asyncio.run(main())

    def test_who_cannot_wait_is_refused_at_once_and_those_behind_him_wait(self) -> None:
        async def main() -> None:
            door = Door(queue("line", Limit(10, 1, Algorithm.LEAKY_BUCKET, burst=20), 1.5))
            tasks = door.start(*range(22))
            await asyncio.sleep(0)
            tasks += door.start("impatient", longest=0.5)
            await asyncio.sleep(0)
            tasks += door.start("a", "b", "c")
            await asyncio.gather(*tasks)
            assert [label for _, label in door.refused] == ["impatient"]
            assert {"a", "b", "c"} <= {label for _, label in door.entered}
            assert door.has_forgotten_all()

        run(main())

    def test_whom_there_is_no_room_for_leaves_the_bucket_to_others(self) -> None:
        async def main() -> None:
            door = Door(make_rule("user", Limit(1, 1, Algorithm.LEAKY_BUCKET, burst=60)), most=2)
            tasks = door.start(*range(30))
            await asyncio.gather(*tasks)
            assert [label for _, label in door.entered] == [0, 1, 2]
            (last,) = await asyncio.gather(*door.start("last"))
            assert (last.allowed, now()) == (True, 3)

        run(main())

    def test_keys_do_not_wait_for_each_other(self) -> None:
        async def main() -> None:
            door = Door(queue("user", parse_limit("1/minute"), 600))
            tasks = door.start("a1", "a2", "a3", who="alice") + door.start("b1", who="bob")
            await asyncio.gather(*tasks)
            assert door.entered == [(0, "a1"), (0, "b1"), (60, "a2"), (120, "a3")]

        run(main())

    def test_who_comes_when_there_is_room_again_does_not_overtake_who_waits(self) -> None:
        async def main() -> None:
            door = Door(queue("user", Limit(1, 1, Algorithm.GCRA)))
            first = door.start(0, 1, 2)
            await asyncio.sleep(0.9999999)
            latecomers = [door.start(number) for number in (3, 4)]
            await asyncio.gather(*first, *[task for tasks in latecomers for task in tasks])
            assert [label for _, label in door.entered] == [0, 1, 2, 3, 4]

        run(main())

    def test_the_heavy_is_not_starved_by_the_light(self) -> None:
        async def main() -> None:
            door = Door(queue("user", Limit(10, 10, Algorithm.GCRA, burst=10)))
            tasks = door.start("all", hits=10) + door.start("heavy", hits=10)
            for number in range(20):
                tasks += door.start(number)
                await asyncio.sleep(0.5)
            await asyncio.gather(*tasks)
            assert [label for _, label in door.entered] == ["all", "heavy", *range(20)]

        run(main())


class TestSeveralLines:
    def test_a_crowd_at_one_counter_keeps_nobody_from_another(self) -> None:
        async def main() -> None:
            door = Door(queue("user", parse_limit("1/minute"), 600), queue("all", parse_limit("1000/second"), 600))
            crowd = door.start(*range(5), who="alice", names="user all")
            await asyncio.sleep(1)
            await door.ask("bob", who="bob", names="user all")
            assert door.entered == [(0, 0), (1, "bob")]
            await asyncio.gather(*crowd)

        run(main())

    @pytest.mark.parametrize("shared", [TEN_A_SECOND, Limit(10, 1), Limit(600, 60, Algorithm.SLIDING_WINDOW_LOG)])
    def test_who_cannot_get_in_yet_by_another_limit_keeps_nobody_from_a_shared_one(self, shared: Limit) -> None:
        async def main() -> None:
            own = Limit(4, 60, Algorithm.GCRA, burst=1)
            door = Door(queue("user", own, 60), queue("all", shared, 60))
            for who in ("mallory", "trudy"):
                await door.ask("first", who=who, names="user")
            crowd = [
                *door.start(*range(8), names="all"),  # others use it up
                *door.start(*(f"mallory {number}" for number in range(3)), who="mallory", names="user all"),
                *door.start(*(f"trudy {number}" for number in range(3)), who="trudy", names="user all"),
            ]
            await asyncio.sleep(0.05)
            waits = []

            async def ask(number: int) -> None:
                began = now()
                assert (await door.ask(number, names="all")).allowed
                waits.append(now() - began)

            tasks = []
            for number in range(500):
                tasks.append(asyncio.create_task(ask(number)))
                await asyncio.sleep(0.125)
            await asyncio.gather(*tasks, *crowd)
            assert max(waits) < 2
            turns = {str(label): time for time, label in door.entered}
            for who in ("mallory", "trudy"):
                got = [turns[f"{who} {number}"] for number in range(3)]
                assert got == sorted(got)
                assert got[0] < 16, "who is passed over gets in when its own limit lets it"
                assert got[2] < 47
            assert door.has_forgotten_all()

        run(main())

    def test_those_who_are_passed_over_fill_no_shared_line(self) -> None:
        async def main() -> None:
            door = Door(queue("user", parse_limit("1/hour"), 1e9), queue("all", TEN_A_SECOND, 1e9), most_of_one=5)
            crowd = []
            for who in ("mallory", "trudy"):
                await door.ask("first", who=who, names="user")
                crowd += door.start(*range(5), who=who, names="user all")
                await asyncio.sleep(0)
            verdicts = await asyncio.gather(*(door.ask(names="all") for _ in range(5)))
            assert [verdict.allowed for verdict in verdicts] == [True] * 5
            assert now() < 1
            for task in crowd:
                task.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
            assert door.has_forgotten_all()

        run(main())

    @pytest.mark.parametrize("hits", [1, 3])
    def test_who_needs_two_busy_counters_at_once_gets_in_among_those_who_need_one(self, hits: int) -> None:
        async def main() -> None:
            limit = Limit(10, 1, Algorithm.GCRA, burst=3)
            door = Door(queue("a", limit, 600), queue("b", limit, 600))

            async def come(name: str, pause: float) -> None:
                await asyncio.sleep(pause)
                await asyncio.gather(*door.start(*["before"] * 5, names=name))
                tasks = []
                for _ in range(300):
                    tasks += door.start("one", names=name)
                    await asyncio.sleep(0.1)
                await asyncio.gather(*tasks)

            crowds = [asyncio.create_task(come("a", 0)), asyncio.create_task(come("b", 0.05))]
            for number in range(20):
                await asyncio.sleep(1.013)
                began = now()
                await door.ask(("both", number), hits=hits, names="a b")
                assert now() - began < 10
            await asyncio.gather(*crowds)
            assert door.has_forgotten_all()

        run(main())

    def test_a_place_that_gets_free_is_kept_for_who_needs_a_moment_for_another_limit(self) -> None:
        async def main() -> None:
            one = Limit(1, 600, Algorithm.CONCURRENCY)
            door = Door(queue("door", None, 60, concurrency=one), queue("all", TEN_A_SECOND, 60))
            held = await door.ask("held", names="door")
            busy = door.start(*range(30), names="all")
            await asyncio.sleep(0)
            early = door.start("early", names="door")
            await asyncio.sleep(0)
            both = door.start("both", names="door all")
            later = door.start("later", names="door")
            await asyncio.sleep(1.03)
            for leaving in (early, both, later):
                await door.queues.release(held)
                (held,) = await asyncio.gather(*leaving)
            assert now() < 4
            await asyncio.gather(*busy)
            entered = [label for _, label in door.entered if not isinstance(label, int)]
            assert entered == ["held", "early", "both", "later"]
            assert door.has_forgotten_all()

        run(main())

    def test_nobody_waits_for_ever_whatever_lines_cross(self) -> None:
        async def main() -> None:
            chance = random.Random(7)
            names = ["a", "b", "c", "d"]
            door = Door(
                *(queue(name, Limit(2, 1, Algorithm.GCRA, burst=1 + index), 1e6) for index, name in enumerate(names))
            )
            tasks = []
            for number in range(300):
                wanted = " ".join(chance.sample(names, chance.randint(1, 4)))
                tasks += door.start(number, names=wanted, hits=1)
                await asyncio.sleep(chance.random())
            await asyncio.wait_for(asyncio.gather(*tasks), 10_000)
            assert len(door.entered) == 300
            assert door.has_forgotten_all()

        run(main())


class TestBounds:
    def test_whose_turn_comes_too_late_is_refused_at_once_and_told_when(self) -> None:
        async def main() -> None:
            door = Door(queue("user", Limit(1, 1, Algorithm.GCRA), 3.5))
            tasks = door.start(*range(6))
            await asyncio.sleep(0.5)
            assert door.refused == [(0, 4), (0, 5)]
            assert tasks[4].result().retry_after == pytest.approx(4, abs=0.01)
            assert tasks[4].result().refusing is not None
            await asyncio.sleep(tasks[4].result().retry_after - 0.5)
            assert (await door.ask("again")).allowed
            assert [label for _, label in door.entered] == [0, 1, 2, 3, "again"]
            assert now() == pytest.approx(4, abs=0.01)

        run(main())

    def test_windows_let_in_as_many_at_once_as_they_hold(self) -> None:
        async def main() -> None:
            door = Door(queue("user", parse_limit("3/minute"), 61))
            await asyncio.gather(*door.start(*range(8)))
            assert door.refused == [(0, 6), (0, 7)]
            assert [time for time, _ in door.entered] == [0, 0, 0, 60, 60, 60]

        run(main())

    def test_nobody_waits_longer_than_allowed_for_what_nobody_knew(self) -> None:
        async def main() -> None:
            door = Door(queue("door", None, 5, concurrency=Limit(1, 60, Algorithm.CONCURRENCY)))
            held = await door.ask("held")
            verdict = await door.ask("late")
            assert (verdict.allowed, now()) == (False, 5)
            assert 0 < verdict.retry_after <= 55
            await door.queues.release(held)
            assert (await door.ask("later")).allowed

        run(main())

    def test_lines_and_their_sum_are_bounded(self) -> None:
        async def main() -> None:
            door = Door(queue("user", parse_limit("1/minute"), 1e6), most=5, most_of_one=3)
            tasks = door.start(*range(6)) + door.start(*range(6, 12), who="bob")
            await asyncio.sleep(0)
            await asyncio.sleep(1)
            assert door.queues.waiting == 5
            assert [label for _, label in door.refused] == [4, 5, 9, 10, 11]
            assert tasks[4].result().retry_after == pytest.approx(4 * 60, abs=1)
            await asyncio.gather(*tasks)
            assert len(door.entered) == 2 + 5

        run(main())

    def test_what_never_fits_does_not_wait(self) -> None:
        async def main() -> None:
            door = Door(queue("user", parse_limit("5/minute")))
            verdict = await door.ask(hits=6)
            assert (verdict.allowed, verdict.retry_after, now()) == (False, inf, 0)
            assert door.has_forgotten_all()

        run(main())

    def test_where_another_rule_refuses_nobody_waits(self) -> None:
        async def main() -> None:
            door = Door(queue("user", parse_limit("1/minute")), make_rule("all", parse_limit("1/minute")))
            await door.ask()
            verdict = await door.ask()
            assert (verdict.allowed, now()) == (False, 0)

        run(main())

    def test_delays_are_bounded_together_with_lines(self) -> None:
        async def main() -> None:
            door = Door(make_rule("user", Limit(4, 60, Algorithm.LEAKY_BUCKET)), most=2)
            tasks = door.start(*range(4))
            await asyncio.gather(*tasks)
            assert door.entered == [(0, 0), (15, 1), (30, 2)]
            assert (door.refused, tasks[3].result().retry_after) == ([(0, 3)], 45)

        run(main())


class TestGivingUp:
    @pytest.mark.parametrize("gone", [1, 2, 3])
    def test_who_goes_leaves_his_place_to_the_next(self, gone: int) -> None:
        async def main() -> None:
            door = Door(queue("user", Limit(1, 1, Algorithm.GCRA)))
            tasks = door.start(*range(5))
            await asyncio.sleep(0.5)
            tasks[gone].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            rest = [number for number in range(5) if number != gone]
            assert door.entered == [(pytest.approx(turn, abs=1e-4), number) for turn, number in enumerate(rest)]
            assert door.has_forgotten_all()

        run(main())

    def test_patience_can_end_and_the_place_is_free(self) -> None:
        async def main() -> None:
            door = Door(queue("user", Limit(1, 1, Algorithm.GCRA)))
            await door.ask(0)

            async def lose_patience(waiting: object) -> Verdict:
                waiting.close()  # type: ignore[attr-defined]
                raise TimeoutError

            with pytest.raises(TimeoutError):
                await door.queues.decide("test", describe("user"), 1, lose_patience)
            assert door.has_forgotten_all()

        run(main())

    def test_who_goes_while_delayed_gives_back_what_he_holds(self) -> None:
        async def main() -> None:
            door = Door(
                make_rule("a", Limit(1, 60, Algorithm.LEAKY_BUCKET, burst=9), Limit(2, 60, Algorithm.CONCURRENCY))
            )
            held = await door.ask()
            (task,) = door.start(1)
            await asyncio.sleep(1)
            assert not (await door.ask(2)).allowed  # two are in flight
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert (await door.limiter.decide("test", describe("a"))).allowed
            await door.queues.release(held)

        run(main())


class TestRequestsInFlight:
    def test_who_waits_is_up_as_soon_as_one_ends(self) -> None:
        async def main() -> None:
            door = Door(queue("door", None, concurrency=Limit(2, 60, Algorithm.CONCURRENCY)))

            async def visit(number: int) -> None:
                verdict = await door.ask(number)
                await asyncio.sleep(0.1)
                await door.queues.release(verdict)

            await asyncio.gather(*(visit(number) for number in range(10)))
            assert door.entered == [(pytest.approx(number // 2 / 10), number) for number in range(10)]

        run(main())

    def test_one_that_ends_elsewhere_is_seen_in_time(self) -> None:
        async def main() -> None:
            door = Door(queue("door", None, concurrency=Limit(1, 60, Algorithm.CONCURRENCY)))
            held = await door.ask()
            (task,) = door.start(1)
            await asyncio.sleep(3.1)
            await door.limiter.release(held)
            await task
            assert now() == pytest.approx(3.2)

        run(main())

    def test_who_waits_for_a_moment_only_gets_the_place_that_gets_free_meanwhile(self) -> None:
        async def main() -> None:
            door = Door(queue("door", None, concurrency=Limit(1, 60, Algorithm.CONCURRENCY)))
            held = await door.ask()
            (task,) = door.start(1, longest=0.15)
            await asyncio.sleep(0.1)
            await door.queues.release(held)
            assert (await task).allowed
            assert now() == pytest.approx(0.1)

        run(main())


@pytest.mark.parametrize("rules", [(queue("user", Limit(1000, 1, Algorithm.GCRA)),), ()], ids=["another", "none"])
def test_who_waits_hears_of_other_rules_and_so_does_who_comes(rules: tuple[Rule, ...]) -> None:
    async def main() -> None:
        door = Door(queue("user", Limit(2, 60, Algorithm.GCRA, burst=1), 300.0))
        waiting = door.start(*range(6))
        await asyncio.sleep(3)
        assert door.entered == [(0.0, 0)]
        door.rules = make_rules(*rules)
        waiting += door.start("newcomer")
        await asyncio.gather(*waiting)
        assert {label for _, label in door.entered} == {*range(6), "newcomer"}
        assert max(when for when, _ in door.entered) <= 4.1
        assert door.has_forgotten_all()

    run(main())


def test_who_waits_hears_of_other_rules_though_nobody_comes() -> None:
    async def main() -> None:
        door = Door(queue("user", Limit(2, 60, Algorithm.GCRA, burst=1), 300.0))
        waiting = door.start(*range(6))
        await asyncio.sleep(3)
        door.rules = make_rules(queue("user", Limit(2, 60, Algorithm.GCRA, burst=1), 1.0))
        await asyncio.gather(*waiting)
        assert [label for _, label in door.entered] == [0]
        assert max(when for when, _ in door.refused) <= 4.1
        assert door.has_forgotten_all()

    run(main())


@pytest.mark.parametrize("limit", [TEN_A_SECOND, Limit(1, 600, Algorithm.CONCURRENCY)])
def test_who_waits_counts_with_his_other_limits_once_he_is_served(limit: Limit) -> None:
    """Or three slow requests would use up for all what they share, five times a second."""

    async def main() -> None:
        counted = (None, limit) if limit.algorithm is Algorithm.CONCURRENCY else (limit, None)
        rule = make_rule("all", *counted, on_limit=OnLimit.QUEUE, max_wait=300.0)
        door = Door(rule, make_rule("user", Limit(20, 3600)))
        held = await door.ask("first")
        waiting = door.start(*range(3))
        for task in waiting:
            await asyncio.sleep(10)
            await door.queues.release(held)
            held = await task
            assert held.allowed
        await door.queues.release(held)
        (status,) = (await door.ask(hits=0, names="user")).statuses
        assert status.decision is not None
        assert status.decision.remaining == 16

    run(main())


def test_who_is_too_heavy_is_refused_at_once_and_keeps_nobody_out() -> None:
    """What a request weighs a client may choose."""

    async def main() -> None:
        door = Door(queue("all", Limit(10, 1, Algorithm.GCRA, burst=2), max_wait=3.0))
        waiting = door.start(*range(4))
        await asyncio.sleep(0)
        heavy = door.start("heavy", hits=1000)
        await asyncio.sleep(0)
        waiting += door.start("behind")
        await asyncio.gather(*waiting, *heavy)
        assert door.refused == [(0.0, "heavy")]
        assert door.entered == [(0.0, 0), (0.0, 1), (0.1, 2), (0.2, 3), (0.3, "behind")]
        assert door.has_forgotten_all()

    run(main())


def test_what_a_descriptor_weighs_may_be_too_heavy_though_the_request_is_not() -> None:
    async def main() -> None:
        door = Door(queue("all", Limit(10, 1, Algorithm.GCRA, burst=2)))
        waiting = door.start(*range(4))
        await asyncio.sleep(0)
        verdict = await door.queues.decide("test", [Descriptor((Entry("all", "everybody"),), hits=1000)])
        assert (verdict.allowed, verdict.retry_after, now()) == (False, inf, 0.0)
        await asyncio.gather(*waiting)

    run(main())


def test_what_a_descriptor_weighs_has_it_wait_though_the_request_were_too_heavy() -> None:
    async def main() -> None:
        door = Door(queue("all", Limit(2, 1, Algorithm.GCRA, burst=2)))
        await door.ask("first", hits=2)
        waiting = door.start("two", hits=2)
        await asyncio.sleep(0.6)  # there is room for one, and he who waits needs it
        verdict = await door.queues.decide("test", [Descriptor((Entry("all", "everybody"),), hits=1)], hits=1000)
        assert (verdict.allowed, door.entered) == (True, [(0.0, "first"), (1.0, "two")])
        await asyncio.gather(*waiting)

    run(main())


def test_who_is_too_heavy_for_one_limit_does_not_wait_for_another() -> None:
    async def main() -> None:
        door = Door(queue("all", Limit(10, 1, Algorithm.GCRA, burst=5)), queue("user", Limit(2, 1)))
        waiting = door.start(*range(9), names="all")
        await asyncio.sleep(0)
        await door.ask("heavy", hits=3)
        assert door.refused == [(0.0, "heavy")]
        await asyncio.gather(*waiting)

    run(main())


def test_who_is_under_another_rule_stands_in_no_line_of_the_one_that_it_replaces() -> None:
    async def main() -> None:
        door = Door(
            queue("all", Limit(2, 1, Algorithm.GCRA, burst=1), alias="general"),
            make_rule("vip", Limit(1000, 1), replaces=("general",)),
        )
        others = [door.start(number, names="all")[0] for number in range(3)]
        await asyncio.sleep(0)
        await door.ask("vip", names="all vip")
        await asyncio.gather(*others)
        assert door.entered == [(0.0, 0), (0.0, "vip"), (0.5, 1), (1.0, 2)]

    run(main())


def test_a_limit_that_comes_with_the_request_replaces_nothing() -> None:
    """It counts instead of the rule that would, in a line as at the counters."""

    async def main() -> None:
        door = Door(
            queue("all", Limit(2, 1, Algorithm.GCRA, burst=2), alias="general"),
            make_rule("vip", Limit(1000, 1), replaces=("general",)),
        )
        await door.ask("first", hits=2, names="all")
        waiting = door.start("two", hits=2, names="all")
        await asyncio.sleep(0.6)  # there is room for one, and he who waits needs it
        vip = Descriptor((Entry("vip", "ann"),), limit=Limit(1000, 1))
        verdict = await door.queues.decide("test", [Descriptor((Entry("all", "everybody"),)), vip])
        assert (verdict.allowed, door.entered) == (True, [(0.0, "first"), (1.0, "two")])
        await asyncio.gather(*waiting)

    run(main())


def test_nobody_waits_for_counters_that_are_away() -> None:
    """With `on_failure: closed` he is refused."""

    async def main() -> None:
        rules = make_rules(queue("all", TEN_A_SECOND, on_failure=OnFailure.CLOSED))
        store = open_counters(f"redis://127.0.0.1:{free_port()}")
        queues = Queues(Limiter(lambda: rules, store), lambda: rules)
        verdict = await queues.decide("test", [Descriptor((Entry("all", "everybody"),))])
        await store.aclose()
        assert (verdict.allowed, queues.waiting, queues._lines) == (False, 0, {})

    asyncio.run(asyncio.wait_for(main(), 20))


def test_those_who_wait_when_the_counters_go_away_are_refused_together() -> None:
    async def main() -> None:
        rules = make_rules(queue("all", TEN_A_SECOND, on_failure=OnFailure.CLOSED))
        store = Leaving()
        queues = Queues(Limiter(lambda: rules, Failover(store, MemoryStore(leaping_clock()), 1.0)), lambda: rules)

        async def ask() -> tuple[bool, float]:
            verdict = await queues.decide("test", [Descriptor((Entry("all", "everybody"),))])
            return verdict.allowed, round(now(), 6)

        waiting = [asyncio.create_task(ask()) for _ in range(6)]
        await asyncio.sleep(0.15)
        store.away = True
        answers = await asyncio.gather(*waiting)
        assert answers == [(True, 0.0), (True, 0.1)] + [(False, 0.2)] * 4
        assert (queues.waiting, queues._lines) == (0, {})

    run(main())


def test_usage_tells_who_waited_and_who_was_refused() -> None:
    async def main() -> None:
        rule = queue("user", Limit(1, 1, Algorithm.GCRA), 2.5)
        door = Door(rule)
        await asyncio.gather(*door.start(*range(5)))
        assert rule.limit is not None
        counts = door.limiter.usage.find_counts(rule, rule.limit)
        assert (len(door.entered), len(door.refused)) == (3, 2)
        assert (counts.admitted, counts.queued) == (3, 2)
        assert counts.refused == 1 + 2  # the first who waited was refused before

    run(main())


def test_whom_ip_rules_refuse_takes_no_place_in_a_line_and_who_waits_is_counted_once() -> None:
    async def main() -> None:
        door = Door(queue("user", Limit(1, 1, Algorithm.GCRA), 2.5))
        rules = [
            parse_rule({"target": "10.0.0.6", "action": "block"}, NOW),
            parse_rule({"target": "10.0.0.7", "rate": "3 connections"}, NOW),
        ]
        door.addresses = AddressRules(keep(rules), {1, 2})
        (first,) = await asyncio.gather(*door.start("first", client="10.0.0.7"))
        waiting = door.start("second", client="10.0.0.7")
        await asyncio.sleep(0.1)
        blocked = await asyncio.gather(*door.start(*range(150), client="10.0.0.6"))
        assert all(verdict.blocked for verdict in blocked)
        (second,) = await asyncio.gather(*waiting)
        assert now() == pytest.approx(1)
        assert door.addresses.counts[2].requests == 2
        assert [len(verdict.leases) for verdict in (first, second)] == [1, 1]
        given_up = door.start(*range(3), client="10.0.0.7")
        await asyncio.sleep(0.1)
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        assert [label for _, label in door.refused[150:]] == [1, 2], "two were in flight, so one more had room"
        await asyncio.sleep(3)
        (last,) = await asyncio.gather(*door.start("last", client="10.0.0.7"))
        assert last.allowed, "who has given up holds nothing"
        assert door.has_forgotten_all()

    run(main())


def test_processes_that_share_their_counters_keep_the_rate_together(server: Server) -> None:
    """In real time, by the clock of Redis: each process has its own lines, in order."""
    rules = make_rules(queue("shared", Limit(50, 1, Algorithm.GCRA, burst=1)))

    async def main() -> None:
        stores = [open_counters(server.url) for _ in range(2)]
        processes = [Queues(Limiter(lambda: rules, store), lambda: rules) for store in stores]
        orders: list[list[int]] = [[], []]

        async def ask(process: int, number: int) -> None:
            assert (await processes[process].decide("test", describe("shared"))).allowed
            orders[process].append(number)

        began = now()
        await asyncio.gather(*(ask(process, number) for number in range(15) for process in range(2)))
        assert now() - began >= 29 / 50
        assert sorted(orders[0]) == sorted(orders[1]) == [*range(15)]
        for order in orders:  # the first ones ask at the same time, before there is a line
            assert order[2:] == sorted(order[2:])
        for store in stores:
            await store.aclose()

    asyncio.run(main())


class TestShares:
    """Of one network some wait, never so many that there is no place for another."""

    @pytest.mark.parametrize("algorithm", [Algorithm.GCRA, Algorithm.LEAKY_BUCKET])
    @pytest.mark.parametrize(
        ("crowd", "neighbour", "other"),
        [
            ("192.0.2.7", "192.0.2.8", "192.0.3.7"),
            ("2001:db8:1:1::7", "2001:db8:1:2::7", "2001:db8:2::7"),
        ],
    )
    def test_a_network_leaves_places_to_others(
        self, algorithm: Algorithm, crowd: str, neighbour: str, other: str
    ) -> None:
        async def main() -> None:
            door = Door(
                queue("user", Limit(1, 1, algorithm, 20 if algorithm is Algorithm.LEAKY_BUCKET else 1)), most=20
            )
            tasks = [task for who in range(15) for task in door.start(1, 2, 3, who=str(who), client=crowd)]
            await asyncio.sleep(0.001)
            assert door.queues.waiting == 10
            tasks += door.start(1, 2, who="bob", client=neighbour)
            await asyncio.sleep(0.001)
            assert door.queues.waiting == 10
            tasks += door.start(1, 2, 3, who="carol", client=other)
            await asyncio.sleep(0.001)
            assert door.queues.waiting == 12
            await asyncio.gather(*tasks)
            assert [label for _, label in door.entered[-2:]] == [3, 3]
            assert door.has_forgotten_all()
            assert not door.queues._crowds

        run(main())

    @pytest.mark.parametrize("name", ["path=/report", "remote_address=192.*"])
    def test_in_a_line_that_clients_share_too(self, name: str) -> None:
        async def main() -> None:
            door = Door(queue(name, TEN_A_SECOND), most_of_one=20)
            tasks = door.start(*range(30), client="192.0.2.7")
            await asyncio.sleep(0.001)
            assert door.queues.waiting == 10
            tasks += door.start("neighbour", client="192.0.2.8")
            tasks += door.start("other", client="192.0.3.7")
            await asyncio.sleep(0.001)
            assert door.queues.waiting == 11
            await asyncio.gather(*tasks)
            assert door.entered[-1][1] == "other"
            assert door.has_forgotten_all()

        run(main())

    def test_in_a_line_of_his_own_a_client_has_all(self) -> None:
        async def main() -> None:
            door = Door(queue("remote_address", TEN_A_SECOND), most_of_one=20)
            tasks = door.start(*range(30), who="192.0.2.7")
            await asyncio.sleep(0.001)
            assert door.queues.waiting == 20
            await asyncio.gather(*tasks)

        run(main())

    def test_whom_descriptors_tell_alone(self) -> None:
        async def main() -> None:
            door = Door(queue("remote_address", Limit(1, 1, Algorithm.GCRA, 1)), most=20)
            tasks = [task for who in range(10) for task in door.start(1, 2, 3, who=f"2001:db8:1:{who:x}::/64")]
            await asyncio.sleep(0.001)
            assert door.queues.waiting == 10
            tasks += door.start(1, 2, who="198.51.100.7")
            await asyncio.sleep(0.001)
            assert door.queues.waiting == 11
            await asyncio.gather(*tasks)

        run(main())

    def test_those_without_an_address_share_all(self) -> None:
        async def main() -> None:
            door = Door(queue("user", Limit(1, 1, Algorithm.GCRA, 1)), most=20)
            tasks = [task for who in range(15) for task in door.start(1, 2, 3, who=str(who))]
            await asyncio.sleep(0.001)
            assert door.queues.waiting == 20
            await asyncio.gather(*tasks)

        run(main())
