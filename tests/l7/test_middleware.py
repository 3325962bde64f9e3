"""The middleware before applications that answer in the same loop, and once before FastAPI on uvicorn."""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request

from netlimit.errors import LimitError, SettingsError
from netlimit.l7.document import parse_document
from netlimit.l7.extraction import Extraction
from netlimit.l7.headers import Family
from netlimit.l7.identity import EXTRACTORS, ClientAddress, hash_key, header
from netlimit.l7.limit import Algorithm, Limit, parse_limit
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.middleware import RateLimit
from netlimit.l7.pressure import Pressure
from netlimit.l7.rules import Mode, OnLimit, Rule, RuleSet
from tests.l7.asking import Asking, ask, begin, hello, make_scope
from tests.l7.leaping import leaping_clock, now, run

ONE = "1/minute"


def limited(limit: Any = None, app: Any = hello, **others: Any) -> RateLimit:
    return RateLimit(app, limit, counters=MemoryStore(leaping_clock()), **others)


async def ask_all(app: Any, *scopes: dict[str, Any]) -> list[int | None]:
    return [(await ask(app, **scope)).status for scope in scopes]


class TestOneLimit:
    def test_by_client_address(self) -> None:
        async def main() -> None:
            app = limited("2/minute")
            first = await ask(app)
            assert (first.status, first.body) == (200, b"hello")
            assert first.headers["ratelimit"] == '"remote_address";r=1;t=60'
            assert first.headers["content-type"] == "text/plain"
            assert await ask_all(app, {}, {}, {"peer": "192.0.2.2"}) == [200, 429, 200]

        run(main())

    def test_what_the_refused_reads_and_that_waiting_helps(self) -> None:
        async def main() -> None:
            app = limited(ONE)
            await ask(app)
            await asyncio.sleep(20.5)
            refused = await ask(app)
            assert (refused.status, refused.headers["retry-after"]) == (429, "40")
            assert refused.headers["content-type"] == "application/problem+json"
            assert int(refused.headers["content-length"]) == len(refused.body)
            assert refused.json()["detail"] == (
                'The limit "remote_address" of 1/minute is reached; come again in 40 seconds.'
            )
            await asyncio.sleep(int(refused.headers["retry-after"]))
            assert (await ask(app)).status == 200

        run(main())

    def test_head_gets_no_body(self) -> None:
        async def main() -> None:
            app = limited("0/minute")
            refused = await ask(app, method="HEAD")
            assert (refused.status, refused.body) == (429, b"")

        run(main())

    @pytest.mark.parametrize("forged", ["X-Forwarded-For", "Forwarded", "X-Real-IP", "Client-IP"])
    def test_a_forged_address_is_no_way_around(self, forged: str) -> None:
        async def main() -> None:
            app = limited(ONE)
            asks = [{"headers": {forged: f"203.0.113.{number}"}} for number in range(3)]
            assert await ask_all(app, *asks) == [200, 429, 429]

        run(main())

    def test_behind_a_trusted_proxy_each_client_has_his_own(self) -> None:
        async def main() -> None:
            app = limited(ONE, extract={"remote_address": ClientAddress(["192.0.2.1"])})
            statuses = await ask_all(
                app, *({"headers": {"X-Forwarded-For": each}} for each in ("203.0.113.1", "203.0.113.2", "203.0.113.1"))
            )
            assert statuses == [200, 200, 429]
            assert await ask_all(app, {"headers": {"X-Forwarded-For": "6.6.6.6, 203.0.113.1"}}) == [429]

        run(main())

    def test_one_ipv6_client_is_a_whole_block(self) -> None:
        async def main() -> None:
            app = limited(ONE)
            peers = ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1")
            assert await ask_all(app, *({"peer": peer} for peer in peers)) == [200, 429, 200]

        run(main())

    def test_by_another_key_or_one_of_ones_own(self) -> None:
        async def main() -> None:
            for app in (limited(ONE, key="path"), limited(ONE, key=lambda scope: scope["path"])):
                assert await ask_all(app, {"path": "/a"}, {"path": "/b"}, {"path": "/a"}) == [200, 200, 429]

        run(main())

    def test_applications_that_share_their_counters_are_told_apart_by_their_domains(self) -> None:
        async def main() -> None:
            store = MemoryStore(leaping_clock())
            shop, blog, annex = (
                RateLimit(hello, ONE, domain=name, counters=store) for name in ("shop", "blog", "shop")
            )
            assert await ask_all(shop, {}, {}) == [200, 429]
            assert await ask_all(blog, {}, {}) == [200, 429]
            assert await ask_all(annex, {}) == [429]

        run(main())

    def test_a_rule_has_a_domain_of_its_own(self) -> None:
        rule = Rule("shop", "each", parse_limit(ONE))
        RateLimit(hello, rule)
        RateLimit(hello, rule, domain="shop")
        with pytest.raises(LimitError, match="The rule is of the domain 'shop', not of 'blog'"):
            RateLimit(hello, rule, domain="blog")

    def test_an_api_key_is_told_to_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        async def main() -> None:
            app = limited(ONE, key="api_key", families=[*Family])
            caplog.set_level(0)
            key = {"headers": {"X-API-Key": "s3cret"}}
            await ask(app, **key)
            refused = await ask(app, **key)
            assert refused.status == 429
            told = str(refused.messages) + caplog.text
            assert "s3cret" not in told
            assert hash_key("s3cret") not in told
            assert await ask_all(app, {"headers": {"X-API-Key": "other"}}, {}, {}) == [200, 200, 200]

        run(main())

    def test_exempt_paths(self) -> None:
        async def main() -> None:
            app = limited("0/minute", exempt=["/healthz", "/static/*"])
            paths = ("/healthz", "/static/a/b", "/healthz/", "/stat", "/")
            assert await ask_all(app, *({"path": path} for path in paths)) == [200, 200, 429, 429, 429]

        run(main())

    def test_weights(self) -> None:
        async def main() -> None:
            app = limited("10/minute", hits=lambda scope: 7 if scope["path"] == "/export" else 1)
            paths = ("/export", "/export", "/a", "/b", "/c", "/d")
            assert await ask_all(app, *({"path": path} for path in paths)) == [200, 429, 200, 200, 200, 429]

        run(main())

    def test_the_application_says_whether_there_is_room(self) -> None:
        async def main() -> None:
            pressure = Pressure()
            app = limited(Rule("app", "elastic", parse_limit(ONE), mode=Mode.ELASTIC, priority=50), pressure=pressure)
            pressure.signal(0.2)
            assert await ask_all(app, {}, {}, {}) == [200, 200, 200]
            pressure.signal(0.8)
            assert await ask_all(app, {}) == [429]

        run(main())

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ({}, "Give either `limit`"),
            ({"limit": ONE, "limits": "limits.yaml"}, "Give either `limit`"),
            ({"limit": "often"}, "'often' is no limit; write for example"),
            ({"limit": 100}, "'100' is no limit; write for example"),
            ({"limit": ONE, "key": "plan"}, "have the key 'plan', which nothing extracts; there are remote_address"),
            ({"limits": "/nowhere/limits.yaml"}, "No such file"),
        ],
    )
    def test_what_cannot_be_kept_is_refused_at_the_start(self, arguments: dict[str, Any], sentence: str) -> None:
        with pytest.raises(LimitError, match=sentence):
            RateLimit(hello, **arguments)

    def test_counters_that_there_are_not(self) -> None:
        with pytest.raises(SettingsError):
            RateLimit(hello, ONE, counters="mysql://x")


