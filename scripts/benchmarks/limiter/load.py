"""Clients that ask over and over, each as soon as it has its answer."""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import count
from time import perf_counter
from typing import NamedTuple, cast

import grpc
import uvloop

from netlimit.l7.service.protocol.descriptor_pb2 import RateLimitDescriptor
from netlimit.l7.service.protocol.service_pb2 import RateLimitRequest, RateLimitResponse
from netlimit.l7.service.rpc import SERVICE

CLIENTS = 32
USERS = 1000


class Question(NamedTuple):
    """A request over HTTP; `{user}` in it is another user each time."""

    head: str
    body: str = ""
    field: str = ""

    def write(self, user: int) -> bytes:
        """As it is sent."""
        body, field = (text.replace("{user}", f"user{user}") for text in (self.body, self.field))
        fields = ["Host: localhost", *([f"Content-Length: {len(body)}"] if body else []), *([field] if field else [])]
        return "\r\n".join([f"{self.head} HTTP/1.1", *fields, "", body]).encode()


_DECIDE = '{"domain":"bench","descriptors":[[{"key":"user","value":"{user}"}]]}'
_JSON = '{"domain":"bench","descriptors":[{"entries":[{"key":"user","value":"{user}"}]}]}'
QUESTIONS = {
    "POST /v1/decide": Question("POST /v1/decide", _DECIDE),
    "GET /v1/auth": Question("GET /v1/auth?domain=bench&key=header:user", field="User: {user}"),
    "POST /json": Question("POST /json", _JSON),
}
SLOW = "POST /json"
"""Envoy's messages as JSON, for people and tests."""
RPC = "ShouldRateLimit"


class Client(asyncio.Protocol):
    """Asks over one connection, and counts the answers, all of which must be good."""

    def __init__(self, questions: list[bytes], answers: list[int]) -> None:
        self._questions = questions
        self._answers = answers
        self._next = count()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        """Go on."""
        begun = data.count(b"HTTP/1.1 ")
        assert data.count(b"HTTP/1.1 200 ") == begun, data
        self._answers[0] += begun
        for _ in range(begun):
            self._ask()

    def _ask(self) -> None:
        self._transport.write(self._questions[next(self._next) % len(self._questions)])


async def ask_http(question: Question, place: str, seconds: float) -> tuple[int, float]:
    """Answers, and seconds."""
    host, _, port = place.rpartition(":")
    loop, answers = asyncio.get_running_loop(), [0]
    questions = [question.write(user) for user in range(USERS)]
    began = perf_counter()
    opened = [await loop.create_connection(lambda: Client(questions, answers), host, int(port)) for _ in range(CLIENTS)]
    await asyncio.sleep(seconds)
    taken = perf_counter() - began
    for transport, _ in opened:
        transport.abort()
    return answers[0], taken


async def ask_rpc(place: str, seconds: float) -> tuple[int, float]:
    """Answers, and seconds."""
    entries = [RateLimitDescriptor.Entry(key="user", value=f"user{user}") for user in range(USERS)]
    requests = [
        RateLimitRequest(domain="bench", descriptors=[RateLimitDescriptor(entries=[entry])]) for entry in entries
    ]
    async with grpc.aio.insecure_channel(place) as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/{RPC}", RateLimitRequest.SerializeToString, RateLimitResponse.FromString
        )
        began = perf_counter()

        async def ask() -> int:
            answers = 0
            while perf_counter() - began < seconds:
                await call(requests[answers % USERS])
                answers += 1
            return answers

        return sum(await asyncio.gather(*(ask() for _ in range(CLIENTS)))), perf_counter() - began


def main() -> None:
    """Ask what each line says, where, for so many seconds; print how many answers came, and in how many seconds."""
    for line in sys.stdin:
        what, place, seconds = json.loads(line)
        asking = ask_rpc(place, seconds) if what == RPC else ask_http(QUESTIONS[what], place, seconds)
        print(json.dumps(uvloop.run(asking)), flush=True)
