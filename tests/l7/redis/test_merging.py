"""Counting here and merging with Redis: what is known when, and how much too many are admitted."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack

import pytest
from redis.crc import key_slot

from netlimit.errors import CountersUnavailable
from netlimit.l7.counters import open_counters
from netlimit.l7.decision import Decision
from netlimit.l7.failover import Failover
from netlimit.l7.limit import Algorithm, Limit, Refill
from netlimit.l7.memory.budget import KEY_BYTES
from netlimit.l7.memory.counter import SECOND, Clock, steady_clock
from netlimit.l7.redis.key import make_name, make_prefix
from netlimit.l7.redis.merging import LEAST_UNMERGED, MergingStore
from netlimit.l7.redis.opening import open_store
from netlimit.l7.redis.store import RedisStore
from netlimit.l7.redis.url import read_url
from netlimit.l7.rules import Mode, Rule
from netlimit.l7.store import Ask
from tests.l7.redis.driving import ask_until_answered, make_rule, opened, wait_until
from tests.l7.redis.servers import Nodes, Server

MERGED = [Algorithm.FIXED_WINDOW, Algorithm.SLIDING_WINDOW_COUNTER, Algorithm.TOKEN_BUCKET, Algorithm.GCRA]
SELDOM = "?merge_ms=60000&timeout_ms=60000&probe_ms=50"
DAY = 86_400


class Sites:
    """So many processes, as it were, that merge with one Redis when the test says so."""

    def __init__(self, url: str, number: int) -> None:
        self._stores = [open_store(read_url(url)) for _ in range(number)]
        self._ending = AsyncExitStack()

    async def __aenter__(self) -> list[MergingStore]:
        return [store for store in self._stores if isinstance(store, MergingStore)]

    async def __aexit__(self, *_: object) -> None:
        for store in self._stores:
            await store.aclose()


async def hit(store: MergingStore, rule: Rule, hits: int = 1, charge: bool = False, slack: int = 0) -> Decision:
    assert rule.limit
    return (await store.decide([Ask(rule, rule.limit, "alice", hits, slack, charge=charge)]))[0]


@pytest.mark.parametrize("algorithm", MERGED)
def test_what_others_have_counted_is_known_after_a_merge(server: Server, algorithm: Algorithm) -> None:
    async def count() -> None:
        rule = make_rule(Limit(10, DAY, algorithm))
        async with Sites(server.url + SELDOM, 3) as (one, two, three):
            assert (await hit(one, rule, 4)).remaining == 6
            assert (await hit(two, rule, 3)).remaining == 7
            await one.merge()
            await two.merge()
            assert (await hit(two, rule, 0)).remaining == 3
            assert (await hit(one, rule)).remaining == 5
            await one.merge()
            assert (await hit(one, rule, 0)).remaining == 2
            assert (await hit(three, rule, 10)).admitted  # has heard of nobody yet
            await three.merge()
            assert (await hit(three, rule)).admitted is False
            await two.merge()
            assert (await hit(two, rule)).admitted  # hears of it only when it has something to tell
            await two.merge()
            assert (await hit(two, rule)).admitted is False

    asyncio.run(count())


@pytest.mark.parametrize("algorithm", MERGED)
def test_a_merge_loses_no_hit_and_counts_none_twice(server: Server, algorithm: Algorithm) -> None:
    async def count() -> None:
        rule = make_rule(Limit(1000, DAY, algorithm))
        async with Sites(server.url + SELDOM, 4) as stores:
            for _ in range(5):
                for store in stores:
                    hits = [hit(store, rule) for _ in range(7)]
                    await asyncio.gather(store.merge(), *hits, store.merge())
            for store in stores:
                await hit(store, rule)
                await store.merge()
            await hit(stores[0], rule)
            await stores[0].merge()
            assert (await hit(stores[0], rule, 0)).remaining == 1000 - 4 * 5 * 7 - 4 - 1

    asyncio.run(count())


@pytest.mark.parametrize("algorithm", MERGED)
def test_what_comes_during_a_merge_counts_beside_it(server: Server, algorithm: Algorithm) -> None:
    async def count() -> None:
        rule = make_rule(Limit(10, DAY, algorithm))
        async with Sites(server.url + SELDOM, 2) as (one, two):
            await hit(two, rule, 5)
            await two.merge()
            await hit(one, rule, 2)
            merging = asyncio.create_task(one.merge())
            await asyncio.sleep(0)
            assert (await hit(one, rule, 2)).remaining == 6
            await merging
            assert (await hit(one, rule, 0)).remaining == 1

    asyncio.run(count())


@pytest.mark.parametrize("algorithm", MERGED)
def test_more_hits_elsewhere_than_there_is_room_here_leave_none(server: Server, algorithm: Algorithm) -> None:
    async def count() -> None:
        rule = make_rule(Limit(10, DAY, algorithm))
        async with Sites(server.url + SELDOM, 2) as (one, two):
            await hit(two, rule, 10)
            await two.merge()
            await hit(one, rule, 2)
            merging = asyncio.create_task(one.merge())
            await asyncio.sleep(0)
            assert (await hit(one, rule, 2)).remaining == 6
            await merging
            assert (await hit(one, rule)).admitted is False

    asyncio.run(count())


@pytest.mark.parametrize("algorithm", MERGED[:2])
def test_what_redis_says_of_a_window_that_has_ended_here_is_not_counted(server: Server, algorithm: Algorithm) -> None:
    """The clock here is a little ahead: the window that Redis is in, and that is full, is over."""
    now = time.time()
    seconds = next(seconds for seconds in range(1000, 9000) if 0.8 < now % seconds / seconds < 0.9)
    steady = steady_clock()
    ahead = int((seconds - now % seconds + 1) * SECOND)

    async def count() -> None:
        rule = make_rule(Limit(10, seconds, algorithm))
        async with opened(server.url + "?timeout_ms=60000") as remote:
            assert isinstance(remote, RedisStore)
            await remote.decide([Ask(rule, Limit(10, seconds, algorithm), "alice", 10)])
            store = MergingStore(remote, 60, lambda: Clock(steady.read, steady.origin + ahead))
            await hit(store, rule)
            await store.merge()
            assert (await hit(store, rule)).remaining == 8
            await store.aclose()

    asyncio.run(count())


@pytest.mark.parametrize("algorithm", MERGED[:2])
def test_a_clock_that_is_set_right_comes_into_the_window_of_the_others(server: Server, algorithm: Algorithm) -> None:
    now = time.time()
    seconds = next(seconds for seconds in range(1000, 9000) if 0.3 < now % seconds / seconds < 0.4)
    steady = steady_clock()
    origins = [steady.origin - int(0.45 * seconds * SECOND)]

    async def count() -> None:
        rule = make_rule(Limit(10, seconds, algorithm))
        async with opened(server.url + "?timeout_ms=60000") as remote:
            assert isinstance(remote, RedisStore)
            store = MergingStore(remote, 60, lambda: Clock(steady.read, origins[-1]))
            assert (await hit(store, rule)).remaining == 9
            origins.append(steady.origin)
            await store.merge()
            assert (await hit(store, rule)).remaining == 8  # what was counted goes on counting
            await remote.decide([Ask(rule, Limit(10, seconds, algorithm), "alice", 8)])
            await store.merge()
            assert (await hit(store, rule)).admitted is False
            await store.aclose()

    asyncio.run(count())


@pytest.mark.parametrize("algorithm", MERGED)
def test_what_is_over_admitted_is_within_the_bound(server: Server, algorithm: Algorithm) -> None:
    """Each of four sites gets five hits between two merges, so at most (4 - 1) * 2 * 5 too many pass."""

    async def count() -> int:
        rule = make_rule(Limit(200, DAY, algorithm))
        admitted = 0
        async with Sites(server.url + SELDOM, 4) as stores:
            for number in range(200):
                store = stores[number % 4]
                admitted += sum([(await hit(store, rule)).admitted for _ in range(5)])
                await store.merge()
        return admitted

    assert 200 <= asyncio.run(count()) <= 200 + 3 * 2 * 5


@pytest.mark.parametrize("overshoot", [10, 50, 150])
@pytest.mark.parametrize("algorithm", MERGED)
def test_what_a_soft_limit_tolerates_is_for_all_together(server: Server, algorithm: Algorithm, overshoot: int) -> None:
    """Each of three sites merges each hit, so none knows less than the last of each other one."""

    async def count() -> int:
        rule = make_rule(Limit(10, DAY, algorithm), mode=Mode.SOFT, overshoot=overshoot)
        admitted = 0
        async with Sites(server.url + SELDOM, 3) as stores:
            for number in range(60):
                store = stores[number % 3]
                admitted += (await hit(store, rule, slack=overshoot // 10)).admitted
                await store.merge()
        return admitted

    assert 0 <= asyncio.run(count()) - 10 - overshoot // 10 <= 2


def test_a_bucket_makes_up_for_what_it_let_pass(server: Server) -> None:
    async def count() -> None:
        rule = make_rule(Limit(10, DAY, Algorithm.GCRA))
        async with Sites(server.url + SELDOM, 2) as (one, two):
            for store in (one, two):
                assert (await hit(store, rule, 10)).admitted
                await store.merge()
            day = (await hit(two, rule)).retry_after
            assert DAY * 1.09 < day <= DAY * 1.1  # as if the ten that were too many had queued

    asyncio.run(count())


@pytest.mark.parametrize("algorithm", MERGED[:2])
def test_what_was_used_at_the_end_of_a_window_counts_in_that_one(server: Server, algorithm: Algorithm) -> None:
    """Though it is merged when the next one has begun: of a sliding window as the previous one, and just once."""
    seconds = 6

    async def count() -> None:
        rule = make_rule(Limit(10, seconds, algorithm))
        async with Sites(server.url + SELDOM, 2) as (one, two):
            await asyncio.sleep(seconds - (time.time() + 1) % seconds)
            assert (await hit(one, rule, 10)).admitted
            await asyncio.sleep(seconds - time.time() % seconds + 0.2)
            await one.merge()
            fits = [3, 10][algorithm is Algorithm.FIXED_WINDOW]
            await asyncio.sleep(seconds - 1.2 - time.time() % seconds)  # the previous one weighs a fifth or more
            assert (await hit(one, rule, 0)).remaining >= fits
            assert (await hit(two, rule)).admitted
            await two.merge()
            left = (await hit(two, rule, 0)).remaining
            assert left == 9 if algorithm is Algorithm.FIXED_WINDOW else fits <= left < 9, left

    asyncio.run(count())


def test_what_could_not_be_merged_before_its_window_was_over_is_not_counted(mortal: Server) -> None:
    async def count() -> None:
        rule = make_rule(Limit(10, 2))
        async with Sites(mortal.url + SELDOM, 1) as (store,):
            await asyncio.sleep(2 - time.time() % 2)
            assert (await hit(store, rule, 10)).admitted
            mortal.kill()
            await store.merge()
            await asyncio.sleep(2)
            mortal.start()
            async with asyncio.timeout(60):
                while store._failure:
                    await asyncio.sleep(0.05)
                    await store.merge()
            assert (await hit(store, rule, 10)).admitted

    asyncio.run(count())


def test_it_merges_by_itself(server: Server) -> None:
    async def count() -> None:
        rule = make_rule(Limit(10, DAY))
        async with Sites(server.url + "?merge_ms=10&timeout_ms=60000", 2) as (one, two):
            await hit(one, rule, 5)
            name = make_name(make_prefix(rule, Limit(10, DAY)), "alice")
            await wait_until(lambda: server.client.exists(name) == 1)
            left = (await hit(two, rule)).remaining
            async with asyncio.timeout(120):
                while left > 4:
                    await asyncio.sleep(0.01)
                    left = (await hit(two, rule, 0)).remaining
            assert left == 4

    asyncio.run(count())


@pytest.mark.parametrize(
    "limit",
    [
        Limit(5, DAY, Algorithm.SLIDING_WINDOW_LOG),
        Limit(5, DAY, Algorithm.LEAKY_BUCKET),
        Limit(5, DAY, Algorithm.TOKEN_BUCKET, refill=Refill.INTERVAL),
        Limit(5, DAY, Algorithm.CONCURRENCY),
    ],
    ids=str,
)
def test_what_cannot_be_merged_is_decided_by_redis(server: Server, limit: Limit) -> None:
    async def count() -> None:
        rule = make_rule(limit)
        async with Sites(server.url + SELDOM, 2) as (one, two):
            assert [(await hit(store, rule)).admitted for store in (one, two) * 3] == [True] * 5 + [False]

    asyncio.run(count())


def test_both_kinds_may_be_asked_together(server: Server) -> None:
    async def count() -> None:
        rules = [
            make_rule(Limit(amount, DAY, algorithm)) for amount, algorithm in enumerate([*MERGED, *MERGED[::-1]], 1)
        ]
        rules[3:3] = [make_rule(Limit(9, DAY, Algorithm.SLIDING_WINDOW_LOG))]
        async with Sites(server.url + SELDOM, 1) as (store,):
            asks = [Ask(rule, rule.limit, "alice") for rule in rules if rule.limit]
            decisions = await store.decide(asks)
            assert [each.remaining for each in decisions] == [ask.limit.amount - 1 for ask in asks]

    asyncio.run(count())


def test_what_is_charged_is_merged_though_it_was_refused(server: Server) -> None:
    async def count() -> None:
        rule = make_rule(Limit(10, DAY))
        async with Sites(server.url + SELDOM, 2) as (one, two):
            assert (await hit(one, rule, 11, charge=True)).admitted is False
            await one.merge()
            await hit(two, rule)
            await two.merge()
            assert (await hit(two, rule)).admitted is False

    asyncio.run(count())


def test_nothing_is_decided_here_while_merges_fail_and_nothing_is_lost(mortal: Server) -> None:
    async def count() -> None:
        rule = make_rule(Limit(10, DAY))
        async with Sites(mortal.url + "?merge_ms=20&timeout_ms=60000&probe_ms=20", 2) as (one, two):
            await hit(one, rule)
            await one.merge()
            mortal.kill()
            assert (await hit(one, rule, 3)).remaining == 6
            await one.merge()
            with pytest.raises(CountersUnavailable):
                await hit(one, rule)
            mortal.start()
            await ask_until_answered(one, rule)
            assert (await hit(one, rule)).remaining == 4
            await hit(two, rule)
            await two.merge()
            assert (await hit(two, rule, 0)).remaining <= 6  # the three, and one of its own: Redis forgot the first

    asyncio.run(count())


def test_more_keys_than_go_into_one_call_are_merged(server: Server) -> None:
    async def count() -> None:
        rule = make_rule(Limit(10, DAY))
        keys = [f"user {number}" for number in range(1000)]
        asks = [Ask(rule, Limit(10, DAY), key, 4) for key in keys]
        async with Sites(server.url + SELDOM, 2) as (one, two):
            for store in (one, two):
                await store.decide(asks)
                await store.merge()
            assert {decision.remaining for decision in await two.decide(asks)} == {2}

    asyncio.run(count())


def test_what_one_node_cannot_take_is_not_decided_here_and_the_rest_is(nodes: Nodes) -> None:
    rule = make_rule(Limit(10, DAY))
    dead = nodes.servers[0]
    slots = {key: key_slot(make_name(make_prefix(rule, Limit(10, DAY)), key)) for key in map(str, range(30))}
    asks = [Ask(rule, Limit(10, DAY), key) for key in slots]

    async def count() -> None:
        url = nodes.url + "?merge_ms=60000&timeout_ms=60000&probe_ms=50"
        async with Sites(url, 1) as (store,):
            await store.decide(asks)
            await store.merge()
            dead.kill()
            assert {decision.remaining for decision in await store.decide(asks)} == {8}
            await store.merge()
            for ask, answer in zip(asks, await store.attempt(asks), strict=True):
                away = nodes.find(slots[ask.key]) is dead
                assert isinstance(answer, CountersUnavailable if away else Decision)

    try:
        asyncio.run(count())
    finally:
        nodes.revive(dead)


@pytest.mark.parametrize("options", ["", "&merge_ms=50"])
def test_all_counters_in_the_process_have_so_much_memory_together(mortal: Server, options: str) -> None:
    """Those that are merged, those that stand in for Redis, and those of emergency limits."""
    memory = 2 * 2**20
    rules = [make_rule(Limit(3, DAY, each), emergency=Limit(2, DAY, each)) for each in MERGED]

    async def ask(store: Failover, times: str) -> None:
        for page in range(100):
            keys = [f"{times} {page} {number}" for number in range(50)]
            await store.decide([Ask(rule, rule.limit, key) for key in keys for rule in rules if rule.limit])

    async def count() -> int:
        store = open_counters(f"{mortal.url}?timeout_ms=60000&probe_ms=60000{options}", memory)
        assert isinstance(store, Failover)
        await ask(store, "while it answers")
        mortal.kill()
        await ask(store, "while it does not")
        stores = [store._local, store._emergencies]
        if isinstance(store._store, MergingStore):
            stores.append(store._store._local)
        await store.aclose()
        return sum(len(counter) for each in stores for counter in each._counters.values())

    assert asyncio.run(count()) * KEY_BYTES <= 1.5 * memory


def test_what_waits_to_be_merged_has_a_bound(mortal: Server) -> None:
    """However seldom counters are merged, and though Redis answers nothing for a while."""
    rule = make_rule(Limit(3, DAY))
    assert rule.limit
    asks = [Ask(rule, rule.limit, f"key {number}") for number in range(8 * LEAST_UNMERGED)]

    async def ask() -> None:
        store = open_store(read_url(mortal.url + SELDOM), memory=2**20)
        assert isinstance(store, MergingStore)
        for first in range(0, len(asks), 100):
            assert all(isinstance(each, Decision) for each in await store.attempt(asks[first : first + 100]))
            await asyncio.sleep(0.005)
            assert len(store._spent) <= LEAST_UNMERGED
        assert len(await asyncio.to_thread(mortal.client.keys, "nl:*")) >= 6 * LEAST_UNMERGED
        mortal.process.send_signal(signal.SIGSTOP)
        try:
            answers = []
            for first in range(0, len(asks), 100):
                answers += await store.attempt([each._replace(hits=2) for each in asks[first : first + 100]])
                await asyncio.sleep(0)
                assert len(store._spent) <= LEAST_UNMERGED
            (told,) = {str(each) for each in answers if isinstance(each, CountersUnavailable)}
            assert "wait to be merged" in told
        finally:
            mortal.process.send_signal(signal.SIGCONT)
        await wait_until(lambda: len(store._spent) < LEAST_UNMERGED // 2)
        assert isinstance((await store.attempt(asks[-1:]))[0], Decision), "and then it decides again"
        await store.aclose()

    asyncio.run(ask())


def test_what_cannot_be_merged_is_tried_no_more_often_for_there_is_much_of_it(
    mortal: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = make_rule(Limit(3, DAY))
    assert rule.limit
    asks = [Ask(rule, rule.limit, f"key {number}") for number in range(LEAST_UNMERGED)]
    merges = []
    merge = MergingStore.merge
    monkeypatch.setattr(MergingStore, "merge", lambda store: merges.append(store) or merge(store))  # type: ignore[func-returns-value]

    async def ask() -> None:
        store = open_store(read_url(mortal.url + "?merge_ms=100&timeout_ms=1000&probe_ms=50"), memory=2**20)
        assert isinstance(store, MergingStore)
        mortal.kill()
        await store.attempt(asks)
        await asyncio.sleep(1)
        assert 1 <= len(merges) <= 12
        await wait_until(lambda: len(store._spent) == LEAST_UNMERGED)
        await store.aclose()

    asyncio.run(ask())
