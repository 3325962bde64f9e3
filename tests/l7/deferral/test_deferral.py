"""Requests over their limit in an application behind the middleware: kept, replayed at the rate, reported."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from netlimit.errors import SettingsError
from netlimit.l7.deferral.application import DeferralApp
from netlimit.l7.deferral.backlog import NOBODY, Backlog, Bounds, Claim
from netlimit.l7.deferral.deferral import Deferral
from netlimit.l7.deferral.redis import RedisBacklog
from netlimit.l7.deferral.replay import Replayer
from netlimit.l7.deferral.request import Deferred, Reply, Report, State
from netlimit.l7.deferral.sqlite import SqliteBacklog
from netlimit.l7.deferral.upstream import AppUpstream
from netlimit.l7.document import parse_document
from netlimit.l7.extraction import Extraction
from netlimit.l7.identity import EXTRACTORS, header, method, path
from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.limiter import Limiter
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.middleware import RateLimit
from netlimit.l7.rules import Descriptor, Entry, Node, OnLimit, Rule, RuleSet
from netlimit.l7.store import Ask
from scripts.testbed.streams import ROOT
from tests.l7.asking import Answer, ask, begin, hello
from tests.l7.deferral.backlogs import make_request
from tests.l7.redis.servers import Server
from tests.l7.waking import Waking

pytestmark = pytest.mark.anyio
FAST = Limit(20, 1, Algorithm.GCRA, burst=1)
NEVER = Limit(1, 86_400)
CONFIGURED: ContextVar[str] = ContextVar("configured")


class Recorder:
    """An application that writes down what it serves."""

    def __init__(self, *statuses: int) -> None:
        self.served: list[tuple[str, bytes, dict[str, str]]] = []
        self._statuses = list(statuses)
        self.state: dict[str, Any] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            scope["state"]["pool"] = "opened"
            await send({"type": "lifespan.startup.complete"})
            await receive()
            return await send({"type": "lifespan.shutdown.complete"})
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        self.state = scope["state"]
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode()
        self.served.append((f"{scope['method']} {scope['path']}?{query}", body, headers))
        status = self._statuses.pop(0) if self._statuses else 201
        if status == 0:
            raise RuntimeError("a fault")
        head = [(b"content-type", b"text/plain"), (b"set-cookie", b"a=b")]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": b"served " + body})
        return None


@asynccontextmanager
async def living(app: Any) -> AsyncIterator[Any]:
    """An application between its start and its end."""
    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    incoming.put_nowait({"type": "lifespan.startup"})
    task = asyncio.create_task(app({"type": "lifespan", "state": {}}, incoming.get, outgoing.put))
    assert (await outgoing.get())["type"] == "lifespan.startup.complete"
    yield app
    incoming.put_nowait({"type": "lifespan.shutdown"})
    assert (await outgoing.get())["type"] == "lifespan.shutdown.complete"
    await task


@pytest.fixture
def waking() -> Waking:
    return Waking()


@pytest.fixture
def make_app(tmp_path: Path, waking: Waking) -> Iterator[Callable[..., RateLimit]]:
    made = []

    def make(app: Any, limit: Limit = FAST, bounds: dict[str, Any] | None = None, **others: Any) -> RateLimit:
        backlog = SqliteBacklog(tmp_path / "deferred.db", Bounds(**(bounds or {})))
        made.append(backlog)
        rule = Rule("app", "user", limit, on_limit=OnLimit.DEFER)
        counters = MemoryStore(waking.clock)
        return RateLimit(app, rule, key=header("X-User"), counters=counters, deferral=Deferral(backlog, **others))

    yield make
    for backlog in made:
        backlog._thread.shutdown()  # SQLite crashes if it is closed under what a replayer that lives still asks
        backlog._reading.shutdown()
        backlog._connection.close()
        backlog._reader.close()


def post(app: Any, body: bytes = b"", user: str = "alice", path: str = "/jobs", **others: Any) -> Any:
    others.setdefault("headers", {"X-User": user, "Authorization": "Bearer s3cret"})
    return ask(app, path, body, method="POST", **others)


async def await_end(app: Any, accepted: Answer, root_path: str = "", before: str = "") -> dict[str, Any]:
    """What has become of a request, once it is not waiting any more. Of the path a proxy takes away `before`."""
    deadline = time.monotonic() + 60
    while True:
        report = await ask(app, accepted.headers["location"].removeprefix(before), root_path=root_path)
        assert (report.status, report.headers["cache-control"]) == (200, "no-store")
        document: dict[str, Any] = report.json()
        if document["state"] != "waiting":
            return document
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_accepted_replayed_in_order_at_the_rate_and_reported(
    make_app: Callable[..., RateLimit], waking: Waking
) -> None:
    recorder = Recorder()
    async with living(make_app(recorder)) as app:
        began = time.monotonic()
        answers = [await post(app, b"%d" % number) for number in range(8)]
        assert [answer.status for answer in answers] == [201] + [202] * 7
        assert (await post(app, b"bob's", user="bob")).status == 201  # who has nothing deferred does not wait
        accepted = answers[1]
        assert accepted.json()["state"] == "waiting"
        assert accepted.headers["location"] == f"/.netlimit/deferred/{accepted.json()['id']}"
        assert len(accepted.json()["id"]) >= 32
        waking.go_on()
        ends = [await await_end(app, answer) for answer in answers[1:]]
        took = time.monotonic() - began
    assert [end["reply"]["body"] for end in ends] == [f"served {number}" for number in range(1, 8)]
    assert ends[0]["reply"] == {
        "status": 201, "headers": {"content-type": "text/plain"}, "body": "served 1", "truncated": False,
    }  # fmt: skip
    assert (ends[0]["state"], ends[0]["tries"]) == ("done", 1)
    assert [body for _, body, headers in recorder.served if headers["x-user"] == "alice"] == [
        b"%d" % number for number in range(8)
    ]
    assert took >= 7 / 20
    assert recorder.state == {"pool": "opened"}


async def test_the_application_sees_the_request_as_it_was_sent(
    make_app: Callable[..., RateLimit], waking: Waking
) -> None:
    recorder = Recorder()
    async with living(make_app(recorder)) as app:
        await post(app)
        accepted = await post(app, b"\0body", path="/a b", query_string=b"x=%20", raw_path=b"/a%20b")
        waking.go_on()
        await await_end(app, accepted)
    what, body, headers = recorder.served[1]
    assert (what, body) == ("POST /a b?x=%20", b"\0body")
    assert headers["authorization"] == "Bearer s3cret"
    assert headers["content-length"] == "5"
    assert headers["idempotency-key"].startswith('"')
    assert accepted.json()["id"] not in headers["idempotency-key"]


async def serve_job(request: Request) -> Response:
    return PlainTextResponse(f"{request.url.path} {request.scope['root_path']} {(await request.body()).decode()}")


ROUTES = [Route("/jobs", serve_job, methods=["POST"])]


@pytest.mark.parametrize(
    ("path", "before"), [("/api/jobs", ""), ("/jobs", "/api")], ids=["as a server writes it", "as a proxy leaves it"]
)
async def test_below_a_root_path(make_app: Callable[..., RateLimit], waking: Waking, path: str, before: str) -> None:
    async with living(make_app(Starlette(routes=ROUTES))) as app:
        first = await post(app, path=path, root_path="/api")
        accepted = await post(app, b"2", path=path, root_path="/api")
        waking.go_on()
        end = await await_end(app, accepted, "/api", before)
    assert (first.status, accepted.status) == (200, 202)
    assert accepted.headers["location"].startswith("/api/.netlimit/deferred/")
    assert (end["reply"]["status"], end["reply"]["body"]) == (200, f"{path} /api 2")


async def test_in_an_application_that_is_mounted_and_told_of_no_life(
    make_app: Callable[..., RateLimit], waking: Waking
) -> None:
    app = Starlette(routes=[Mount("/sub", make_app(Starlette(routes=ROUTES)))])
    answers = [await post(app, b"%d" % number, path="/sub/jobs") for number in range(3)]
    assert [answer.status for answer in answers] == [200, 202, 202]
    assert answers[1].headers["location"].startswith("/sub/.netlimit/deferred/")
    waking.go_on()
    ends = [await await_end(app, answer) for answer in answers[1:]]
    assert [end["reply"]["body"] for end in ends] == ["/sub/jobs /sub 1", "/sub/jobs /sub 2"]


async def test_what_is_known_of_one_client_is_not_known_of_another(
    make_app: Callable[..., RateLimit], waking: Waking
) -> None:
    """Context variables are those of the application, and not those of whoever came first."""
    user: ContextVar[str] = ContextVar("user")
    CONFIGURED.set("at the start")
    seen = list[tuple[str, str]]()

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append((user.get("nobody"), CONFIGURED.get()))
        await hello(scope, receive, send)

    limited = make_app(inner)

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            user.set(dict(scope["headers"])[b"x-user"].decode())
        await limited(scope, receive, send)

    answers = [await post(outer, user=who) for who in ("alice", "alice", "bob", "bob")]
    assert [answer.status for answer in answers] == [200, 202, 200, 202]
    waking.go_on()
    for answer in answers[1::2]:
        assert (await await_end(outer, answer))["state"] == "done"
    assert [who for who, _ in seen] == ["alice", "bob", "nobody", "nobody"]
    assert {configured for _, configured in seen} == {"at the start"}


@pytest.mark.parametrize(("method", "body", "length"), [("GET", b"", None), ("GET", b"a", "1"), ("POST", b"", "0")])
async def test_a_request_that_has_no_body_says_nothing_of_one(method: str, body: bytes, length: str | None) -> None:
    recorder = Recorder()
    await AppUpstream(recorder).send(make_request(method=method, body=body))
    assert [headers.get("content-length") for _, _, headers in recorder.served] == [length]


async def test_a_path_that_was_written_anew_is_replayed_so(make_app: Callable[..., RateLimit], waking: Waking) -> None:
    async with living(make_app(Starlette(routes=ROUTES))) as app:
        await post(app, raw_path=b"/v1/jobs")
        accepted = await post(app, b"2", raw_path=b"/v1/jobs")
        waking.go_on()
        end = await await_end(app, accepted)
    assert (end["reply"]["status"], end["reply"]["body"]) == (200, "/jobs  2")


async def test_who_comes_later_does_not_overtake_who_waits(make_app: Callable[..., RateLimit], waking: Waking) -> None:
    recorder = Recorder()
    async with living(make_app(recorder)) as app:
        waking.go_on()
        answers = []
        for number in range(20):
            answers.append(await post(app, b"%d" % number))
            await asyncio.sleep(0.02)
        for answer in answers:
            if answer.status == 202:
                await await_end(app, answer)
    assert [body for _, body, _ in recorder.served] == [b"%d" % number for number in range(20)]


async def test_what_is_not_served_is_tried_again_and_the_others_wait_behind_it(
    make_app: Callable[..., RateLimit], waking: Waking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netlimit.l7.deferral.replay._FIRST_PAUSE", 0.02)
    recorder = Recorder(201, 503, 0, 200, 404)
    async with living(make_app(recorder)) as app:
        await post(app, b"0")
        first, second = await post(app, b"1"), await post(app, b"2")
        waking.go_on()
        end = await await_end(app, first)
        assert (end["state"], end["tries"], end["reply"]["status"]) == ("done", 3, 200)
        end = await await_end(app, second)
        assert (end["tries"], end["reply"]["status"]) == (1, 404)  # that is an answer
    assert [body for _, body, _ in recorder.served] == [b"0", b"1", b"1", b"1", b"2"]
    keys = {headers["idempotency-key"] for _, body, headers in recorder.served if body == b"1"}
    assert len(keys) == 1


class Trailing:
    """An application that goes on after its answers, until it is let go."""

    def __init__(self, status: int = 200, fault: bool = False) -> None:
        self.served: list[bytes] = []
        self.going_on, self.let_go = asyncio.Event(), asyncio.Event()
        self._status = status
        self._fault = fault

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.served.append((await receive())["body"])
        await send({"type": "http.response.start", "status": self._status, "headers": []})
        await send({"type": "http.response.body", "body": b"half, ", "more_body": True})
        await send({"type": "http.response.body", "body": b"whole"})
        self.going_on.set()
        if self._fault:
            raise RuntimeError("a fault of what comes afterwards")
        await self.let_go.wait()


@asynccontextmanager
async def replaying(
    backlog: Path | Backlog, app: Any, *requests: Deferred, limiter: Limiter | None = None
) -> AsyncIterator[Backlog]:
    """Requests are replayed to an application as long as the block lasts, out of a backlog or one in a folder."""
    if isinstance(backlog, Path):
        backlog = SqliteBacklog(backlog / "deferred.db")
    for request in requests:
        await backlog.put(request)
    replayer = Replayer(backlog, limiter or Limiter(lambda: RuleSet({}), MemoryStore()), AppUpstream(app))
    replayer.start()
    try:
        async with asyncio.timeout(60):
            yield backlog
    finally:
        await replayer.stop()
        await backlog.aclose()


async def find_end(backlog: Backlog, request: Deferred) -> Report:
    while (report := await backlog.find(request.id)) is None or report.state is State.WAITING:
        await asyncio.sleep(0.01)
    return report


async def test_a_whole_answer_is_the_answer_whatever_the_application_raises_afterwards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app, request = Trailing(fault=True), make_request()
    async with replaying(tmp_path, app, request) as backlog:
        report = await find_end(backlog, request)
    assert (report.state, report.tries, report.reply) == (State.DONE, 1, Reply(200, (), b"half, whole"))
    assert len(app.served) == 1
    (record,) = caplog.records
    assert record.getMessage() == "The application has failed after its answer to a deferred request."


async def test_and_however_long_it_goes_on(tmp_path: Path) -> None:
    """It takes no other's place either: there are 16 for clients of one network."""
    app, requests = Trailing(), [make_request("alice" if n < 2 else f"user {n}", body=b"%d" % n) for n in range(20)]
    async with replaying(tmp_path, app, *requests) as backlog:
        for request in requests:
            assert (await find_end(backlog, request)).state is State.DONE
        app.let_go.set()
    assert sorted(app.served, key=int) == [b"%d" % n for n in range(20)]


