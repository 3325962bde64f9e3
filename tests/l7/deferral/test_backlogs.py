"""The suite over both backlogs, and what is SQLite's own."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from netlimit.errors import SettingsError
from netlimit.l7.deferral.backlog import BacklogFull, BacklogUnavailable, Bounds, Claim
from netlimit.l7.deferral.deferral import open_backlog
from netlimit.l7.deferral.redis import RedisBacklog
from netlimit.l7.deferral.request import Deferred, Reply, State, keep_answered, keep_headers
from netlimit.l7.deferral.sqlite import SqliteBacklog
from netlimit.l7.rules import Descriptor, Entry
from tests.l7.deferral.backlogs import BacklogSuite, end_one, make_request
from tests.l7.redis.servers import Server

TOLD = (Descriptor((Entry("remote_address", "2001:db8:1:2::/64"), Entry("path", "/"))),)
LOST = "Redis has lost deferred requests, by eviction or a failover: those (%d now) are dropped, and never replayed."


class TestBacklogs(BacklogSuite):
    pass


@pytest.mark.anyio
async def test_nobody_else_may_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deferred.db"
    path.touch(0o644)
    backlog = SqliteBacklog(path)
    await backlog.put(make_request())
    assert {each.name: oct(each.stat().st_mode & 0o777) for each in tmp_path.iterdir()} == {
        "deferred.db": "0o600",
        "deferred.db-wal": "0o600",
        "deferred.db-shm": "0o600",
    }
    await backlog.aclose()


@pytest.mark.anyio
async def test_of_what_has_ended_credentials_are_forgotten(tmp_path: Path) -> None:
    backlog = SqliteBacklog(tmp_path / "deferred.db")
    request = make_request(body=b"a private body")
    await backlog.put(request)
    await backlog.finish(request, State.DONE, time.time(), None, "")
    await backlog.aclose()
    with sqlite3.connect(tmp_path / "deferred.db") as connection:
        rows = str(connection.execute("SELECT * FROM deferred").fetchall())
    connection.close()
    assert "s3cret" not in rows
    assert "private" not in rows


@pytest.mark.anyio
async def test_no_more_ends_are_remembered_than_may_wait(tmp_path: Path) -> None:
    backlog = SqliteBacklog(tmp_path / "deferred.db", Bounds(most=3))
    requests = [make_request() for _ in range(5)]
    for number, request in enumerate(requests):
        await backlog.put(request)
        await backlog.finish(request, State.DONE, 1e9 + number, None, "")
    await backlog.sweep(1e9)
    assert [await backlog.find(request.id) is not None for request in requests] == [False] * 2 + [True] * 3
    await backlog.aclose()


@pytest.mark.anyio
async def test_a_file_of_a_former_version_tells_the_networks_too(tmp_path: Path) -> None:
    backlog = SqliteBacklog(tmp_path / "deferred.db")
    request, other = make_request("alice"), make_request("bob", client="198.51.100.1 80")
    for each in (request, other, make_request("carol")):
        await backlog.put(each)
    await backlog.aclose()
    with closing(sqlite3.connect(tmp_path / "deferred.db")) as connection:
        connection.executescript("DROP TRIGGER deferred_comes; DROP TRIGGER deferred_ends; DROP TRIGGER deferred_goes")
        connection.executescript("DROP TRIGGER deferred_moves; DROP TRIGGER deferred_moved")
        connection.executescript("DROP TABLE weights; DROP INDEX deferred_answers")
        connection.executescript("ALTER TABLE deferred DROP COLUMN network")
        connection.executescript("UPDATE deferred SET head = CAST(x'ff' AS TEXT) WHERE key = 'carol'")
    backlog = SqliteBacklog(tmp_path / "deferred.db")
    assert weigh(tmp_path / "deferred.db") == add_up(tmp_path / "deferred.db") != []
    assert await backlog.claim(backlog.now(), {request.network: 1}, 1) == (other, 1)
    await backlog.aclose()


def weigh(path: Path) -> list[tuple[object, ...]]:
    """How much waits of each key and network, as the file tells it."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT * FROM weights ORDER BY key, network").fetchall()


def add_up(path: Path) -> list[tuple[object, ...]]:
    """The same, of all that waits."""
    query = "SELECT key, network, count(*), sum(size) FROM deferred WHERE state = 'waiting' GROUP BY 1, 2 ORDER BY 1, 2"
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


