"""Calls that take a place over gRPC and ask nothing: they end, and keep nobody else from an answer."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from netlimit.l7.service.calls import Calls
from netlimit.l7.service.rpc import SERVICE
from tests.l7.service.serving import Served

pytestmark = pytest.mark.anyio
METHOD = f"/{SERVICE}/ShouldRateLimit"
HEADERS, RST_STREAM, SETTINGS = 1, 3, 4
TOO_MUCH, MAX_CONCURRENT_STREAMS = 11, 3


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def echo(question: bytes, context: Any) -> bytes:
    return question


@asynccontextmanager
async def serving(most: int) -> AsyncIterator[grpc.aio.Channel]:
    calls = Calls(most)
    server = grpc.aio.server(interceptors=[calls])
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(SERVICE, {"ShouldRateLimit": grpc.unary_unary_rpc_method_handler(echo)})]
    )
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    watching = asyncio.create_task(calls.watch())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    watching.cancel()
    await server.stop(0)


async def test_a_call_that_asks_nothing_in_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.l7.service.calls.SECONDS", 0.2)
    async with serving(10) as channel:
        for method in (METHOD, "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"):
            call = channel.stream_unary(method)(timeout=30)
            assert (await call.code(), await call.details()) == (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "No question has come in time.",
            )
        assert await channel.unary_unary(METHOD)(b"asked") == b"asked"


async def test_one_without_a_question_ends_at_once() -> None:
    async with serving(10) as channel:
        call = channel.stream_unary(METHOD)(timeout=30)
        await call.done_writing()
        async with asyncio.timeout(5):
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_where_too_many_ask_nothing_the_oldest_go() -> None:
    async with serving(3) as channel:
        calls = []
        for _ in range(5):
            calls.append(channel.stream_unary(METHOD)(timeout=30))
            await asyncio.sleep(0.1)
        assert [call.done() for call in calls] == [True, True, False, False, False]
        assert await channel.unary_unary(METHOD)(b"asked") == b"asked"
        await calls[4].write(b"late")
        await calls[4].done_writing()
        assert await calls[4] == b"late"


async def test_where_the_process_grows_all_go_but_a_few_of_those_that_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.l7.service.calls.FEW", 2)
    monkeypatch.setattr("netlimit.l7.service.calls.GROWTH", 20 * 2**20)
    async with serving(10) as channel:
        calls = [channel.stream_unary(METHOD)(timeout=30) for _ in range(5)]
        await asyncio.sleep(1)
        assert not any(call.done() for call in calls)
        grown = bytes(range(256)) * (30 * 2**12)
        await asyncio.sleep(1)
        ended = [call for call in calls if call.done()]
        assert [await call.code() for call in ended] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 3
        assert len(grown) == 30 * 2**20


async def test_where_too_many_watch_the_oldest_go() -> None:
    async with serving(2) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = []
        for _ in range(3):
            watches.append(stub.Watch(health_pb2.HealthCheckRequest(), timeout=30))
            assert (await watches[-1].read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await watches[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [watch.done() for watch in watches] == [True, False, False]
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        for watch in watches:
            watch.cancel()


def test_calls_of_one_connection_are_bounded_whatever_it_heeds(served: Served) -> None:
    """As of one that opens them as fast as it can, and never acknowledges what it is told."""
    fields = ((":method", "POST"), (":scheme", "http"), (":path", METHOD), (":authority", "a"),
              ("content-type", "application/grpc"), ("te", "trailers"))  # fmt: skip
    head = b"".join(b"\0" + b"".join(bytes([len(part)]) + part.encode() for part in field) for field in fields)
    host, _, port = served.grpc_place.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=15) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, b"", 0))
        connection.sendall(b"".join(frame(HEADERS, 4, head, 2 * number + 1) for number in range(6000)))
        refused, told = 0, b""
        with connection.makefile("rb") as incoming:
            while refused < 100:
                length, kind = struct.unpack(">IB", b"\0" + incoming.read(9)[:4])
                payload = incoming.read(length)
                refused += kind == RST_STREAM and payload == struct.pack(">I", TOO_MUCH)
                told = told or (payload if kind == SETTINGS else b"")
    settings = dict(struct.iter_unpack(">HI", told))
    assert settings[MAX_CONCURRENT_STREAMS] == 4096


def frame(kind: int, flags: int, payload: bytes, stream: int) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload
