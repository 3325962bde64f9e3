"""What has its turn may wait for a connection still: what goes out keeps to the budget all the same."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpcore
import httpx
import pytest

from netlimit.client import AsyncTransport, Transport
from netlimit.client.transport import goes_out
from netlimit.l7.memory.store import MemoryStore
from tests.l7.client.script import Script

BUDGETS = {"*": "3/minute"}
ONE = httpx.Limits(max_connections=1)
SENT = [0.0, 60.0, 60.0, 60.0, 120.0, 120.0, 120.0]
"""The first has the connection until the others have had their turns, the last at 120."""


def is_crowded(inner: Any) -> bool:
    """Whether all others wait for the connection."""
    return len(inner._pool._requests) == len(SENT)


def never_more(sent: list[float]) -> bool:
    return all(later - earlier >= 60 for earlier, later in zip(sent, sent[3:], strict=False))


@pytest.mark.parametrize(
    ("event", "method", "goes"),
    [
        ("http11.send_request_headers.started", b"GET", True),
        ("http11.send_request_headers.started", b"CONNECT", False),
        ("http11.send_request_headers.complete", b"GET", False),
        ("http2.send_request_headers.started", b"GET", False),
        ("connection.connect_tcp.started", b"GET", False),
    ],
)
def test_when_a_request_goes_out(event: str, method: bytes, goes: bool) -> None:
    info = {"request": httpcore.Request(method, "https://api.example.com/")}
    assert goes_out(event, info) == goes


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_tasks_that_waited_for_a_connection_do_not_go_at_once(script: Script) -> None:
    inner = httpx.AsyncHTTPTransport(verify=False, limits=ONE)
    store = MemoryStore(script.time.counters)
    transport = AsyncTransport(inner, budgets=BUDGETS, store=store, clock=script.time, sleep=script.time.sleep_async)
    seen = list[str]()

    async def trace(name: str, info: Any) -> None:
        seen.append(name)

    async with httpx.AsyncClient(transport=transport, trust_env=False, timeout=60) as client, asyncio.timeout(60):
        async with client.stream("GET", script.url, extensions={"trace": trace}):
            others = [asyncio.create_task(client.get(script.url)) for _ in SENT[1:]]
            while not is_crowded(inner):
                await asyncio.sleep(0.001)
        await asyncio.gather(*others)
    assert never_more(script.times), script.times
    assert len(script.times) == len(SENT)
    assert "http11.send_request_headers.started" in seen  # whoever else listens


def test_threads_that_waited_for_a_connection_do_not_go_at_once(script: Script) -> None:
    inner = httpx.HTTPTransport(verify=False, limits=ONE)
    store = MemoryStore(script.time.counters)
    transport = Transport(inner, budgets=BUDGETS, store=store, clock=script.time, sleep=script.time.sleep)
    seen = list[str]()
    deadline = time.monotonic() + 60
    with (
        httpx.Client(transport=transport, trust_env=False, timeout=60) as client,
        ThreadPoolExecutor(len(SENT)) as threads,
    ):
        with client.stream("GET", script.url, extensions={"trace": lambda name, info: seen.append(name)}):
            others = [threads.submit(client.get, script.url) for _ in SENT[1:]]
            while not is_crowded(inner):
                assert time.monotonic() < deadline
                time.sleep(0.001)
        for other in others:
            assert other.result(60).status_code == 200
    assert never_more(script.times), script.times
    assert len(script.times) == len(SENT)
    assert "http11.send_request_headers.started" in seen  # whoever else listens
