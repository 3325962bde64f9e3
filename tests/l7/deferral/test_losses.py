"""What becomes of deferred requests when a real Redis loses some of what it has, and not all."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from netlimit.l7.deferral.backlog import BacklogUnavailable, Bounds, Claim
from netlimit.l7.deferral.redis import RedisBacklog
from netlimit.l7.deferral.request import Deferred, Report, State
from tests.l7.deferral.backlogs import make_request
from tests.l7.redis.servers import Server

pytestmark = pytest.mark.anyio
LOST = "Redis has lost deferred requests, by eviction or a failover: those (%d now) are dropped, and never replayed."
RESTORED = (
    "Redis has lost the order of deferred requests, by eviction or a failover: those that it still has (%d) are "
    "replayed in the order in which they came."
)
RECOUNTED = (
    "Redis has lost how many deferred requests wait of whom, by eviction or a failover. They are counted anew; "
    "meanwhile a request may have been served before those that wait."
)
STREAM, KEYS, BYTES, SHARES, LOCK = (
    f"nl:{{deferred}}:{part}" for part in ("stream", "keys", "bytes", "shares", "lock")
)


@pytest.fixture
async def backlog(server: Server) -> AsyncIterator[RedisBacklog]:
    server.client.flushall()
    backlog = RedisBacklog(server.url)
    yield backlog
    await backlog.aclose()


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[Server]:
    """A server that can go back to what it has saved, as after a failover to a replica that has not heard the last."""
    running = Server(tmp_path, "--enable-debug-command", "yes")
    yield running
    running.close()


def name_record(request: Deferred) -> str:
    return f"nl:{{deferred}}:request:{request.id}"


async def claim_next(backlog: RedisBacklog) -> Claim | None:
    """What is claimed within some turns."""
    for _ in range(4):
        with suppress(BacklogUnavailable):
            if (claim := await backlog.claim(time.time())) is not None:
                return claim
    return None


async def finish(backlog: RedisBacklog, request: Deferred) -> None:
    await backlog.finish(request, State.DONE, time.time(), None, "")


async def find(backlog: RedisBacklog, request: Deferred) -> Report:
    report = await backlog.find(request.id)
    assert report is not None
    return report


async def replay_all(backlog: RedisBacklog) -> list[str]:
    """The paths of all that is claimed, each as the one before has ended."""
    order = []
    while (claim := await claim_next(backlog)) is not None:
        order.append(claim.request.target)
        await finish(backlog, claim.request)
    return order


@pytest.mark.parametrize("lost", [(STREAM,), (STREAM, LOCK), (STREAM, KEYS, BYTES, SHARES)], ids=str)
async def test_of_a_stream_that_is_lost_the_requests_are_replayed_in_order(
    server: Server, backlog: RedisBacklog, lost: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    requests = [make_request(target=f"/{number}") for number in range(12)]
    for request in requests[:11]:
        await backlog.put(request)
    assert await backlog.claim(time.time()) == (requests[0], 1)
    server.client.delete(*lost)
    await backlog.put(requests[11])
    assert await claim_next(backlog) is None  # while the first is being tried still
    await finish(backlog, requests[0])
    assert (await find(backlog, requests[0])).state is State.DONE
    assert await replay_all(backlog) == [f"/{number}" for number in range(1, 12)]
    assert not await backlog.is_waiting("alice")
    assert RESTORED % 11 in [record.getMessage() for record in caplog.records]
    assert not server.client.exists(KEYS, BYTES, SHARES)


async def test_what_ends_after_the_stream_is_lost_has_ended(
    server: Server, backlog: RedisBacklog, caplog: pytest.LogCaptureFixture
) -> None:
    request, behind = make_request(), make_request(target="/behind")
    await backlog.put(request)
    await backlog.put(behind)
    assert await backlog.claim(time.time()) == (request, 1)
    server.client.delete(STREAM)
    await finish(backlog, request)
    assert (await find(backlog, request)).state is State.DONE
    assert await replay_all(backlog) == ["/behind"]
    assert not await backlog.is_waiting("alice")
    assert [record.getMessage() for record in caplog.records] == [RESTORED % 1, RECOUNTED]


async def test_another_worker_finds_what_was_in_a_stream_that_is_lost(server: Server, backlog: RedisBacklog) -> None:
    await backlog.put(make_request())
    assert await backlog.claim(time.time()) is not None
    server.client.delete(STREAM, LOCK)
    heir = RedisBacklog(server.url)
    assert await replay_all(heir) == ["/a?b=%20c"]
    await heir.aclose()


async def test_what_is_lost_with_the_stream_frees_its_key(
    server: Server, backlog: RedisBacklog, caplog: pytest.LogCaptureFixture
) -> None:
    request = make_request()
    await backlog.put(request)
    assert await backlog.claim(time.time() - 1000) is not None
    server.client.delete(STREAM, name_record(request))
    assert await claim_next(backlog) is None
    assert not await backlog.is_waiting("alice")
    assert LOST % 1 in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("lost", [KEYS, BYTES, SHARES])
async def test_counts_that_are_lost_are_counted_anew(
    server: Server, backlog: RedisBacklog, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    counts = (server.client.hgetall, KEYS), (server.client.get, BYTES), (server.client.hgetall, SHARES)
    for request in (make_request(), make_request(), make_request("bob", client="198.51.100.1 80")):
        await backlog.put(request)
    assert await backlog.claim(time.time()) is not None
    before = [read(name) for read, name in counts]
    server.client.delete(lost)
    await backlog.sweep(time.time())
    await backlog.claim(time.time())
    assert [read(name) for read, name in counts] == before
    assert [record.getMessage() for record in caplog.records] == ([RECOUNTED] if lost == KEYS else [])


async def test_what_is_in_flight_ends_though_a_failover_brings_back_its_predecessor(forgetful: Server) -> None:
    backlog = RedisBacklog(forgetful.url)
    first, second = make_request(target="/1"), make_request(target="/2")
    for request in (first, second):
        await backlog.put(request)
    assert await backlog.claim(time.time()) == (first, 1)
    forgetful.client.save()
    await finish(backlog, first)
    assert await backlog.claim(time.time()) == (second, 1)
    forgetful.client.execute_command("DEBUG", "RELOAD", "NOSAVE")
    await backlog.sweep(time.time())
    assert await backlog.claim(time.time()) is None  # one of a line is tried at a time
    await finish(backlog, second)
    assert (await find(backlog, second)).state is State.DONE
    assert await backlog.claim(time.time()) == (first, 2)  # whose end the new master has not heard
    await finish(backlog, first)
    assert await backlog.claim(time.time() + 1000) is None
    assert not await backlog.is_waiting("alice")
    await backlog.aclose()


async def test_losses_of_an_outage_longer_than_the_lease_are_told(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.client.flushall()
    backlog = RedisBacklog(server.url)
    for _ in range(2):
        await backlog.put(make_request())
    assert await backlog.claim(time.time()) is not None
    server.client.flushall()  # the lock too: it would have ended
    assert await claim_next(backlog) is None
    assert [record.getMessage() for record in caplog.records] == [LOST % 2]
    await backlog.aclose()


async def test_what_another_has_ended_so_long_ago_that_it_is_forgotten_is_not_lost(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.client.flushall()
    backlog, other = (RedisBacklog(server.url, Bounds(keep=1)) for _ in range(2))
    request = make_request()
    await backlog.put(request)
    assert await backlog.claim(time.time()) is not None
    server.client.delete(LOCK)
    assert await replay_all(other) == [request.target]
    await other.aclose()
    server.client.delete(name_record(request))  # as it expires
    assert await backlog.claim(time.time() + 2) is None
    assert not caplog.records
    await backlog.aclose()


async def test_an_entry_of_the_stream_that_cannot_be_read_is_dropped(
    server: Server, backlog: RedisBacklog, caplog: pytest.LogCaptureFixture
) -> None:
    for fields in ({"x": "y"}, {"id": b"\xff", "key": "alice"}, {"id": "1", "key": "alice", "size": "much"}):
        server.client.xadd(STREAM, fields)
    request = make_request()
    await backlog.put(request)
    assert await backlog.claim(time.time()) == (request, 1)
    assert server.client.xlen(STREAM) == 1
    told = [record for record in caplog.records if "that cannot be read" in record.getMessage()]
    assert len(told) == 3


@pytest.mark.parametrize("whole", [False, True], ids=["its fields", "all of it"])
async def test_a_record_of_garbage_holds_nobody_up(server: Server, backlog: RedisBacklog, whole: bool) -> None:
    spoilt, behind = make_request(target="/spoilt"), make_request(target="/behind")
    for request in (spoilt, behind):
        await backlog.put(request)
    name = name_record(spoilt)
    if whole:
        server.client.set(name, b"\xff")
    else:
        server.client.hset(name, mapping=dict.fromkeys(("head", "tries", "size", "accepted"), b"\xff"))
    server.client.delete(STREAM)
    server.client.xadd(STREAM, {"id": spoilt.id, "key": "alice", "size": 1})
    server.client.hset(KEYS, "bob", b"\xff")
    assert await replay_all(backlog) == ["/behind"]
    assert not server.client.exists(KEYS, BYTES, SHARES)
