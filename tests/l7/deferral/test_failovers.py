"""Deferred requests in Redis after a failover, where the name in the URL leads to whoever is master."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import pytest

from netlimit.l7.deferral.backlog import BacklogUnavailable
from netlimit.l7.deferral.redis import RedisBacklog
from tests.l7.deferral.backlogs import make_request
from tests.l7.redis.servers import START_SECONDS, Server

pytestmark = pytest.mark.anyio


class Pair:
    """A master and its replica."""

    def __init__(self, directory: Path) -> None:
        self.master, self.replica = Server(directory), Server(directory)
        self.replica.client.replicaof("127.0.0.1", str(self.master.port))
        _wait_for(lambda: self.replica.client.info("replication")["master_link_status"] == "up")

    def fail_over(self) -> None:
        """The replica takes over; the old master lives on as a replica of it, and closes no connection."""
        old, new = self.master, self.replica
        old.client.execute_command("FAILOVER", "TO", "127.0.0.1", new.port)
        _wait_for(lambda: new.client.role()[0] == b"master" and old.client.role()[0] == b"slave")
        self.master, self.replica = new, old


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    for server in (pair.master, pair.replica):
        server.close()


@asynccontextmanager
async def lead_to_master(pair: Pair) -> AsyncIterator[str]:
    """A URL that leads each new connection to the master as it is then; those that are open stay, as with a name."""
    passages: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError), closing(writer):
            while data := await reader.read(65536):
                writer.write(data)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = await asyncio.open_connection("127.0.0.1", pair.master.port)
        for way in ((reader, onward[1]), (onward[0], writer)):
            passages.add(asyncio.create_task(pump(*way)))

    name = await asyncio.start_server(forward, "127.0.0.1")
    try:
        yield f"redis://127.0.0.1:{name.sockets[0].getsockname()[1]}"
    finally:
        name.close()
        for passage in passages:
            passage.cancel()
        await asyncio.wait(passages)
        await asyncio.sleep(0)  # what has been closed ends in the next round


async def succeed(backlog: RedisBacklog) -> bool:
    """Whether all that is asked of it now has an answer."""
    try:
        await asyncio.gather(*(backlog.put(make_request()) for _ in range(4)))
        await backlog.claim(time.time())
    except BacklogUnavailable:
        return False
    return True


async def test_after_a_failover_the_new_master_is_reached(pair: Pair) -> None:
    async with lead_to_master(pair) as url:
        backlog = RedisBacklog(url)
        requests = [make_request() for _ in range(20)]
        await asyncio.gather(*map(backlog.put, requests))  # over many connections
        await asyncio.gather(*(backlog.find(request.id) for request in requests))
        assert await backlog.claim(time.time()) is not None
        await asyncio.to_thread(pair.fail_over)
        answered = [await succeed(backlog) for _ in range(6)]
        assert not answered[0]
        assert all(answered[2:])
        assert pair.master.client.xlen("nl:{deferred}:stream") >= 20 + 4 * 4
        pair.master.client.delete(f"nl:{{deferred}}:request:{requests[0].id}")
        found = await asyncio.gather(*(backlog.find(requests[0].id) for _ in range(4)))
        assert found == [None] * 4  # those who only read hear of it from others
        assert len(pair.replica.client.client_list(_type="normal")) == 1  # the test's own: all others are closed
        await backlog.aclose()


async def test_what_is_asked_meanwhile_is_answered(pair: Pair) -> None:
    """A connection in use is not closed before it has its answer."""
    backlog = RedisBacklog(pair.master.url)
    request = make_request()
    await backlog.put(request)
    pair.master.client.client_pause(500, all=True)
    asked = [asyncio.create_task(backlog.find(request.id)) for _ in range(4)]
    await asyncio.sleep(0.1)
    for client in backlog._clients:
        await client.connection_pool.renew()
    assert all(report is not None for report in await asyncio.gather(*asked))
    assert len(pair.master.client.client_list(_type="normal")) == 1
    await backlog.aclose()
