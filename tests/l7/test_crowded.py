"""That nobody is blocked in the kernel for what a counter says that he shares with others."""

from __future__ import annotations

import asyncio
from collections import Counter as Counts
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import pytest

from netlimit.l7.breaker import State
from netlimit.l7.counters import open_counters
from netlimit.l7.decision import Crowded
from netlimit.l7.document import parse_document
from netlimit.l7.escalation import Refusals
from netlimit.l7.failover import Failover
from netlimit.l7.limit import Algorithm, Limit, Refill
from netlimit.l7.limiter import Limiter
from netlimit.l7.memory.budget import Budget
from netlimit.l7.memory.shares import find_shares
from netlimit.l7.memory.store import MemoryStore, make_counter
from netlimit.l7.redis.merging import MergingStore
from netlimit.l7.rules import CLIENT_KEY, Descriptor, Entry, Escalation, Node, Rule, RuleSet
from netlimit.l7.service.envoy import should_rate_limit
from netlimit.l7.service.protocol.descriptor_pb2 import RateLimitDescriptor
from netlimit.l7.service.protocol.service_pb2 import RateLimitRequest
from netlimit.l7.store import Store
from tests.l7.redis.driving import PATIENT, guarded, opened
from tests.l7.redis.servers import Server
from tests.ports import free_port

DAY = 86_400
KEYS = 256
AFTER = 10
LIMITS = [
    *(Limit(2, DAY, algorithm) for algorithm in Algorithm),
    Limit(2, DAY, Algorithm.TOKEN_BUCKET, refill=Refill.INTERVAL),
    Limit(2, DAY, Algorithm.SLIDING_WINDOW_LOG, count_refused=False),
]
every = pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: f"{limit.algorithm}-{limit.refill}")
ESCALATE = Escalation(AFTER, 60, 600)


class Asked:
    """A limiter whose limits escalate: one of clients, and one of clients and paths."""

    def __init__(self, limit: Limit, store: Store) -> None:
        flying = limit.algorithm is Algorithm.CONCURRENCY
        limits = (None, limit) if flying else (limit, None)
        by_client = Rule("web", "remote_address", *limits, escalate=ESCALATE)
        by_path = Rule("web", "remote_address,path", *limits, escalate=ESCALATE)
        rules = RuleSet({"web": Node(default={CLIENT_KEY: Node(by_client, default={"path": Node(by_path)})})})
        self.refusals = Refusals()
        self.limiter = Limiter(lambda: rules, store, refusals=self.refusals)

    async def ask(self, client: str, path: str = "") -> bool:
        entries = (Entry(CLIENT_KEY, client), *([Entry("path", path)] if path else []))
        return (await self.limiter.decide("web", [Descriptor(entries)])).allowed

    async def ask_often(self, client: str, path: str = "", times: int = 4 * AFTER) -> int:
        """How many pass."""
        return sum([await self.ask(client, path) for _ in range(times)])

    async def flood_from_everywhere(self) -> None:
        """As many addresses as there is room for go over their limit."""
        for number in range(KEYS):
            for _ in range(4):
                await self.ask(f"10.{number}.0.1")

    async def flood_paths(self, client: str) -> None:
        for number in range(2 * KEYS):
            await self.ask(client, f"/{number}")

    @property
    def blocked(self) -> set[str]:
        found = set()
        while (taken := self.refusals.take()) is not None:
            found.add(taken[0])
        return found


def crowd_out(limit: Limit) -> Asked:
    return Asked(limit, MemoryStore(keys=KEYS))


@every
def test_newcomers_for_whom_there_is_no_room_are_not_blocked(limit: Limit) -> None:
    asked = crowd_out(limit)

    async def ask() -> None:
        await asked.flood_from_everywhere()
        await asked.ask_often("198.51.100.77", times=10)
        assert await asked.ask_often("203.0.113.9") == 0

    asyncio.run(ask())
    assert asked.blocked == set()


@every
@pytest.mark.parametrize(
    ("greedy", "neighbour"),
    [("2001:db8:1:1::/64", "2001:db8:1:2::/64"), ("203.0.113.5", "203.0.113.6")],
    ids=["IPv6", "IPv4"],
)
def test_who_shares_a_network_with_one_that_invents_paths_is_not_blocked(
    limit: Limit, greedy: str, neighbour: str
) -> None:
    asked = crowd_out(limit)

    async def ask() -> None:
        await asked.flood_paths(greedy)
        passed = [await asked.ask(neighbour, f"/page/{number}") for number in range(4 * AFTER)]
        assert passed.count(False) >= 3 * AFTER

    asyncio.run(ask())
    assert neighbour not in asked.blocked


