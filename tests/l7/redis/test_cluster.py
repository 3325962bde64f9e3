"""A cluster of three nodes: counters on all of them, slots that move, nodes that die."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

import pytest
from redis.crc import key_slot

from netlimit.errors import CountersUnavailable
from netlimit.l7.breaker import State
from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.redis.key import make_name, make_prefix
from netlimit.l7.rules import OnFailure, Rule
from netlimit.l7.store import Ask
from tests.l7.redis.driving import EVERY, PATIENT, ask_until_answered, guarded, hit, make_rule, opened
from tests.l7.redis.servers import Nodes, Server

DAY = 86_400


def find_slot(rule: Rule, key: str = "alice") -> int:
    assert rule.limit
    return int(key_slot(make_name(make_prefix(rule, rule.limit), key)))


@pytest.fixture
def nodes(nodes: Nodes) -> Iterator[Nodes]:
    """With nothing in them, and every slot where it was."""
    for server in nodes.servers:
        server.client.flushall()
    yield nodes
    nodes.restore()


def test_counters_spread_over_all_nodes(nodes: Nodes) -> None:
    rules = [make_rule(limit) for limit in EVERY]

    async def ask() -> None:
        async with opened(nodes.url + PATIENT) as store:
            asks = [Ask(rule, rule.limit, f"user {number}") for rule in rules for number in range(30) if rule.limit]
            for left in (1, 2):
                for each, decision in zip(asks, await store.decide(asks), strict=True):
                    assert decision.remaining == each.limit.capacity - left or each.limit.seconds == 1

    asyncio.run(ask())
    assert all(server.client.dbsize() > 30 for server in nodes.servers)
    assert all(server.client.pttl(key) != -1 for server in nodes.servers for key in server.client.scan_iter(count=1000))


def test_leases_on_a_cluster(nodes: Nodes) -> None:
    limit = Limit(1, 30, Algorithm.CONCURRENCY)
    rule = Rule("test", "doors", None, limit)

    async def ask() -> None:
        async with opened(nodes.url + PATIENT) as store:
            asks = [Ask(rule, limit, f"door {number}", lease=f"lease {number}") for number in range(20)]
            assert all(each.admitted for each in await store.decide(asks))
            await store.renew(asks)
            others = [each._replace(lease="other") for each in asks]
            assert not any(each.admitted for each in await store.decide(others))
            await store.release(asks)
            assert all(each.admitted for each in await store.decide(others))

    asyncio.run(ask())


def test_a_slot_that_has_moved_is_followed(nodes: Nodes) -> None:
    rule = make_rule(Limit(5, DAY))
    slot = find_slot(rule)

    async def ask() -> None:
        async with opened(nodes.url + PATIENT) as store:
            assert (await hit(store, rule)).remaining == 4
            target = nodes.move(slot)
            assert (await hit(store, rule)).remaining == 3
            before = count_commands(nodes.find(slot))
            assert (await hit(store, rule)).remaining == 2
            assert count_commands(nodes.find(slot)) == before  # it is not asked again
            assert target.client.dbsize() == 1

    asyncio.run(ask())


def count_commands(server: Server) -> int:
    stats = server.client.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {}).get("calls", 0)) + int(
        stats.get("cmdstat_evalsha", {}).get("rejected_calls", 0)
    )


def test_a_slot_that_is_moving_is_asked_for_at_both_ends(nodes: Nodes) -> None:
    """What is at the old node yet is counted there; what is not, at the new one."""
    rule = make_rule(Limit(5, DAY))
    prefix = make_prefix(rule, Limit(5, DAY))
    slot = key_slot(make_name(prefix, "old"))
    new = next(key for key in map(str, count()) if key_slot(make_name(prefix, key)) == slot)

    async def ask() -> None:
        async with opened(nodes.url + PATIENT) as store:
            assert (await hit(store, rule, "old")).remaining == 4
            target = nodes.begin_to_move(slot)
            assert (await hit(store, rule, "old")).remaining == 3
            together = await store.decide([Ask(rule, Limit(5, DAY), key) for key in ("old", new, new)])
            assert [decision.remaining for decision in together] == [2, 4, 3]
            assert (nodes.find(slot).client.dbsize(), target.client.dbsize()) == (1, 1)

    asyncio.run(ask())


def test_a_node_that_dies_takes_no_other_with_it(nodes: Nodes) -> None:
    open_rule = make_rule(Limit(5, DAY), emergency=Limit(2, DAY))
    closed = make_rule(Limit(5, DAY), on_failure=OnFailure.CLOSED)
    dead = nodes.servers[2]
    keys = {
        server: next(key for key in map(str, range(999)) if nodes.find(find_slot(open_rule, key)) is server)
        for server in nodes.servers
    }
    key = next(key for key in map(str, range(999)) if nodes.find(find_slot(closed, key)) is dead)

    async def ask() -> None:
        async with guarded(nodes.url + "?timeout_ms=60000&probe_ms=50") as store:
            assert all([(await hit(store, open_rule, each)).remaining == 4 for each in keys.values()])
            dead.kill()
            assert [(await hit(store, open_rule, keys[dead])).admitted for _ in range(3)] == [True, True, False]
            assert (await hit(store, closed, key)).admitted is False
            assert (store.decided_here, store.refused) == (3, 1)
            assert store.state is not State.CLOSED
            asks = [Ask(open_rule, Limit(5, DAY), each) for each in keys.values()]
            assert [decision.remaining for decision in await store.decide(asks)] == [3, 3, 0]
            assert store.decided_here == 4
            nodes.revive(dead)
            async with asyncio.timeout(120):
                while store.state is not State.CLOSED:
                    await hit(store, open_rule, keys[dead])
                    await asyncio.sleep(0.02)
            here = store.decided_here
            assert (await hit(store, closed, key)).admitted
            assert store.decided_here == here

    asyncio.run(ask())


def test_whoever_takes_over_from_a_dead_node_is_found(nodes: Nodes) -> None:
    rule = make_rule(Limit(5, DAY))
    dead = nodes.find(find_slot(rule))

    async def ask() -> None:
        async with opened(nodes.url + "?timeout_ms=60000&probe_ms=50") as store:
            assert (await hit(store, rule)).remaining == 4
            dead.kill()
            heir = nodes.inherit(find_slot(rule))
            with pytest.raises(CountersUnavailable):
                await hit(store, rule)
            await ask_until_answered(store, rule)
            assert (await hit(store, rule)).remaining == 3
            assert heir.client.dbsize() == 1

    try:
        asyncio.run(ask())
    finally:
        nodes.revive(dead)


def test_one_node_that_answers_is_enough_to_begin_with(nodes: Nodes) -> None:
    rule = make_rule(Limit(5, DAY))
    url = f"redis+cluster://127.0.0.1:1,127.0.0.1:{nodes.servers[1].port}{PATIENT}"

    async def ask() -> None:
        async with opened(url) as store:
            left = await asyncio.gather(*(hit(store, rule, str(number)) for number in range(20)))
            assert {decision.remaining for decision in left} == {4}

    asyncio.run(ask())


def test_without_any_node_nothing_is_decided() -> None:
    async def ask() -> None:
        async with opened("redis+cluster://127.0.0.1:1,127.0.0.1:2?timeout_ms=60000&probe_ms=60000") as store:
            for _ in range(2):
                with pytest.raises(CountersUnavailable, match=r"127[.]0[.]0[.]1:1, 127[.]0[.]0[.]1:2 cannot be asked"):
                    await hit(store, make_rule(Limit(5, 60)))
            assert store.state is State.OPEN

    asyncio.run(ask())
