"""nginx asks the limiter about each request, and hands it those that are over their limit."""

from __future__ import annotations

import asyncio
import re
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
import uvicorn

from netlimit.l7.addresses import AddressRules
from netlimit.l7.deferral.application import DeferralApp
from netlimit.l7.deferral.deferral import Deferral
from netlimit.l7.deferral.sqlite import SqliteBacklog
from netlimit.l7.document import parse_document
from netlimit.l7.gate import Gate
from netlimit.l7.identity import EXTRACTORS, ClientAddress
from netlimit.l7.limiter import Limiter
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.middleware import RateLimit
from netlimit.l7.rules import Descriptor, RuleSet
from netlimit.l7.service.application import Service
from netlimit.rules import parse_rule
from scripts.testbed.streams import ROOT
from tests.l7.asking import Answer, Asking, ask, hello, make_scope
from tests.l7.deferral.test_deferral import living
from tests.l7.waking import Waking
from tests.ports import free_port

RULES = """
domain: web
descriptors:
  - key: remote_address
    rate_limit: {unit: second, requests_per_unit: 10, algorithm: gcra, burst: 1}
    on_limit: defer
"""
CONFIGURATION = ROOT / "docs/proxies/nginx-defer.conf"


@contextmanager
def serving(app: Any, lifespan: Any = "off") -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan=lifespan, ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()


@pytest.fixture
def served() -> list[tuple[str, bytes]]:
    return []


@pytest.fixture
def waking() -> Waking:
    return Waking()


