"""Whatever is sent, the answer is a sentence, and nothing is kept."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from api import bodies
from netlimit.settings import Settings
from netlimit.store import Store
from tests.api.server import PATIENCE, TOKENS, connect, serve
from tests.databases import copy_fresh

ONE = {"target": "10.1.2.3", "rate": "200 packets/s"}
SHAPED = {"target": "10.1.2.3", "rate": "20 Mbit/s", "action": "shape"}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def strict(fresh_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of one API for all that is refused: it leaves nothing that the next could find."""
    settings = Settings(database_url=copy_fresh(fresh_database, tmp_path_factory.mktemp("strict") / "netlimit.db"))
    store = Store(settings.database_url)
    with serve(settings, store) as url, connect(url, "admin") as client:
        yield client
    store.close()


def assert_refused(client: httpx.Client, answer: httpx.Response, *statuses: int) -> dict[str, Any]:
    problem = dict(answer.json())
    assert answer.status_code in statuses, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert set(problem) <= {"type", "title", "status", "detail", "field", "errors", "rule"}
    assert (problem["type"], problem["status"]) == ("about:blank", answer.status_code)
    assert problem["title"]
    assert problem["detail"][0].isupper() or problem["detail"][0] in "[`'\"0123456789"
    assert problem["detail"][-1] in ".?…"
    assert client.get("/rules").json()["total"] == 0
    return problem