DOCUMENT = """
domain: api
descriptors:
  - key: remote_address
    rate_limit: {unit: minute, requests_per_unit: 5}
  - key: path
    value: /login
    descriptors:
      - key: remote_address
        rate_limit: {unit: minute, requests_per_unit: 2}
  - key: device
    rate_limit: {unit: minute, requests_per_unit: 1}
"""


class TestDocument:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "limits.yaml"
        path.write_text(DOCUMENT)
        return path

    def test_the_rules_keys_say_what_is_asked_of_a_request(self, path: Path) -> None:
        async def main() -> None:
            app = limited(limits=path, domain="api", extract={"device": header("X-Device")})
            login = {"path": "/login"}
            assert await ask_all(app, login, login, login, {}, {}) == [200, 200, 429, 200, 200]
            both = await ask(app, "/login", peer="192.0.2.9", headers={"X-Device": "d1"})
            assert both.headers["ratelimit-policy"].count(";q=") == 3
            assert await ask_all(app, {"peer": "192.0.2.10", "headers": {"X-Device": "d1"}}) == [429]

        run(main())

    def test_patterns_and_values_are_looked_for_as_well(self) -> None:
        async def main() -> None:
            text = """
domain: api
descriptors:
  - key: path
    value: /api/*
    rate_limit: {unit: minute, requests_per_unit: 1}
  - key: method
    value: DELETE
    descriptors:
      - key: user
        rate_limit: {unit: minute, requests_per_unit: 1}
"""
            rules = RuleSet({"api": parse_document(text).root})
            app = limited(limits=lambda: rules, domain="api")
            assert await ask_all(app, *({"path": path} for path in ("/api/a", "/api/a", "/api/b", "/"))) == [
                200, 429, 200, 200,
            ]  # fmt: skip
            ann = {"path": "/x", "method": "DELETE", "state": {"user": "ann"}}
            anonymous = {"path": "/x", "method": "DELETE"}
            assert await ask_all(app, ann, ann, anonymous, anonymous) == [200, 429, 200, 200]

        run(main())

    @pytest.mark.parametrize("sent", ["HEAD", "head", "Get"])
    @pytest.mark.parametrize(
        ("path", "root"),
        [("/export", ""), ("/x/../export", ""), ("/api/export", "/api"), ("/api/x/../export", "/api")],
    )
    def test_a_head_has_the_limits_of_get(self, path: str, root: str, sent: str) -> None:
        """Applications run for it what they have for GET; and make capitals of methods, some of them."""
        text = """
domain: api
descriptors:
  - key: method
    value: GET
    descriptors:
      - {key: path, value: /export, rate_limit: {unit: minute, requests_per_unit: 1}}
"""
        rules = RuleSet({"api": parse_document(text).root})

        async def main() -> None:
            app = limited(limits=lambda: rules, domain="api")
            wanted = {"path": path, "root_path": root}
            assert await ask_all(app, {**wanted, "method": sent}, wanted, {**wanted, "method": sent}) == [200, 429, 429]
            others = {**wanted, "method": "POST"}, {**wanted, "path": f"{root}/", "method": sent}
            assert await ask_all(app, *others) == [200, 200]

        run(main())

    def test_a_head_counts_once_where_any_method_does(self) -> None:
        text = """
domain: api
descriptors:
  - {key: method, value: "*", share_threshold: true, rate_limit: {unit: minute, requests_per_unit: 2}}
"""
        rules = RuleSet({"api": parse_document(text).root})

        async def main() -> None:
            app = limited(limits=lambda: rules, domain="api")
            assert await ask_all(app, *[{"method": "HEAD"}] * 3) == [200, 200, 429]

        run(main())

    @pytest.mark.parametrize(("way", "longest"), [("/users/{}/export", 429), ("/users/{}/../export", 400)])
    def test_a_pattern_fits_however_long_the_value_is(self, way: str, longest: int) -> None:
        text = """
domain: api
descriptors:
  - key: path
    value: /users/*/export
    share_threshold: true
    rate_limit: {unit: hour, requests_per_unit: 1}
"""
        rules = RuleSet({"api": parse_document(text).root})

        async def main() -> None:
            app = limited(limits=lambda: rules, domain="api")
            assert await ask_all(app, *({"path": way.format(name)} for name in ("a", "b" * 600, "c" * 60_000))) == [
                200, 429, longest,
            ]  # fmt: skip

        run(main())

    def test_below_a_root_path_the_limits_of_the_routes_hold(self) -> None:
        """Starlette's router takes the root path away: what reaches it as `/api/login` is served as `/login`."""
        text = """
domain: api
descriptors:
  - key: path
    value: /login
    rate_limit: {unit: minute, requests_per_unit: 1}
  - key: path
    value: /api/old
    rate_limit: {unit: minute, requests_per_unit: 1}
  - key: path
    value: "*"
    share_threshold: true
    rate_limit: {unit: minute, requests_per_unit: 3}
"""
        rules = RuleSet({"api": parse_document(text).root})
        inner = FastAPI()

        @inner.get("/login")
        @inner.get("/old")
        @inner.get("/other")
        async def answer() -> str:
            return "in"

        inner.add_middleware(RateLimit, limits=lambda: rules, domain="api", counters=MemoryStore(leaping_clock()))
        outer = FastAPI()
        outer.mount("/v2", inner)

        async def ask_paths(app: Any, *paths: str, root: str = "/api") -> list[int | None]:
            return await ask_all(app, *({"path": path, "root_path": root} for path in paths))

        async def main() -> None:
            assert await ask_paths(inner, "/login", "/login", "/api/login", "/api/./login") == [200, 429, 429, 429]
            assert await ask_paths(inner, "/api/old", "/api/old") == [200, 429]  # who wrote it whole has it still
            await asyncio.sleep(60)
            assert await ask_paths(inner, "/other", *["/api/other"] * 3) == [200, 200, 200, 429]  # it counts as one
            await asyncio.sleep(60)
            assert await ask_paths(outer, "/v2/login", "/v2/login", root="") == [200, 429]

        run(main())

    def test_a_key_that_nothing_extracts_or_another_domain_is_an_error_at_the_start(self, path: Path) -> None:
        with pytest.raises(LimitError, match="have the key 'device', which nothing extracts"):
            RateLimit(hello, limits=path, domain="api")
        with pytest.raises(LimitError, match="There is no domain 'app' in the limits; there is 'api'"):
            RateLimit(hello, limits=path)

    def test_rules_that_change_are_heeded_and_what_is_unknown_among_them_is_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def read(text: str) -> RuleSet:
            return RuleSet({"api": parse_document(text).root})

        async def main() -> None:
            current = read(DOCUMENT.replace("device", "method"))
            app = limited(limits=lambda: current, domain="api")
            assert await ask_all(app, {}, {"method": "PUT"}, {}) == [200, 200, 429]
            current = read(DOCUMENT.replace("device", "plan").replace("requests_per_unit: 5", "requests_per_unit: 9"))
            assert await ask_all(app, *[{}] * 7) == [200] * 6 + [429]  # those before count still
            assert "have the key 'plan', which nothing extracts" in caplog.text

        run(main())

    def test_a_file_is_followed_as_it_changes(self, path: Path) -> None:
        extract = {"device": header("X-Device")}

        async def main() -> None:
            app = RateLimit(hello, limits=path, domain="api", extract=extract)
            path.write_text(
                DOCUMENT.replace("unit: minute, requests_per_unit: 5", "unit: minute, requests_per_unit: 0")
            )
            deadline = time.monotonic() + 60
            peers = itertools.count(1)  # each for the first time
            while (await ask(app, peer=f"192.0.2.{next(peers) % 250}")).status == 200:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

        asyncio.run(main())

    @pytest.mark.parametrize("way", ["raises", "returns", "starts"])
    def test_an_application_without_a_whole_lifespan_hears_of_changed_limits(self, path: Path, way: str) -> None:
        """Servers go on without one then (uvicorn, hypercorn); Django's raises."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "lifespan":
                await hello(scope, receive, send)
            elif way == "starts":
                await send({"type": "lifespan.startup.complete"})
            elif way == "raises":
                raise ValueError("Django can only handle ASGI/HTTP connections, not lifespan.")

        async def main() -> None:
            limited = RateLimit(app, limits=path, domain="api", extract={"device": header("X-Device")})
            life = Asking(limited, {"type": "lifespan", "asgi": {}}, [{"type": "lifespan.startup"}])
            with suppress(ValueError):
                await life.end()
            path.write_text(
                DOCUMENT.replace("unit: minute, requests_per_unit: 5", "unit: minute, requests_per_unit: 0")
            )
            deadline = time.monotonic() + 20
            peers = itertools.count(1)
            while (await ask(limited, peer=f"192.0.2.{next(peers) % 250}")).status == 200:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

        asyncio.run(main())

    @pytest.mark.parametrize("way", ["end", "failed", "cancelled"])
    def test_files_are_followed_until_the_end_of_the_application(self, path: Path, way: str) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "lifespan.startup.failed" if way == "failed" else "lifespan.startup.complete"})
            if way != "failed":
                await receive()
                await send({"type": "lifespan.shutdown.complete"})

        async def main() -> None:
            before = {*threading.enumerate()}
            limited = RateLimit(app, limits=path, domain="api", extract={"device": header("X-Device")})
            (thread,) = {*threading.enumerate()} - before
            life = Asking(limited, {"type": "lifespan", "asgi": {}}, [{"type": "lifespan.startup"}])
            await asyncio.sleep(0)
            if way == "end":
                life._incoming.put_nowait({"type": "lifespan.shutdown"})
            if way == "cancelled":
                life.task.cancel()
            await asyncio.gather(life.task, return_exceptions=True)
            await asyncio.to_thread(thread.join, 20)
            assert not thread.is_alive()

        asyncio.run(main())

    def test_a_long_value_is_kept_short_and_still_told_apart(self) -> None:
        async def main() -> None:
            store = MemoryStore(leaping_clock())
            app = RateLimit(hello, ONE, key=header("X-Device"), counters=store)
            long = "x" * 60_000
            asks = [{"headers": {"X-Device": long + end}} for end in "aab"]
            assert await ask_all(app, *asks) == [200, 429, 200]
            ((_, counter),) = store._counters.items()
            assert all(len(key) < 1000 for key in counter._counts)  # type: ignore[attr-defined]

        run(main())


def in_flight(amount: int = 1, seconds: int = 60, **others: Any) -> Rule:
    return Rule("app", "door", None, Limit(amount, seconds, Algorithm.CONCURRENCY), **others)


class TestRequestsInFlight:
    def test_held_from_start_to_end_and_renewed_meanwhile(self) -> None:
        async def main() -> None:
            async def slow(scope: Any, receive: Any, send: Any) -> None:
                await asyncio.sleep(1000)
                await hello(scope, receive, send)

            app = limited(in_flight(), slow)
            first = begin(app)
            await asyncio.sleep(900)
            assert (await ask(app)).status == 429
            assert (await first.end()).status == 200
            assert now() == 1000
            timers = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
            assert all(timer.cancelled() for timer in timers)  # nothing is renewed for ever
            assert (await begin(app).end()).status == 200

        run(main())

    @pytest.mark.parametrize("way", ["error", "cancelled", "gone"])
    def test_released_however_it_ends(self, way: str) -> None:
        async def main() -> None:
            async def ends(scope: Any, receive: Any, send: Any) -> None:
                if way == "error":
                    raise RuntimeError("a fault")
                while (await receive())["type"] != "http.disconnect":
                    pass

            app = limited(in_flight(), ends)
            for _ in range(3):
                asking = begin(app)
                await asyncio.sleep(1)
                if way == "cancelled":
                    asking.task.cancel()
                asking.hang_up()
                result = await asyncio.gather(asking.task, return_exceptions=True)
                assert isinstance(
                    result[0], {"error": RuntimeError, "cancelled": asyncio.CancelledError}.get(way, type(None))
                )
                assert asking.answer.status is None

        run(main())

    def test_a_websocket_is_counted_and_held(self) -> None:
        async def chat(scope: Any, receive: Any, send: Any) -> None:
            assert (await receive())["type"] == "websocket.connect"
            await send({"type": "websocket.accept"})
            while (await receive())["type"] != "websocket.disconnect":
                pass

        async def main() -> None:
            app = limited(in_flight(), chat)

            def connect(**others: Any) -> Asking:
                scope = make_scope(type="websocket", **others)
                del scope["method"]
                return Asking(app, scope, [{"type": "websocket.connect"}])

            first = connect()
            await asyncio.sleep(300)
            assert first.answer.headers["ratelimit"] == '"door";r=0'
            closed = await connect().end()
            assert [message["type"] for message in closed.messages] == ["websocket.close"]
            assert closed.messages[0]["code"] == 1013
            assert 'The limit "door" of 1 in flight is reached' in closed.messages[0]["reason"]
            answered = await connect(extensions={"websocket.http.response": {}}).end()
            assert answered.messages[0]["type"] == "websocket.http.response.start"
            assert (answered.status, answered.json()["status"]) == (429, 429)
            first.hang_up("websocket")
            await first.end()
            third = connect()
            third.hang_up("websocket")
            assert (await third.end()).messages[0]["type"] == "websocket.accept"

        run(main())


class TestAmbiguousPaths:
    """Those of which servers may make too many to compare them all with limits."""

    PATHS = """