async def test_what_goes_on_after_its_answer_has_a_while_when_all_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netlimit.l7.deferral.replay._GRACE", 0.05)
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await trailing(scope, receive, send)
        finally:
            ended.set()

    trailing, request = Trailing(), make_request()
    async with replaying(tmp_path, app, request) as backlog:
        await find_end(backlog, request)
    assert ended.is_set()


async def test_after_the_answer_the_client_has_gone(tmp_path: Path) -> None:
    told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        trailing = Trailing()
        trailing.let_go.set()
        await trailing(scope, receive, send)
        told.put_nowait(await receive())

    async with replaying(tmp_path, app, make_request()):
        assert await told.get() == {"type": "http.disconnect"}


async def test_an_answer_that_is_no_service_is_tried_again_though_the_application_fails_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netlimit.l7.deferral.replay._FIRST_PAUSE", 0.01)
    app, request = Trailing(503, fault=True), make_request()
    async with replaying(tmp_path, app, request) as backlog:
        report = await find_end(backlog, request)
    assert (report.state, report.tries, report.reason) == (State.FAILED, 5, "The upstream has answered 503.")


class Renewed(MemoryStore):
    """Counters that tell when leases are renewed, and released."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed, self.released = asyncio.Event(), asyncio.Event()

    async def renew(self, asks: Sequence[Ask], anew: bool = False) -> bool:
        self.renewed.set()
        return await super().renew(asks, anew)

    async def release(self, asks: Sequence[Ask]) -> None:
        await super().release(asks)
        self.released.set()


async def test_its_place_under_a_concurrency_is_renewed_until_it_has_ended(tmp_path: Path) -> None:
    store, request = Renewed(), make_request()
    rule = Rule("app", "user", None, Limit(1, 1, Algorithm.CONCURRENCY))
    rules = RuleSet({"app": Node(default={"user": Node(rule)})})
    limiter = Limiter(lambda: rules, store)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await store.renewed.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        store.renewed.clear()
        await store.renewed.wait()

    async with replaying(tmp_path, app, request, limiter=limiter) as backlog:
        assert (await find_end(backlog, request)).tries == 1
        await store.released.wait()
        store.renewed.clear()
        assert (await limiter.decide(request.domain, request.descriptors, 1)).allowed


async def delay(limiter: Limiter) -> tuple[Descriptor, ...]:
    """Descriptors of which a leaky bucket lets a request go in some seconds, behind others."""
    descriptors = (Descriptor((Entry("user", "alice"),)),)
    for _ in range(3):
        await limiter.decide("app", descriptors)
    return descriptors


@pytest.fixture
def leaky() -> Limiter:
    rule = Rule("app", "user", Limit(1, 2, Algorithm.LEAKY_BUCKET, burst=9))
    rules = RuleSet({"app": Node(default={"user": Node(rule)})})
    return Limiter(lambda: rules, MemoryStore())


@pytest.fixture(params=["sqlite", "redis"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Backlog:
    if request.param == "sqlite":
        return SqliteBacklog(tmp_path / "deferred.db")
    server = request.getfixturevalue("server")
    server.client.flushall()
    return RedisBacklog(server.url)


async def test_what_a_path_means_besides_is_replayed_within_its_limit(either: Backlog) -> None:
    """What the path says first would take that limit's place, and have all of it sent at once."""
    text = """
domain: app
descriptors:
  - {key: path, value: /login, on_limit: defer, rate_limit: {name: general, unit: second, requests_per_unit: 1}}
  - key: path
    value: /files/*
    rate_limit: {unit: hour, requests_per_unit: 1000, replaces: [{name: general}]}
"""
    rules, recorder = RuleSet({"app": parse_document(text).root}), Recorder()
    limiter, first = Limiter(lambda: rules, MemoryStore()), asyncio.get_running_loop().time()
    descriptors = Extraction(lambda: rules, "app", {"path": path})({"path": "/files/../login"})
    assert [each.besides for each in descriptors] == [0, 1]
    deferred = [make_request(descriptors=tuple(descriptors), hits=1) for _ in range(3)]
    async with replaying(either, recorder, *deferred, limiter=limiter):
        for each in deferred:
            await find_end(either, each)
    assert len(recorder.served) == 3
    assert asyncio.get_running_loop().time() - first >= 1.0, "a window of each second lets one go"


