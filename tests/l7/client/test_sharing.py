"""Threads, tasks and processes that share a client, or a budget; and tasks that are cancelled."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from netlimit.client import AsyncTransport, BudgetExhausted, Retry, Transport
from netlimit.errors import CountersUnavailable
from netlimit.l7.memory.counter import Clock
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.redis.opening import open_store
from netlimit.l7.redis.url import read_url
from tests.l7.client.script import Answer, Script
from tests.l7.redis.driving import PATIENT
from tests.l7.redis.servers import Server

FASTER = 20
"""Time goes so much faster than it really does."""


def read_fast_clock() -> float:
    return time.monotonic() * FASTER


def sleep(seconds: float) -> None:
    time.sleep(seconds / FASTER)


async def sleep_async(seconds: float) -> None:
    await asyncio.sleep(seconds / FASTER)


def fast_store() -> MemoryStore:
    return MemoryStore(Clock(lambda: time.monotonic_ns() * FASTER, 0))


class StandingTime:
    """Seconds that pass when a test says so."""

    now = 1000

    async def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            await asyncio.sleep(0.01)


class Recorder(httpx.AsyncHTTPTransport):
    """Sends, and remembers in which order."""

    def __init__(self) -> None:
        super().__init__(verify=False)
        self.sent: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(request.url.path)
        return await super().handle_async_request(request)


def open_async(inner: httpx.AsyncBaseTransport | None = None, **options: Any) -> httpx.AsyncClient:
    options = {"store": fast_store(), "clock": read_fast_clock, "sleep": sleep_async, **options}
    return httpx.AsyncClient(transport=AsyncTransport(inner or Recorder(), **options), trust_env=False, timeout=60)


def test_many_tasks_get_their_turns_in_order(script: Script) -> None:
    async def run() -> list[httpx.Response]:
        async with open_async(recorder, budgets={"*": "8/second"}) as client:
            return await asyncio.gather(*(client.get(f"{script.url}/{number}") for number in range(40)))

    recorder = Recorder()
    began = read_fast_clock()
    assert [answer.status_code for answer in asyncio.run(run())] == [200] * 40
    assert read_fast_clock() - began >= 4
    assert recorder.sent == [f"/{number}" for number in range(40)]


def test_many_threads_get_their_turns(script: Script) -> None:
    options: dict[str, Any] = {"store": fast_store(), "clock": read_fast_clock, "sleep": sleep}
    transport = Transport(httpx.HTTPTransport(verify=False), budgets={"*": "8/second"}, **options)
    began = read_fast_clock()
    with httpx.Client(transport=transport, trust_env=False, timeout=60) as client, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda number: client.get(f"{script.url}/{number}"), range(40)))
    assert [answer.status_code for answer in answers] == [200] * 40
    assert sorted(int(heard.path[1:]) for heard in script.heard) == list(range(40))
    assert read_fast_clock() - began >= 4


def test_who_stands_too_far_behind_is_told(script: Script) -> None:
    async def run() -> list[httpx.Response | BaseException]:
        async with open_async(budgets={"*": "1/day"}, retry=Retry(patience=1)) as client:
            return await asyncio.gather(*(client.get(script.url) for _ in range(5)), return_exceptions=True)

    ended = asyncio.run(run())
    assert [type(each) for each in ended] == [httpx.Response] + [BudgetExhausted] * 4


def test_who_is_cancelled_in_line_keeps_nobody_up(script: Script) -> None:
    async def run() -> list[httpx.Response | BaseException]:
        time = StandingTime()
        store = MemoryStore(Clock(lambda: time.now * 10**9, 0))
        options = {"store": store, "clock": lambda: time.now, "sleep": time.sleep}
        async with open_async(budgets={"*": "2/10 seconds"}, **options) as client:
            tasks = [asyncio.create_task(client.get(f"{script.url}/{number}")) for number in range(6)]
            while not script.heard:
                await asyncio.sleep(0)
            for number in (2, 3, 4):  # at the head of the line, asleep; and two behind it
                tasks[number].cancel()
            time.now += 10
            return await asyncio.gather(*tasks, return_exceptions=True)

    ended = asyncio.run(run())
    cancelled = asyncio.CancelledError
    assert [type(each) for each in ended] == [*[httpx.Response] * 2, *[cancelled] * 3, httpx.Response]
    assert sorted(heard.path for heard in script.heard) == ["/0", "/1", "/5"]


def test_who_is_cancelled_while_the_server_dallies_leaves_the_client_usable(script: Script) -> None:
    async def run() -> None:
        async with open_async(budgets={"*": "9/second"}) as client:
            script.play(Answer(drips=True))
            task = asyncio.create_task(client.get(script.url))
            while not script.heard:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.get(script.url)).status_code == 200

    asyncio.run(run())


def test_answers_are_streamed(script: Script) -> None:
    async def run() -> None:
        script.play(Answer(drips=True))
        async with open_async() as client, client.stream("GET", script.url) as response:
            assert set(await anext(response.aiter_raw())) == set(b"."), "a part of what never ends"

    asyncio.run(run())


def test_processes_share_a_budget_in_redis(script: Script, redis: Server) -> None:
    program = f"""
import httpx
from netlimit.client import BudgetExhausted, Retry, Transport
from netlimit.l7.redis.opening import open_store
from netlimit.l7.redis.url import read_url

store = open_store(read_url({redis.url + PATIENT!r}))
client = httpx.Client(transport=Transport(budgets={{"*": "7/day"}}, store=store, retry=Retry(patience=5)), timeout=60)
sent = 0
for number in range(5):
    try:
        client.get({script.url!r})
        sent += 1
    except BudgetExhausted:
        pass
print(sent)
"""  # and ends without closing anything
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        told = [int(process.communicate(timeout=120)[0]) for process in running]
    finally:
        for process in running:
            process.kill()
    assert sum(told) == len(script.heard) == 7


def test_tasks_and_threads_share_a_budget_in_redis(script: Script, redis: Server) -> None:
    async def run() -> None:
        async with open_async(budgets={"*": "3/hour"}, store=open_store(read_url(redis.url + PATIENT))) as client:
            for _ in range(3):
                await client.get(script.url)

    asyncio.run(run())
    with httpx.Client(
        transport=Transport(budgets={"*": "3/hour"}, store=open_store(read_url(redis.url + PATIENT)))
    ) as client:
        with pytest.raises(BudgetExhausted):
            client.get(script.url)
        with pytest.raises(BudgetExhausted):
            client.get(script.url)
    assert len(script.heard) == 3


def test_nothing_is_spent_that_nobody_counts(script: Script) -> None:
    store = open_store(read_url("redis://127.0.0.1:1"))
    client = httpx.Client(transport=Transport(budgets={"*": "3/hour"}, store=store))
    with client, pytest.raises(CountersUnavailable):
        client.get(script.url)
    assert not script.heard
