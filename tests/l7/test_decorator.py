"""Limits on calls, of coroutines and of plain functions in threads."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from math import inf
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from netlimit.errors import LimitError
from netlimit.l7.counters import open_counters
from netlimit.l7.decorator import RateLimited, answer_limited, rate_limit
from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import Rule
from netlimit.l7.threads import MOST
from tests.l7.leaping import leaping_clock, now, run
from tests.l7.redis.driving import PATIENT
from tests.l7.redis.servers import Server

SLOW = Limit(1, 1, Algorithm.GCRA)


class Hurry(Exception):
    """As of a time-out for a task."""


@contextmanager
def interrupted_in(seconds: float) -> Iterator[None]:
    """A signal comes, whose handler raises Hurry."""

    def raise_hurry(*_: Any) -> None:
        raise Hurry

    before = signal.signal(signal.SIGUSR1, raise_hurry)
    alarm = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()
        signal.signal(signal.SIGUSR1, before)


class TestCoroutines:
    def test_so_many_calls_and_no_more(self) -> None:
        async def main() -> None:
            @rate_limit("2/minute", counters=MemoryStore(leaping_clock()))
            async def call(number: int) -> int:
                return number

            assert [await call(1), await call(number=2)] == [1, 2]
            await asyncio.sleep(18)
            with pytest.raises(
                RateLimited, match=r"TestCoroutines.*call\" of 2/minute is reached; come again in 42"
            ) as info:
                await call(3)
            await asyncio.sleep(info.value.retry_after)
            assert await call(4) == 4

        run(main())

    def test_calls_wait_for_their_turn_if_they_are_to(self) -> None:
        async def main() -> None:
            @rate_limit(SLOW, wait=2.5, counters=MemoryStore(leaping_clock()))
            async def call(number: int) -> tuple[int, int]:
                return number, round(now())

            results = await asyncio.gather(*map(call, range(4)), return_exceptions=True)
            assert results[:3] == [(0, 0), (1, 1), (2, 2)]
            assert isinstance(results[3], RateLimited)
            assert results[3].retry_after == pytest.approx(3, abs=0.01)

        run(main())

    def test_calls_in_flight_even_if_they_fail(self) -> None:
        async def main() -> None:
            rule = Rule("calls", "two", None, Limit(2, 10, Algorithm.CONCURRENCY))

            @rate_limit(rule, counters=MemoryStore(leaping_clock()))
            async def call() -> None:
                await asyncio.sleep(100)
                raise ValueError("a fault")

            first = [asyncio.create_task(call()) for _ in range(2)]
            await asyncio.sleep(50)  # longer than a lease lasts
            with pytest.raises(RateLimited):
                await call()
            assert [type(error) for error in await asyncio.gather(*first, return_exceptions=True)] == [ValueError] * 2
            with pytest.raises(ValueError, match="a fault"):
                await call()

        run(main())


class TestKeys:
    def test_the_key_is_made_of_the_arguments_that_it_names(self) -> None:
        @rate_limit("1/day", key=lambda user, page: f"{user}/{page}")
        def call(user: str, *, page: int = 1, other: object = None) -> None: ...

        call("ann")
        call(user="ann", page=2)
        call("bob", other=1)
        for again in (lambda: call("ann", page=1), lambda: call(user="ann", page=2, other=3)):
            with pytest.raises(RateLimited):
                again()

    def test_an_argument_that_there_is_not_is_refused_at_once(self) -> None:
        with pytest.raises(LimitError, match="`key` asks for 'who', which is no argument of"):

            @rate_limit("1/day", key=lambda who: who)
            def call(user: str) -> None: ...

    def test_functions_count_apart(self) -> None:
        store = MemoryStore()

        @rate_limit("1/day", counters=store)
        def one() -> None: ...

        @rate_limit("1/day", counters=store)
        def other() -> None: ...

        one()
        other()
        with pytest.raises(RateLimited):
            one()


def call_of_all(call: Callable[[], object]) -> tuple[int, int, float]:
    """How many of 40 threads pass that call at once, how many are refused, and within how many seconds."""
    refused: list[float] = []
    together = threading.Barrier(40)

    def try_once() -> bool:
        together.wait(60)
        began = time.monotonic()
        try:
            call()
        except RateLimited:
            refused.append(time.monotonic() - began)
            return False
        return True

    with ThreadPoolExecutor(40) as threads:
        passed = sum(threads.map(lambda _: try_once(), range(40)))
    return passed, len(refused), max(refused, default=0.0)


class TestThreads:
    def test_exactly_the_limit_of_many_threads_at_once(self) -> None:
        @rate_limit("100/day")
        def call() -> None: ...

        def try_often() -> int:
            admitted = 0
            for _ in range(50):
                try:
                    call()
                    admitted += 1
                except RateLimited:
                    pass
            return admitted

        with ThreadPoolExecutor(8) as threads:
            assert sum(threads.map(lambda _: try_often(), range(8))) == 100

    def test_threads_wait_for_their_turn(self) -> None:
        @rate_limit(Limit(100, 1, Algorithm.GCRA, burst=1), wait=60)
        def call() -> float:
            return time.monotonic()

        began = time.monotonic()
        with ThreadPoolExecutor(8) as threads:
            times = list(threads.map(lambda _: call(), range(16)))
        assert max(times) - began >= 0.15

    @pytest.mark.parametrize("algorithm", [Algorithm.GCRA, Algorithm.LEAKY_BUCKET])
    def test_no_more_of_them_wait_than_leave_others_to_other_functions(self, algorithm: Algorithm) -> None:
        """AnyIO has 40 for all `def` routes of an application."""

        @rate_limit(Limit(4, 1, algorithm, burst=40 if algorithm is Algorithm.LEAKY_BUCKET else 1), wait=30)
        def call() -> None: ...

        passed, refused, lasted = call_of_all(call)
        assert (passed, refused) == (MOST + 1, 40 - MOST - 1)
        assert lasted < 1.5, "who is refused is so at once"
        call()  # the places are free again

    def test_of_those_that_wait_some_are_for_other_callers(self) -> None:
        @rate_limit(Limit(2, 1, Algorithm.GCRA, burst=1), key=lambda caller: caller, wait=30)
        def call(caller: str) -> None: ...

        with ThreadPoolExecutor(1) as thread:
            crowd = thread.submit(call_of_all, lambda: call("one"))
            time.sleep(0.3)
            call("other")
            call("other")  # waits
            assert crowd.result()[:2] == (MOST // 2 + 1, 40 - MOST // 2 - 1)

    def test_generators_are_as_calls_there(self) -> None:
        @rate_limit(Limit(10, 1, Algorithm.GCRA, burst=1), wait=30)
        def count() -> Iterator[int]:
            yield 1

        assert call_of_all(lambda: next(count()))[0] == MOST + 1

    def test_a_call_for_which_there_is_room_needs_no_place(self) -> None:
        @rate_limit("100/day", wait=30)
        def call() -> None: ...

        assert call_of_all(call)[0] == 40

    def test_calls_in_flight(self) -> None:
        @rate_limit(Rule("calls", "one", None, Limit(1, 60, Algorithm.CONCURRENCY)))
        def call(begun: threading.Event, end: threading.Event) -> None:
            begun.set()
            end.wait(60)

        begun, end = threading.Event(), threading.Event()
        thread = threading.Thread(target=call, args=(begun, end))
        thread.start()
        assert begun.wait(60)
        with pytest.raises(RateLimited):
            call(begun, end)
        end.set()
        thread.join()
        call(begun, end)

    def test_a_call_that_a_signal_ends_while_it_waits_takes_no_place(self) -> None:
        @rate_limit(Rule("calls", "interrupted", None, Limit(1, 1, Algorithm.CONCURRENCY)), wait=5)
        def call(end: threading.Event) -> None:
            end.wait(60)

        end = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(call, end)
            with interrupted_in(0.3), pytest.raises(Hurry):
                call(end)
            end.set()
            first.result()
        time.sleep(1.5)  # longer than the lease of one that had begun
        call(end)

    def test_what_is_too_heavy_never_passes(self) -> None:
        @rate_limit("1/day", hits=2)
        def call() -> None: ...

        with pytest.raises(RateLimited) as info:
            call()
        assert info.value.retry_after == inf


class TestGenerators:
    """They are calls as long as they run: from the first item to the end."""

    RULE = Rule("calls", "items", None, Limit(1, 60, Algorithm.CONCURRENCY))

    def test_one_holds_its_place_until_it_has_ended(self) -> None:
        @rate_limit(self.RULE)
        def count(most: int) -> Generator[int, str, str]:
            for number in range(most):
                assert (yield number) in (None, "on")
            return "done"

        first = count(2)
        assert (next(first), first.send("on")) == (0, 1)
        with pytest.raises(RateLimited):
            next(count(2))
        with pytest.raises(StopIteration, match="done"):
            next(first)
        assert list(count(3)) == [0, 1, 2]
        given_up = count(2)
        next(given_up)
        del given_up
        assert list(count(1)) == [0]

    def test_an_asynchronous_one_too(self) -> None:
        @rate_limit(self.RULE)
        async def count(most: int) -> AsyncGenerator[int, str]:
            for number in range(most):
                assert (yield number) in (None, "on")

        async def main() -> None:
            first = count(2)
            assert (await anext(first), await first.asend("on")) == (0, 1)
            with pytest.raises(RateLimited):
                await anext(count(2))
            with pytest.raises(StopAsyncIteration):
                await anext(first)
            assert [number async for number in count(3)] == [0, 1, 2]
            given_up = count(2)
            await anext(given_up)
            await given_up.aclose()
            assert [number async for number in count(1)] == [0]

        asyncio.run(main())

    def test_what_is_thrown_into_one_arrives(self) -> None:
        @contextmanager
        @rate_limit(self.RULE)
        def hold() -> Iterator[None]:
            with pytest.raises(Hurry):
                yield

        @asynccontextmanager
        @rate_limit(self.RULE)
        async def hold_too() -> AsyncIterator[None]:
            with pytest.raises(Hurry):
                yield

        @asynccontextmanager
        @rate_limit(self.RULE)
        async def fail() -> AsyncIterator[None]:
            yield

        async def main() -> None:
            for _ in range(2):
                async with hold_too():
                    raise Hurry
                with pytest.raises(Hurry):
                    async with fail():
                        raise Hurry

        for _ in range(2):
            with hold():
                raise Hurry
        asyncio.run(main())

    def test_a_rate_counts_them(self) -> None:
        @rate_limit("1/day")
        def count() -> Iterator[int]:
            yield 1

        assert list(count()) == [1]
        with pytest.raises(RateLimited):
            list(count())


def test_a_weight_that_is_none_is_an_error() -> None:
    with pytest.raises(LimitError, match="A call weighs -1; its weight is a whole number"):
        rate_limit("1/day", hits=-1)


def test_counters_in_redis_from_threads_and_from_a_loop(server: Server) -> None:
    rule = Rule("calls", "shared", Limit(10, 86_400))

    store = open_counters(server.url + PATIENT)

    @rate_limit(rule, counters=server.url + PATIENT)
    def call() -> None: ...

    @rate_limit(rule, counters=store)
    async def other() -> None: ...

    async def main() -> int:
        results = await asyncio.gather(*(other() for _ in range(8)), return_exceptions=True)
        await store.aclose()
        return results.count(None)

    for _ in range(6):
        call()
    assert asyncio.run(main()) == 4
    with pytest.raises(RateLimited):
        call()


def test_a_route_of_fastapi_answers_429() -> None:
    app = FastAPI()
    app.add_exception_handler(RateLimited, answer_limited)

    @app.get("/{user}")
    @rate_limit("1/day", key=lambda user: user)
    async def read(user: str, request: Request) -> str:
        return user

    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.get(path) for path in ("/ann", "/bob", "/ann")]

    answers = asyncio.run(main())
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].headers["content-type"] == "application/problem+json"
    assert 1 <= int(answers[2].headers["retry-after"]) <= 86_400