@pytest.fixture
def place(tmp_path: Path, waking: Waking, served: list[tuple[str, bytes]]) -> Iterator[str]:
    """Where nginx is."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        served.append((f"{scope['path']}?{scope['query_string'].decode()}", body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"served " + body})

    rules = RuleSet({"web": parse_document(RULES).root})
    limiter = Limiter(lambda: rules, MemoryStore(waking.clock))
    service = Service(limiter, lambda: rules)
    with serving(application) as backend:
        deferral = Deferral(f"sqlite://{tmp_path}/deferred.db", upstream=f"http://127.0.0.1:{backend}")
        extractors = {**EXTRACTORS, "remote_address": ClientAddress(["127.0.0.1"])}
        defer = DeferralApp(deferral, limiter, lambda: rules, "web", extractors)

        async def both(scope: Any, receive: Any, send: Any) -> None:
            asks = scope["type"] == "http" and scope["path"] == "/v1/auth"
            await (service if asks else defer)(scope, receive, send)

        with serving(both, "on") as limiting:
            port = free_port()
            text = CONFIGURATION.read_text()
            for written, place in ((80, port), (8080, backend), (8751, limiting), (8753, limiting)):
                text = re.sub(rf"127\.0\.0\.1:{written}\b(?!\.)", f"127.0.0.1:@{place}", text)
            kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
            places = "".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
            (tmp_path / "nginx.conf").write_text(
                f"daemon off; master_process off; pid {tmp_path}/pid; error_log {tmp_path}/log;\n"
                f"events {{}}\nhttp {{ access_log off; {places}\n{text.replace(':@', ':')}\n}}"
            )
            command = ["/usr/sbin/nginx", "-e", f"{tmp_path}/log", "-c", f"{tmp_path}/nginx.conf"]
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            yield f"http://127.0.0.1:{port}"
            process.kill()
            process.wait(60)


def test_nginx_hands_over_what_is_over_its_limit(place: str, waking: Waking, served: list[tuple[str, bytes]]) -> None:
    deadline = time.monotonic() + 60
    with httpx.Client(base_url=place, trust_env=False, timeout=60) as client:
        while True:
            try:
                client.get("/first")
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
        answers = [client.post(f"/jobs?number={number}", content=b"%d" % number) for number in range(5)]
        assert [answer.status_code for answer in answers] == [202] * 5
        began = time.monotonic()
        waking.go_on()
        for answer in answers:
            while (report := client.get(answer.headers["Location"]).json())["state"] == "waiting":
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert (report["state"], report["reply"]["status"]) == ("done", 200)
            assert report["reply"]["body"].startswith("served ")
    jobs = [(what, body) for what, body in served if what.startswith("/jobs")]
    assert sorted(jobs) == [(f"/jobs?number={number}", b"%d" % number) for number in range(5)]
    assert time.monotonic() - began >= 0.1 * len(jobs)  # the first request has had its turn before


def test_nginx_hands_on_that_there_is_no_room_though_it_still_sends(place: str) -> None:
    reaching = httpx.HTTPTransport(retries=8)  # nginx may have just begun
    with httpx.Client(transport=reaching, trust_env=False, timeout=60) as client:
        assert client.get(f"{place}/first").status_code == 200
        statuses = [client.post(f"{place}/jobs", content=b"x" * 2**20).status_code for _ in range(49)]
    assert statuses == [202] * 24 + [429] * 25, "of one client 25 MiB are kept, with the heads"


@pytest.mark.parametrize(
    "target",
    [
        "/v1/defer/login.php////../../../.netlimit/deferred/x",
        "/v1/defer%2f@127.0.0.1:9/../../../.netlimit/deferred/x",
        "/v1/defer/login/%2e%2e/%2e%2e/%2e%2e/.netlimit/deferred/x",
        "/v1/defer/login/../..%2f../.netlimit/deferred/x",
        "//.netlimit//deferred/../../v1/defer/x/../../../.netlimit/deferred/x",
    ],
)
def test_nobody_comes_to_where_requests_are_kept_but_by_the_limiter(
    place: str, served: list[tuple[str, bytes]], target: str
) -> None:
    """In the name of others, and for paths that the limiter has not seen."""
    host, _, port = place.removeprefix("http://").partition(":")
    deadline = time.monotonic() + 60
    answers = list[bytes]()
    while len(answers) < 5:
        fields = f"Host: a\r\nX-Forwarded-For: 198.51.100.{len(answers)}\r\nConnection: close\r\n\r\n"
        try:
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(f"GET {target} HTTP/1.1\r\n{fields}".encode())
                answers.append(connection.makefile("rb").readline().split()[1])
        except ConnectionError:
            assert time.monotonic() < deadline
    assert answers == [b"404"] * 5
    time.sleep(0.5)
    assert served == []


def test_what_is_sent_for_no_path_is_not_kept(tmp_path: Path) -> None:
    """Behind the upstream's name it would be for another server: `http://127.0.0.1:8080` and `@192.0.2.1/`."""

    async def main() -> None:
        rules = RuleSet({"web": parse_document(RULES).root})
        deferral = Deferral(f"sqlite://{tmp_path}/deferred.db", upstream="http://127.0.0.1:9")
        app = DeferralApp(deferral, Limiter(lambda: rules, MemoryStore()), lambda: rules, "web", EXTRACTORS)
        for raw in (b"/v1/defer%2f@192.0.2.1/x", b"/v1%2fdefer/@192.0.2.1/x", b"@192.0.2.1/v1/defer/x"):
            assert (await ask(app, "/v1/defer/@192.0.2.1/x", raw_path=raw)).status == 400
        limits = tmp_path / "limits.yaml"
        limits.write_text(RULES)
        limited = RateLimit(hello, limits=limits, domain="web", deferral=deferral)
        assert [(await ask(limited, "/", raw_path=b"@192.0.2.1/x")).status for _ in range(2)] == [200, 400]
        assert [(await ask(limited, "/")).status for _ in range(2)] == [202] * 2
        await deferral.stop()

    asyncio.run(main())


def test_what_may_mean_too_much_is_not_kept(tmp_path: Path) -> None:
    async def main() -> None:
        rules = RuleSet({"web": parse_document(RULES.replace("remote_address", "path")).root})
        deferral = Deferral(f"sqlite://{tmp_path}/deferred.db", upstream="http://127.0.0.1:9")
        app = DeferralApp(deferral, Limiter(lambda: rules, MemoryStore()), lambda: rules, "web", EXTRACTORS)
        answer = await ask(app, f"/v1/defer/a{'/..;//' * 100}", method="POST")
        assert (answer.status, "more than 128 parts" in answer.json()["detail"]) == (400, True)
        answer = await ask(app, "/v1/defer/a\u00e9", method="POST", raw_path=b"/v1/defer/a\xe9")
        assert (answer.status, "encode it" in answer.json()["detail"]) == (400, True)
        await deferral.stop()

    asyncio.run(main())


