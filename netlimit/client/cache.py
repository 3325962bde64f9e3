"""What may be answered from a cache is not asked for: hishel (the extra `client`) in front of a transport."""

from __future__ import annotations

from hashlib import sha256

import httpx
from hishel import AsyncBaseStorage, BaseStorage, CacheOptions
from hishel.httpx import AsyncCacheTransport, CacheTransport

_PRIVATE = CacheOptions(shared=False)
_CREDENTIALS = ("authorization", "x-api-key", "cookie")


class AsyncCachingTransport(AsyncCacheTransport):
    """A private cache of one program (RFC 9111) in `storage`, which is one of hishel's.

    Put it in front of an AsyncTransport: what comes from the cache costs no budget, and waits for nobody. Answers are
    kept apart by credentials, so that no account is given another's. Closes the transport and the storage.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, storage: AsyncBaseStorage) -> None:
        super().__init__(transport, storage, rfc=_PRIVATE)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The answer, from the cache if it may be."""
        _set_key(request)
        return await super().handle_async_request(request)


class CachingTransport(CacheTransport):
    """The same for programs with threads, in front of a Transport."""

    def __init__(self, transport: httpx.BaseTransport, storage: BaseStorage) -> None:
        super().__init__(transport, storage, rfc=_PRIVATE)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """The answer, from the cache if it may be."""
        _set_key(request)
        return super().handle_request(request)


def _set_key(request: httpx.Request) -> None:
    """hishel's own key is the URL alone."""
    whose = [request.headers.get(name, "") for name in _CREDENTIALS]
    key = sha256(repr((str(request.url), whose)).encode()).hexdigest()
    request.extensions["caching"] = {"key": key, **request.extensions.get("caching", {})}