@every
def test_who_is_over_his_own_limit_is_blocked_in_a_flood(limit: Limit) -> None:
    """Also where his counter is one of those that take all room, and after others have begun to share one."""
    asked = crowd_out(limit)

    async def ask() -> None:
        await asked.ask_often("192.0.2.7", times=4)
        await asked.flood_from_everywhere()
        await asked.ask("203.0.113.9")
        assert await asked.ask_often("192.0.2.7") == 0
        await asked.ask_often("10.7.0.1")

    asyncio.run(ask())
    assert asked.blocked == {"192.0.2.7", "10.7.0.1"}


@every
def test_who_invents_paths_is_blocked_for_one_that_he_asks_for_too_often(limit: Limit) -> None:
    asked = crowd_out(limit)

    async def ask() -> None:
        await asked.ask_often("203.0.113.5", "/login", times=3)
        await asked.flood_paths("203.0.113.5")
        assert await asked.ask_often("203.0.113.5", "/login") == 0

    asyncio.run(ask())
    assert asked.blocked == {"203.0.113.5"}


@pytest.mark.parametrize(("count_refused", "weight"), [(True, 1), (False, 1), (True, 2), (False, 2)])
def test_who_is_over_his_own_limit_is_blocked_where_logs_have_no_more_room(count_refused: bool, weight: int) -> None:
    """Nor is anything of the counter given to him that others share then."""
    asked = Asked(Limit(500, DAY, Algorithm.SLIDING_WINDOW_LOG, count_refused=count_refused), MemoryStore(memory=2**20))

    async def use_up(client: str, times: int = 500, escalates: bool = False) -> int:
        descriptor = Descriptor((Entry(CLIENT_KEY, client),), weight)
        decide = asked.limiter.decide
        return sum([(await decide("web", [descriptor], escalates=escalates)).allowed for _ in range(times)])

    async def ask() -> None:
        assert await use_up("192.0.2.7") == 500 // weight
        for number in range(100):
            await use_up(f"10.{number}.0.1", 510 // weight + 1)
        assert await use_up("203.0.113.9", escalates=True) <= 500 // weight
        assert await use_up("192.0.2.7", 2 * AFTER, escalates=True) == 0
        assert await use_up("203.0.113.10", escalates=True) < 500 // weight, "there is no room for another"

    asyncio.run(ask())
    assert asked.blocked == {"192.0.2.7"}
    (counter,) = asked.limiter._store._counters.values()  # type: ignore[attr-defined]
    assert counter._count_entries() <= 34_000


@every
@pytest.mark.parametrize("seed", range(10))
def test_what_a_key_has_not_used_itself_is_never_refused_as_if_it_had(limit: Limit, seed: int) -> None:
    """Whatever else comes, in whichever order, and however scarce room is."""
    chance = Random(seed)
    amount = chance.randrange(1, 300 if limit.algorithm is Algorithm.SLIDING_WINDOW_LOG else 30)
    counter = make_counter(replace(limit, amount=amount), None, chance.choice([64, 300]), Budget(2**20))
    if seed % 2:
        counter.shares = find_shares("remote_address,path")
    used: Counts[str] = Counts()
    counts_all = limit.algorithm is Algorithm.SLIDING_WINDOW_LOG and limit.count_refused
    for _ in range(1500):
        key = chance.choice(
            [
                f"9.9.{chance.randrange(3)}.9|/{chance.randrange(500)}",
                f"2001:db8:1:{chance.randrange(300):x}::/64|/",
                f"{chance.randrange(60)}.1.1.1|/",
            ]
        )
        weight, charge = min(amount, chance.choice([1, 3, 25])), chance.random() < 0.1
        answer = counter.hit(key, weight, 0, charge)
        if not answer.admitted and not isinstance(answer, Crowded):
            assert used[key] + weight > amount
        if answer.admitted or charge or counts_all:
            used[key] += weight
        if chance.random() < 0.005:
            counter.shrink()


def test_what_a_key_looks_like_hides_nobody() -> None:
    """A client may write a path as counters are named that many share."""
    asked = crowd_out(Limit(2, DAY))

    async def ask() -> None:
        await asked.ask_often("192.0.2.7", "\0crowd")
        await asked.ask_often("192.0.2.8", "\0crowd of 192.0.2.8")

    asyncio.run(ask())
    assert asked.blocked == {"192.0.2.7", "192.0.2.8"}


def test_a_limit_of_the_rate_blocks_beside_one_in_flight_that_is_crowded() -> None:
    """However long it takes until the other has room."""
    rule = Rule("web", "remote_address", Limit(1, 60), Limit(1, DAY, Algorithm.CONCURRENCY), escalate=ESCALATE)
    rules = RuleSet({"web": Node(default={CLIENT_KEY: Node(rule)})})
    refusals = Refusals()
    store = MemoryStore(keys=KEYS)
    limiter = Limiter(lambda: rules, store, refusals=refusals)

    async def ask(client: str, times: int = 1) -> None:
        for _ in range(times):
            await limiter.decide("web", [Descriptor((Entry(CLIENT_KEY, client),))])

    async def flood() -> None:
        assert rule.limit
        for number in range(KEYS):
            await ask(f"10.{number}.0.1")
        store._counters.pop(("web", "remote_address", False))  # a day lasts longer than a minute
        await ask("192.0.2.7", 4 * AFTER)

    asyncio.run(flood())
    taken = refusals.take()
    assert taken is not None
    assert taken[0] == "192.0.2.7"


@asynccontextmanager
async def standing_in(limit: Limit) -> AsyncIterator[Asked]:
    """One that counts by itself, since there is no Redis."""
    async with guarded(f"redis://127.0.0.1:{free_port()}?probe_ms=60000") as store:
        store._local = MemoryStore(keys=KEYS)
        yield Asked(limit, store)
        assert store.state is not State.CLOSED


@every
def test_nor_are_they_while_the_process_stands_in_for_redis(limit: Limit) -> None:
    async def ask() -> set[str]:
        async with standing_in(limit) as asked:
            await asked.ask_often("192.0.2.7", times=4)
            await asked.flood_from_everywhere()
            assert await asked.ask_often("203.0.113.9") <= 2
            await asked.ask_often("192.0.2.7")
            return asked.blocked

    assert asyncio.run(ask()) == {"192.0.2.7"}


def test_nor_by_an_emergency_limit_that_many_share() -> None:
    async def ask() -> set[str]:
        rule = Rule("web", "remote_address", Limit(9, DAY), emergency=Limit(2, DAY), escalate=ESCALATE)
        rules = RuleSet({"web": Node(default={CLIENT_KEY: Node(rule)})})
        async with guarded(f"redis://127.0.0.1:{free_port()}?probe_ms=60000") as store:
            store._emergencies = MemoryStore(keys=KEYS)
            asked = Asked(Limit(1, 1), store)
            asked.limiter = Limiter(lambda: rules, store, refusals=asked.refusals)
            await asked.flood_from_everywhere()
            assert await asked.ask_often("203.0.113.9") <= 2
            return asked.blocked

    assert asyncio.run(ask()) == set()


@pytest.mark.parametrize(
    "limit", [each for each in LIMITS if each.algorithm in (Algorithm.GCRA, "fixed_window")], ids=str
)
def test_nor_where_counters_are_merged_with_redis(server: Server, limit: Limit) -> None:
    async def ask() -> set[str]:
        async with opened(server.url + PATIENT + "&merge_ms=60000") as merging:
            assert isinstance(merging, MergingStore)
            merging._local = MemoryStore(keys=KEYS)
            asked = Asked(limit, Failover(merging, MemoryStore(keys=KEYS), 1.0))
            await asked.ask_often("192.0.2.7", times=4)
            await asked.flood_from_everywhere()
            assert await asked.ask_often("203.0.113.9") <= 2
            await asked.ask_often("192.0.2.7")
            return asked.blocked

    assert asyncio.run(ask()) == {"192.0.2.7"}


def test_nor_by_what_envoy_asks() -> None:
    """Which counts what is refused, too."""
    asked = crowd_out(Limit(2, DAY))

    async def ask(clients: Sequence[str]) -> None:
        for client in clients:
            entry = RateLimitDescriptor.Entry(key=CLIENT_KEY, value=client)
            question = RateLimitRequest(domain="web", descriptors=[RateLimitDescriptor(entries=[entry])])
            await should_rate_limit(asked.limiter, (), question.SerializeToString(), escalates=True)

    asyncio.run(ask([f"10.{number}.0.1" for number in range(KEYS) for _ in range(4)]))
    asyncio.run(ask(["203.0.113.9"] * 4 * AFTER + ["10.7.0.1"] * AFTER))
    assert asked.blocked == {"10.7.0.1"}


def test_nor_by_what_all_of_a_pattern_share() -> None:
    document = parse_document(
        "domain: web\ndescriptors:\n- {key: remote_address, value: '10.*', share_threshold: true, "
        f"rate_limit: {{unit: day, requests_per_unit: 5}}, escalate: {{after: {AFTER}, within: 1m, block: 10m}}}}\n"
    )
    rules = RuleSet({"web": document.root})
    asked = crowd_out(Limit(1, 1))
    asked.limiter = Limiter(lambda: rules, MemoryStore(), refusals=asked.refusals)

    async def ask() -> None:
        assert await asked.ask_often("10.1.1.1", times=5) == 5
        assert await asked.ask_often("10.2.2.2") == 0

    asyncio.run(ask())
    assert asked.blocked == set()


def test_in_memory_alone_as_well() -> None:
    """As `memory://` is opened, by memory and not by a number of keys."""
    asked = Asked(Limit(2, DAY), open_counters("memory://", 2**20))

    async def ask() -> None:
        for number in range(6000):
            for _ in range(3):
                await asked.ask(f"10.{number // 250}.{number % 250}.1")
        assert await asked.ask_often("203.0.113.9") == 0

    asyncio.run(ask())
    assert asked.blocked == set()
