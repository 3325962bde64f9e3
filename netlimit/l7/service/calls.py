"""Calls over gRPC that keep a place and ask nothing: how long each may, and how many there may be."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from netlimit.resident import read_resident

MOST = 4096
"""Calls that may be open and have not asked, and as many that watch how the limiter is; each takes 20 KB."""
SECONDS = 10.0
"""A question has come so long after its call."""
FEW = 64
"""So many calls may have a long question on its way, ..."""
GROWTH = 256 * 2**20
"""... and more of them as long as the process grows by no more bytes than that. gRPC holds what has come of a question,
and tells nobody how much that is."""
_LOOK_SECONDS, _CALM = 0.1, 100
"""How often that is looked at, and after how many looks without many of them the process is as large as usual."""

_Timeouts = dict[asyncio.Timeout, None]
_Context = grpc.aio.ServicerContext[Any, Any]


class Calls(grpc.aio.ServerInterceptor):
    """Has those calls end that do not ask in time, and where there are too many, those that have been open for longest.

    gRPC itself waits for a question for ever, and takes a call that has begun for one that is busy. So handlers are
    told of calls when they begin, as if many questions might come by them, and read the one. For one event loop.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._silent = _Timeouts()
        self._watching = _Timeouts()

    async def watch(self) -> None:
        """Have those end that take too much memory together, the oldest first, until cancelled."""
        before, usual, calm = set[asyncio.Timeout](), read_resident(), 0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            slow = [each for each in self._silent if each in before]
            before = set(self._silent)
            memory = read_resident()
            calm = calm + 1 if len(slow) <= FEW else 0
            if calm > _CALM:
                usual = memory
            elif not calm and memory - usual > GROWTH:
                for each in slow[:-FEW]:
                    self._end(self._silent, each)
                await asyncio.to_thread(_give_back)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The handler of a call; None for a method that there is not."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        functions = (handler.request_deserializer, handler.response_serializer)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._watch(handler.unary_stream), *functions)
        return grpc.stream_unary_rpc_method_handler(self._answer(handler.unary_unary), *functions)

    def _answer(self, answer: Callable[[Any, _Context], Awaitable[Any]]) -> Any:
        async def receive_and_answer(questions: AsyncIterator[Any], context: _Context) -> Any:
            return await answer(await self._receive(questions, context), context)

        return receive_and_answer

    def _watch(self, watch: Callable[[Any, _Context], Awaitable[None]]) -> Any:
        async def receive_and_watch(questions: AsyncIterator[Any], context: _Context) -> None:
            question = await self._receive(questions, context)
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as timeout:
                    with self._noting(self._watching, timeout):
                        await watch(question, context)
                        return
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Too many watch how the limiter is.")

        return receive_and_watch

    async def _receive(self, questions: AsyncIterator[Any], context: _Context) -> Any:
        with suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(SECONDS) as timeout:
                with self._noting(self._silent, timeout):
                    return await anext(questions)
        return await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "No question has come in time.")

    @contextmanager
    def _noting(self, open_ones: _Timeouts, timeout: asyncio.Timeout) -> Iterator[None]:
        open_ones[timeout] = None
        if len(open_ones) > self._most:
            self._end(open_ones, next(iter(open_ones)))
        try:
            yield
        finally:
            open_ones.pop(timeout, None)

    @staticmethod
    def _end(open_ones: _Timeouts, one: asyncio.Timeout) -> None:
        del open_ones[one]
        one.reschedule(0)  # at once


def _give_back() -> None:
    """Give the kernel back what nobody uses any more: what ended would count as growth else."""
    with suppress(AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)