async def test_below_a_root_path_too_an_exception_is_replayed_as_that(either: Backlog) -> None:
    """It is found by the path of the route, and takes the place of a limit that would have it wait for a day."""
    text = """
domain: app
descriptors:
  - {key: method, rate_limit: {name: general, unit: day, requests_per_unit: 1}}
  - key: path
    value: /orders
    on_limit: defer
    rate_limit: {unit: second, requests_per_unit: 1, replaces: [{name: general}]}
"""
    rules, recorder = RuleSet({"app": parse_document(text).root}), Recorder()
    limiter = Limiter(lambda: rules, MemoryStore())
    scope = {"path": "/api/orders", "root_path": "/api", "method": "GET"}
    descriptors = Extraction(lambda: rules, "app", {"path": path, "method": method})(scope)
    deferred = [make_request(descriptors=tuple(descriptors), hits=1) for _ in range(2)]
    async with replaying(either, recorder, *deferred, limiter=limiter):
        for each in deferred:
            await find_end(either, each)
    assert len(recorder.served) == 2


async def test_what_a_leaky_bucket_delays_is_nobody_elses_meanwhile(either: Backlog, leaky: Limiter) -> None:
    assert isinstance(either, SqliteBacklog | RedisBacklog)
    either.lease, recorder = 3.0, Recorder()
    waiting = make_request(descriptors=await delay(leaky), hits=1)
    async with replaying(either, recorder, waiting, limiter=leaky):
        report = await find_end(either, waiting)
    assert (report.state, report.tries, len(recorder.served)) == (State.DONE, 1, 1)