@pytest.mark.anyio
async def test_how_much_waits_is_known_whatever_becomes_of_it(tmp_path: Path) -> None:
    """Nothing is added up, and no body read, when one more comes: bodies of 256 MiB took everybody seconds."""
    path = tmp_path / "deferred.db"
    backlog, chance, waiting = SqliteBacklog(path, Bounds(most=20)), random.Random(7), dict[str, Deferred]()
    for _ in range(200):
        key, client = chance.choice("abc"), f"192.0.{chance.randrange(3)}.1 80"
        request = make_request(key, body=bytes(chance.randrange(9000)), client=client)
        with suppress(BacklogFull):
            await backlog.put(request)
            waiting[request.id] = request
        claim = await backlog.claim(backlog.now())
        if claim is not None and chance.random() < 0.3:
            await backlog.postpone(claim.request, backlog.now() - 1, tried=True, aside=chance.random() < 0.5)
        elif claim is not None:
            state = chance.choice([State.DONE, State.FAILED])
            await backlog.finish(claim.request, state, backlog.now(), Reply(200, (), b"x" * 500), "")
        assert weigh(path) == add_up(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM deferred WHERE key = 'a'")
    assert weigh(path) == add_up(path) != []
    await backlog.aclose()


@pytest.mark.anyio
async def test_what_each_request_asks_does_not_wait_for_what_is_written(tmp_path: Path) -> None:
    backlog = SqliteBacklog(tmp_path / "deferred.db")
    request = make_request()
    await backlog.put(request)
    with closing(sqlite3.connect(tmp_path / "deferred.db", isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        putting = asyncio.create_task(backlog.put(make_request("bob")))
        async with asyncio.timeout(5):
            assert await backlog.comes_behind(request.key, "")
            assert await backlog.is_waiting(request.key)
            assert await backlog.find(request.id) is not None
        assert not putting.done()
        connection.execute("ROLLBACK")
    await putting
    assert await backlog.is_waiting("bob")
    await backlog.aclose()


@pytest.mark.anyio
async def test_those_of_a_key_that_wait_hold_up_no_others_in_redis(server: Server) -> None:
    server.client.flushall()
    backlog = RedisBacklog(server.url)
    requests = [make_request("alice") for _ in range(1000)]
    other = make_request("bob")
    for request in (*requests, other):
        await backlog.put(request)
    assert await backlog.claim(time.time()) == (requests[0], 1)
    assert await backlog.claim(time.time()) == (other, 1)
    await backlog.aclose()


@pytest.mark.parametrize(
    ("told", "network"),
    [
        ({"client": "192.0.2.1 80"}, "192.0.2"),
        ({"client": "2001:db8:1:2::3 80"}, "2001:db8:1::/48"),
        ({"client": "127.0.0.1 80", "address": "2001:db8:1:2::3"}, "2001:db8:1::/48"),
        ({"client": "127.0.0.1 80", "descriptors": TOLD}, "2001:db8:1::/48"),
        ({"client": None}, "alice"),
        ({"client": "testclient 80"}, "alice"),
    ],
)
def test_whose_room_and_places_it_takes(told: dict[str, Any], network: str) -> None:
    assert make_request("alice", **told).network == network


@pytest.mark.parametrize("url", ["mysql://x", "sqlite://relative.db", "deferred.db", ""])
def test_what_is_no_backlog_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="write sqlite:///path/to/file or redis://host:port/0"):
        open_backlog(url)


@pytest.mark.parametrize(("mode", "owner"), [(0o1777, 0), (0o777, 0), (0o700, 65534)])
def test_a_file_where_others_may_put_some_is_refused(tmp_path: Path, mode: int, owner: int) -> None:
    """An empty `deferred.db-wal` of anybody's would keep the application from starting."""
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(mode)
    os.chown(directory, owner, -1)
    with pytest.raises(SettingsError, match=f"In {directory} others may write"):
        open_backlog(f"sqlite://{directory}/deferred.db")
    assert list(directory.iterdir()) == []


def test_fields_of_one_connection_are_not_kept_and_an_idempotency_key_is_added() -> None:
    sent = {
        "host": "example.org", "connection": "close, X-Tenant", "x-tenant": "1", "te": "trailers", "upgrade": "h2c",
        "transfer-encoding": "chunked", "content-length": "5", "expect": "100-continue", "cookie": "a=b",
        "proxy-authorization": "Basic x", "authorization": "Bearer x",
    }  # fmt: skip
    pairs = [(name.encode(), value.encode()) for name, value in sent.items()]
    kept = dict(keep_headers(pairs, "an-id"))
    key = kept.pop("idempotency-key")
    # A proxy sets fields, and hands on what a client has written into `Connection`.
    assert kept == {"host": "example.org", "x-tenant": "1", "cookie": "a=b", "authorization": "Bearer x"}
    assert "an-id" not in key
    assert key == dict(keep_headers(pairs, "an-id"))["idempotency-key"]  # the same in every try
    own = keep_headers([(b"idempotency-key", b'"mine"')], "an-id")
    assert own == (("idempotency-key", '"mine"'),)


def test_cookies_of_the_answer_are_for_nobody_who_has_the_url() -> None:
    assert keep_answered([(b"Set-Cookie", b"a=b"), (b"Content-Type", b"text/plain"), (b"X-A", b"1")]) == (
        ("content-type", "text/plain"),
    )


@pytest.mark.anyio
async def test_answers_of_one_network_push_out_none_of_others(tmp_path: Path) -> None:
    backlog = SqliteBacklog(tmp_path / "deferred.db", Bounds(most=10))
    others = [await end_one(backlog, client=f"198.51.{number}.1 80") for number in range(3)]
    crowd = [await end_one(backlog, client=f"203.0.113.{number} 80") for number in range(20)]
    await backlog.sweep(time.time())
    assert None not in [await backlog.find(request.id) for request in others]
    known = [await backlog.find(request.id) is not None for request in crowd]
    assert known == [False] * 13 + [True] * 7
    await backlog.aclose()


@pytest.mark.anyio
async def test_answers_in_redis_are_bounded_without_a_sweep(server: Server) -> None:
    """Redis is the counters', too: full of answers it would refuse them."""
    server.client.flushall()
    backlog = RedisBacklog(server.url, Bounds(most=10, most_bytes=100_000))
    for number in range(30):
        await end_one(backlog, b"x" * (500 if number < 15 else 30_000))
    records = [*server.client.scan_iter("nl:{deferred}:request:*")]
    assert len(records) == 3
    assert 0 < server.client.ttl("nl:{deferred}:ended") <= 86_400
    await backlog.aclose()


@pytest.mark.anyio
async def test_while_redis_is_away_it_is_told_and_afterwards_all_goes_on(mortal: Server) -> None:
    backlog = RedisBacklog(mortal.url)
    request = make_request()
    mortal.client.config_set("save", "3600 1")
    await backlog.put(request)
    assert await backlog.claim(time.time()) == (request, 1)
    mortal.client.save()
    mortal.kill()
    for ask in (backlog.claim(1.0), backlog.put(request), backlog.is_waiting("alice"), backlog.find(request.id)):
        with pytest.raises(BacklogUnavailable, match="cannot be asked: "):
            await ask
    with pytest.raises(BacklogUnavailable):
        await backlog.finish(request, State.DONE, time.time(), None, "")
    mortal.start()
    assert await backlog.is_waiting("alice")
    assert await backlog.claim(time.time() + 1000) == (request, 2)  # its lease has ended
    await backlog.finish(request, State.DONE, time.time(), None, "")
    assert not await backlog.is_waiting("alice")
    await backlog.aclose()


@pytest.mark.anyio
async def test_many_requests_at_once_wait_for_a_connection(server: Server) -> None:
    server.client.flushall()
    backlog = RedisBacklog(server.url)
    requests = [make_request(f"key {number}") for number in range(300)]
    await asyncio.gather(*map(backlog.put, requests))
    assert all(await asyncio.gather(*(backlog.is_waiting(request.key) for request in requests)))
    assert None not in await asyncio.gather(*(backlog.find(request.id) for request in requests))
    assert server.client.info("clients")["connected_clients"] < 100
    await backlog.aclose()


@pytest.mark.anyio
async def test_who_asks_for_the_end_of_requests_holds_up_nobody_else(server: Server) -> None:
    """Neither those that come, nor those that are replayed: whatever anybody asks, and however often."""
    server.client.flushall()
    backlog = RedisBacklog(server.url)
    polls = [asyncio.create_task(backlog.find("unknown")) for _ in range(1000)]
    await asyncio.sleep(0)
    request = make_request()
    await backlog.put(request)
    assert await backlog.is_waiting(request.key)
    assert await backlog.claim(time.time()) == (request, 1)
    await backlog.finish(request, State.DONE, time.time(), None, "")
    assert not all(poll.done() for poll in polls)
    await asyncio.wait(polls)
    await backlog.aclose()


@pytest.mark.anyio
async def test_nor_do_those_that_come_hold_up_those_that_are_replayed(server: Server) -> None:
    server.client.flushall()
    backlog = RedisBacklog(server.url)
    request = make_request()
    await backlog.put(request)
    coming = [asyncio.create_task(backlog.is_waiting("bob")) for _ in range(1000)]
    await asyncio.sleep(0)
    assert await backlog.claim(time.time()) == (request, 1)
    await backlog.finish(request, State.DONE, time.time(), None, "")
    assert not all(task.done() for task in coming)
    await asyncio.wait(coming)
    await backlog.aclose()


@pytest.mark.anyio
async def test_who_puts_a_request_again_since_the_answer_was_lost_puts_one(server: Server) -> None:
    server.client.flushall()
    backlog = RedisBacklog(server.url)
    request = make_request()
    await put_all(backlog, request, request)
    assert server.client.xlen("nl:{deferred}:stream") == 1
    assert await backlog.claim(time.time()) == (request, 1)
    await backlog.finish(request, State.DONE, time.time(), None, "")
    assert not await backlog.is_waiting(request.key)
    await backlog.aclose()


@pytest.mark.anyio
async def test_a_redis_that_comes_back_empty_begins_anew(mortal: Server) -> None:
    backlog = RedisBacklog(mortal.url)
    await backlog.put(make_request())
    assert await backlog.claim(time.time()) is not None
    mortal.kill()
    mortal.start()
    with suppress(BacklogUnavailable):  # by the connection that has broken
        await backlog.claim(time.time())
    assert await backlog.claim(time.time()) is None
    request = make_request()
    await backlog.put(request)
    assert await backlog.claim(time.time()) == (request, 1)
    mortal.kill()
    await backlog.aclose()


@pytest.mark.anyio
async def test_processes_of_a_host_have_one_clock_whenever_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim is nobody else's, though the time of day has been set between the start of the one and of the other."""
    told = time.time
    elder = SqliteBacklog(tmp_path / "deferred.db")
    request = make_request()
    await elder.put(request)
    assert await elder.claim(elder.now()) == (request, 1)
    for seconds in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: told() + seconds)
        younger = SqliteBacklog(tmp_path / "deferred.db")
        assert await younger.claim(younger.now()) is None
        assert await younger.claim(younger.now() + 121) is not None
        await younger.postpone(request, younger.now() + 120, tried=False)
        await younger.aclose()
    await elder.aclose()


@pytest.mark.anyio
async def test_what_was_claimed_before_the_machine_has_booted_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = time.time
    backlog = SqliteBacklog(tmp_path / "deferred.db")
    request = make_request()
    await backlog.put(request)
    assert await backlog.claim(backlog.now()) == (request, 1)
    await backlog.aclose()
    monkeypatch.setattr("netlimit.l7.deferral.sqlite.find_boot", lambda: "another")
    monkeypatch.setattr(time, "time", lambda: told() - 3600)
    backlog = SqliteBacklog(tmp_path / "deferred.db")
    assert backlog.now() == pytest.approx(time.time(), abs=5)
    assert await backlog.claim(backlog.now()) == (request, 2)
    await backlog.aclose()


async def put_all(backlog: RedisBacklog, *requests: Deferred) -> None:
    for request in requests:
        await backlog.put(request)


@pytest.mark.anyio
async def test_a_request_that_redis_has_lost_is_dropped_and_the_others_go_on(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.client.flushall()
    backlog, heir = RedisBacklog(server.url), RedisBacklog(server.url)
    lost, behind, other = make_request(body=b"x" * 1000), make_request(), make_request("bob")
    await put_all(backlog, lost, behind, other)
    server.client.delete(f"nl:{{deferred}}:request:{lost.id}")  # as Redis evicts it
    assert await backlog.claim(time.time()) == (behind, 1)
    assert await backlog.claim(time.time()) == (other, 1)
    assert [record.getMessage() for record in caplog.records] == [LOST % 1]
    assert await backlog.find(lost.id) is None
    server.client.delete(f"nl:{{deferred}}:request:{other.id}")  # while it is tried
    for request in (behind, other):
        await backlog.finish(request, State.DONE, time.time(), None, "")
    assert await backlog.find(other.id) is None
    assert server.client.xlen("nl:{deferred}:stream") == 0
    assert not await backlog.is_waiting("alice")
    await backlog.aclose()
    assert await heir.claim(time.time()) is None
    await heir.aclose()


@pytest.mark.anyio
async def test_what_a_lost_request_took_up_is_given_back(server: Server) -> None:
    server.client.flushall()
    backlog = RedisBacklog(server.url, Bounds(most=4, most_of_one=2, most_bytes_of_one=15_000))
    lost, other = make_request(body=b"x" * 10_000), make_request("bob", client="198.51.100.1 80")
    await put_all(backlog, lost, other)
    server.client.delete(f"nl:{{deferred}}:request:{lost.id}")
    assert await backlog.claim(time.time()) == (other, 1)
    await put_all(backlog, make_request(body=b"x" * 10_000))
    await backlog.aclose()


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[Server]:
    """A server that can go back to what it has saved, as after a failover to a replica that has not heard the
    last."""
    running = Server(tmp_path, "--enable-debug-command", "yes")
    yield running
    running.close()


def fail_over(server: Server) -> None:
    server.client.execute_command("DEBUG", "RELOAD", "NOSAVE")


@pytest.mark.anyio
@pytest.mark.parametrize("breaks", [False, True], ids=["unnoticed", "the connection breaks"])
async def test_after_a_failover_what_the_new_master_has_is_replayed(
    forgetful: Server, breaks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backlog = RedisBacklog(forgetful.url)
    first, lost, also_lost, new = (make_request(key) for key in ("alice", "alice", "bob", "bob"))
    await backlog.put(first)
    assert await backlog.claim(time.time()) == (first, 1)
    forgetful.client.save()
    await put_all(backlog, lost, also_lost)
    assert await backlog.claim(time.time()) == (also_lost, 1)
    await backlog.postpone(also_lost, time.time(), tried=True)
    if breaks:
        forgetful.kill()
        forgetful.start()
        await claim_some(backlog, time.time())
    else:
        fail_over(forgetful)
    await backlog.put(new)
    claims = await claim_some(backlog, time.time())
    assert claims == [(new, 1)]  # while the first is being tried still
    await backlog.finish(first, State.DONE, time.time(), None, "")
    assert await claim_some(backlog, time.time()) == []
    await backlog.finish(new, State.DONE, time.time(), None, "")
    assert not await backlog.is_waiting("bob")
    assert [record.getMessage() for record in caplog.records] == [LOST % 2]
    await backlog.aclose()


async def claim_some(backlog: RedisBacklog, now: float) -> list[Claim]:
    """What can be claimed in some turns."""
    claims = []
    for _ in range(4):
        with suppress(BacklogUnavailable):  # by the connection that has broken
            claim = await backlog.claim(now)
            claims += [] if claim is None else [claim]
    return claims


@pytest.mark.anyio
async def test_whose_end_the_new_master_has_not_heard_is_tried_again(forgetful: Server) -> None:
    backlog = RedisBacklog(forgetful.url)
    request = make_request()
    await backlog.put(request)
    assert await backlog.claim(time.time()) == (request, 1)
    forgetful.client.save()
    await backlog.finish(request, State.DONE, time.time(), None, "")
    fail_over(forgetful)
    await backlog.sweep(time.time())
    assert await backlog.claim(time.time()) == (request, 2)
    await backlog.aclose()


@pytest.mark.anyio
async def test_what_is_tried_is_not_claimed_again_when_all_is_read_anew(server: Server) -> None:
    server.client.flushall()
    backlog = RedisBacklog(server.url)
    request, other = make_request(), make_request("bob")
    await backlog.put(request)
    assert await backlog.claim(time.time()) == (request, 1)
    await backlog.put(other)
    await backlog.sweep(time.time())
    assert await claim_some(backlog, time.time()) == [(other, 1)]
    await backlog.finish(request, State.DONE, time.time(), None, "")
    report = await backlog.find(request.id)
    assert report is not None
    assert report.state is State.DONE
    await backlog.aclose()
