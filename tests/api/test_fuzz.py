"""Hostile requests to the API as it is, over a database as it is: never a fault, and what is refused leaves nothing.

`test_document.py` lets schemathesis do the same from the outside, by the document; `tests/unit/test_hostile_texts.py`
goes on with the parsers by themselves. With `scripts/test --long` more than 10,000 inputs are refused in all.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.app import create_app
from netlimit.settings import Settings
from netlimit.store import Store
from tests.api.server import TOKENS
from tests.size import choose
from tests.unit.hostile import VALUES, damaged

RULE = {"target": "10.1.2.0/24", "rate": "200 packets/s", "per": "host"}
EXAMPLES = choose(250, 700)
FUZZING = settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
PATHS = (
    "/rules", "/rules/1", "/rules/kept", "/rules/bulk", "/rules/1/counters", "/counters", "/plan", "/explain",
    "/status", "/offenders", "/audit", "/tokens", "/tokens/admin", "/revisions", "/confirmation", "/nothing",
)  # fmt: skip
QUERIES = (
    "limit", "cursor", "contains", "target", "label", "action", "state", "name", "dry_run", "src", "dst", "protocol",
    "port", "rule", "since", "until", "actor", "request", "host", "force", "colour", "seconds",
)  # fmt: skip
FIELDS = (
    *RULE,
    "name",
    "action",
    "burst",
    "ceil",
    "ports",
    "protocol",
    "ttl",
    "expires_at",
    "labels",
    "hosts",
    "colour",
)


class Victim:
    """The application, asked without a network between; and whether its database was written to."""

    def __init__(self, app: Any, path: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app),  # raises what the application does not answer
            base_url="http://x/api/v1",
            headers={"Authorization": f"Bearer {TOKENS['admin']}"},
        )
        self._watch = sqlite3.connect(path)
        self.refused = 0

    def ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Send a request. What is refused is a problem document, and has changed nothing in the database."""
        before = self._version()
        answer = self._loop.run_until_complete(self._http.request(method, path, **arguments))
        assert answer.status_code not in (500, 501, 502, 504)
        assert answer.headers["X-Request-ID"]
        if answer.status_code >= 400:
            assert answer.headers["Content-Type"] == "application/problem+json"
            assert answer.json()["detail"]
            assert self._version() == before, "something was written"
            self.refused += 1
        return answer

    def close(self) -> None:
        self._loop.run_until_complete(self._http.aclose())
        self._loop.close()
        self._watch.close()

    def _version(self) -> int:
        """Changes with every commit of anybody."""
        version: int = self._watch.execute("PRAGMA data_version").fetchone()[0]
        return version


@pytest.fixture
def victim(settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Victim]:
    monkeypatch.setattr("api.doorkeeper.FAILURES", 10**9)
    app = create_app(settings.model_copy(update={"request_rate": 10**9}), store)
    victim = Victim(app, Path(settings.database_url.removeprefix("sqlite:///")))
    assert victim.ask("POST", "/rules", json={**RULE, "name": "kept"}).status_code == 201
    yield victim
    victim.close()


def as_header(text: str) -> bytes:
    """What a server lets through to the application."""
    return "".join(letter for letter in text if letter.isprintable()).encode("latin-1", "replace")


def as_json(value: object) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def test_hostile_fields(victim: Victim) -> None:
    texts = damaged("10.1.2.0/24", "20 Mbit/s", "udp", "eth0", "office", "/24", "2030-01-31T18:00:00Z", "shape")

    @FUZZING
    @given(
        st.sampled_from(["POST", "PUT", "PATCH"]), st.dictionaries(st.sampled_from(FIELDS), VALUES | texts, min_size=1)
    )
    def send(method: str, fields: Mapping[str, object]) -> None:
        sent = fields if method == "PATCH" else {**RULE, **fields}
        path = "/rules" if method == "POST" else "/rules/kept"
        victim.ask(method, path, content=as_json(sent), headers={"Content-Type": "application/json"})

    send()
    assert victim.refused >= EXAMPLES * 4 // 7


def test_hostile_bodies(victim: Victim) -> None:
    good = json.dumps(RULE), json.dumps([RULE, RULE]), '{"name": "x", "role": "viewer"}', "[" * 3000, '{"a":' * 3000
    bodies = damaged(*good).map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=40)
    types = st.sampled_from(
        ["application/json", "application/x-ndjson", "application/merge-patch+json", "text/plain", ""]
    )

    @FUZZING
    @given(st.sampled_from(["POST", "PUT", "PATCH", "DELETE"]), st.sampled_from(PATHS), bodies, types)
    def send(method: str, path: str, body: bytes, media_type: str) -> None:
        if method == "DELETE" and path != "/rules/bulk":
            path = "/rules/nobody"
        victim.ask(method, path, content=body, headers={"Content-Type": media_type})

    send()
    assert victim.refused >= EXAMPLES * 5 // 7


def test_hostile_queries_and_headers(victim: Victim) -> None:
    words = damaged("10.1.2.3", "tcp", "a=b", "YWZ0ZXIgMQ", "2030-01-31T18:00:00Z", "1", "true", "drop")
    headers = st.dictionaries(
        st.sampled_from(["If-Match", "Prefer", "X-Request-ID", "Accept", "Content-Type", "Cookie", "Range", "Expect"]),
        damaged('"1"', "wait=0", "bytes=0-1").map(as_header),
        max_size=3,
    )
    queries = st.lists(st.tuples(st.sampled_from(QUERIES), words), min_size=1, max_size=3)

    @FUZZING
    @given(st.sampled_from(PATHS) | damaged("/rules/1", "/audit"), queries, headers)
    def send(path: str, query: list[tuple[str, str]], headers: Mapping[str, bytes]) -> None:
        address = f"/{quote(path.lstrip('/'), errors='replace')}?{urlencode(query, errors='surrogatepass')}"
        victim.ask("GET", address, headers=dict(headers))

    send()
    assert victim.refused >= EXAMPLES * 3 // 7


def test_hostile_tokens(victim: Victim) -> None:
    @settings(FUZZING, max_examples=200)
    @given(damaged(f"Bearer {TOKENS['admin']}", "Bearer admin-token", "Basic YWRtaW46YQ==").map(as_header))
    def send(header: bytes) -> None:
        victim.ask("GET", "/rules", headers={"Authorization": header})

    send()
    assert victim.refused >= 100


def test_a_bulk_with_one_bad_line_keeps_nothing(victim: Victim, store: Store) -> None:
    lines = st.lists(
        st.builds(
            lambda fields: json.dumps({**RULE, **fields}), st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=2)
        )
        | damaged(json.dumps(RULE)).map(lambda text: text.replace("\n", "")),
        min_size=2,
        max_size=8,
    )
    kept = store.revision()

    @settings(FUZZING, max_examples=150)
    @given(lines)
    def send(sent: list[str]) -> None:
        body = "\n".join([*sent, '{"target": "10.1.2.3/8"}']).encode("utf-8", "surrogatepass")
        answer = victim.ask("POST", "/rules/bulk", content=body, headers={"Content-Type": "application/x-ndjson"})
        assert answer.status_code in (400, 422)

    send()
    assert victim.refused >= 100
    assert store.revision() == kept
