"""What comes through a tunnel is seen by no proxy, and so by no limit: no client gets one for requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.l7.proxies.programs import MAKERS, Places, running_at
from tests.l7.proxies.recording import Recorder, recording
from tests.l7.proxies.wire import connect, send_in_frames
from tests.l7.service.serving import serving
from tests.ports import free_port

RULES = """
domain: web
descriptors:
  - key: remote_address
    rate_limit: {unit: day, requests_per_unit: 1}
"""
KEY = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
HANDSHAKE = f"Connection: Upgrade\r\nUpgrade: websocket\r\n{KEY}"
OPENINGS = {
    "h2c": "GET / HTTP/1.1|Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n",
    "H2C": "GET / HTTP/1.1|Connection: upgrade\r\nUpgrade: H2C\r\n",
    "TLS": "GET / HTTP/1.1|Connection: Upgrade\r\nUpgrade: TLS/1.0\r\n",
    "of the whole server": "OPTIONS * HTTP/1.1|Connection: Upgrade\r\nUpgrade: TLS/1.0\r\n",
    "h2c besides": f"GET / HTTP/1.1|Connection: Upgrade\r\nUpgrade: h2c, websocket\r\n{KEY}",
    "h2c in another line": f"GET / HTTP/1.1|Connection: Upgrade\r\nUpgrade: h2c\r\nUpgrade: websocket\r\n{KEY}",
    "h2c last": f"GET / HTTP/1.1|Connection: Upgrade\r\nUpgrade: websocket, h2c\r\n{KEY}",
    "TLS besides": f"GET / HTTP/1.1|Connection: Upgrade\r\nUpgrade: TLS/1.0, h2c, websocket\r\n{KEY}",
    "posted": "POST / HTTP/1.1|Content-Length: 0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n",
    "CONNECT": "CONNECT host.example:80 HTTP/1.1|",
    "CONNECT elsewhere": "CONNECT 127.0.0.1:1 HTTP/1.1|",
}
LISTS = {"h2c besides", "h2c in another line", "h2c last"}
"""Of these a proxy may make the handshake of a websocket, as HAProxy 3.0 does: it takes `h2c` and `h2` out of `Upgrade`
before any rule sees it."""
FIELDS = {
    "CONNECT": [(b":method", b"CONNECT"), (b":authority", b"host.example:80")],
    "extended CONNECT": [
        *((b":method", b"CONNECT"), (b":protocol", b"h2c"), (b":scheme", b"http")),
        *((b":path", b"/"), (b":authority", b"host.example")),
    ],
}
FRAMED_HANDSHAKE = [
    *((b":method", b"CONNECT"), (b":protocol", b"websocket"), (b":scheme", b"http"), (b":path", b"/")),
    *((b":authority", b"host.example"), (b"sec-websocket-version", b"13")),
]
WEBSOCKETS = ("haproxy", "caddy")
"""The proxies whose configuration lets websockets through."""


@dataclass
class Site:
    """A proxy before an application that speaks whatever it is asked to."""

    place: str
    h2: str
    recorder: Recorder

    def count(self, mark: str) -> int:
        return sum(reached.startswith(mark) for reached in self.recorder.reached)

    def wanted(self, mark: str) -> list[bytes]:
        """What the application has been asked to switch to."""
        return self.recorder.wanted.get(mark, [])


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        recorder = stack.enter_context(recording(switches=True))
        served = stack.enter_context(serving(RULES))
        h2 = f"127.0.0.1:{free_port()}" if request.param in ("nginx", "haproxy") else ""
        places = Places(
            f"127.0.0.1:{free_port()}", recorder.place, served.place, served.grpc_place, "", h2, any_host=True
        )
        place = stack.enter_context(running_at(request.param, tmp_path, places))
        yield Site(place, h2 or place, recorder)


def write(mark: str) -> bytes:
    return f"GET /login HTTP/1.1\r\nHost: host.example\r\nX-Mark: {mark}\r\n\r\n".encode()


async def go_through(place: str, source: str, opening: str, mark: str) -> bytes:
    """Open a tunnel, and send three requests after its answer; the first line of that."""
    line, _, fields = opening.partition("|")
    reader, writer = await connect(place, source)
    writer.write(f"{line}\r\nHost: host.example\r\nX-Mark: first-{mark}\r\n{fields}\r\n".encode())
    try:
        async with asyncio.timeout(10):
            answer = await reader.readline()
            for number in range(3):
                writer.write(write(f"{mark}-{number}"))
                await asyncio.sleep(0.1)
    finally:
        writer.transport.abort()
    return answer


@pytest.mark.parametrize("site", MAKERS, indirect=True)
def test_no_request_reaches_the_application_by_a_tunnel(site: Site, request: pytest.FixtureRequest) -> None:
    """One request of each client may pass, and that is the one that asks for the tunnel, unless it is refused. The
    application is asked for none, but for a websocket by who might have asked for that alone."""
    proxy = request.node.callspec.params["site"]
    for number, (name, opening) in enumerate(OPENINGS.items()):
        source, mark = f"127.0.1.{number + 1}", f"plain{number}"
        answer = asyncio.run(go_through(site.place, source, opening, mark))
        if site.wanted(f"first-{mark}") == [b"websocket"] and name in LISTS and proxy in WEBSOCKETS:
            continue
        assert site.wanted(f"first-{mark}") == [], name
        assert b" 101 " not in answer, name
        assert site.count(mark) + site.count(f"first-{mark}") <= 1, name
    for number, (name, fields) in enumerate(FIELDS.items()):
        source, mark = f"127.0.2.{number + 1}", f"framed{number}"
        tunnelled = b"".join(write(f"{mark}-{each}") for each in range(3))
        asyncio.run(send_in_frames(site.h2, source, [*fields, (b"x-mark", f"first-{mark}".encode())], tunnelled))
        assert site.count(mark) == 0, name


@pytest.mark.parametrize("site", WEBSOCKETS, indirect=True)
def test_websockets_go_through_as_far_as_the_limit_lets_them(site: Site, request: pytest.FixtureRequest) -> None:
    answers = [
        asyncio.run(go_through(site.place, "127.0.3.1", f"GET / HTTP/1.1|{HANDSHAKE}", f"socket{number}"))
        for number in range(2)
    ]
    assert [answer.split()[1] for answer in answers] == [b"101", b"429"]
    framed = [
        asyncio.run(send_in_frames(site.h2, "127.0.3.2", [*FRAMED_HANDSHAKE, (b"x-mark", b"framed")], b"said"))
        for _ in range(2)
    ]
    if request.node.callspec.params["site"] == "caddy":  # which has them over HTTP/1.1 alone
        assert framed == ["reset", "reset"]
    else:
        assert framed == ["200", "429"]
        assert site.count("framed") == 1