def test_what_no_rule_wants_kept_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        rules = RuleSet({"web": parse_document(RULES.replace("defer", "reject")).root})
        deferral = Deferral(f"sqlite://{tmp_path}/deferred.db", upstream="http://127.0.0.1:9")
        app = DeferralApp(deferral, Limiter(lambda: rules, MemoryStore()), lambda: rules, "web", EXTRACTORS)
        assert (await ask(app, "/v1/defer/a", method="POST")).status == 429
        assert (await ask(app, "/elsewhere")).status == 404
        assert (await ask(app, f"/v1/defer/a{'/..;//' * 100}", method="POST")).status == 429
        assert (await ask(app, "/.netlimit/deferred/unknown")).status == 404
        await deferral.stop()

    asyncio.run(main())


def test_what_a_server_writes_among_the_fields_later_is_not_kept(tmp_path: Path) -> None:
    async def main() -> None:
        rules = RuleSet({"web": parse_document(RULES).root})
        fields = [(b"x-kept", b"yes")]

        def find_rules() -> RuleSet:
            fields.append((b"x-api-key", b"stolen"))
            return rules

        deferral = Deferral(f"sqlite://{tmp_path}/deferred.db", upstream="http://127.0.0.1:9")
        app = DeferralApp(deferral, Limiter(lambda: rules, MemoryStore()), find_rules, "web", EXTRACTORS)
        del fields[1:]
        scope = {**make_scope("/v1/defer/a", method="POST"), "headers": fields}
        answer = await Asking(app, scope, [{"type": "http.request"}]).end()
        assert answer.status == 202
        await deferral.stop()

    asyncio.run(main())
    with closing(sqlite3.connect(tmp_path / "deferred.db")) as database:
        kept = "\n".join(database.iterdump())
    assert "x-kept" in kept
    assert "stolen" not in kept


def test_websockets_ask_for_nothing_that_is_kept(tmp_path: Path) -> None:
    """Where requests ask what has become of theirs."""

    async def main() -> None:
        rules = RuleSet({"web": parse_document(RULES).root})
        deferral = Deferral(f"sqlite://{tmp_path}/deferred.db", upstream="http://127.0.0.1:9")
        app = DeferralApp(deferral, Limiter(lambda: rules, MemoryStore()), lambda: rules, "web", EXTRACTORS)
        limits = tmp_path / "limits.yaml"
        limits.write_text(RULES)

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "websocket.accept"})

        told = []
        for each in (app, RateLimit(inner, limits=limits, domain="web", deferral=deferral)):
            scope = make_scope("/.netlimit/deferred/x", type="websocket")
            del scope["method"]  # there is none
            answer = await Asking(each, scope, [{"type": "websocket.connect"}]).end()
            told.append(answer.messages[0]["type"])
        assert told == ["websocket.close", "websocket.accept"]
        await deferral.stop()

    asyncio.run(main())


def test_a_head_is_not_kept_where_a_limit_of_get_rejects_it(tmp_path: Path) -> None:
    limits = RULES + "  - key: method\n    value: GET\n    rate_limit: {unit: day, requests_per_unit: 1}\n"

    async def main() -> None:
        rules = RuleSet({"web": parse_document(limits).root})
        deferral = Deferral(f"sqlite://{tmp_path}/deferred.db", upstream="http://127.0.0.1:9")
        limiter = Limiter(lambda: rules, MemoryStore())
        app = DeferralApp(deferral, limiter, lambda: rules, "web", EXTRACTORS)
        assert (await limiter.decide("web", [Descriptor((("method", "GET"),))], 1)).allowed
        for method, status in (("HEAD", 429), ("get", 429), ("POST", 202)):
            assert (await ask(app, "/v1/defer/", method=method)).status == status
        await deferral.stop()

    asyncio.run(main())


