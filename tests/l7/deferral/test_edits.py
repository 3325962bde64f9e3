"""What waits while the document of limits is edited: it comes under the limits that are in force when its turn is."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from netlimit.l7.deferral.backlog import Backlog
from netlimit.l7.deferral.deferral import Deferral
from netlimit.l7.deferral.redis import RedisBacklog
from netlimit.l7.deferral.request import Deferred, State, make_idempotency_key, read_head, write_head
from netlimit.l7.deferral.revision import Revision, remember
from netlimit.l7.deferral.sqlite import SqliteBacklog
from netlimit.l7.document import parse_document
from netlimit.l7.extraction import Extraction
from netlimit.l7.identity import EXTRACTORS, ClientAddress, Extractor, header
from netlimit.l7.middleware import RateLimit
from netlimit.l7.rules import Descriptor, Entry, RuleSet
from tests.l7.asking import Answer, ask
from tests.l7.deferral.backlogs import OpenBacklog, make_request

pytestmark = pytest.mark.anyio
SOON = "rate_limit: {unit: second, requests_per_unit: 1, algorithm: gcra}"
THREE = "rate_limit: {unit: day, requests_per_unit: 3, algorithm: gcra}"
A_WHILE = 1.0
"""Seconds in which all are tried that nothing holds."""
FREE = "Deferred requests were replayed under no limit (%d): the limits of the domain %r have none for them any more."


def nest(*keys: str, limit: str, on_limit: str = "defer") -> str:
    """A document with a rule by these keys."""
    lines = [f"domain: app\ndescriptors:\n- key: {keys[0]}"]
    for depth, key in enumerate(keys[1:], 1):
        lines.append(f"{'  ' * depth}descriptors:\n{'  ' * depth}- key: {key}")
    depth = "  " * len(keys)
    return "\n".join([*lines, f"{depth}{limit}", f"{depth}on_limit: {on_limit}", ""])


class Site:
    """An application whose document is edited, and what it has served."""

    def __init__(self, text: str, backlog: Backlog, **others: Any) -> None:
        self.served: list[str] = []
        self.edit(text)
        limits = others.pop("limits", lambda: self._rules)
        self.app = RateLimit(self._serve, limits=limits, domain="app", deferral=Deferral(backlog), **others)

    def edit(self, text: str) -> None:
        document = parse_document(text)
        self._rules = RuleSet({document.domain: document.root})

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for _ in range(2):
                await send({"type": f"{(await receive())['type']}.complete"})
            return
        self.served.append((await receive())["body"].decode())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def post(self, bodies: Iterable[str], who: str = "192.0.2.7", path: str = "/jobs") -> list[Answer]:
        return [await ask(self.app, path, body.encode(), method="POST", peer=who) for body in bodies]

    async def count(self, bodies: Iterable[str], who: str = "192.0.2.7", path: str = "/jobs") -> list[int | None]:
        return [answer.status for answer in await self.post(bodies, who, path)]

    async def await_served(self, times: int) -> None:
        """Wait until so many have been served, and see that no more are."""
        async with asyncio.timeout(20):
            while len(self.served) < times:
                await asyncio.sleep(0.01)
        await asyncio.sleep(A_WHILE)
        assert len(self.served) == times

    def list_served(self, whose: str = "") -> list[str]:
        return [body for body in self.served if body.startswith(whose)]


@asynccontextmanager
async def living(app: Any) -> AsyncIterator[None]:
    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    task = asyncio.create_task(app({"type": "lifespan", "state": {}}, incoming.get, outgoing.put))
    incoming.put_nowait({"type": "lifespan.startup"})
    await outgoing.get()
    try:
        async with asyncio.timeout(60):
            yield
    finally:
        incoming.put_nowait({"type": "lifespan.shutdown"})
        await task


OpenSite = Callable[..., Any]


@pytest.fixture(params=["sqlite", "redis"])
def open_site(request: pytest.FixtureRequest, tmp_path: Path) -> OpenSite:
    @asynccontextmanager
    async def open_one(text: str, **others: Any) -> AsyncIterator[Site]:
        backlog: Backlog
        if request.param == "redis":
            server = request.getfixturevalue("server")
            server.client.flushall()
            backlog = RedisBacklog(server.url)
        else:
            backlog = SqliteBacklog(tmp_path / "deferred.db")
        site = Site(text, backlog, **others)
        async with living(site.app):
            yield site

    return open_one


def number(whose: str, *numbers: int) -> list[str]:
    return [f"{whose} {each}" for each in numbers]


async def test_it_comes_under_the_limit_that_is_there_now_in_its_order(open_site: OpenSite) -> None:
    async with open_site(nest("remote_address", limit=SOON)) as site:
        bodies = number("a", *range(9))
        assert await site.count(bodies) == [200] + [202] * 8
        site.edit(nest("remote_address", "path", limit=THREE))
        await site.await_served(4)
        assert site.served == bodies[:4], "three by the new limit"
        assert await site.count(["late"]) == [202], "it has its place behind them"
        assert await site.count(number("o", *range(4)), path="/other") == [200] * 3 + [202]


async def test_whose_limit_is_another_now_waits_for_nobody_else(open_site: OpenSite) -> None:
    """In a line that all had shared."""
    async with open_site(nest("path", limit=SOON)) as site:
        assert await site.count(number("a", *range(7))) == [200] + [202] * 6
        assert await site.count(number("b", *range(2)), who="198.51.100.9") == [202] * 2
        site.edit(nest("remote_address", "path", limit=THREE))
        await site.await_served(6)
        assert site.list_served("a") == number("a", 0, 1, 2, 3)
        assert site.list_served("b") == number("b", 0, 1)


async def test_those_of_several_lines_come_into_one(open_site: OpenSite) -> None:
    async with open_site(nest("remote_address", "path", limit=SOON)) as site:
        for path in ("/a", "/b", "/c"):
            assert await site.count(number(path, *range(4)), path=path) == [200] + [202] * 3
        site.edit(nest("remote_address", limit=THREE))
        await site.await_served(3 + 3)
        for path in ("/a", "/b", "/c"):
            mine = site.list_served(path)
            assert mine == number(path, *range(len(mine)))


async def test_a_limit_that_has_come_beside_holds_for_what_waits(open_site: OpenSite) -> None:
    own = nest("remote_address", limit="rate_limit: {unit: second, requests_per_unit: 20, algorithm: gcra, burst: 1}")
    async with open_site(own) as site:
        await site.post(number("a", *range(30)))
        before = len(site.served)
        assert before < 20
        site.edit(own + f"- key: path\n  {THREE}\n")
        await asyncio.sleep(2 * A_WHILE)
        assert len(site.served) <= before + 4, "the one that was on its way, and three"


async def test_where_there_is_no_limit_any_more_they_go_and_the_log_says_how_many(
    open_site: OpenSite, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_site(nest("remote_address", limit=SOON)) as site:
        bodies = number("a", *range(9))
        await site.post(bodies)
        site.edit(nest("user", limit=SOON))
        async with asyncio.timeout(20):
            while len(site.served) < len(bodies) or not caplog.messages:
                await asyncio.sleep(0.05)
        waited = len(bodies) - 1
        assert site.served == bodies
    told = [int(record.args[0]) for record in caplog.records if record.msg == FREE]
    assert (sum(told), len(told)) == (waited, len(caplog.records))


async def test_a_document_that_cannot_be_read_changes_nothing(open_site: OpenSite, tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    text = nest("remote_address", limit="rate_limit: {unit: second, requests_per_unit: 1, algorithm: gcra}")
    limits.write_text(text)
    async with open_site(text, limits=limits) as site:
        await site.post(number("a", *range(12)))
        limits.write_text(nest("remote_address", "path", limit="rate_limit: {unit: never}"))
        await asyncio.sleep(4)
        assert 3 <= len(site.served) <= 6


async def test_whom_another_middleware_has_told_is_known_still(open_site: OpenSite) -> None:
    """It is not there when a request is replayed, but what it told is kept."""

    def find(scope: Any) -> str | None:
        user: str = scope["session"]["user"]
        return user

    async with open_site(nest("user", limit=SOON), extract={"user": find}) as site:

        async def post(body: str) -> int | None:
            return (await ask(site.app, "/jobs", body.encode(), method="POST", session={"user": "alice"})).status

        assert [await post(f"a {each}") for each in range(9)] == [200] + [202] * 8
        site.edit(nest("user", "path", limit=THREE))
        await site.await_served(4)
        assert site.served == number("a", *range(4))


async def test_an_edit_that_is_undone_has_them_where_they_were(open_site: OpenSite) -> None:
    async with open_site(nest("user", limit=SOON), extract={"user": lambda scope: scope.get("who")}) as site:

        async def post(body: str) -> int | None:
            return (await ask(site.app, "/jobs", body.encode(), method="POST", who="alice")).status

        assert [await post(f"a {each}") for each in range(9)] == [200] + [202] * 8
        limit = "rate_limit: {unit: second, unit_multiplier: 3, requests_per_unit: 1, algorithm: gcra}"
        site.edit(nest("remote_address", limit=limit))
        await site.await_served(2)
        site.edit(nest("user", limit=THREE))
        await site.await_served(5)
        assert site.served == number("a", *range(5))


def revise(text: str, request: Deferred, **extract: Extractor) -> Deferred:
    rules = RuleSet({"app": parse_document(text).root})
    extraction = Extraction(lambda: rules, "app", remember({**EXTRACTORS, **extract}))
    return Revision(lambda: rules, extraction).revise(request)


def tell(request: Deferred) -> list[dict[str, str]]:
    return [dict(each.entries) for each in request.descriptors]


KEPT = make_request(
    descriptors=(Descriptor((Entry("path", "/a"),)),),
    headers=(("x-forwarded-for", "203.0.113.66"), ("x-user", "mallory")),
    client="198.51.100.1 4711",
    address="198.51.100.1",
)


@pytest.mark.parametrize("by", [{}, {"remote_address": ClientAddress(["0.0.0.0/0"])}], ids=["by default", "trusting"])
def test_nobody_is_another_than_he_was_whatever_he_has_written(by: dict[str, Extractor]) -> None:
    """Though proxies are trusted by now that were not when he came."""
    revised = revise(nest("remote_address", limit=SOON), KEPT, **by)
    assert tell(revised)[0] == {"remote_address": "198.51.100.1"}
    told = replace(KEPT, descriptors=(Descriptor((Entry("user", "alice"),)),))
    assert tell(revise(nest("user", "path", limit=SOON), told, user=header("X-User")))[0] == {
        "user": "alice",
        "path": "/a",
    }


def test_his_block_is_told_of_his_address() -> None:
    request = replace(KEPT, client="127.0.0.1 80", address="2001:db8:1:2:3::4")
    assert tell(revise(nest("remote_address", limit=SOON), request))[0] == {"remote_address": "2001:db8:1:2::/64"}


def test_the_key_that_we_have_added_is_not_his() -> None:
    own = ("idempotency-key", make_idempotency_key(KEPT.id))
    request = replace(KEPT, headers=(own,))
    extract = {"idempotency_key": header("Idempotency-Key")}
    assert revise(nest("idempotency_key", limit=SOON), request, **extract).descriptors == KEPT.descriptors
    his = replace(KEPT, headers=(("idempotency-key", "his"),))
    assert tell(revise(nest("idempotency_key", limit=SOON), his, **extract))[0] == {"idempotency_key": "his"}


def test_what_a_former_version_has_kept_comes_under_them_too() -> None:
    """It knew no address but that of the socket, and no others in a line."""
    document = json.loads(write_head(KEPT))
    del document["address"]
    former = read_head(KEPT.id, json.dumps(document), KEPT.body)
    revised = revise(nest("remote_address", limit=SOON), former)
    assert tell(revised)[0] == {"remote_address": "198.51.100.1"}
    assert revised.key == "app|remote_address|198.51.100.1"


def test_what_cannot_be_told_any_more_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def find(scope: Any) -> str | None:
        tenant: str = scope["session"]["tenant"]
        return tenant

    text = nest("tenant", limit=SOON)
    rules = RuleSet({"app": parse_document(text).root})
    extraction = Extraction(lambda: rules, "app", remember({"tenant": find}))
    revision = Revision(lambda: rules, extraction)
    assert [revision.revise(KEPT) for _ in range(2)] == [KEPT] * 2
    assert caplog.messages == ["'tenant' cannot be told of deferred requests: limits by it do not hold for them."]


class TestMoves:
    """From line to line of a backlog."""

    async def test_what_is_moved_has_left_its_line(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog()
        first, second = make_request(target="/1"), make_request(target="/2")
        await backlog.put(first)
        await backlog.put(second)
        network, now = first.network, time.time()
        before = await backlog.weigh("alice", network)
        assert await backlog.claim(now) == (first, 1)
        moved = replace(first, key="bob", others="carol's")
        assert await backlog.move(first, moved)
        load = await backlog.weigh("bob", network)
        assert (load.requests, load.of_key, load.of_network, load.of_both) == (2, 1, 2, 1)
        assert load.bytes == before.bytes + len(write_head(moved)) - len(write_head(first))
        assert await backlog.claim(now) == (second, 1), "nobody stands before it any more"
        assert await backlog.claim(now) is None, "the claim goes on"
        await backlog.postpone(moved, now + 5, tried=False)
        assert await backlog.claim(now + 4) is None
        assert await backlog.claim(now + 5) == (moved, 1)
        for request in (moved, second):
            await backlog.finish(request, State.DONE, now, None, "")
        assert await backlog.weigh("alice", network) == await backlog.weigh("bob", network) == (0,) * 8

    async def test_so_it_has_in_a_file_of_a_former_version(self, tmp_path: Path) -> None:
        await SqliteBacklog(tmp_path / "deferred.db").aclose()
        with closing(sqlite3.connect(tmp_path / "deferred.db")) as connection:
            connection.executescript("DROP TRIGGER deferred_moves; DROP TRIGGER deferred_moved")
        backlog, request = SqliteBacklog(tmp_path / "deferred.db"), make_request()
        await backlog.put(request)
        moved = replace(request, key="bob")
        assert await backlog.move(request, moved)
        assert (await backlog.weigh("bob", request.network)).of_both == 1
        assert (await backlog.weigh("alice", request.network)).of_key == 0
        await backlog.aclose()

    async def test_those_who_come_wait_behind_it(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog()
        request = make_request()
        await backlog.put(request)
        await backlog.claim(time.time())
        moved = replace(request, key="bob")
        assert await backlog.move(request, moved)
        assert await backlog.comes_behind("bob", "")
        assert not await backlog.comes_behind("alice", "")
        later = make_request("bob")
        await backlog.put(later)
        await backlog.postpone(moved, time.time(), tried=False)
        assert await backlog.claim(time.time()) == (moved, 1)

    async def test_another_process_finds_it_there(self, open_backlog: OpenBacklog) -> None:
        backlog, other = open_backlog(lease=1.0), open_backlog(lease=1.0)
        request = make_request()
        await backlog.put(request)
        await backlog.claim(time.time())
        moved = replace(request, key="bob", others="carol's")
        assert await backlog.move(request, moved)
        deadline = time.monotonic() + 60
        while (claim := await other.claim(time.time())) is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert claim == (moved, 2)
        assert not await backlog.move(moved, request) or isinstance(backlog, SqliteBacklog), "it is not its own now"
        await other.finish(moved, State.DONE, time.time(), None, "")
        assert await other.weigh("bob", request.network) == (0,) * 8

    async def test_what_has_ended_stays_so(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog()
        request = make_request()
        await backlog.put(request)
        await backlog.claim(time.time())
        await backlog.finish(request, State.DONE, time.time(), None, "")
        assert not await backlog.move(request, replace(request, key="bob"))
        assert await backlog.weigh("bob", request.network) == (0,) * 8


class Edited(SqliteBacklog):
    """Something is edited while a request is put into another line."""

    edit: Callable[[], None] = staticmethod(lambda: None)

    async def move(self, request: Deferred, moved: Deferred) -> bool:
        done = await super().move(request, moved)
        self.edit()
        return done


async def test_what_is_edited_again_while_it_is_moved_holds_for_it(tmp_path: Path) -> None:
    backlog = Edited(tmp_path / "deferred.db")
    site = Site(nest("remote_address", limit=SOON), backlog)
    backlog.edit = lambda: site.edit(nest("path", limit=THREE))
    async with living(site.app):
        await site.post(number("a", *range(9)))
        site.edit(nest("remote_address", "path", limit=SOON))
        await site.await_served(4)
        assert site.served == number("a", *range(4))
