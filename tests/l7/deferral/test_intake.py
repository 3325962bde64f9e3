"""What is being read takes up room, before it is kept: what has none is not read."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from netlimit.l7.deferral.backlog import Backlog, Bounds
from netlimit.l7.deferral.deferral import Deferral
from netlimit.l7.deferral.redis import RedisBacklog
from netlimit.l7.deferral.request import State
from netlimit.l7.deferral.sqlite import SqliteBacklog
from netlimit.l7.identity import header
from netlimit.l7.limit import Limit
from netlimit.l7.middleware import RateLimit
from netlimit.l7.rules import OnLimit, Rule
from tests.l7.asking import Asking, hello, make_scope
from tests.l7.deferral.test_proxies import serving
from tests.l7.redis.servers import Server

pytestmark = pytest.mark.anyio
LARGE = 10_000
UNREAD = "The request is over its limit, and as many are kept or being read as may be."


def make_app(deferral: Deferral) -> RateLimit:
    """Each user is served once a day, and the rest is kept."""
    rule = Rule("app", "user", Limit(1, 86_400), on_limit=OnLimit.DEFER)
    return RateLimit(hello, rule, key=header("X-User"), deferral=deferral)


class Upload(Asking):
    """A request whose body has come but for its last byte, with its length announced or not."""

    def __init__(
        self, app: Any, user: str = "alice", peer: str = "192.0.2.1", length: int = LARGE, told: bool | str = True,
        http: str = "1.1",
    ) -> None:  # fmt: skip
        framing = (
            {"Content-Length": f"{length}" if told is True else told} if told else {"Transfer-Encoding": "chunked"}
        )
        scope = make_scope("/jobs", "POST", peer, {"X-User": user, **framing}, http_version=http)
        super().__init__(app, scope, [{"type": "http.request", "body": b"x" * (length - 1), "more_body": True}])
        self.unread = True
        """Whether nothing of it had been read when it was answered."""

    async def _send(self, message: dict[str, Any]) -> None:
        if not self.answer.messages:
            self.unread = not self._incoming.empty()
        await super()._send(message)

    async def settle(self) -> bool:
        """Whether it is being read, once that is known."""
        deadline = time.monotonic() + 20
        while not self._incoming.empty() and not self.answer.messages:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        await asyncio.wait([self.task], timeout=0.02)
        return not self.answer.messages

    async def finish(self) -> int | None:
        self._incoming.put_nowait({"type": "http.request", "body": b"x", "more_body": False})
        return (await self.end()).status


class Site:
    """An application of which uploads are kept."""

    def __init__(self, backlog: Backlog, largest: int) -> None:
        self.backlog = backlog
        self.deferral = Deferral(backlog, largest=largest)
        self.app = make_app(self.deferral)
        self._uploads = list[Upload]()

    def begin(self, *told: Any, **others: Any) -> Upload:
        self._uploads.append(Upload(self.app, *told, **others))
        return self._uploads[-1]

    async def close(self) -> None:
        for upload in self._uploads:
            upload.task.cancel()
        await asyncio.gather(*(upload.task for upload in self._uploads), return_exceptions=True)
        await self.deferral.stop()


OpenSite = Callable[..., Site]


@pytest.fixture(params=["sqlite", "redis"])
async def open_site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenSite]:
    sites = list[Site]()

    def open_one(largest: int = 2**20, **bounds: int) -> Site:
        backlog: Backlog
        if request.param == "redis":
            server = request.getfixturevalue("server")
            server.client.flushall()
            backlog = RedisBacklog(server.url, Bounds(**bounds))
        else:
            backlog = SqliteBacklog(tmp_path / "deferred.db", Bounds(**bounds))
        sites.append(Site(backlog, largest))
        return sites[-1]

    yield open_one
    for site in sites:
        await site.close()


async def use_up(app: Any, *users: str) -> None:
    for user in users:
        asking = Asking(app, make_scope(headers={"X-User": user}), [{"type": "http.request"}])
        assert (await asking.end()).status == 200


@pytest.mark.parametrize("told", [True, False], ids=["announced", "as it comes"])
@pytest.mark.parametrize("bounds", [{"most": 16}, {"most_bytes": 170_000}], ids=["requests", "bytes"])
async def test_of_all_and_of_a_network(open_site: OpenSite, bounds: dict[str, int], told: bool) -> None:
    site = open_site(**bounds)
    reading = list[int]()
    for network in range(4):
        users = [f"{network} {number}" for number in range(9)]
        await use_up(site.app, *users)
        uploads = [site.begin(user, f"192.0.{network}.{place}", told=told) for place, user in enumerate(users)]
        held = [upload for upload in uploads if await upload.settle()]
        reading.append(len(held))
        for upload in uploads:
            assert upload in held or (upload.answer.status == 429 and upload.unread >= told)
    assert reading == [8, 4, 2, 1], "none has more than it leaves free"


@pytest.mark.parametrize("told", [True, False], ids=["announced", "as it comes"])
@pytest.mark.parametrize("bounds", [{"most_of_one": 3}, {"most_bytes_of_one": 35_000}], ids=["requests", "bytes"])
async def test_of_a_client_together_with_what_of_him_waits(
    open_site: OpenSite, bounds: dict[str, int], told: bool
) -> None:
    site = open_site(**bounds)
    await use_up(site.app, "alice", "bob")
    first, second = site.begin(told=told), site.begin(told=told)
    assert [await first.settle(), await second.settle()] == [True, True]
    assert await first.finish() == 202
    assert await (third := site.begin(told=told)).settle()
    fourth = site.begin(told=told)
    assert not await fourth.settle()
    assert (fourth.answer.status, fourth.answer.json()["detail"]) == (429, UNREAD)
    assert await site.begin("bob").settle(), "he has his own room"
    assert [await upload.finish() for upload in (second, third)] == [202, 202], "what has been read has room"


async def finish(upload: Upload, backlog: Backlog) -> int | None:
    status = await upload.finish()
    claim = await backlog.claim(backlog.now() + 1e6)
    assert claim is not None
    assert claim.request.body == b"x" * LARGE
    assert claim.request.accepted > backlog.now() - 10
    await backlog.finish(claim.request, State.DONE, backlog.now(), None, "")
    return status


async def go(upload: Upload, _: Backlog) -> int | None:
    upload.hang_up()
    return (await upload.end()).status


async def come_late(upload: Upload, _: Backlog) -> int | None:
    return (await upload.end()).status


async def send_too_much(upload: Upload, _: Backlog) -> int | None:
    upload._incoming.put_nowait({"type": "http.request", "body": b"x" * LARGE, "more_body": True})
    return (await upload.end()).status


async def be_cancelled(upload: Upload, _: Backlog) -> int | None:
    upload.task.cancel()
    with suppress(asyncio.CancelledError):
        await upload.end()
    return upload.answer.status


async def send_nonsense(upload: Upload, _: Backlog) -> int | None:
    upload._incoming.put_nowait({})  # what no server sends: a fault of its own
    with suppress(KeyError):
        await upload.end()
    return upload.answer.status


@pytest.mark.parametrize("told", [True, False], ids=["announced", "as it comes"])
@pytest.mark.parametrize(
    ("end", "status"),
    [(finish, 202), (go, None), (come_late, 408), (send_too_much, 413), (be_cancelled, None), (send_nonsense, None)],
)
async def test_however_it_ends_its_room_is_free_again(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch, end: Any, status: int | None, told: bool
) -> None:
    monkeypatch.setattr("netlimit.l7.deferral.deferral._LINGERING", 0.05)
    if end is come_late:
        monkeypatch.setattr("netlimit.l7.deferral.intake._SECONDS", 2.0)
    site = open_site(LARGE, most_bytes_of_one=15_000)
    await use_up(site.app, "alice")
    for _ in range(1 if end is come_late else 3):
        upload = site.begin(told=told)
        assert await upload.settle()
        assert not await site.begin(told=told).settle()
        assert await end(upload, site.backlog) == status
    assert not site.deferral._intake._bytes
    assert not site.deferral._intake._requests


@pytest.mark.parametrize(("told", "http", "closes"), [(True, "1.1", True), (False, "1.1", True), (True, "2", False)])
async def test_a_full_line_is_refused_unread(open_site: OpenSite, told: bool, http: str, closes: bool) -> None:
    site = open_site(most_of_one=1)
    await use_up(site.app, "alice")
    first = site.begin(length=1)
    assert await first.finish() == 202
    refused = site.begin(told=told, http=http)
    assert not await refused.settle()
    assert refused.unread
    assert (refused.answer.status, refused.answer.json()["detail"]) == (429, UNREAD)
    assert int(refused.answer.headers["retry-after"]) >= 1
    assert (refused.answer.headers.get("connection") == "close") == closes


async def test_the_connection_of_a_request_without_a_body_stays(open_site: OpenSite) -> None:
    site = open_site(most_of_one=1)
    await use_up(site.app, "alice")
    assert await site.begin(length=1).finish() == 202
    asking = Asking(site.app, make_scope(headers={"X-User": "alice"}), [{"type": "http.request"}])
    assert (await asking.end()).status == 429
    assert "connection" not in asking.answer.headers


@pytest.mark.parametrize("told", [f"{LARGE + 1}", "1" + "0" * 5000], ids=["by a byte", "by far"])
async def test_what_is_announced_too_large_is_not_read(open_site: OpenSite, told: str) -> None:
    site = open_site(LARGE)
    await use_up(site.app, "alice")
    upload = site.begin(told=told)
    answer = await upload.end()
    assert (answer.status, answer.headers["connection"], upload.unread) == (413, "close", True)


@pytest.mark.parametrize("goes", [False, True])
async def test_who_still_sends_gets_the_answer_and_then_the_connection_ends(open_site: OpenSite, goes: bool) -> None:
    site = open_site(most_of_one=1)
    await use_up(site.app, "alice")
    assert await site.begin(length=1).finish() == 202
    refused = site.begin()
    assert not await refused.settle()
    assert json.loads(refused.answer.body)["status"] == 429
    assert not refused.task.done()
    if goes:
        refused.hang_up()
        await refused.end()
    else:
        assert await refused.finish() == 429
    assert refused.answer.messages[-1].get("more_body", False) == goes, "who has gone is sent nothing"


async def test_without_the_backlog_nothing_is_read(mortal: Server) -> None:
    deferral = Deferral(mortal.url)
    app = make_app(deferral)
    await use_up(app, "alice")
    mortal.kill()
    upload = Upload(app)
    assert not await upload.settle()
    assert upload.unread
    assert (upload.answer.status, upload.answer.headers["connection"]) == (503, "close")
    await deferral.stop()


async def test_a_client_of_a_real_server_fills_no_memory(tmp_path: Path) -> None:
    """He opens more and more connections, on each of which the last byte of a body does not come."""
    app = make_app(Deferral(f"sqlite://{tmp_path}/deferred.db"))
    with serving(app) as port:
        httpx.get(f"http://127.0.0.1:{port}", headers={"X-User": "alice"})
        head = b"POST /jobs HTTP/1.1\r\nHost: x\r\nX-User: alice\r\nContent-Length: 1048576\r\n\r\n"
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        for _, writer in connections:
            writer.write(head)
        answers = {asyncio.create_task(reader.read()) for reader, _ in connections}
        while len(done := {answer for answer in answers if answer.done()}) < 16:
            await asyncio.wait(answers - done, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        done, _ = await asyncio.wait(answers, timeout=0.5)
        assert len(done) == 16, "of one client there is room for 25 MiB, with the heads"
        assert {answer.result().partition(b"\r")[0] for answer in done} == {b"HTTP/1.1 429 Too Many Requests"}
        for _, writer in connections:
            writer.close()
        await asyncio.wait(answers)
