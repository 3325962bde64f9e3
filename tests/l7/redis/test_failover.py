"""What becomes of decisions when Redis is killed, stops, or comes back."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from math import inf

import pytest

from netlimit.l7.breaker import State
from netlimit.l7.failover import SETTLED, Failover, find_span
from netlimit.l7.limit import Algorithm, Limit, Refill
from netlimit.l7.limiter import Limiter
from netlimit.l7.memory.counter import Clock
from netlimit.l7.memory.store import MemoryStore, make_counter
from netlimit.l7.problems import REDUCED_CAPACITY, write_problem
from netlimit.l7.rules import Descriptor, Entry, Node, OnFailure, Rule, RuleSet
from netlimit.l7.store import Ask
from tests.awake import Awake
from tests.l7.redis.driving import PATIENT, guarded, hit, make_rule, wait_until
from tests.l7.redis.servers import Server

NOWHERE = "redis://127.0.0.1:1?timeout_ms=60000&probe_ms=60000"
DAY = 86_400


def test_an_open_rule_is_counted_here_up_to_its_emergency_limit() -> None:
    rule = make_rule(Limit(100, DAY, Algorithm.GCRA), emergency=Limit(3, DAY))

    async def ask() -> None:
        async with guarded(NOWHERE) as store:
            decisions = [await hit(store, rule, slack=50) for _ in range(5)]
            assert [decision.admitted for decision in decisions] == [True] * 3 + [False] * 2
            assert (await hit(store, rule, key="bob")).remaining == 2
            assert (store.decided_here, store.refused, store.state) == (6, 0, State.OPEN)

    asyncio.run(ask())


def test_or_up_to_its_own() -> None:
    rule = make_rule(Limit(4, DAY, Algorithm.SLIDING_WINDOW_LOG))

    async def ask() -> None:
        async with guarded(NOWHERE) as store:
            assert [(await hit(store, rule)).admitted for _ in range(5)] == [True] * 4 + [False]

    asyncio.run(ask())


def test_a_closed_rule_refuses_until_redis_is_tried_again() -> None:
    rule = make_rule(Limit(100, DAY), on_failure=OnFailure.CLOSED, emergency=Limit(3, DAY))

    async def ask() -> None:
        async with guarded(NOWHERE) as store:
            decision = await hit(store, rule)
            assert (decision.admitted, decision.remaining, decision.retry_after) == (False, 0, 60)
            assert (store.decided_here, store.refused) == (0, 1)

    asyncio.run(ask())


def test_who_is_refused_so_is_not_told_that_a_limit_is_reached() -> None:
    rule = make_rule(Limit(100, DAY), on_failure=OnFailure.CLOSED)

    async def ask() -> None:
        async with guarded(NOWHERE) as store:
            rules = RuleSet({rule.domain: Node(default={"user": Node(rule)})})
            verdict = await Limiter(lambda: rules, store).decide(rule.domain, [Descriptor((Entry("user", "alice"),))])
            said = json.loads(write_problem(verdict))
            assert said["detail"].endswith("cannot be asked, so it refuses; come again in 60 seconds.")
            assert said["type"] == REDUCED_CAPACITY

    asyncio.run(ask())


def test_an_outage_is_told_once_and_so_is_its_end(mortal: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "netlimit.l7.failover")
    rule = make_rule(Limit(100, DAY))
    mortal.client.config_set("requirepass", "secret")

    async def ask() -> None:
        url = mortal.url.replace("//", "//:mistyped@") + "?timeout_ms=60000&probe_ms=20"
        async with guarded(url) as store:
            for _ in range(5):
                await hit(store, rule)
                await asyncio.sleep(0.05)
            (told,) = caplog.messages
            assert (told,) == store.troubles
            assert told.startswith(
                f"The counters at 127.0.0.1:{mortal.port} cannot be asked: invalid username-password"
            )
            assert "mistyped" not in told
            mortal.client.config_set("requirepass", "mistyped")
            await ask_until_closed(store)
            store._clock = lambda: time.monotonic() + SETTLED
            await hit(store, rule)
            await hit(store, rule)
            assert (caplog.messages[1:], store.troubles) == (["The counters can be asked again."], ())

    asyncio.run(ask())


def test_the_newest_reason_of_an_outage_is_told_and_each_is_logged_once(
    mortal: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """What an outage begins with is seldom what keeps it going: Redis comes back with other passwords or rights."""
    caplog.set_level(logging.INFO, "netlimit.l7.failover")
    rule = make_rule(Limit(100, DAY))
    acl = mortal.client.acl_setuser

    async def ask_some(store: Failover, said: str) -> None:
        for _ in range(8):
            await hit(store, rule)
            await asyncio.sleep(0.02)
        (told,) = store.troubles
        assert said in told
        assert caplog.messages[-1] == told

    async def ask() -> None:
        async with guarded(f"{mortal.url}?timeout_ms=60000&probe_ms=30") as store:
            acl("default", enabled=True, nopass=True, commands=["-@scripting"])
            await ask_some(store, "NOPERM")
            acl("default", enabled=True, passwords=["+secret"], reset_passwords=True)
            mortal.client.client_kill_filter(_type="normal", skipme=True)
            await ask_some(store, "Authentication required")
            assert len(caplog.messages) == 2
            acl("default", enabled=True, nopass=True, commands=["+@all"])
            await ask_until_closed(store)
            assert store.troubles, "it may be away again in a moment"
            store._clock = lambda: time.monotonic() + SETTLED
            assert store.troubles == (), "though nobody asks"
            assert caplog.messages[2:] == ["The counters can be asked again."]

    asyncio.run(ask())


def test_a_renewal_that_is_not_answered_is_told(caplog: pytest.LogCaptureFixture) -> None:
    rule = make_rule(Limit(1, 30, Algorithm.CONCURRENCY))
    assert rule.limit
    lease = Ask(rule, rule.limit, "alice", lease="first")

    async def ask() -> None:
        async with guarded(NOWHERE) as store:
            await store.renew([lease])
            assert "cannot be asked" in store.troubles[0]
        async with guarded(NOWHERE) as store:
            await store.release([lease])
            assert "cannot be asked" in store.troubles[0]

    asyncio.run(ask())


def test_leases_are_taken_and_ended_here_meanwhile() -> None:
    limit = Limit(1, 30, Algorithm.CONCURRENCY)
    rule = Rule("test", "leases", None, limit, emergency=Limit(1000, 1))

    async def ask() -> None:
        async with guarded(NOWHERE) as store:
            first, second = (Ask(rule, limit, "alice", lease=lease) for lease in ("first", "second"))
            assert [each.admitted for each in await store.decide([first, second])] == [True, False]
            await store.renew([first])
            await store.release([first])
            assert (await store.decide([second]))[0].admitted

    asyncio.run(ask())


def test_redis_killed_under_load_costs_no_latency_and_comes_back_by_itself(mortal: Server) -> None:
    """64 tasks ask all the time: none waits for it, and afterwards Redis counts again."""
    rule = make_rule(Limit(10**6, DAY, Algorithm.GCRA))

    async def live() -> None:
        async with guarded(mortal.url + "?timeout_ms=60000&probe_ms=50") as store:
            load = Load(store, rule)
            async with load:
                await wait_until(lambda: load.answered > 1000)
                await asyncio.to_thread(mortal.kill)
                await wait_until(lambda: store.decided_here > 1000 and store.state is not State.CLOSED)
                await asyncio.to_thread(mortal.start)
                await wait_until(lambda: store.state is State.CLOSED)
                here = store.decided_here
                answered = load.answered
                await wait_until(lambda: load.answered > answered + 1000)
                assert store.decided_here == here
            assert load.slowest < 3.5
            assert load.failures == 0

    asyncio.run(live())


def test_of_all_that_ask_a_redis_that_hangs_one_waits_for_it_now_and_then(mortal: Server) -> None:
    rule = make_rule(Limit(10**6, DAY))

    async def hang() -> None:
        async with guarded(mortal.url + "?timeout_ms=300&probe_ms=200") as store:
            load = Load(store, rule)
            async with load:
                await wait_until(lambda: load.answered > 500)
                mortal.process.send_signal(signal.SIGSTOP)
                await wait_until(lambda: store.decided_here > 64)
                await asyncio.sleep(0.7)  # each of two connections had a batch under way, which waited as well
                load.waited.clear()
                loop = asyncio.get_running_loop()
                start = loop.time()
                await wait_until(lambda: loop.time() > start + 1.2 and load.waited.total() > 1000)
                probes = (loop.time() - start) / 0.5 + 1
                patient = sum(number for tenths, number in load.waited.items() if tenths >= 2)
                assert patient <= probes + 3
                mortal.process.send_signal(signal.SIGCONT)
                await wait_until(lambda: store.state is State.CLOSED)
            assert load.failures == 0
            assert load.slowest < 2.5

    asyncio.run(hang())


class Load:
    """64 tasks that ask without a pause, while it is entered."""

    def __init__(self, store: Failover, rule: Rule) -> None:
        self.answered = 0
        self.failures = 0
        self.slowest = 0.0
        self.waited: Counter[int] = Counter()
        """Decisions by how many tenths of a second they took."""
        self._store = store
        self._rule = rule
        self._awake = Awake()

    async def __aenter__(self) -> None:
        self._awake.__enter__()
        self._tasks = [asyncio.create_task(self._ask(f"user {number}")) for number in range(64)]

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._awake.__exit__(None, None, None)

    async def _ask(self, key: str) -> None:
        while True:
            start = self._awake.seconds
            try:
                decision = await hit(self._store, self._rule, key)
                assert decision.retry_after < inf
            except Exception:
                self.failures += 1
                raise
            took = self._awake.seconds - start
            self.answered += 1
            self.slowest = max(self.slowest, took)
            self.waited[int(took * 10)] += 1
            await asyncio.sleep(0)


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "lost"])
@pytest.mark.parametrize("algorithm", [each for each in Algorithm if each is not Algorithm.CONCURRENCY])
def test_a_redis_that_comes_and_goes_admits_no_more_than_the_limit(
    mortal: Server, algorithm: Algorithm, keeps: bool
) -> None:
    """Of one process, whether Redis has its counters still when it comes back, or none."""
    rule = make_rule(Limit(20, DAY, algorithm))

    async def ask() -> int:
        admitted = 0
        async with guarded(mortal.url + "?timeout_ms=200&probe_ms=20") as store:
            for turn in range(4):
                for _ in range(10):
                    admitted += (await hit(store, rule)).admitted
                if keeps:
                    mortal.process.send_signal(signal.SIGSTOP if turn % 2 == 0 else signal.SIGCONT)
                elif turn % 2 == 0:
                    await asyncio.to_thread(mortal.kill)
                else:
                    await asyncio.to_thread(mortal.start)
                if turn % 2 == 1:
                    await ask_until_closed(store)
        return admitted

    assert asyncio.run(ask()) == 20


async def ask_until_closed(store: Failover) -> None:
    other = make_rule(Limit(10**6, DAY))

    async def is_up() -> bool:
        await hit(store, other)
        return store.state is State.CLOSED

    async with asyncio.timeout(60):
        while not await is_up():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("algorithm", [each for each in Algorithm if each is not Algorithm.CONCURRENCY])
def test_a_redis_that_forgets_while_nobody_asks_does_not_either(mortal: Server, algorithm: Algorithm) -> None:
    rule = make_rule(Limit(5, DAY, algorithm))

    async def ask() -> int:
        admitted = 0
        async with guarded(mortal.url + PATIENT) as store:
            for _ in range(3):
                for _ in range(5):
                    admitted += (await hit(store, rule)).admitted
                losses = store._store.losses
                await asyncio.to_thread(mortal.kill)
                await wait_until(lambda before=losses: store._store.losses != before)
                await asyncio.to_thread(mortal.start)
        return admitted

    assert asyncio.run(ask()) == 5


@pytest.mark.parametrize(
    ("burst", "amount", "seconds"),
    [(10, 6000, 60), (100, 100, 60), (150, 100, 120), (201, 100, 180), (5, 0, inf)],
)
def test_a_bucket_filled_by_interval_is_doubted_until_it_would_be_full_again(
    burst: int, amount: int, seconds: float
) -> None:
    limit = Limit(amount, 60, Algorithm.TOKEN_BUCKET, burst, Refill.INTERVAL)
    assert find_span(limit) == seconds
    start = 1_000_000 * 60 * 10**9  # a unit begins: nothing is given for as long as it can be
    bucket = make_counter(limit, Clock(lambda: start, 0))
    assert bucket.hit("alice", limit.capacity).reset_after <= seconds


def test_a_bucket_filled_by_interval_gives_nothing_anew_in_the_unit_in_which_redis_has_forgotten(
    mortal: Server,
) -> None:
    rule = make_rule(Limit(DAY * 100, DAY, Algorithm.TOKEN_BUCKET, burst=5, refill=Refill.INTERVAL))

    async def ask() -> int:
        async with guarded(mortal.url + PATIENT) as store:
            admitted = sum([(await hit(store, rule)).admitted for _ in range(5)])
            losses = store._store.losses
            await asyncio.to_thread(mortal.kill)
            await wait_until(lambda: store._store.losses != losses)
            await asyncio.to_thread(mortal.start)
            await ask_until_closed(store)
            await asyncio.sleep(0.2)  # so long a continuous one would take to be full again
            return admitted + sum([(await hit(store, rule)).admitted for _ in range(5)])

    assert asyncio.run(ask()) == 5


def test_requests_in_flight_for_longer_than_redis_was_away_keep_their_places(mortal: Server) -> None:
    limit = Limit(2, 3, Algorithm.CONCURRENCY)
    rule = Rule("test", "long", None, limit)
    first, second, third = (Ask(rule, limit, "alice", lease=lease) for lease in ("first", "second", "third"))

    async def live() -> None:
        async with guarded(mortal.url + "?timeout_ms=200&probe_ms=20") as store:
            assert all(each.admitted for each in await store.decide([first, second]))

            async def renew() -> None:
                while True:
                    await store.renew([first, second])
                    await asyncio.sleep(0.2)

            renewing = asyncio.create_task(renew())
            mortal.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(limit.seconds + 1)
            mortal.process.send_signal(signal.SIGCONT)
            await ask_until_closed(store)
            for _ in range(10 * limit.seconds):
                assert not (await store.decide([third]))[0].admitted
                await asyncio.sleep(0.2)
            renewing.cancel()
            await store.release([first])
            assert (await store.decide([third]))[0].admitted

    asyncio.run(live())


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_who_has_no_room_here_has_what_redis_says_while_its_counters_are_in_doubt(
    mortal: Server, algorithm: Algorithm
) -> None:
    """And whose count is here is refused by that, whatever Redis has forgotten."""
    limit = Limit(2, DAY, algorithm)
    rule = make_rule(limit) if algorithm is not Algorithm.CONCURRENCY else Rule("test", "flying", None, limit)
    leases = count()

    async def admit(store: Failover, *keys: str) -> list[int]:
        """How many of three requests of each."""
        asks = [Ask(rule, limit, key, lease=_name_lease(limit, leases)) for key in keys for _ in range(3)]
        admitted = [answer.admitted for answer in await store.decide(asks)]
        return [sum(admitted[first : first + 3]) for first in range(0, len(asks), 3)]

    async def ask() -> None:
        async with guarded(mortal.url + PATIENT) as store:
            store._local = MemoryStore(keys=100)
            counted = [f"counted {number}" for number in range(90)]
            assert await admit(store, *counted) == [2] * 90
            await admit(store, *(f"without room {number}" for number in range(30)))
            losses = store._store.losses
            await asyncio.to_thread(mortal.client.client_kill_filter, _type="normal", skipme=True)
            await wait_until(lambda: store._store.losses != losses)
            assert await admit(store, "counted 1", *(f"newcomer {number}" for number in range(40))) == [0] + [2] * 40
            await asyncio.to_thread(mortal.client.flushall)
            assert await admit(store, *counted[:10]) == [0] * 10

    asyncio.run(ask())


def _name_lease(limit: Limit, numbers: Iterator[int]) -> str:
    return f"lease {next(numbers)}" if limit.algorithm is Algorithm.CONCURRENCY else ""


@pytest.mark.parametrize("emergency", [None, Limit(2, DAY)], ids=["its own", "an emergency limit"])
def test_who_has_no_room_here_is_not_refused_for_what_redis_admitted_to_others(
    mortal: Server, emergency: Limit | None
) -> None:
    """While Redis is away they share one counter, as in memory, or have the emergency limit; never more."""
    rule = make_rule(Limit(2, DAY), emergency=emergency)

    async def ask() -> None:
        async with guarded(mortal.url + "?probe_ms=60000") as store:
            store._local = MemoryStore(keys=100)
            for number in range(120):
                await hit(store, rule, f"before {number}", hits=2)
            mortal.kill()
            admitted = sum([(await hit(store, rule, f"newcomer {number}")).admitted for number in range(8)])
            assert admitted == (8 if emergency else 2)
            assert [(await hit(store, rule, "one")).admitted for _ in range(3)] == (
                [True, True, False] if emergency else [False] * 3
            )

    asyncio.run(ask())


def test_two_processes_admit_no_more_than_the_limit_each(mortal: Server) -> None:
    rule = make_rule(Limit(20, DAY))

    async def ask() -> int:
        admitted = 0
        async with guarded(mortal.url + "?probe_ms=20") as one, guarded(mortal.url + "?probe_ms=20") as other:
            for _ in range(3):
                for _ in range(15):
                    admitted += (await hit(one, rule)).admitted + (await hit(other, rule)).admitted
                await asyncio.to_thread(mortal.kill)
                for _ in range(15):
                    admitted += (await hit(one, rule)).admitted + (await hit(other, rule)).admitted
                await asyncio.to_thread(mortal.start)
                await asyncio.sleep(0.05)
        return admitted

    assert asyncio.run(ask()) == 2 * 20