domain: api
descriptors:
  - key: path
    value: /login
    rate_limit: {unit: minute, requests_per_unit: 1}
"""
    LONG: ClassVar = {"path": "/login" + "/..;//" * 100}

    def test_they_are_refused_where_paths_are_limited(self) -> None:
        rules = RuleSet({"api": parse_document(self.PATHS).root})

        async def main() -> None:
            app = limited(limits=lambda: rules, domain="api", exempt=["/login/*"])
            answer = await ask(app, **self.LONG)
            assert (answer.status, answer.json()["status"]) == (400, 400)
            assert "more than 128 parts" in answer.json()["detail"]
            assert await ask_all(app, {"path": "/login"}, {"path": "/login"}) == [200, 429]

        run(main())

    def test_a_websocket_is_closed(self) -> None:
        rules = RuleSet({"api": parse_document(self.PATHS).root})

        async def main() -> None:
            scope = make_scope(type="websocket", **self.LONG)
            del scope["method"]
            app = limited(limits=lambda: rules, domain="api")
            closed = await Asking(app, scope, [{"type": "websocket.connect"}]).end()
            assert [(message["type"], message["code"]) for message in closed.messages] == [("websocket.close", 1008)]

        run(main())

    def test_they_pass_where_none_are(self) -> None:
        async def main() -> None:
            assert await ask_all(limited("1/minute"), self.LONG, self.LONG) == [200, 429]

        run(main())

    def test_nobody_looks_for_what_they_mean_where_none_are_limited(self) -> None:
        """It took 30 ms of the application's thread for each request, also of a client that was refused."""

        async def main() -> float:
            app = limited("1/minute", exempt=["/static/*"])
            began = time.thread_time()
            for beginning in ("/", "/static/"):
                for _ in range(20):
                    await ask(app, beginning + "/..;//" * 10_000)
            return time.thread_time() - began

        assert run(main()) < 40 * 0.01