@pytest.mark.parametrize(
    ("field", "rule"),
    [
        ("target", {"rate": "200 packets/s"}),
        ("target", {**ONE, "target": None}),
        ("target", {**ONE, "target": ["10.1.2.3"]}),
        ("target", {**ONE, "target": "10.1.2.3/16", "per": "host"}),
        ("target", {**ONE, "target": "gateway.example"}),
        ("target", {**ONE, "target": "10.1.0.0/255.255.0.0", "per": "host"}),
        ("target", {**ONE, "target": "fe80::1%eth0"}),
        ("rate", {"target": "10.1.2.3"}),
        ("rate", {**ONE, "rate": "0 packets/s"}),
        ("rate", {**ONE, "rate": "-1 packets/s"}),
        ("rate", {**ONE, "rate": 200}),
        ("rate", {**ONE, "rate": "200"}),
        ("rate", {**ONE, "rate": "200 packets"}),
        ("rate", {**ONE, "rate": "200 parsecs/s"}),
        ("rate", {**ONE, "rate": "200 packets/fortnight"}),
        ("rate", {**ONE, "rate": "2000000 packets/s"}),
        ("rate", {**ONE, "rate": "400 Gbit/s"}),
        ("rate", {**ONE, "rate": "1 kbit/s"}),
        ("rate", {**ONE, "rate": "5000000000 connections"}),
        ("rate", {**ONE, "rate": "9" * 900 + " packets/s"}),
        ("rate", {**ONE, "rate": "9" * 9000 + " packets/s"}),
        ("rate", {**ONE, "rate": {"amount": 200, "unit": "packets", "seconds": 1}}),
        ("rate", {**ONE, "rate": {"text": "200 packets/s", "amount": 100}}),
        ("rate", {**ONE, "rate": {"text": "200 packets/s", "colour": "red"}}),
        ("rate", {**ONE, "rate": {"text": "9" * 9000 + " packets/s"}}),
        ("rate", {**ONE, "action": "block"}),
        ("rate", {**ONE, "protocol": "icmp", "rate": "5 connections/s"}),
        ("burst", {**ONE, "rate": "1000 packets/s", "burst": 9}),
        ("burst", {**ONE, "burst": 0}),
        ("burst", {**ONE, "burst": 1.5}),
        ("burst", {**ONE, "burst": True}),
        ("burst", {**ONE, "burst": "2 MB"}),
        ("burst", {**ONE, "burst": 10**30}),
        ("ports", {**ONE, "ports": [53]}),
        ("ports", {**ONE, "protocol": "icmp", "ports": [53]}),
        ("ports", {**ONE, "protocol": "udp", "ports": [65536]}),
        ("ports", {**ONE, "protocol": "udp", "ports": ["90-80"]}),
        ("ports", {**ONE, "protocol": "udp", "ports": list(range(1, 40, 2))}),
        ("ports", {**ONE, "protocol": "udp", "ports": [[53]]}),
        ("source_ports", {**ONE, "source_ports": 53}),
        ("per", {**ONE, "target": "10.1.0.0/16"}),
        ("per", {**ONE, "target": "10.1.0.0/16", "per": "nobody"}),
        ("per", {**ONE, "target": "10.1.0.0/16", "per": "/8"}),
        ("per", {**ONE, "target": "10.1.0.0/16", "per": "/" + "9" * 999}),
        ("per", {**ONE, "target": "10.0.0.0/8", "per": "host"}),
        ("action", {**ONE, "action": "stop"}),
        ("direction", {**ONE, "direction": "both"}),
        ("protocol", {**ONE, "protocol": "sctp"}),
        ("interface", {**ONE, "interface": "an interface"}),
        ("on_failure", {**ONE, "on_failure": "panic"}),
        ("enabled", {**ONE, "enabled": "yes"}),
        ("enabled", {**ONE, "enabled": 1}),
        ("ttl", {**ONE, "ttl": 0}),
        ("ttl", {**ONE, "ttl": "soon"}),
        ("ttl", {**ONE, "ttl": "9" * 9000}),
        ("ttl", {**ONE, "ttl": 60, "expires_at": "2035-01-01T00:00:00Z"}),
        ("expires_at", {**ONE, "expires_at": "tomorrow"}),
        ("expires_at", {**ONE, "expires_at": "0001-01-01T00:00:00+10:00"}),
        ("hosts", {**ONE, "hosts": "gw1"}),
        ("hosts", {**ONE, "hosts": [1]}),
        ("hosts", {**ONE, "hosts": ["a,b"]}),
        ("labels", {**ONE, "labels": ["site"]}),
        ("labels", {**ONE, "labels": {"site": 1}}),
        ("labels", {**ONE, "labels": {"a b": "c"}}),
        ("labels", {**ONE, "labels": {"a": "b" * 256}}),
        ("name", {**ONE, "name": "7"}),
        ("name", {**ONE, "name": "Guests"}),
        ("name", {**ONE, "name": "a" * 64}),
        ("comment", {**ONE, "comment": "x" * 1001}),
        ("comment", {**ONE, "comment": 5}),
        ("comment", {**ONE, "comment": "a \x1b[31m bell \x07"}),
        ("labels", {**ONE, "labels": {"a": "\u202eb"}}),
        ("colour", {**ONE, "colour": "red"}),
        ("id", {**ONE, "id": 7}),
        ("", {**ONE, "": 1}),
        ("ceil", {**ONE, "ceil": "30 Mbit/s"}),
        ("rate", {**ONE, "action": "shape"}),
        ("rate", {**SHAPED, "rate": "10 connections/s"}),
        ("rate", {**SHAPED, "rate": "200 Gbit/s"}),
        ("rate", {**SHAPED, "rate": "7 kbit/s"}),
        ("rate", {"target": "10.1.2.3", "action": "shape"}),
        ("ceil", {**SHAPED, "ceil": "19 Mbit/s"}),
        ("ceil", {**SHAPED, "ceil": "200 Gbit/s"}),
        ("ceil", {**SHAPED, "ceil": "5000 packets/s"}),
        ("ceil", {**SHAPED, "ceil": "much"}),
        ("per", {**SHAPED, "target": "10.1.0.0/16"}),
        ("per", {**SHAPED, "target": "10.1.0.0/16", "per": "peer"}),
        ("per", {**SHAPED, "per": "/24"}),
    ],
)
def test_a_wrong_rule_is_refused_by_field(strict: httpx.Client, field: str, rule: dict[str, Any]) -> None:
    problem = assert_refused(strict, strict.post("/rules", json=rule), 422)
    assert problem.get("field", "") == field


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{", b'{"target"', b"{'target': 1}", b'{"target": "10.1.2.3",}', b"{} {}", b"\x00", b"nonsense",
        b'{"target": "10.1.2.3", "target": "10.1.2.4", "rate": "200 packets/s"}',
        b'{"target": "10.1.2.3", "rate": "200 packets/s", "labels": {"a": "b", "a": "c"}}',
        b'{"target": "10.1.2.3", "rate": "200 packets/s", "burst": NaN}',
        b'{"target": "10.1.2.3", "rate": "200 packets/s", "burst": -Infinity}',
        b'{"target": "10.1.2.3", "rate": "200 packets/s", "burst": ' + b"9" * 5000 + b"}",
        b'{"target": "10.1.2.3", "rate": "200 packets/s", "comment": "\xff\xfe"}',
        b'{"target": "10.1.2.3", "rate": "200 packets/s", "comment": "\xed\xa0\x80"}',
        b'{"target": "10.1.2.3", "rate": "200 packets/s", "comment": "\x00"}',
        '{"target": "10.1.2.3", "rate": "200 packets/s"}'.encode("utf-16"),
        b"[" * 60_000,
        b'{"labels":' * 6000,
        b'{"target": "10.1.2.3", "rate": "200 packets/s", "comment": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_json_is_400(strict: httpx.Client, body: bytes) -> None:
    assert_refused(strict, strict.post("/rules", content=body, headers=JSON), 400)


@pytest.mark.parametrize(
    "body",
    [
        b"null", b"1", b'"text"', b"[]", b'[{"target": "10.1.2.3", "rate": "200 packets/s"}]', b"true", b"{}",
        b'{"target": "10.1.2.3", "rate": "200 packets/s", "burst": 1e999}',
        b'{"target": "10.1.2.3", "rate": "200 packets/s", "burst": ' + b"9" * 4000 + b"}",
        b'{"target": "10.1.2.3", "rate": "200 packets/s", "comment": "\\u0000"}',
        b'{"target": "10.1.2.3", "rate": "200 packets/s", "comment": "\\ud800"}',
        b'{"target": "10.1.2.3", "rate": "200 packets/s", "labels": {"a\\u0000": "b"}}',
        b'{"target": "10.1.2.3", "rate": "200 packets/s", "labels": {"a": "\\udfff\\ud800"}}',
        b'{"target": "10.1.2.3\\u0000", "rate": "200 packets/s"}',
        b'{"\\ud800": 1}',
    ],
)  # fmt: skip
def test_json_that_is_no_rule_is_422(strict: httpx.Client, body: bytes) -> None:
    assert_refused(strict, strict.post("/rules", content=body, headers=JSON), 422)
    several = b'[{"target": "10.9.9.9", "action": "block"},' + body + b"]"
    problem = assert_refused(strict, strict.post("/rules/bulk", content=several, headers=JSON), 422)
    assert "line 2" in problem["detail"].lower() or "cannot be kept" in problem["detail"]


def test_any_text_that_json_can_hold_comes_back(client: httpx.Client) -> None:
    comment = 'a "quoted" \\ line\n\tand 🦊 é'
    kept = client.post("/rules", json={**ONE, "comment": comment}).json()
    assert client.get("/rules/1").json()["comment"] == kept["comment"] == comment
    escaped = client.post(
        "/rules",
        content=b'\xef\xbb\xbf {"target": "10.1.2.4", "rate": "200 packets/s", "comment": "\\ud83e\\udd8a \\\\u0000"}',
        headers=JSON,
    )
    assert escaped.json()["comment"] == "🦊 \\u0000"


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "application/xml", "", "json"]
)
def test_another_media_type_is_415(client: httpx.Client, media_type: str) -> None:
    headers = {"Content-Type": media_type} if media_type else {}
    for method, address in (("POST", "/rules"), ("PUT", "/rules/1"), ("PATCH", "/rules/1"), ("POST", "/rules/bulk")):
        answer = client.request(method, address, content=json.dumps(ONE).encode(), headers=headers)
        assert_refused(client, answer, 415)
        assert "application/" in answer.headers["Accept"]
    ndjson = client.post("/rules", content=json.dumps(ONE), headers={"Content-Type": "application/x-ndjson"})
    assert_refused(client, ndjson, 415)
    charset = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post("/rules?dry_run=true", content=json.dumps(ONE), headers=charset).status_code == 200


