"""Requests over their limit while the disk of what is kept is full, and when there is room on it again."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from netlimit.l7.deferral.application import DeferralApp
from netlimit.l7.deferral.backlog import BacklogUnwritten, Bounds
from netlimit.l7.deferral.deferral import Deferral
from netlimit.l7.deferral.request import State
from netlimit.l7.deferral.sqlite import SqliteBacklog
from netlimit.l7.document import parse_document
from netlimit.l7.identity import EXTRACTORS, header
from netlimit.l7.limit import Limit
from netlimit.l7.limiter import Limiter
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.middleware import RateLimit
from netlimit.l7.rules import OnLimit, Rule, RuleSet
from tests.l7.asking import ask
from tests.l7.deferral.backlogs import make_request
from tests.l7.deferral.test_deferral import Recorder, await_end, living, post

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("root")]
SHORT = Limit(2, 1)
BODY = bytes(range(256)) * 8
RECOVERED = "Deferred requests can be kept again."
RULES = """
domain: web
descriptors:
  - key: remote_address
    rate_limit: {unit: day, requests_per_unit: 1}
    on_limit: defer
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """One of its own, of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "netlimit-test", disk], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path, leave: int = 0) -> None:
    """Take all room of a disk but so many bytes."""
    with (disk / "others").open("wb", buffering=0) as file, suppress(OSError):
        while (room := os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - leave) > 0:
            file.write(bytes(min(room, 65536)))


def make_room(disk: Path) -> None:
    (disk / "others").unlink()


@asynccontextmanager
async def deferring(disk: Path, recorder: Recorder, limit: Limit = SHORT) -> AsyncIterator[RateLimit]:
    rule = Rule("app", "user", limit, on_limit=OnLimit.DEFER)
    deferral = Deferral(f"sqlite://{disk}/deferred.db")
    async with living(RateLimit(recorder, rule, key=header("X-User"), deferral=deferral)) as app:
        yield app


async def await_that(holds: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def find_sentences(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_who_is_within_his_limit_is_served_while_nothing_can_be_kept(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    async with deferring(disk, recorder) as app:
        answers = [await post(app, BODY) for _ in range(8)]
        assert [answer.status for answer in answers] == [201] * 2 + [202] * 6
        fill(disk)
        assert [(await post(app, BODY, "bob")).status for _ in range(4)] == [201, 201, 503, 503]
        await asyncio.sleep(1.1)
        assert [(await post(app, BODY, "bob")).status for _ in range(3)] == [201, 201, 503]
        assert len(find_sentences(caplog)) == 1, find_sentences(caplog)
        assert f"the disk of {disk}/deferred.db" in find_sentences(caplog)[0]
        make_room(disk)
        await await_that(lambda: RECOVERED in find_sentences(caplog))
        for answer in answers[2:]:
            assert (await await_end(app, answer))["state"] == "done"
        assert [(await post(app, BODY, "carl")).status for _ in range(4)] == [201, 201, 202, 202]
    assert [fields["x-user"] for *_, fields in recorder.served].count("alice") == 8, "each once"
    assert find_sentences(caplog)[1:] == [RECOVERED]


async def test_what_has_been_answered_on_a_full_disk_is_not_sent_again_though_its_lease_ends(disk: Path) -> None:
    recorder, path = Recorder(), disk / "deferred.db"

    async def fill_meanwhile(scope: Any, receive: Any, send: Any) -> None:
        if len(recorder.served) == 2:
            with closing(sqlite3.connect(path)) as connection:  # what its log has taken others get
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            fill(disk)
        await recorder(scope, receive, send)

    rule = Rule("app", "user", SHORT, on_limit=OnLimit.DEFER)
    deferral = Deferral(SqliteBacklog(path, Bounds(lease=1.0)))
    async with living(RateLimit(fill_meanwhile, rule, key=header("X-User"), deferral=deferral)) as app:
        answers = [await post(app, BODY) for _ in range(3)]
        await await_that(lambda: len(recorder.served) == 3)
        await asyncio.sleep(3)
        make_room(disk)
        assert (await await_end(app, answers[2]))["state"] == "done"
        await asyncio.sleep(1.5)
    assert len(recorder.served) == 3


async def test_the_first_that_finds_the_disk_full_is_served_with_all_of_its_body(disk: Path) -> None:
    """Though others of its line wait."""
    recorder = Recorder()
    async with deferring(disk, recorder, Limit(2, 60)) as app:
        assert [(await post(app, BODY)).status for _ in range(3)] == [201, 201, 202]
        app._limiter = app._queues._limiter = Limiter(app._rules, MemoryStore())  # a minute later
        fill(disk)
        assert (await post(app, BODY)).status == 201
        assert recorder.served[-1][1] == BODY


async def test_a_small_disk_is_not_filled_by_what_has_been_replayed(disk: Path) -> None:
    """The log of writes would take it all, and then nothing could end any more."""
    recorder = Recorder()
    async with deferring(disk, recorder, Limit(50, 1)) as app:
        for number in range(200):
            assert (await post(app, BODY, f"user {number % 2}")).status in (201, 202), number
        await await_that(lambda: len(recorder.served) == 200)
    assert sum(each.stat().st_size for each in disk.iterdir()) < 600_000


async def test_who_fills_the_disk_with_requests_leaves_room_for_replaying_them(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backlog = SqliteBacklog(disk / "deferred.db")
    kept, full = 0, ""
    while not full:
        try:
            await backlog.put(make_request(f"user {kept}", body=BODY))
            kept += 1
        except BacklogUnwritten as error:
            full = str(error)
    assert kept > 50
    assert "MiB left" in full
    for _ in range(kept):
        claim = await backlog.claim(time.time())
        assert claim is not None
        await backlog.finish(claim.request, State.DONE, time.time(), None, "")
    assert await backlog.claim(time.time()) is None
    await backlog.put(make_request(body=BODY))
    await backlog.aclose()


async def test_what_others_leave_of_the_disk_is_not_taken(disk: Path) -> None:
    backlog = SqliteBacklog(disk / "deferred.db")
    fill(disk, leave=48 * 1024)
    with pytest.raises(BacklogUnwritten, match="MiB left"):
        await backlog.put(make_request())
    make_room(disk)
    await backlog.put(make_request())
    await backlog.aclose()


async def test_behind_a_proxy_it_recovers_without_a_new_start(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules = RuleSet({"web": parse_document(RULES).root})
    limiter = Limiter(lambda: rules, MemoryStore())
    deferral = Deferral(f"sqlite://{disk}/deferred.db", upstream="http://127.0.0.1:9")

    async def defer(app: Any) -> int | None:
        return (await ask(app, "/v1/defer/jobs", BODY, method="POST")).status

    async with living(DeferralApp(deferral, limiter, lambda: rules, "web", EXTRACTORS)) as app:
        assert [await defer(app) for _ in range(3)] == [202] * 3
        fill(disk)
        assert [await defer(app) for _ in range(5)] == [503] * 5
        assert len(find_sentences(caplog)) == 1
        make_room(disk)
        await await_that(lambda: RECOVERED in find_sentences(caplog))
        assert [await defer(app) for _ in range(3)] == [202] * 3
    assert len(find_sentences(caplog)) == 2
