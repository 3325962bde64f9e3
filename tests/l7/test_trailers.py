"""What follows a body is no field of its head: neither for a limit nor for the application."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from fastapi import FastAPI, Header, HTTPException

from netlimit.l7.identity import ClientAddress
from netlimit.l7.middleware import RateLimit
from netlimit.l7.trailers import end_heads, ignore_trailers
from tests.l7.asking import Asking, make_scope
from tests.l7.leaping import run
from tests.l7.trailing import send, serving_by_httptools, write_request

KEY = "X-API-Key: stolen"
WAYS = pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
ANNOUNCED = pytest.mark.parametrize("announced", [False, True], ids=["unannounced", "announced"])


class Recording:
    """An application that reads the body, and only then the fields."""

    def __init__(self) -> None:
        self.seen: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        self.seen.append(dict(scope["headers"]))
        known = b"x-api-key" in self.seen[-1]
        await send({"type": "http.response.start", "status": 200 if known else 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@WAYS
@ANNOUNCED
def test_a_key_after_the_body_is_none(late: bool, announced: bool) -> None:
    app = Recording()
    with serving_by_httptools(RateLimit(app, "3/day", key="api_key")) as place:
        trailing = write_request(KEY, announced=announced)
        assert [send(place, trailing, late) for _ in range(5)] == [[401]] * 5
        leading = write_request("X-Other: 1", [KEY])
        assert [send(place, leading, late) for _ in range(5)] == [[200]] * 3 + [[429]] * 2
    assert [fields.get(b"x-api-key") for fields in app.seen] == [None] * 5 + [b"stolen"] * 3
    assert not [fields for fields in app.seen if b"x-other" in fields]


@WAYS
def test_an_address_after_the_body_is_none(late: bool) -> None:
    app = Recording()
    limited = RateLimit(app, "3/day", extract={"remote_address": ClientAddress(["127.0.0.1"])})
    with serving_by_httptools(limited) as place:
        own = "X-Forwarded-For: 192.0.2.1"
        others = [write_request(f"X-Forwarded-For: 203.0.113.{number}", [own]) for number in range(5)]
        assert [send(place, each, late) for each in others] == [[401]] * 3 + [[429]] * 2
    assert [fields[b"x-forwarded-for"] for fields in app.seen] == [b"192.0.2.1"] * 3


@WAYS
def test_nor_for_the_server_itself(late: bool) -> None:
    """uvicorn takes the last address of what a proxy has written."""
    with serving_by_httptools(RateLimit(Recording(), "3/day"), proxy_headers=True) as place:
        own = "X-Forwarded-For: 192.0.2.1"
        others = [write_request(f"X-Forwarded-For: 203.0.113.{number}", [own]) for number in range(5)]
        assert [send(place, each, late) for each in others] == [[401]] * 3 + [[429]] * 2


@WAYS
def test_the_request_after_it_has_its_own_fields(late: bool) -> None:
    app = Recording()
    with serving_by_httptools(RateLimit(app, "9/day")) as place:
        first = write_request(KEY, ["X-Mark: 1"], closes=False)
        second, third = write_request(KEY, ["X-Mark: 2", KEY], closes=False), write_request(KEY, ["X-Mark: 3"])
        assert send(place, [*first, *second, *third], late) == [401, 200, 401]
    assert [fields[b"x-mark"] for fields in app.seen] == [b"1", b"2", b"3"]


@WAYS
def test_the_first_request_of_an_application_that_makes_its_middlewares_then(late: bool) -> None:
    """Without lifespan Starlette makes them when the first request has come: its connection reads already."""
    app = FastAPI()
    app.add_middleware(RateLimit, limit="3/day", key="api_key")

    @app.post("/x")
    async def _answer(body: dict[str, str], x_api_key: str | None = Header(None)) -> None:
        if x_api_key is None:
            raise HTTPException(401)

    with serving_by_httptools(app) as place:
        parts = write_request(KEY, ["Content-Type: application/json"])
        assert [send(place, parts, late) for _ in range(2)] == [[401]] * 2


def test_the_application_sees_what_was_decided_on() -> None:
    """Whatever a server writes into its own list meanwhile."""
    seen: list[Any] = []

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        fields.append((b"x-api-key", b"stolen"))
        seen.append([*scope["headers"]])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async def main() -> None:
        app = RateLimit(serve, "1/minute", exempt=["/free"])
        for path in ("/x", "/free"):
            scope = make_scope(path)
            scope["headers"] = fields
            await Asking(app, scope, [{"type": "http.request"}]).end()

    fields: list[tuple[bytes, bytes]] = [(b"host", b"h")]
    run(main())
    assert seen == [[(b"host", b"h")], [(b"host", b"h"), (b"x-api-key", b"stolen")]]


def start(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


DEAF = "from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as P; print(P.on_header.__module__)"


@pytest.mark.parametrize("module", ["netlimit.l7.middleware", "netlimit.l7.deferral.application"])
@pytest.mark.parametrize("first", ["", "import uvicorn.protocols.http.httptools_impl"])
def test_whoever_is_imported_first(first: str, module: str) -> None:
    assert start(f"{first}\nimport {module}\n{DEAF}") == "netlimit.l7.trailers\n"


@pytest.mark.parametrize("absent", ["uvicorn", "httptools"])
def test_without_uvicorn_or_httptools_nothing_is_to_be_done(absent: str) -> None:
    start(f"import sys; sys.modules[{absent!r}] = None; import netlimit.l7.middleware")


def test_it_is_done_once() -> None:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    before = HttpToolsProtocol.on_header
    ignore_trailers()
    assert HttpToolsProtocol.on_header is before

    class Own(HttpToolsProtocol):
        """A protocol of somebody's own."""

    end_heads(Own)
    assert "on_header" not in vars(Own)


def test_a_protocol_that_reads_otherwise_is_left_alone() -> None:
    class Other:
        """One of another uvicorn."""

        def on_header(self, name: bytes, value: bytes) -> None:
            """Take a field."""

    before = dict(vars(Other))
    end_heads(Other)
    assert dict(vars(Other)) == before