class TestQueues:
    RULE = Rule("app", "slow", Limit(1, 1, Algorithm.GCRA), on_limit=OnLimit.QUEUE, max_wait=2.5)

    def test_requests_wait_for_their_turn_and_the_body_is_not_lost(self) -> None:
        async def main() -> None:
            async def echo(scope: Any, receive: Any, send: Any) -> None:
                chunks = []
                while (message := await receive())["type"] == "http.request":
                    chunks.append(message["body"])
                    if not message["more_body"]:
                        break
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"".join(chunks) + b" at %d" % round(now())})

            app = limited(self.RULE, echo)
            parts = [
                {"type": "http.request", "body": b"x" * 40_000, "more_body": True},
                {"type": "http.request", "body": b"y" * 40_000, "more_body": True},
                {"type": "http.request", "body": b"z", "more_body": False},
            ]
            tasks = [Asking(app, make_scope(), parts) for _ in range(4)]
            answers = [await asking.end() for asking in tasks]
            assert [answer.status for answer in answers] == [200, 200, 200, 429]
            whole = b"x" * 40_000 + b"y" * 40_000 + b"z at "
            assert [answer.body for answer in answers[:3]] == [whole + b"0", whole + b"1", whole + b"2"]
            assert answers[3].headers["retry-after"] == "3"

        run(main())

    def test_a_client_that_goes_leaves_its_place(self) -> None:
        async def main() -> None:
            reached = []

            async def note(scope: Any, receive: Any, send: Any) -> None:
                reached.append((scope["path"], round(now())))
                await hello(scope, receive, send)

            app = limited(self.RULE, note)
            tasks = [begin(app, f"/{number}") for number in range(3)]
            await asyncio.sleep(0.2)
            tasks[1].hang_up()
            for asking in tasks:
                await asking.end()
            assert reached == [("/0", 0), ("/2", 1)]
            assert tasks[1].answer.messages == []
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}  # nobody listens any more

        run(main())

    @pytest.mark.parametrize("rounds", range(6))
    def test_one_that_is_given_up_just_as_its_turn_comes_holds_no_place(self, rounds: int) -> None:
        """An outer time-out, so many rounds of the loop after the place has become free."""

        async def main() -> None:
            free = asyncio.Event()

            async def first_waits(scope: Any, receive: Any, send: Any) -> None:
                if scope["path"] == "/first":
                    await free.wait()
                await hello(scope, receive, send)

            app = limited(in_flight(seconds=600, on_limit=OnLimit.QUEUE, max_wait=5), first_waits)
            first, second, third = begin(app, "/first"), begin(app), begin(app)
            await asyncio.sleep(0.1)
            free.set()
            await first.end()
            for _ in range(rounds):
                await asyncio.sleep(0)
            second.task.cancel()
            await asyncio.gather(second.task, return_exceptions=True)
            assert (await third.end()).status == 200
            assert now() < 0.5
            assert (await ask(app)).status == 200

        run(main())

    def test_who_waits_comes_under_a_limit_of_another_key_that_takes_the_place_of_the_one_he_waits_for(self) -> None:
        """Else an edit lets all that wait go at once, under no limit."""

        def read(key: str) -> RuleSet:
            limit = "{unit: second, requests_per_unit: 1, algorithm: gcra}"
            text = f"{{key: {key}, rate_limit: {limit}, on_limit: queue}}"
            return RuleSet({"app": parse_document(f"domain: app\ndescriptors: [{text}]").root})

        async def main() -> None:
            rules = read("path")
            app = limited(limits=lambda: rules)
            waiting = [begin(app) for _ in range(6)]
            await asyncio.sleep(0.5)
            rules = read("remote_address")
            answers = [await asking.end() for asking in waiting]
            assert [answer.status for answer in answers] == [200] * 6
            assert 4 < now() < 7

        run(main())

    def test_a_websocket_waits_too(self) -> None:
        async def main() -> None:
            async def accept(scope: Any, receive: Any, send: Any) -> None:
                assert (await receive())["type"] == "websocket.connect"
                await send({"type": "websocket.accept", "headers": []})

            app = limited(self.RULE, accept)
            tasks = [Asking(app, make_scope(type="websocket"), [{"type": "websocket.connect"}]) for _ in range(2)]
            for asking in tasks:
                assert (await asking.end()).messages[0]["type"] == "websocket.accept"
            assert round(now()) == 1

        run(main())


