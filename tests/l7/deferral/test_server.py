"""What a server gets of a request that is replayed to it: what its client has sent, and nothing of another's."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from netlimit.errors import SettingsError
from netlimit.l7.deferral.deferral import Deferral
from netlimit.l7.deferral.request import Headers
from netlimit.l7.deferral.server import HttpUpstream
from netlimit.l7.deferral.upstream import Unserved
from tests.l7.deferral.backlogs import make_request

pytestmark = pytest.mark.anyio
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HOST: Headers = (("host", "shop.example"),)


class Listening:
    """A server that writes down the bytes of each request, by connections, and answers as it is told."""

    def __init__(self) -> None:
        self.answer = OK
        self.connections: list[list[bytes]] = []
        self.url = ""
        self.hanging = asyncio.Event()
        """Until it is set no answer comes."""
        self.hanging.set()

    @property
    def requests(self) -> list[bytes]:
        return [request for connection in self.connections for request in connection]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests = list[bytes]()
        self.connections.append(requests)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(lengths[0].partition(b":")[2])) if lengths else b""
                requests.append(head + body)
                await self.hanging.wait()
                writer.write(self.answer)
                if not self.answer:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def listening(url: str = "http://127.0.0.1:{port}") -> AsyncIterator[tuple[Listening, HttpUpstream]]:
    place = Listening()
    server = await asyncio.start_server(place.serve, "127.0.0.1", 0)
    async with server:
        place.url = url.format(port=server.sockets[0].getsockname()[1])
        upstream = HttpUpstream(place.url)
        yield place, upstream
        await upstream.aclose()


async def test_cookies_of_an_answer_go_to_nobody_else() -> None:
    async with listening() as (place, upstream):
        place.answer = OK.replace(b"OK\r\n", b"OK\r\nSet-Cookie: session=alice; Path=/\r\n")
        for user in ("alice", "bob"):
            await upstream.send(make_request(headers=(*HOST, ("x-user", user))))
    assert [b"session=alice" in request for request in place.requests] == [False, False]


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("user-agent", "me"), ("accept", "q"), ("accept-encoding", "br")),
        (("x-a", "1"), ("cookie", "a=1"), ("x-b", ""), ("x-a", "2"), ("cookie", "b=2"), ("x-a", "1")),
        (("x-name", "\u00e4\u00ff, \x01"), ("authorization", "Basic eDp5"), ("x-_under_", "~")),
    ],
)
async def test_fields_are_those_of_the_client(headers: Headers) -> None:
    async with listening() as (place, upstream):
        await upstream.send(make_request(method="GET", body=b"", headers=(*HOST, *headers)))
    lines = [f"{name}: {value}".encode("latin-1") for name, value in (*HOST, *headers)]
    assert place.requests == [b"GET /a?b=%20c HTTP/1.1\r\n" + b"\r\n".join([*lines, b"", b""])]


@pytest.mark.parametrize(
    "target",
    [
        "/", "//host.example/x", "/a{b}|^`\"<>\\", "/x?q=%zz&q=\"<>{}|^`'[]", "/x?a=#frag", "/#", "/../a/./b//c;d=1",
        "/%2e%2e%2f%c3%A4%00%0a", "/@host", "/:80/", "/x?../../y?z=1", "/" + "p" * 60_000,
    ],
)  # fmt: skip
async def test_path_and_query_are_those_of_the_client(target: str) -> None:
    async with listening() as (place, upstream):
        await upstream.send(make_request(method="GET", body=b"", target=target, headers=HOST))
    assert place.requests[0].split(b"\r\n")[0] == f"GET {target} HTTP/1.1".encode()


async def test_what_no_request_line_has_is_written_in_percent() -> None:
    async with listening() as (place, upstream):
        await upstream.send(make_request(method="GET", body=b"", target="/\u00e4?\u00ff %zz", headers=HOST))
    assert place.requests[0].split(b"\r\n")[0] == b"GET /%E4?%FF%20%zz HTTP/1.1"


async def test_the_path_is_appended_to_that_of_the_upstream() -> None:
    async with listening("http://127.0.0.1:{port}/below/%7B/") as (place, upstream):
        await upstream.send(make_request(method="GET", body=b"", target="/{x}", headers=HOST))
    assert place.requests[0].split(b"\r\n")[0] == b"GET /below/%7B/{x} HTTP/1.1"


@pytest.mark.parametrize("method", ["POST", "DELETE", "GET", "brew", "Get"])
async def test_the_body_goes_byte_for_byte_whatever_the_method(method: str) -> None:
    body = bytes(range(256)) * 4000
    async with listening() as (place, upstream):
        await upstream.send(make_request(method=method, body=body, headers=(*HOST, ("content-encoding", "gzip"))))
    head, _, sent = place.requests[0].partition(b"\r\n\r\n")
    fields = b"host: shop.example\r\ncontent-encoding: gzip\r\nContent-Length: 1024000"
    assert (head, sent) == (method.encode() + b" /a?b=%20c HTTP/1.1\r\n" + fields, body)


@pytest.mark.parametrize(("method", "told"), [("POST", True), ("PUT", True), ("GET", False), ("DELETE", False)])
async def test_that_there_is_no_body_is_told_where_one_is_expected(method: str, told: bool) -> None:
    async with listening() as (place, upstream):
        await upstream.send(make_request(method=method, body=b"", headers=HOST))
    assert (b"content-length: 0" in place.requests[0].lower()) == told


async def test_a_request_without_host_is_sent_for_the_upstream() -> None:
    """As HTTP/1.0 allows; in HTTP/1.1 there must be one."""
    async with listening() as (place, upstream):
        await upstream.send(make_request(method="GET", body=b"", headers=()))
    assert place.requests == [f"GET /a?b=%20c HTTP/1.1\r\nhost: {place.url[7:]}\r\n\r\n".encode()]


async def test_redirects_are_answers() -> None:
    async with listening() as (place, upstream):
        place.answer = f"HTTP/1.1 307 Go\r\nLocation: {place.url}/b\r\nContent-Length: 0\r\n\r\n".encode()
        reply = (await upstream.send(make_request(headers=HOST))).reply
    assert (reply.status, reply.headers) == (307, (("location", f"{place.url}/b"),))
    assert len(place.requests) == 1


async def test_a_compressed_answer_is_kept_so() -> None:
    packed = gzip.compress(b"ok")
    async with listening() as (place, upstream):
        place.answer = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed
        reply = (await upstream.send(make_request(headers=HOST))).reply
    assert (reply.headers, reply.body) == ((("content-encoding", "gzip"),), packed)


async def test_proxies_of_the_environment_get_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with listening() as (_, upstream):
        assert (await upstream.send(make_request(headers=HOST))).reply.body == b"ok"


async def test_no_request_goes_out_on_the_connection_of_another() -> None:
    """What one leaves behind there is nobody else's: an answer too many, or the login of who sent it."""
    async with listening() as (place, upstream):
        place.answer = OK + OK.replace(b"ok", b"no")
        replies = [(await upstream.send(make_request(headers=HOST))).reply.body for _ in range(3)]
        await asyncio.gather(*(upstream.send(make_request(headers=HOST)) for _ in range(20)))
    assert replies == [b"ok"] * 3
    assert [len(requests) for requests in place.connections] == [1] * 23