def test_what_another_limit_rejects_is_not_kept(tmp_path: Path) -> None:
    """One that defers concerns it, too, but has room."""
    limits = RULES + "  - key: path\n    value: /login\n    rate_limit: {unit: day, requests_per_unit: 1}\n"

    async def main() -> None:
        rules = RuleSet({"web": parse_document(limits).root})
        deferral = Deferral(f"sqlite://{tmp_path}/deferred.db", upstream="http://127.0.0.1:9")
        limiter = Limiter(lambda: rules, MemoryStore())
        app = DeferralApp(deferral, limiter, lambda: rules, "web", EXTRACTORS)
        assert (await limiter.decide("web", [Descriptor((("path", "/login"),))], 1)).allowed
        assert (await ask(app, "/v1/defer/login", method="POST")).status == 429
        assert (await ask(app, "/v1/defer/other", method="POST")).status == 202
        await deferral.stop()

    asyncio.run(main())


@pytest.mark.parametrize("target", ["login#x", "login;1", "x/..;/login", "login;%2f"])
def test_what_is_kept_has_the_limits_of_all_that_its_path_means(tmp_path: Path, target: str) -> None:
    """And is replayed as it has been limited: without a fragment."""
    limits = RULES + "  - key: path\n    value: /login\n    rate_limit: {unit: day, requests_per_unit: 1}\n"

    async def main() -> None:
        rules = RuleSet({"web": parse_document(limits).root})
        backlog = SqliteBacklog(tmp_path / "deferred.db")
        deferral = Deferral(backlog, upstream="http://127.0.0.1:9")
        limiter = Limiter(lambda: rules, MemoryStore())
        app = DeferralApp(deferral, limiter, lambda: rules, "web", EXTRACTORS)
        path, raw = f"/v1/defer/{unquote(target)}", f"/v1/defer/{target}".encode()
        assert (await ask(app, path, method="POST", raw_path=raw)).status == 202
        claim = await backlog.claim(backlog.now())
        assert claim is not None
        assert claim.request.target == f"/{target.partition('#')[0]}"
        assert (await ask(app, path, method="POST", raw_path=raw)).status == 429
        await deferral.stop()

    asyncio.run(main())


SHARED = """
domain: web
descriptors:
  - key: path
    value: /jobs
    rate_limit: {unit: second, requests_per_unit: 5, algorithm: gcra, burst: 2}
    on_limit: defer
  - key: remote_address
    rate_limit: {unit: day, requests_per_unit: 5, algorithm: gcra}
"""
"""A line that clients share, and a limit that each has beside it."""


class Proxy:
    """Asks the limiter about each request, and hands over what is to be kept, as nginx does."""

    def __init__(self, folder: Path, upstream: int) -> None:
        rules = RuleSet({"web": parse_document(SHARED).root})
        limiter = Limiter(lambda: rules, MemoryStore())
        self._service = Service(limiter, lambda: rules)
        deferral = Deferral(f"sqlite://{folder}/deferred.db", upstream=f"http://127.0.0.1:{upstream}")
        extractors = {**EXTRACTORS, "remote_address": ClientAddress(["127.0.0.1"])}
        self.app = DeferralApp(deferral, limiter, lambda: rules, "web", extractors)

    async def post(self, who: str, path: str = "/jobs") -> Answer:
        told = {"X-Forwarded-For": who, "X-Forwarded-Uri": path, "X-Forwarded-Method": "POST"}
        query = b"domain=web&key=remote_address&key=path&deny=401&wait=0.5"
        answer = await ask(self._service, "/v1/auth", peer="127.0.0.1", headers=told, query_string=query)
        if answer.status != 401:
            return answer
        return await ask(self.app, f"/v1/defer{path}", method="POST", peer="127.0.0.1", headers=told)

    async def count(self, who: str, times: int, path: str = "/jobs") -> list[int | None]:
        return [(await self.post(who, path)).status for _ in range(times)]

    async def await_end(self, accepted: Answer) -> str:
        async with asyncio.timeout(30):
            while True:
                answer = await ask(self.app, accepted.headers["location"])
                state: str = answer.json()["state"]
                if state != "waiting":
                    return state
                await asyncio.sleep(0.02)