class TestAroundAnother:
    """Of fields that tell of one limit alone a response has those of the tighter one."""

    NAMES = ("limit", "remaining", "reset")

    def tell(self, outer: str, inner: str, requests: int, family: Family = Family.X_RATELIMIT) -> list[dict[str, str]]:
        prefix = f"{family}-"
        told: list[dict[str, str]] = []

        async def main() -> None:
            families = [Family.IETF, Family.RETRY_AFTER, family]
            within = limited(inner, domain="shared", families=families)
            app = limited(outer, within, domain="own", families=families)
            for _ in range(requests):
                answer = await ask(app)
                pairs = next(message["headers"] for message in answer.messages if "headers" in message)
                names = [name.decode().removeprefix(prefix) for name, _ in pairs]
                assert sorted(name for name in names if name in self.NAMES) == [*self.NAMES]
                told.append({name: answer.headers[prefix + name] for name in self.NAMES})

        run(main())
        return told

    @pytest.mark.parametrize("family", [Family.X_RATELIMIT, Family.RATELIMIT])
    def test_the_inner_is_tighter(self, family: Family) -> None:
        told = self.tell("5/minute", "2/minute", 3, family)
        assert [each["limit"] for each in told] == ["2"] * 3
        assert [each["remaining"] for each in told] == ["1", "0", "0"]

    def test_the_outer_is_tighter(self) -> None:
        told = self.tell("2/minute", "5/hour", 3)
        assert [(each["limit"], each["remaining"], each["reset"]) for each in told] == [
            ("2", "1", "60"),
            ("2", "0", "60"),
            ("2", "0", "60"),
        ]

    def test_of_what_the_inner_refuses_its_own_are_told(self) -> None:
        told = self.tell("2/minute", "1/hour", 2)
        assert told[1] == {"limit": "1", "remaining": "0", "reset": "3600"}

    def test_the_others_are_lists(self) -> None:
        async def main() -> None:
            answer = await ask(limited("5/minute", limited("2/minute", domain="shared", key="path"), domain="own"))
            pairs = next(message["headers"] for message in answer.messages if "headers" in message)
            assert [value for name, value in pairs if name == b"ratelimit-policy"] == [
                b'"path";q=2;w=60',
                b'"remote_address";q=5;w=60',
            ]

        run(main())

    @pytest.mark.parametrize("own", [b"", b"many", b"\xb2", b"9" * 5000])
    def test_what_an_application_tells_itself_and_nobody_can_read_stays(self, own: bytes) -> None:
        async def tell(scope: Any, receive: Any, send: Any) -> None:
            headers = [(b"x-ratelimit-remaining", own)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b""})

        async def main() -> None:
            answer = await ask(limited("5/minute", tell))
            pairs = next(message["headers"] for message in answer.messages if "headers" in message)
            assert [value for name, value in pairs if name == b"x-ratelimit-remaining"] == [own, b"4"]

        run(main())


