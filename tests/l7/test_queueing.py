"""Requests that wait for their turn. Time leaps here: nothing takes as long as it says."""

from __future__ import annotations

import asyncio
import random
from math import inf

import pytest

from netlimit.l7.addresses import AddressRules
from netlimit.l7.counters import open_counters
from netlimit.l7.gate import Gate
from netlimit.l7.limit import Algorithm, Limit, parse_limit
from netlimit.l7.limiter import Limiter, Verdict
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.queueing import Queues
from netlimit.l7.rules import OnLimit, Rule
from netlimit.rules import parse_rule
from tests.l7.leaping import leaping_clock, now, run
from tests.l7.redis.servers import Server
from tests.l7.verdicts import describe, make_rule, make_rules
from tests.unit.strategies import NOW, keep

TEN_A_SECOND = Limit(10, 1, Algorithm.GCRA, burst=1)


def queue(name: str, limit: Limit | None, max_wait: float = 30.0, **others: object) -> Rule:
    return make_rule(name, limit, on_limit=OnLimit.QUEUE, max_wait=max_wait, **others)


class Door:
    """Queues before rules, and a record of who got in when."""

    def __init__(self, *rules: Rule, most: int = 1000, most_of_one: int = 100) -> None:
        ruleset = make_rules(*rules)
        self.addresses = AddressRules()
        store = MemoryStore(leaping_clock())
        self.limiter = Limiter(lambda: ruleset, store, gate=Gate(lambda: self.addresses, store))
        self.queues = Queues(self.limiter, lambda: ruleset, most, most_of_one)
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
        descriptors = describe(*(names.split() or self.names), who=who)
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
            door = Door(queue("user", parse_limit("3/minute"), 60))
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
            await asyncio.sleep(3.2)
            await door.limiter.release(held)
            await task
            assert now() == pytest.approx(3.5)

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