def test_of_a_line_that_clients_share_nobodys_own_limit_makes_the_others_wait(tmp_path: Path) -> None:
    served = list[str]()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        served.append(dict(scope["headers"])[b"x-forwarded-for"].decode())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main(port: int) -> None:
        proxy = Proxy(tmp_path, port)
        async with living(proxy.app):
            ann = [await proxy.post("192.0.2.7") for _ in range(7)]
            assert [answer.status for answer in ann] == [200, 200, 202, 202, 202, 429, 429]
            assert await proxy.count("198.51.100.1", 6, "/other") == [200] * 5 + [429]
            assert await proxy.count("198.51.100.1", 3) == [429] * 3  # though others wait
            assert [await proxy.await_end(answer) for answer in ann[2:5]] == ["done"] * 3
            assert await proxy.count("192.0.2.7", 2, "/other") == [429] * 2  # five have been counted, each once

            bob = [await proxy.post("192.0.2.8") for _ in range(3)]
            kept = [answer for answer in bob if answer.status == 202]
            assert kept
            await proxy.count("192.0.2.8", 5, "/other")
            dan = [await proxy.post("203.0.113.4") for _ in range(3)]
            assert [await proxy.await_end(answer) for answer in dan if answer.status == 202]
            state = (await ask(proxy.app, kept[-1].headers["location"])).json()["state"]
            assert state == "waiting"

    with serving(application) as port:
        asyncio.run(main(port))
    assert served.count("192.0.2.7") == 3
    assert "198.51.100.1" not in served


def test_who_is_under_another_rule_is_not_kept_by_the_one_that_it_replaces(tmp_path: Path) -> None:
    """Neither by the proxy nor by the application, where others wait."""
    limits = """
domain: web
descriptors:
  - key: remote_address
    rate_limit: {unit: day, requests_per_unit: 1, name: general}
    on_limit: defer
  - key: path
    value: /vip
    rate_limit: {unit: day, requests_per_unit: 1000, replaces: [{name: general}]}
"""

    async def main() -> None:
        rules = RuleSet({"web": parse_document(limits).root})
        deferral = Deferral(f"sqlite://{tmp_path}/deferred.db", upstream="http://127.0.0.1:9")
        app = DeferralApp(deferral, Limiter(lambda: rules, MemoryStore()), lambda: rules, "web", EXTRACTORS)
        assert (await ask(app, "/v1/defer/vip", method="POST")).status == 429
        path = tmp_path / "limits.yaml"
        path.write_text(limits)
        limited = RateLimit(hello, limits=path, domain="web", deferral=deferral)
        assert [(await ask(limited, "/other")).status for _ in range(2)] == [200, 202]
        assert (await ask(limited, "/vip")).status == 200
        await deferral.stop()

    asyncio.run(main())


def test_nothing_is_kept_of_a_client_that_is_blocked(tmp_path: Path) -> None:
    async def main() -> None:
        rules = RuleSet({"web": parse_document(RULES).root})
        deferral = Deferral(f"sqlite://{tmp_path}/deferred.db", upstream="http://127.0.0.1:9")
        blocked = ("192.0.2.0/28", "2001:db8::2")
        blocks = [parse_rule({"target": each, "action": "block"}, datetime.now(UTC)) for each in blocked]
        addresses = AddressRules([replace(each, id=n, revision=n) for n, each in enumerate(blocks, 1)], [1, 2])
        store = MemoryStore()
        limiter = Limiter(lambda: rules, store, gate=Gate(lambda: addresses, store))
        app = DeferralApp(deferral, limiter, lambda: rules, "web", EXTRACTORS)
        assert (await ask(app, "/v1/defer/a", peer="192.0.2.1")).status == 403
        assert (await ask(app, "/v1/defer/a", peer="192.0.2.99")).status == 202
        assert (await ask(app, "/v1/defer/a", peer="2001:db8::2")).status == 403
        assert (await ask(app, "/v1/defer/a", peer="2001:db8::3")).status == 202
        await deferral.stop()

    asyncio.run(main())
