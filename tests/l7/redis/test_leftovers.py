"""A Redis that answers late holds no lease that no request has: who is not in flight takes up no place."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count

import pytest

from netlimit.l7 import leftovers
from netlimit.l7.breaker import State
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


class Straits:
    """A way to a server on which what has been sent already may be held up, and new connections overtake it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: list[asyncio.Event] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> str:
        """Listen; the URL."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def hold_up(self) -> None:
        """Let nothing more through of what is sent on the connections that there are."""
        for each in self._connections:
            each.clear()

    def let_go(self) -> None:
        for each in self._connections:
            each.set()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(each.wait_closed() for each in self._writers), return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        free, always = asyncio.Event(), asyncio.Event()
        self._connections.append(free)
        self._writers += [writer, back]
        for event, *ends in ((free, reader, back), (always, there, writer)):
            event.set()
            self._tasks.add(asyncio.create_task(self._pass_on(event, *ends)))

    @staticmethod
    async def _pass_on(free: asyncio.Event, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await free.wait()
                writer.write(data)
            await free.wait()
            await writer.drain()
            writer.close()


def test_a_place_taken_anew_too_late_is_left_when_the_request_has_ended(mortal: Server) -> None:
    """What was not answered in time may arrive behind the release."""
    ask = Ask(Rule("test", "renewed", None, LIMIT), LIMIT, "alice", lease="first")

    async def live() -> None:
        straits = Straits(mortal.port)
        url = await straits.open()
        async with guarded(url + HASTY) as store, opened(mortal.url + PATIENT) as direct:
            assert await take(store, ask)
            await direct.release([ask])  # its place was lost there
            straits.hold_up()
            await store.renew([ask], anew=True)
            async with asyncio.timeout(60):
                while store.state is not State.CLOSED:
                    await take(store, ask._replace(key="bob", lease="bob's"))
                    await asyncio.sleep(0.05)
            await store.release([ask])
            straits.let_go()
            await asyncio.sleep(0.2)
            await wait_for_room(direct, ask)
        await straits.close()

    asyncio.run(live())