class TestServer:
    """The one line in a real application on a real server."""

    @pytest.fixture
    def url(self) -> Iterator[str]:
        app = FastAPI()
        app.add_middleware(RateLimit, limit="3/day", exempt=["/healthz"])

        @app.get("/hello")
        async def _hello(request: Request) -> str:
            return "hello"

        @app.get("/healthz")
        async def _healthz() -> str:
            return "ok"

        with socket.create_server(("127.0.0.1", 0)) as listening:
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on", ws="none"))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
            thread.start()
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            server.should_exit = True
            thread.join()

    def test_one_line_in_fastapi(self, url: str) -> None:
        with httpx.Client(base_url=url, transport=httpx.HTTPTransport(retries=50), timeout=60) as client:
            answers = [client.get("/hello") for _ in range(4)]
            assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
            assert answers[0].headers["RateLimit-Policy"] == '"remote_address";q=3;w=86400'
            refused = answers[3]
            assert refused.json()["violated-policies"] == ["remote_address"]
            assert 1 <= int(refused.headers["Retry-After"]) <= 86_400
            assert client.post("/hello", content=b"x" * 200_000).status_code == 429
            assert client.get("/healthz").status_code == 200


LOGIN = "domain: app\ndescriptors: [{key: path, value: /login, rate_limit: {unit: day, requests_per_unit: 2}}]"


