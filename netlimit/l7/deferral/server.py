"""Replays deferred requests to a server. By itself, since httpx takes long to import and few need it here."""

from __future__ import annotations

import asyncio

import httpx

from netlimit.l7.deferral.request import Deferred
from netlimit.l7.deferral.upstream import SECONDS, Collected, Served, Unserved


class HttpUpstream:
    """A server at a URL; the path of a request is appended, and its Host is kept."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._client = httpx.AsyncClient(timeout=SECONDS, trust_env=False)

    async def send(self, request: Deferred) -> Served:
        """Have a request served. Raises Unserved."""
        collected = Collected()
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers]
        try:
            async with (
                asyncio.timeout(SECONDS),
                self._client.stream(
                    request.method, self._url + request.target, headers=headers, content=request.body
                ) as response,
            ):
                collected.start(response.status_code, list(response.headers.raw))
                async for chunk in response.aiter_raw():
                    collected.add(chunk)
        except TimeoutError:
            raise Unserved(f"The upstream has not answered within {SECONDS:g} seconds.") from None
        except httpx.HTTPError as error:
            raise Unserved(f"The upstream cannot be reached: {error or type(error).__name__}.") from error
        return Served(collected.conclude())

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