def test_a_body_that_is_too_large_is_413(client: httpx.Client) -> None:
    large = json.dumps({**ONE, "comment": "x" * bodies.SMALL}).encode()

    def in_pieces() -> Iterator[bytes]:
        for start in range(0, len(large), 1000):
            yield large[start : start + 1000]

    assert_refused(client, client.post("/rules", content=large, headers=JSON), 413)
    assert_refused(client, client.post("/rules", content=in_pieces(), headers=JSON), 413)
    assert_refused(client, client.put("/rules/1", content=large, headers=JSON), 413)
    assert_refused(client, client.patch("/rules/1", content=large, headers=JSON), 413)


def test_a_bulk_body_that_is_too_large_is_413(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bodies.BULK == 64 * 2**20
    monkeypatch.setattr(bodies, "BULK", 2**20)
    assert_refused(client, client.post("/rules/bulk", content=b" " * (2**20 + 1), headers=JSON), 413)
    assert_refused(client, client.post("/rules/bulk", content=iter([b" " * 2**19] * 3), headers=JSON), 413)


def test_a_body_without_end_is_not_read_for_ever(url: str) -> None:
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as connection:
        head = f"POST /api/v1/rules HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKENS['admin']}\r\n"
        connection.sendall((head + "Content-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n").encode())
        try:
            for _ in range(200):
                connection.sendall(b" " * 10_000)
        except OSError:
            return
        assert b" 413 " in connection.recv(1000)


def test_what_is_not_there_is_a_problem_too(url: str, client: httpx.Client) -> None:
    for address in ("/nothing", "/api/v1", "/api/v1/", "/api/v1/rule", "/api/v2/rules", "/api/v1/rules/", "/%00", "//"):
        assert_refused(client, client.get(url + address), 404)
    for method, address, allowed in (
        ("DELETE", "/rules", {"GET", "POST"}),
        ("POST", "/rules/1", {"GET", "PUT", "PATCH", "DELETE"}),
        ("POST", "/status", {"GET"}),
        ("TRACE", "/rules", {"GET", "POST"}),
        ("GET", "/rules/bulk", {"POST"}),
        ("PUT", "/rules/bulk", {"POST"}),
        ("DELETE", "/rules/bulk", {"POST"}),
    ):
        answer = client.request(method, address)
        assert_refused(client, answer, 405)
        assert {each.strip() for each in answer.headers["Allow"].split(",")} == allowed, (method, address)


def test_parameters_that_are_not_known_are_refused(url: str, client: httpx.Client) -> None:
    client.post("/rules", json=ONE)
    for method, address in (
        ("GET", "/rules/1"), ("DELETE", "/rules/1"),
        ("POST", "/rules/bulk"), ("GET", "/rules/1/counters"), ("GET", "/plan"), ("GET", "/status"),
        ("GET", "/offenders"), ("GET", "/audit"), ("GET", f"{url}/healthz"), ("GET", f"{url}/metrics"),
    ):  # fmt: skip
        body = None if method in ("GET", "DELETE") else ONE
        answer = client.request(method, address, params={"dry_run": "true"}, json=body)
        assert (answer.status_code, answer.json()["field"]) == (422, "dry_run"), (method, address)
    assert client.get("/rules").json()["total"] == 1
