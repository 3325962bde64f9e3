"""Replays deferred requests to a server. By itself, since httpx takes long to import and few need it here."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import httpcore
import httpx

from netlimit.errors import SettingsError
from netlimit.l7.deferral.request import Deferred
from netlimit.l7.deferral.upstream import SECONDS, Collected, Served, Unserved, tells_length

_VISIBLE = "".join(map(chr, range(0x21, 0x7F)))
"""All that a request line may have in its target."""
_LOST = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)


class HttpUpstream:
    """A server at a URL; the path of a request is appended, and its Host is kept. Raises SettingsError.

    By httpcore and not by a client of httpx, which is made for one user: it keeps cookies, adds fields of its own, and
    writes paths anew. No connection is used again, for what one request leaves behind there, be it a login or an answer
    too many, is for no other; and one that a server ends just then would cost a try.
    """

    def __init__(self, url: str) -> None:
        self._url = _parse(url)
        self._path = self._url.raw_path.rstrip(b"/")
        # The replayer bounds how many there are at once; it asks for no proxy, whatever the environment says.
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(trust_env=False), max_connections=None, max_keepalive_connections=0
        )

    async def send(self, request: Deferred) -> Served:
        """Have a request served, as its client has sent it. Raises Unserved."""
        collected = Collected()
        try:
            async with (
                asyncio.timeout(SECONDS),
                self._pool.stream(
                    request.method,
                    self._locate(request),
                    headers=self._write_headers(request),
                    content=request.body if tells_length(request) else None,
                ) as response,
            ):
                collected.start(response.status, response.headers)
                async for chunk in response.aiter_stream():
                    collected.add(chunk)
        except TimeoutError:
            raise Unserved(f"The upstream has not answered within {SECONDS:g} seconds.") from None
        except httpcore.LocalProtocolError as error:
            raise Unserved(f"The request cannot be sent as it came: {error}.") from error
        except _LOST as error:
            raise Unserved(f"The upstream cannot be reached: {str(error) or type(error).__name__}.") from error
        return Served(collected.conclude())

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.aclose()

    def _locate(self, request: Deferred) -> httpcore.URL:
        target = quote(request.target.encode("latin-1"), safe=_VISIBLE).encode()
        url = self._url
        return httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=self._path + target)

    def _write_headers(self, request: Deferred) -> list[tuple[bytes, bytes]]:
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers]
        if any(name == b"host" for name, _ in headers):
            return headers
        return [(b"host", self._url.netloc), *headers]  # HTTP/1.0 knows of none, and HTTP/1.1 wants one


def _parse(text: str) -> httpx.URL:
    """The URL of a server. Raises SettingsError: a user of its own would take the place of each client's."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise SettingsError(
            "UPSTREAM", "The upstream is a URL such as http://127.0.0.1:8080, of http or https, without user or query."
        )
    return url