class Taking(Recorder):
    """An application that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(self._seconds)
        await super().__call__(scope, receive, send)


@pytest.mark.parametrize("seconds", [0.3, 1.5], ids=["it ends meanwhile", "it goes on"])
async def test_what_is_being_sent_is_not_sent_again_though_its_lease_ends(
    either: Backlog, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Whoever sends it could not renew that in time: the machine slept, or the backlog was slow, or its disk full."""
    assert isinstance(either, SqliteBacklog | RedisBacklog)
    either.lease, app, waiting, claim = 0.5, Taking(seconds), make_request(), either.claim

    async def claim_slowly(*asked: Any) -> Claim | None:
        claimed = await claim(*asked)
        await asyncio.sleep(0.6 if claimed else 0)
        return claimed

    monkeypatch.setattr(either, "claim", claim_slowly)
    async with replaying(either, app, waiting):
        assert (await find_end(either, waiting)).state is State.DONE
        await asyncio.sleep(2.0)
    assert len(app.served) == 1


async def stop_at_once(either: Backlog, limiter: Limiter, reached: asyncio.Event, waiting: Deferred) -> None:
    """End a replayer as soon as something is reached, as SIGTERM does after a while."""
    await either.put(waiting)
    replayer = Replayer(either, limiter, AppUpstream(Recorder()))
    replayer.start()
    async with asyncio.timeout(30):
        await reached.wait()
        await replayer.stop()