@pytest.mark.parametrize("parser", ["h11", "httptools"])
@pytest.mark.parametrize(
    "target", ["http://127.0.0.1/login", "HTTP://u@h:1/login?x", "/login#x", "/login?x#y", "//login"]
)
def test_what_a_server_leaves_before_a_path_or_behind_it_is_no_way_around_a_limit(parser: str, target: str) -> None:
    """The application sees the path that has been limited, whatever it would make of the whole."""
    rules = RuleSet({"app": parse_document(LOGIN).root})
    seen: list[tuple[str, bytes]] = []

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["path"], scope["raw_path"]))
        await hello(scope, receive, send)

    app = RateLimit(serve, limits=lambda: rules)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(app, http=parser, log_level="warning", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            statuses = [ask_server(listening.getsockname(), target) for _ in range(4)]
        finally:
            server.should_exit = True
            thread.join()
    assert statuses == [200, 200, 429, 429]
    assert {path.replace("//", "/") for path, _ in seen} == {"/login"}
    assert {raw.replace(b"//", b"/") for _, raw in seen} == {b"/login"}


def ask_server(place: tuple[str, int], target: str) -> int:
    with socket.create_connection(place, timeout=10) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
        return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.parametrize(
    ("path", "raw", "seen"),
    [
        ("http://h/login", None, ("/login", b"/login")),
        ("http://h#/login", b"http://h%23/login", ("/login", b"/login")),
        ("http://h/lo#gin?", b"http://h/lo%23gin%3F", ("/lo#gin?", b"/lo%23gin%3F")),
        ("http://h/", b"/other", ("/", b"/")),
        ("http:///login", b"http:///login", ("/login", b"/login")),
        ("login", b"login", ("/login", b"/login")),
        ("a:login", b"a:login", ("/a:login", b"/a:login")),
        ("/a#b", None, ("/a#b", None)),
        ("/a#b", b"/a%23b", ("/a#b", b"/a%23b")),
        ("*", b"*", ("*", b"*")),
        ("", b"", ("", b"")),
    ],
)
def test_an_application_sees_a_path_where_its_server_tells_one(
    path: str, raw: bytes | None, seen: tuple[str, bytes | None]
) -> None:
    found: list[tuple[str, bytes | None]] = []

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        found.append((scope["path"], scope["raw_path"]))
        await hello(scope, receive, send)

    async def main() -> None:
        assert (await ask(RateLimit(serve, limit="9/day"), path, raw_path=raw)).status == 200

    run(main())
    assert found == [seen]


@pytest.mark.parametrize("weight", [-1, 0.5])
def test_a_weight_that_is_none_is_an_error(weight: Any) -> None:
    """A negative one would give back what others have used."""

    async def main() -> None:
        app = limited("3/hour", hits=lambda scope: weight)
        with pytest.raises(LimitError, match=f"weighs {weight}; its weight is a whole number"):
            await ask(app)

    run(main())


def test_of_the_places_to_wait_one_network_leaves_some_to_others() -> None:
    """Also where rules say nothing of addresses."""
    text = "{key: path, rate_limit: {unit: hour, requests_per_unit: 1}, on_limit: queue, max_wait: 7200s}"
    rules = RuleSet({"app": parse_document(f"domain: app\ndescriptors: [{text}]").root})

    async def main() -> None:
        app = limited(limits=lambda: rules)
        crowd = [asyncio.create_task(ask(app, path=f"/{n % 1200}")) for n in range(2400)]
        await asyncio.sleep(1)
        waiting = [task for task in crowd if not task.done()]
        assert 0 < len(waiting) < 1000
        other = {"path": "/quiet", "peer": "198.51.100.1"}
        await ask(app, **other)
        late = asyncio.create_task(ask(app, **other))
        await asyncio.sleep(1)
        assert not late.done(), "there is no place left for another network"
        for task in (*waiting, late):
            task.cancel()

    run(main())


@pytest.mark.parametrize(
    ("named", "asked"),
    [("/login", "/files/../login"), ("/login*", "/login/../files/x"), ("/api/login", "/api/login")],
)
def test_what_a_path_means_besides_takes_no_limit_from_what_it_means(named: str, asked: str) -> None:
    """Else whoever writes a path so that it means two things would be rid of the limit of the one that is served."""
    text = f"""
domain: app
descriptors:
  - {{key: path, value: {named!r}, rate_limit: {{name: general, unit: hour, requests_per_unit: 1}}}}
  - key: path
    value: /files/*
    rate_limit: {{unit: hour, requests_per_unit: 1000, replaces: [{{name: general}}]}}
  - key: path
    value: /login
    rate_limit: {{unit: hour, requests_per_unit: 1000, replaces: [{{name: general}}]}}
"""
    if named == "/login":
        text = text[: text.rindex("  - key: path")]
    rules = RuleSet({"app": parse_document(text).root})

    async def main() -> None:
        app = limited(limits=lambda: rules)
        scope = {"path": asked, "root_path": "/api"}
        assert await ask_all(app, scope, scope) == [200, 429]

    run(main())


CUSTOMERS = """
domain: app
descriptors:
  - key: path
    value: /orders
    rate_limit: {name: general, unit: hour, requests_per_unit: 1}
    descriptors:
      - {key: customer, value: gold, rate_limit: {unit: hour, requests_per_unit: 9, replaces: [{name: general}]}}
  - {key: customer, value: silver, rate_limit: {unit: hour, requests_per_unit: 9, replaces: [{name: general}]}}
"""
PLACES = """
domain: app
descriptors:
  - {key: remote_address, rate_limit: {name: general, unit: hour, requests_per_unit: 1}}
  - {key: path, value: /orders, rate_limit: {unit: hour, requests_per_unit: 9, replaces: [{name: general}]}}
  - {key: path, value: /api/files/*, rate_limit: {unit: hour, requests_per_unit: 9, replaces: [{name: general}]}}
"""

ANYTHING = """
domain: app
descriptors:
  - {key: path, rate_limit: {name: general, unit: hour, requests_per_unit: 1}}
  - {key: path, value: "/o*", rate_limit: {unit: hour, requests_per_unit: 9}}
  - {key: path, value: /files, rate_limit: {unit: hour, requests_per_unit: 9, replaces: [{name: general}]}}
  - {key: path, value: /exempt}
  - {key: path, value: /deep, descriptors: [{key: method, rate_limit: {unit: hour, requests_per_unit: 9}}]}
"""

METHODS = """
domain: app
descriptors:
  - key: method
    value: GET
    descriptors:
      - {key: path, rate_limit: {unit: hour, requests_per_unit: 1}}
      - {key: path, value: "/o*", rate_limit: {unit: hour, requests_per_unit: 9}}
      - {key: path, value: /exempt}
"""


@pytest.mark.parametrize("root", ["", "/api"])
@pytest.mark.parametrize(
    ("text", "path", "customer", "expected"),
    [
        (CUSTOMERS, "/orders", "gold", 200),
        (CUSTOMERS, "/orders", "silver", 200),
        (CUSTOMERS, "/orders", "tin", 429),
        (CUSTOMERS, "/x/../orders", "gold", 200),
        (PLACES, "/orders", "", 200),
        (PLACES, "/api/files/x", "", 200),
        (PLACES, "/login/../orders", "", 429),
        (PLACES, "/login", "", 429),
        (ANYTHING, "/orders", "", 200),
        (ANYTHING, "/exempt", "", 200),
        (ANYTHING, "/files", "", 200),
        (ANYTHING, "/login", "", 429),
        (ANYTHING, "/login/../orders", "", 429),
        (METHODS, "/orders", "", 200),
        (METHODS, "/exempt", "", 200),
        (METHODS, "/login", "", 429),
        (METHODS, "/login/../orders", "", 429),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_exceptions_hold_below_a_root_path(
    root: str, text: str, path: str, customer: str, expected: int, method: str
) -> None:
    """Rules are written for the paths that routes have; and none is an exception by one meaning of a path alone."""
    rules = RuleSet({"app": parse_document(text).root})
    extract = {"customer": header("X-Customer")} if customer else {}

    async def main() -> None:
        app = limited(limits=lambda: rules, extract=extract)
        asked = {"path": path if path.startswith("/api") else root + path, "root_path": root, "method": method}
        assert await ask_all(app, *[{**asked, "headers": {"X-Customer": customer}}] * 3) == [200, expected, expected]

    run(main())


@pytest.fixture
def daphne(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which Daphne serves, as the middleware sees it."""
    monkeypatch.setitem(sys.modules, "daphne.http_protocol", ModuleType("daphne.http_protocol"))


@pytest.mark.parametrize(("text", "exempt"), [(PLACES, []), (ANYTHING, ["/static/*", "/healthz", "/api/*"])])
@pytest.mark.parametrize("root", ["/static", "/healthz", "/api/files", "/exempt"])
@pytest.mark.usefixtures("daphne")
def test_a_root_path_that_the_client_has_chosen_is_no_way_around(text: str, exempt: list[str], root: str) -> None:
    """Daphne takes it from the field `Daphne-Root-Path`, and applications take it away: `/static/login` is `/login`."""
    rules = RuleSet({"app": parse_document(text).root})

    async def main() -> None:
        app = limited(limits=lambda: rules, exempt=exempt)
        asked = {"path": f"{root}/login", "root_path": root}
        assert await ask_all(app, {"path": "/login"}, asked, asked) == [200, 429, 429]
        within = {"path": "/api/files/x", "root_path": ""}
        assert await ask_all(app, *[within] * 3) == [200] * 3

    run(main())


def test_what_any_path_has_is_counted_by_that_of_the_route() -> None:
    """And once: a rule that names no path means those of the routes, as any other."""
    rules = RuleSet({"app": parse_document(ANYTHING).root})
    tell = Extraction(lambda: rules, "app", EXTRACTORS)

    def find(path: str) -> list[tuple[str, str]]:
        told = tell(make_scope(path, root_path="/api"))
        return [(match.rule.name, match.key) for match in rules.find_counting("app", told) if match is not None]

    assert find("/api/login") == find("/login") == [("path", "/login")]
    assert find("/api/orders") == [("path=/o*", "/orders")]
    assert find("/api/login/../x") == [("path", "/x"), ("path", "/login/../x")]
    assert find("/api/deep") == find("/deep") == [("path=/deep,method", "GET")]
