"""A Redis that answers late holds no lease that no request has: who is not in flight takes up no place."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import pytest

from netlimit.l7 import leftovers
from netlimit.l7.failover import Failover
from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.rules import OnFailure, Rule
from netlimit.l7.store import Ask, Store
from tests.l7.redis.driving import PATIENT, guarded, opened
from tests.l7.redis.servers import Server

LIMIT = Limit(1, 600, Algorithm.CONCURRENCY)
HASTY = "?timeout_ms=200&probe_ms=50"


@asynccontextmanager
async def hanging(server: Server) -> AsyncIterator[None]:
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


async def wait_for_room(store: Store, ask: Ask) -> None:
    async with asyncio.timeout(60):
        for number in count():
            if (await store.decide([ask._replace(lease=f"another {number}")]))[0].admitted:
                return
            await asyncio.sleep(0.05)


async def connect(store: Failover, ask: Ask) -> None:
    """Have a connection, over which Redis is told of what it answers too late."""
    assert await take(store, ask._replace(key="bob", lease="bob's"))


async def take(store: Failover, ask: Ask) -> bool:
    return (await store.decide([ask]))[0].admitted


@pytest.mark.parametrize("case", ["taken before", "taken meanwhile", "refused", "given up"])
def test_what_is_not_in_flight_is_ended_when_redis_answers_again(mortal: Server, case: str) -> None:
    closed = {"on_failure": OnFailure.CLOSED} if case == "refused" else {}
    ask = Ask(Rule("test", case, None, LIMIT, **closed), LIMIT, "alice", lease="first")

    async def live() -> None:
        async with guarded(mortal.url + HASTY) as store, opened(mortal.url + PATIENT) as direct:
            await connect(store, ask)
            if case == "taken before":
                assert await take(store, ask)
            async with hanging(mortal):
                match case:
                    case "taken meanwhile":
                        assert await take(store, ask)
                    case "refused":
                        assert not await take(store, ask)
                    case "given up":
                        with pytest.raises(TimeoutError):
                            await asyncio.wait_for(take(store, ask), 0.1)
                if case.startswith("taken"):
                    await store.release([ask])
            await wait_for_room(direct, ask)

    asyncio.run(live())


def test_what_is_in_flight_keeps_its_place(mortal: Server) -> None:
    ask = Ask(Rule("test", "kept", None, LIMIT), LIMIT, "alice", lease="first")

    async def live() -> None:
        async with guarded(mortal.url + HASTY) as store, opened(mortal.url + PATIENT) as direct:
            await connect(store, ask)
            async with hanging(mortal):
                assert await take(store, ask)
            await asyncio.sleep(2.5 * leftovers.SECONDS)
            assert not (await direct.decide([ask._replace(lease="second")]))[0].admitted
            await store.release([ask])
            await wait_for_room(direct, ask)

    asyncio.run(live())


def test_what_is_left_over_is_forgotten_when_it_has_ended_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "SECONDS", 0.01)
    limit = Limit(1, 1, Algorithm.CONCURRENCY)

    async def live() -> None:
        async with guarded("redis://127.0.0.1:1" + HASTY) as store:
            await store.release([Ask(Rule("test", "forgotten", None, limit), limit, "alice", lease="first")])
            assert len(store._leftovers._held) == 1
            async with asyncio.timeout(60):
                while store._leftovers._held:
                    await asyncio.sleep(0.01)

    asyncio.run(live())


def test_who_goes_before_he_is_answered_leaves_his_place_at_once(
    mortal: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who opens and drops requests all the time would else shut everybody out."""
    monkeypatch.setattr(leftovers, "SECONDS", 600.0)
    ask = Ask(Rule("test", "gone", None, LIMIT), LIMIT, "alice", lease="first")

    async def live() -> None:
        async with guarded(mortal.url + PATIENT) as store, opened(mortal.url + PATIENT) as direct:
            await connect(store, ask)
            async with hanging(mortal):
                asking = asyncio.create_task(take(store, ask))
                await asyncio.sleep(0.1)
                asking.cancel()
                await asyncio.sleep(0)
            await wait_for_room(direct, ask)

    asyncio.run(live())