async def test_who_ends_while_a_leaky_bucket_delays_a_request_has_not_tried_it(
    either: Backlog, leaky: Limiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netlimit.l7.deferral.replay._GRACE", 0.05)
    decided = asyncio.Event()
    waiting = make_request(descriptors=await delay(leaky), hits=1)
    decide = leaky.decide

    async def tell(*args: Any, **others: Any) -> Any:
        verdict = await decide(*args, **others)
        decided.set()
        return verdict

    monkeypatch.setattr(leaky, "decide", tell)
    await stop_at_once(either, leaky, decided, waiting)
    assert await either.claim(either.now()) == (waiting, 1)
    await either.aclose()


async def test_nor_who_ends_while_counters_are_asked(either: Backlog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.l7.deferral.replay._GRACE", 0.05)
    asked = asyncio.Event()

    class Slow(MemoryStore):
        async def decide(self, asks: Sequence[Ask]) -> Any:
            asked.set()
            await asyncio.Future()

    rules = RuleSet({"app": Node(default={"user": Node(Rule("app", "user", FAST))})})
    waiting = make_request(descriptors=(Descriptor((Entry("user", "alice"),)),), hits=1)
    await stop_at_once(either, Limiter(lambda: rules, Slow()), asked, waiting)
    assert await either.claim(either.now()) == (waiting, 1)
    await either.aclose()


async def test_what_a_leaky_bucket_would_delay_too_long_expires_in_time(either: Backlog, leaky: Limiter) -> None:
    """And takes no turn in it: its successor does not wait for that."""
    descriptors, recorder = await delay(leaky), Recorder()  # the next one would go in 6 seconds
    waiting = make_request(descriptors=descriptors, hits=1, expires=either.now() + 0.5)
    successor = make_request(descriptors=descriptors, hits=1, target="/successor")
    began = time.monotonic()
    async with replaying(either, recorder, waiting, successor, limiter=leaky):
        report = await find_end(either, waiting)
        took = time.monotonic() - began
        assert (await find_end(either, successor)).state is State.DONE
        assert time.monotonic() - began < 8
    assert (report.state, took < 4) == (State.EXPIRED, True)
    assert [what for what, _, _ in recorder.served] == ["POST /successor?"]


async def test_what_has_expired_while_the_machine_slept_is_not_sent(tmp_path: Path, leaky: Limiter) -> None:
    backlog, recorder, slept = SqliteBacklog(tmp_path / "deferred.db"), Recorder(), 0.0
    clock = backlog.now
    backlog.now = lambda: clock() + slept
    waiting = make_request(descriptors=await delay(leaky), hits=1)
    async with replaying(backlog, recorder, waiting, limiter=leaky):
        while (report := await backlog.find(waiting.id)) is None or report.tries == 0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        slept = 2000.0
        report = await find_end(backlog, waiting)
    assert (report.state, recorder.served) == (State.EXPIRED, [])


async def test_what_may_be_tried_again_only_when_it_has_expired_expires_in_time(
    either: Backlog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netlimit.l7.deferral.replay._FIRST_PAUSE", 60.0)
    waiting = make_request(expires=either.now() + 1)
    async with replaying(either, Recorder(503), waiting):
        assert (await find_end(either, waiting)).state is State.EXPIRED


class Stubborn:
    """An application that does not end when it is cancelled, before an answer or after it."""

    def __init__(self, answers: bool) -> None:
        self.calls = 0
        self.let_go, self.cancelled = asyncio.Event(), asyncio.Event()
        self._answers = answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        if self._answers or scope["path"] == "/answered":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            if not self._answers:
                return
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.cancelled.set()


GOES_ON = (
    "An application has not ended within 0.05 seconds of being cancelled: it is left alone, and may still be at work "
    "on a deferred request that is tried again."
)


async def test_who_does_not_end_when_cancelled_keeps_neither_place_nor_key(
    either: Backlog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("replay._FIRST_PAUSE", 0.01), ("upstream.SECONDS", 0.05), ("upstream._PATIENCE", 0.05)):
        monkeypatch.setattr(f"netlimit.l7.deferral.{name}", value)
    app = Stubborn(answers=False)
    stubborn, behind = make_request(target="/stubborn"), make_request(target="/answered")
    async with replaying(either, app, stubborn, behind):
        report = await find_end(either, stubborn)
        assert (report.state, report.tries) == (State.FAILED, 5)
        assert report.reason == "The application has not answered within 0.05 seconds."
        assert (await find_end(either, behind)).state is State.DONE
    assert [record.getMessage() for record in caplog.records] == [GOES_ON] * 5
    app.let_go.set()


@pytest.mark.parametrize("answers", [False, True], ids=["before", "after"])
async def test_nor_does_it_keep_the_process_from_ending(
    tmp_path: Path, answers: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("replay._GRACE", 0.05), ("upstream._PATIENCE", 0.05)):
        monkeypatch.setattr(f"netlimit.l7.deferral.{name}", value)
    app, request = Stubborn(answers), make_request()
    async with asyncio.timeout(20), replaying(tmp_path, app, request) as backlog:
        while not app.calls:
            await asyncio.sleep(0.01)
        if answers:
            await find_end(backlog, request)
    assert app.cancelled.is_set()
    assert [record.getMessage() for record in caplog.records] == [GOES_ON]
    app.let_go.set()


async def test_it_fails_after_so_many_tries(
    make_app: Callable[..., RateLimit], waking: Waking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netlimit.l7.deferral.replay._FIRST_PAUSE", 0.01)
    async with living(make_app(Recorder(201, 502, 502), tries=2)) as app:
        await post(app)
        accepted = await post(app)
        waking.go_on()
        end = await await_end(app, accepted)
        assert (end["state"], end["tries"], end["reason"]) == ("failed", 2, "The upstream has answered 502.")
        assert "reply" not in end


async def test_what_waits_too_long_expires_and_is_never_sent(make_app: Callable[..., RateLimit]) -> None:
    recorder = Recorder()
    async with living(make_app(recorder, expires=0.0)) as app:
        await post(app, b"0")
        end = await await_end(app, await post(app, b"1"))
    assert end["state"] == "expired"
    assert len(recorder.served) == 1


@pytest.mark.parametrize("seconds", [-3600, 7 * 86_400])
def test_a_clock_that_is_set_holds_nothing_up_and_loses_nothing(tmp_path: Path, seconds: int) -> None:
    command = [sys.executable, "-m", "tests.l7.deferral.setting", f"sqlite://{tmp_path}/deferred.db", str(seconds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "done", "2", "done"], done.stderr


async def test_it_is_bounded(make_app: Callable[..., RateLimit]) -> None:
    app = make_app(Recorder(), NEVER, {"most_of_one": 2}, largest=1000)
    assert [(await post(app)).status for _ in range(4)] == [201, 202, 202, 429]
    full = await post(app)
    assert full.json()["detail"] == "The request is over its limit, and as many are kept or being read as may be."
    assert int(full.headers["retry-after"]) >= 1
    await post(app, user="bob")
    large = {"X-User": "bob", "Content-Length": "1001"}
    assert (await post(app, b"", headers=large)).status == 413  # before anything of it is read
    assert (await post(app, b"x" * 1001, user="bob")).status == 413
    assert (await post(app, b"x" * 1000, user="bob")).status == 202


async def test_of_a_client_that_goes_nothing_is_kept(make_app: Callable[..., RateLimit], tmp_path: Path) -> None:
    app = make_app(Recorder(), NEVER)
    await post(app)
    asking = begin(app, method="POST", headers={"X-User": "alice"})
    asking._incoming.get_nowait()
    asking._incoming.put_nowait({"type": "http.request", "body": b"half", "more_body": True})
    asking.hang_up()
    assert (await asking.end()).messages == []
    other = SqliteBacklog(tmp_path / "deferred.db")
    assert await other.claim(time.time()) is None
    await other.aclose()


async def test_the_status_of_what_is_not_known(make_app: Callable[..., RateLimit]) -> None:
    app = make_app(Recorder(), NEVER)
    assert (await ask(app, "/.netlimit/deferred/unknown")).status == 404
    assert (await ask(app, "/.netlimit/deferred/", method="DELETE")).status == 405


async def test_a_request_that_kills_whoever_tries_it_is_not_tried_for_ever(tmp_path: Path) -> None:
    backlog = SqliteBacklog(tmp_path / "deferred.db", Bounds(lease=0.0))
    request = make_request()
    await backlog.put(request)
    for tries in (1, 2):
        claim = await backlog.claim(time.time())
        assert claim == (request, tries)  # and whoever has claimed it dies
    recorder = Recorder()
    replayer = Replayer(backlog, Limiter(lambda: RuleSet({}), MemoryStore()), AppUpstream(recorder), tries=2)
    replayer.start()
    deadline = time.monotonic() + 60
    while (report := await backlog.find(request.id)) is None or report.state is State.WAITING:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert (report.state, recorder.served) == (State.FAILED, [])
    await replayer.stop()
    await backlog.aclose()


class Faulty(SqliteBacklog):
    """One whose first claims fail."""

    def __init__(self, path: Path, faults: int) -> None:
        super().__init__(path)
        self.faults = faults

    async def claim(self, now: float, places: Mapping[str, int] = NOBODY, most: int = 1) -> Claim | None:
        if self.faults:
            self.faults -= 1
            raise RuntimeError("a fault")
        return await super().claim(now, places, most)


async def test_a_fault_of_a_turn_is_logged_and_the_next_turn_follows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backlog = Faulty(tmp_path / "deferred.db", 2)
    request = make_request()
    await backlog.put(request)
    replayer = Replayer(backlog, Limiter(lambda: RuleSet({}), MemoryStore()), AppUpstream(Recorder()))
    replayer.start()
    deadline = time.monotonic() + 60
    while (report := await backlog.find(request.id)) is None or report.state is State.WAITING:
        assert time.monotonic() < deadline
        replayer.stir()
        await asyncio.sleep(0.01)
    await replayer.stop()
    await backlog.aclose()
    assert report.state is State.DONE
    (record,) = caplog.records
    assert record.getMessage() == (
        "Deferred requests cannot be replayed by a fault of netlimit's own. It is tried again until they can be."
    )
    assert record.exc_info is not None


async def test_slow_replays_of_one_network_hold_up_no_others(tmp_path: Path) -> None:
    slow, others = asyncio.Event(), set[str]()
    served = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            await slow.wait()
        else:
            others.add(scope["client"][0])
            if len(others) == 20:
                served.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    backlog = SqliteBacklog(tmp_path / "deferred.db")
    requests = [make_request(f"slow {n}", "/slow", client=f"2001:db8:0:{n:x}::1 80") for n in range(100)]
    requests += [make_request(f"good {n}", "/good", client=f"198.51.{n}.1 80") for n in range(20)]
    for request in requests:
        await backlog.put(request)
    replayer = Replayer(backlog, Limiter(lambda: RuleSet({}), MemoryStore()), AppUpstream(app))
    replayer.start()
    async with asyncio.timeout(20):
        await served.wait()
    slow.set()
    await replayer.stop()
    await backlog.aclose()


async def test_replayed_to_a_server_with_the_host_that_was_asked_for(
    make_app: Callable[..., RateLimit], waking: Waking
) -> None:
    requests = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        requests.append((head.decode(), await reader.readexactly(3)))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 70000\r\nSet-Cookie: a=b\r\n\r\n" + b"x" * 70_000)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    app = make_app(Recorder(), upstream=f"http://127.0.0.1:{port}/base/")
    async with living(app):
        headers = {"X-User": "alice", "Host": "shop.example", "Authorization": "Bearer s3cret", "Connection": "close"}
        await post(app, headers=headers)
        accepted = await post(app, b"abc", headers=headers, query_string=b"q=%20")
        waking.go_on()
        end = await await_end(app, accepted)
    server.close()
    await server.wait_closed()
    assert (end["state"], end["reply"]["truncated"], len(end["reply"]["body"])) == ("done", True, 64 * 1024)
    assert end["reply"]["headers"] == {}
    ((head, body),) = requests
    lines = head.lower().splitlines()
    assert head.startswith("POST /base/jobs?q=%20 HTTP/1.1\r\n")
    assert body == b"abc"
    assert {"host: shop.example", "authorization: bearer s3cret", "content-length: 3"} <= {*lines}
    assert sum(line.startswith("host:") for line in lines) == 1


async def test_a_server_that_is_not_there_is_tried_again(
    make_app: Callable[..., RateLimit], waking: Waking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netlimit.l7.deferral.replay._FIRST_PAUSE", 0.01)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        app = make_app(Recorder(), upstream=f"http://127.0.0.1:{nobody.getsockname()[1]}", tries=2)
        async with living(app):
            await post(app)
            accepted = await post(app)
            waking.go_on()
            end = await await_end(app, accepted)
    assert (end["state"], end["tries"]) == ("failed", 2)
    assert end["reason"].startswith("The upstream cannot be reached: ")


async def test_applications_that_have_one_redis_replay_nothing_of_each_other(server: Server, waking: Waking) -> None:
    """There would be credentials in it, and the other's rules know nothing of its limit."""
    server.client.flushall()
    admin, shop = Recorder(), Recorder()
    rules = [Rule(domain, "user", FAST, on_limit=OnLimit.DEFER) for domain in ("admin", "shop")]
    apps = [
        RateLimit(app, rule, key=header("X-User"), counters=MemoryStore(waking.clock), deferral=Deferral(server.url))
        for app, rule in zip((admin, shop), rules, strict=True)
    ]
    async with living(apps[0]), living(apps[1]):
        accepted = [each for each in [await post(apps[1]) for _ in range(4)] if each.status == 202]
        assert len(accepted) > 1
        for each in accepted:
            waking.go_on()
            assert (await await_end(apps[1], each))["state"] == "done"
            assert (await ask(apps[0], each.headers["location"])).status == 404
    assert (len(admin.served), len(shop.served)) == (0, 4)


async def test_a_file_keeps_requests_of_one_domain_alone(tmp_path: Path) -> None:
    name = "remote_address"
    rules = RuleSet({each: Node(default={name: Node(Rule(each, name, FAST))}) for each in ("shop", "admin")})
    url = f"sqlite://{tmp_path}/deferred.db"
    for _ in range(2):  # the second time it is an application that starts anew
        shop = Deferral(url)
        DeferralApp(shop, Limiter(lambda: rules, MemoryStore()), lambda: rules, "shop", EXTRACTORS)
        with pytest.raises(SettingsError, match=r"the domain 'shop' are kept here already.*'admin' a Deferral"):
            RateLimit(Recorder(), "1/minute", domain="admin", deferral=shop)
        other = Deferral(url)
        with pytest.raises(SettingsError, match="the domain 'admin'"):
            DeferralApp(other, Limiter(lambda: rules, MemoryStore()), lambda: rules, "admin", EXTRACTORS)
        await shop.stop()
        await other.stop()


async def test_without_the_backlog_what_is_within_the_limit_is_served(mortal: Server) -> None:
    rule = Rule("app", "user", NEVER, on_limit=OnLimit.DEFER)
    app = RateLimit(Recorder(), rule, key=header("X-User"), deferral=Deferral(mortal.url))
    mortal.kill()
    async with living(app):
        answers = [await post(app) for _ in range(2)]
        assert [answer.status for answer in answers] == [201, 503]
        assert answers[1].json()["detail"].startswith("The backlog of deferred requests cannot be asked: ")
        assert answers[1].headers["retry-after"].isdigit()
        assert (await ask(app, "/.netlimit/deferred/unknown")).status == 503


def test_what_is_more_than_is_kept_of_one_client_cannot_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="20971520 bytes"):
        Deferral(f"sqlite:///{tmp_path}/deferred.db", largest=2**25)
