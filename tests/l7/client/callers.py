"""Programs with threads and programs with tasks, alike. (`verify=False`: no certificates are read for plain HTTP.)"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import httpx

from netlimit.client import AsyncTransport, Transport
from netlimit.l7.memory.store import MemoryStore
from tests.l7.client.script import Time


class Caller(Protocol):
    """A client whose time is the script's."""

    def __call__(self, method: str, url: str, **options: Any) -> httpx.Response: ...

    def close(self) -> None: ...


class ThreadCaller:
    def __init__(self, time: Time, **options: Any) -> None:
        options.setdefault("store", MemoryStore(time.counters))
        transport = Transport(httpx.HTTPTransport(verify=False), clock=time, sleep=time.sleep, **options)
        self.client = httpx.Client(transport=transport, trust_env=False, timeout=60)

    def __call__(self, method: str, url: str, **options: Any) -> httpx.Response:
        return self.client.request(method, url, **options)

    def close(self) -> None:
        self.client.close()


class TaskCaller:
    def __init__(self, time: Time, **options: Any) -> None:
        options.setdefault("store", MemoryStore(time.counters))
        self.runner = asyncio.Runner()
        inner = httpx.AsyncHTTPTransport(verify=False)
        transport = AsyncTransport(inner, clock=time, sleep=time.sleep_async, **options)
        self.client = httpx.AsyncClient(transport=transport, trust_env=False, timeout=60)

    def __call__(self, method: str, url: str, **options: Any) -> httpx.Response:
        return self.runner.run(self.client.request(method, url, **options))

    def close(self) -> None:
        self.runner.run(self.client.aclose())
        self.runner.close()
