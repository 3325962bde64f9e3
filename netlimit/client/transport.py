"""The transports: they carry out, with threads or with tasks, what a course says is next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager
from threading import Lock
from typing import Any
from weakref import finalize

import httpx
from anyio.from_thread import start_blocking_portal

from netlimit.client.budget import Budgets, Charge, Ledger
from netlimit.client.course import Conduct, Count, Drop, Enter, Leave, Line, Outcome, Send, Step, Wait
from netlimit.client.retry import Retry
from netlimit.l7.decision import Decision
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.store import Ask, Store


def goes_out(event: str, info: Mapping[str, Any]) -> bool:
    """Whether a request that has its connection is about to go out on it; not the CONNECT to a proxy. In HTTP/2 it
    must not be held up there: its stream has a number already, which another would take as well."""
    return event == "http11.send_request_headers.started" and info["request"].method != b"CONNECT"


@contextmanager
def tracing(request: httpx.Request, trace: Callable[..., object] | None) -> Iterator[None]:
    """Have `trace` told how a request is sent; None tells nobody."""
    former = request.extensions
    if trace is not None:
        request.extensions = {**former, "trace": trace}
    try:
        yield
    finally:
        request.extensions = former


class AsyncTransport(httpx.AsyncBaseTransport):
    """Sends by another transport (default: `httpx.AsyncHTTPTransport()`), when servers and budgets permit it.

    It waits while a server says that nothing remains, sends again what was refused or lost, as `retry` says, and keeps
    to `budgets`. These are counted in `store`: in memory by default, in Redis for all processes that share it. The
    transport closes both. For the tasks of one event loop.

    A request may fail with `BudgetExhausted` or `QuotaExhausted`, which were not sent, and with CountersUnavailable
    when the store cannot be asked: nothing is spent that nobody counts. Raises LimitError for budgets that mean
    nothing.

    `clock` (seconds, steady) and `sleep` stand for the time in tests.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        budgets: Budgets | None = None,
        retry: Retry = Retry(),  # noqa: B008, it never changes
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._conduct = Conduct(Ledger(budgets or {}), retry, clock)
        self._transport = transport or httpx.AsyncHTTPTransport()
        self._store = store or MemoryStore()
        self._sleep = sleep
        self._lines: dict[Line, asyncio.Lock] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request when its turn has come, and again if need be; the answer."""
        outcome: Outcome = None
        async with AsyncExitStack() as standing:
            with closing(self._conduct.pursue(request)) as course:
                while not isinstance(step := course.send(outcome), httpx.Response):
                    outcome = await self._carry_out(step, request, standing)
                return step

    async def _carry_out(self, step: Step, request: httpx.Request, standing: AsyncExitStack) -> Outcome:
        match step:
            case Wait(seconds):
                await self._sleep(seconds)
            case Enter(line):
                await standing.enter_async_context(self._lines.setdefault(line, asyncio.Lock()))
            case Leave():
                await standing.aclose()
            case Count(ask):
                return (await self._store.decide([ask]))[0]
            case Send(charges):
                return await self._send(request, charges)
            case Drop(response):
                await response.aclose()
        return None

    async def _send(self, request: httpx.Request, charges: tuple[Charge, ...]) -> Outcome:
        others = request.extensions.get("trace")

        async def trace(event: str, info: Mapping[str, Any]) -> None:
            if goes_out(event, info):
                while wait := self._conduct.go_out(charges):
                    await self._sleep(wait)
            if others is not None:
                await others(event, info)

        with tracing(request, trace if charges else others):
            try:
                return await self._transport.handle_async_request(request)
            except httpx.TransportError as error:
                return error

    async def aclose(self) -> None:
        """Let go of connections and counters."""
        await self._transport.aclose()
        await self._store.aclose()


class Transport(httpx.BaseTransport):
    """The same for programs with threads; the default is `httpx.HTTPTransport()`.

    A store that needs an event loop, as that of Redis does, gets one in a thread of its own.
    """

    def __init__(
        self,
        transport: httpx.BaseTransport | None = None,
        *,
        budgets: Budgets | None = None,
        retry: Retry = Retry(),  # noqa: B008, it never changes
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._conduct = Conduct(Ledger(budgets or {}), retry, clock)
        self._transport = transport or httpx.HTTPTransport()
        self._open = ExitStack()
        self._close = finalize(self, self._open.close)  # else a loop's thread would keep the program from its end
        self._decide = self._reach(store or MemoryStore())
        self._sleep = sleep
        self._lines: dict[Line, Lock] = {}

    def _reach(self, store: Store) -> Callable[[list[Ask]], list[Decision]]:
        if isinstance(store, MemoryStore):
            return store.decide_now
        portal = self._open.enter_context(start_blocking_portal())
        self._open.callback(portal.call, store.aclose)
        return lambda asks: portal.call(store.decide, asks)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request when its turn has come, and again if need be; the answer."""
        outcome: Outcome = None
        with ExitStack() as standing, closing(self._conduct.pursue(request)) as course:
            while not isinstance(step := course.send(outcome), httpx.Response):
                outcome = self._carry_out(step, request, standing)
            return step

    def _carry_out(self, step: Step, request: httpx.Request, standing: ExitStack) -> Outcome:
        match step:
            case Wait(seconds):
                self._sleep(seconds)
            case Enter(line):
                standing.enter_context(self._lines.setdefault(line, Lock()))
            case Leave():
                standing.close()
            case Count(ask):
                return self._decide([ask])[0]
            case Send(charges):
                return self._send(request, charges)
            case Drop(response):
                response.close()
        return None

    def _send(self, request: httpx.Request, charges: tuple[Charge, ...]) -> Outcome:
        others = request.extensions.get("trace")

        def trace(event: str, info: Mapping[str, Any]) -> None:
            if goes_out(event, info):
                while wait := self._conduct.go_out(charges):
                    self._sleep(wait)
            if others is not None:
                others(event, info)

        with tracing(request, trace if charges else others):
            try:
                return self._transport.handle_request(request)
            except httpx.TransportError as error:
                return error

    def close(self) -> None:
        """Let go of connections and counters."""
        self._transport.close()
        self._close()
