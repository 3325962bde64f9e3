"""Fields that follow a body: which proxies hand them on, and that netlimit takes none of them for one of the head."""

from __future__ import annotations

import asyncio
import re
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from netlimit.l7.identity import ClientAddress
from netlimit.l7.middleware import RateLimit
from tests.l7.proxies.programs import APART, MAKERS, Change, Places, running_at
from tests.l7.proxies.wire import send_in_frames
from tests.l7.service.serving import serving
from tests.l7.trailing import send, serving_by_httptools, write_request
from tests.ports import free_port

RULES = """
domain: web
descriptors:
  - key: remote_address
    rate_limit: {unit: day, requests_per_unit: 1000}
"""
CLIENT = "127.0.0.2"
TRAILER = "X-Forwarded-For: 203.0.113.1"
HEAD = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"), (b":authority", b"host.example")]
PAIRS = [(b"x-forwarded-for", b"203.0.113.1")]
WITHOUT_LENGTH = re.compile(r"# (http-request return status 411 if .*)")
BIND = re.compile(r"^    (bind 127\.0\.0\.1:80)$", re.MULTILINE)
WAYS = pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
ANNOUNCED = pytest.mark.parametrize("announced", [False, True], ids=["unannounced", "announced"])


class Reading(socketserver.ThreadingTCPServer):
    """An application that answers everything, and remembers what has followed a body."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Serving)
        self.place = f"127.0.0.1:{self.server_address[1]}"
        self.trailers: list[list[bytes]] = []


class _Serving(socketserver.StreamRequestHandler):
    server: Reading
    timeout = 20

    def handle(self) -> None:
        with suppress(OSError):
            while head := self._read_lines():
                fields = b"".join(head).lower()
                length = re.search(rb"content-length: *([1-9]\d*)", fields)
                if b"chunked" in fields:
                    while size := int(self.rfile.readline() or b"0", 16):
                        self.rfile.read(size + 2)
                    self.server.trailers.append(self._read_lines())
                elif length:
                    self.rfile.read(int(length[1]))
                    self.server.trailers.append([])
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    def _read_lines(self) -> list[bytes]:
        lines = []
        while (line := self.rfile.readline()).strip():
            lines.append(line.strip().lower())
        return lines


@contextmanager
def reading() -> Iterator[Reading]:
    with Reading() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def running_before(
    name: str, application: str, directory: Path, change: Change = str, h2: bool = True
) -> Iterator[Places]:
    """A proxy, and where it is."""
    with serving(RULES, running=True) as served:
        apart = f"127.0.0.1:{free_port()}" if h2 and name in APART else ""
        proxy = f"127.0.0.1:{free_port()}"
        places = Places(proxy, application, served.place, served.grpc_place, h2=apart, any_host=True, changes=change)
        with running_at(name, directory, places):
            yield places


def frame(places: Places, *more: tuple[bytes, bytes]) -> str:
    """The status of a request over HTTP/2 that a trailer follows."""
    place = places.h2 or places.proxy
    return asyncio.run(send_in_frames(place, CLIENT, [*HEAD, *more], trailer=PAIRS))


def drops_trailers() -> bool:
    """Whether this HAProxy can (from 3.2 on)."""
    told = subprocess.run(["/usr/sbin/haproxy", "-v"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", told)
    assert found is not None
    return (int(found[1]), int(found[2])) >= (3, 2)


@pytest.mark.parametrize("name", MAKERS)
def test_which_proxies_hand_them_on(name: str, tmp_path: Path) -> None:
    """As docs/proxies.md tells it."""
    with reading() as server, running_before(name, server.place, tmp_path) as places:
        server.trailers.clear()
        requests = [(write_request(TRAILER, announced=announced), late) for announced in (0, 1) for late in (0, 1)]
        assert [send(places.proxy, parts, bool(late), CLIENT) for parts, late in requests] == [[200]] * 4
        assert frame(places) == ("reset" if name == "nginx" else "200")
        handed_on = name == "haproxy" and not drops_trailers()
        told = [TRAILER.lower().encode()] if handed_on else []
        assert server.trailers == [told] * (4 if name == "nginx" else 5)


def test_haproxy_refuses_what_may_have_some(tmp_path: Path) -> None:
    """By the lines for one older than 3.2."""
    changed: list[str] = []

    def change(text: str) -> str:
        changed.extend([*WITHOUT_LENGTH.findall(text), *BIND.findall(text)])
        return BIND.sub(r"    \1 proto h1", WITHOUT_LENGTH.sub(r"\1", text))

    with reading() as server, running_before("haproxy", server.place, tmp_path, change, h2=False) as places:
        assert len(changed) == 2
        server.trailers.clear()
        for announced in (False, True):
            assert send(places.proxy, write_request(TRAILER, announced=announced), False, CLIENT) == [411]
        assert frame(places) == "closed"
        whole = b"POST /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
        bare = b"POST /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
        got = b"GET /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
        assert [send(places.proxy, [each], False, CLIENT) for each in (whole, bare, got)] == [[200]] * 3
        assert server.trailers == [[]]


@WAYS
@ANNOUNCED
@pytest.mark.parametrize("name", MAKERS)
def test_the_middleware_takes_none_for_a_field(name: str, announced: bool, late: bool, tmp_path: Path) -> None:
    seen: list[list[bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        if scope["path"] == "/x":
            seen.append([value for field, value in scope["headers"] if field == b"x-forwarded-for"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    extract = {"remote_address": ClientAddress(["127.0.0.1"])}
    with (
        serving_by_httptools(RateLimit(app, "3/day", extract=extract)) as application,
        running_before(name, application, tmp_path) as places,
    ):
        others = [write_request(f"X-Forwarded-For: 203.0.113.{number}", announced=announced) for number in range(5)]
        statuses = [send(places.proxy, each, late, CLIENT) for each in others]
    assert statuses == [[200]] * 3 + [[429]] * 2
    assert seen == [[CLIENT.encode()]] * 3
