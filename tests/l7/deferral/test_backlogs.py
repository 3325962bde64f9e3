"""The suite over both backlogs, and what is SQLite's own."""

from __future__ import annotations

import sqlite3
import time
from contextlib import suppress
from pathlib import Path

import pytest

from netlimit.errors import SettingsError
from netlimit.l7.deferral.backlog import BacklogUnavailable, Bounds
from netlimit.l7.deferral.deferral import open_backlog
from netlimit.l7.deferral.redis import RedisBacklog
from netlimit.l7.deferral.request import State, keep_answered, keep_headers
from netlimit.l7.deferral.sqlite import SqliteBacklog
from tests.l7.deferral.backlogs import BacklogSuite, make_request
from tests.l7.redis.servers import Server


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


@pytest.mark.parametrize("url", ["mysql://x", "sqlite://relative.db", "deferred.db", ""])
def test_what_is_no_backlog_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="write sqlite:///path/to/file or redis://host:port/0"):
        open_backlog(url)


def test_fields_of_one_connection_are_not_kept_and_an_idempotency_key_is_added() -> None:
    sent = {
        "host": "example.org", "connection": "close, X-Hop", "x-hop": "1", "te": "trailers", "upgrade": "h2c",
        "transfer-encoding": "chunked", "content-length": "5", "expect": "100-continue", "cookie": "a=b",
        "proxy-authorization": "Basic x", "authorization": "Bearer x",
    }  # fmt: skip
    pairs = [(name.encode(), value.encode()) for name, value in sent.items()]
    kept = dict(keep_headers(pairs, "an-id"))
    key = kept.pop("idempotency-key")
    assert kept == {"host": "example.org", "cookie": "a=b", "authorization": "Bearer x"}
    assert "an-id" not in key
    assert key == dict(keep_headers(pairs, "an-id"))["idempotency-key"]  # the same in every try
    own = keep_headers([(b"idempotency-key", b'"mine"')], "an-id")
    assert own == (("idempotency-key", '"mine"'),)


def test_cookies_of_the_answer_are_for_nobody_who_has_the_url() -> None:
    assert keep_answered([(b"Set-Cookie", b"a=b"), (b"Content-Type", b"text/plain"), (b"X-A", b"1")]) == (
        ("content-type", "text/plain"),
    )


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