async def test_a_try_sends_a_request_once() -> None:
    """Whether it is sent again is for who counts the tries."""
    async with listening() as (place, upstream):
        await upstream.send(make_request(headers=HOST))
        place.answer = b""
        with pytest.raises(Unserved, match=r"^The upstream cannot be reached: Server disconnected"):
            await upstream.send(make_request(headers=HOST))
    assert len(place.requests) == 2


async def test_a_server_that_does_not_answer_in_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as (place, upstream):
        place.hanging.clear()
        with monkeypatch.context() as patched:
            patched.setattr("netlimit.l7.deferral.server.SECONDS", 0.2)
            tries = (upstream.send(make_request(headers=HOST)) for _ in range(3))
            ends = await asyncio.gather(*tries, return_exceptions=True)
        assert [str(end) for end in ends] == ["The upstream has not answered within 0.2 seconds."] * 3
        place.hanging.set()
        assert (await upstream.send(make_request(headers=HOST))).reply.body == b"ok"
    assert [len(requests) for requests in place.connections] == [1] * 4


async def test_what_cannot_be_sent_is_told_so() -> None:
    async with listening() as (place, upstream):
        with pytest.raises(Unserved, match=r"^The request cannot be sent as it came: Found multiple Host: headers\.$"):
            await upstream.send(make_request(headers=HOST * 2))
    assert place.requests == []


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8080", "http:///x", "ftp://127.0.0.1", "http://127.0.0.1:x", "http://user:s3cret@127.0.0.1",
        "http://127.0.0.1/?a", "http://127.0.0.1/#a", "http://[::1", "",
    ],
)  # fmt: skip
def test_an_upstream_that_is_none_is_refused_at_once(tmp_path: Path, url: str) -> None:
    with pytest.raises(SettingsError, match="upstream is a URL such as") as raised:
        Deferral(f"sqlite://{tmp_path}/unused.db", upstream=url)
    assert "s3cret" not in str(raised.value)
