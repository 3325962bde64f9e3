"""The limiter's two servers on real sockets, in a thread, with a clock that stands until a test moves it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import grpc
import httpx
import uvloop

from netlimit.l7.addresses import AddressRules
from netlimit.l7.document import parse_document
from netlimit.l7.gate import Gate
from netlimit.l7.headers import USUAL
from netlimit.l7.identity import UNIX
from netlimit.l7.limiter import Limiter
from netlimit.l7.memory.counter import Clock
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import RuleSet
from netlimit.l7.service.application import Service
from netlimit.l7.service.auth import LOOPBACK
from netlimit.l7.service.protocol.descriptor_pb2 import RateLimitDescriptor
from netlimit.l7.service.protocol.service_pb2 import RateLimitRequest, RateLimitResponse
from netlimit.l7.service.rpc import SERVICE, RpcServer
from netlimit.l7.service.server import HttpServer
from tests.l7.counting import SECOND, moment
from tests.places import open_client

_clients = count(1)
Response = RateLimitResponse


class Served:
    """A running limiter, and clients of it."""

    def __init__(self, text: str, running: bool, directory: Path | None) -> None:
        self.now = moment("10:00:00")
        document = parse_document(text)
        self.rules = RuleSet({document.domain: document.root})
        self.addresses = AddressRules()
        store = MemoryStore(Clock(self._read, 0))
        self.limiter = Limiter(lambda: self.rules, store, gate=Gate(lambda: self.addresses, store))
        proxies = LOOPBACK if directory is None else (*LOOPBACK, UNIX)
        self.service = Service(self.limiter, lambda: self.rules, proxies=proxies)
        self._directory = directory
        self.place = self.grpc_place = ""
        self._ending = asyncio.Event()
        self._started = threading.Event()
        self._runs = running

    def _read(self) -> int:
        return self.now + (time.monotonic_ns() if self._runs else 0)

    def pass_time(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)

    def begin_minute(self) -> None:
        self.now += -self._read() % (60 * SECOND)

    def run(self) -> None:
        uvloop.run(self._run())  # as the limiter runs

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        rpc = RpcServer(self.limiter, USUAL, self.service.answers, self.service.askers)
        http = HttpServer(self.service)
        if self._directory is None:
            self.grpc_place = f"127.0.0.1:{await rpc.start('127.0.0.1:0')}"
            listening = socket.create_server(("127.0.0.1", 0))
            self.place = f"127.0.0.1:{listening.getsockname()[1]}"
        else:
            self.place, self.grpc_place = (f"unix:{self._directory}/{each}.sock" for each in ("http", "grpc"))
            await rpc.start(self.grpc_place)
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(self.place.removeprefix("unix:"))
            listening.listen()
        with listening:
            running = asyncio.create_task(http.serve([listening]))
            self._started.set()
            await self._ending.wait()
            http.should_exit = True
            await asyncio.gather(running, rpc.stop(1))

    def block(self, until: threading.Event) -> None:
        """Have the event loop do nothing else meanwhile."""
        self._loop.call_soon_threadsafe(until.wait)

    def wait(self) -> None:
        assert self._started.wait(30)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)

    def connect(self) -> httpx.Client:
        return open_client(self.place, 30)


class Asker:
    """Asks as Envoy does."""

    def __init__(self, place: str) -> None:
        self._channel = grpc.insecure_channel(place)
        self._ask = self._channel.unary_unary(
            f"/{SERVICE}/ShouldRateLimit", RateLimitRequest.SerializeToString, RateLimitResponse.FromString
        )

    def ask(
        self, *descriptors: RateLimitDescriptor, domain: str = "web", hits: int = 0, wait: float = 0
    ) -> RateLimitResponse:
        """Ask, once there is a connection: `wait` seconds later at most."""
        request = RateLimitRequest(domain=domain, descriptors=descriptors, hits_addend=hits)
        response: RateLimitResponse = self._ask(request, timeout=wait or 30, wait_for_ready=bool(wait))
        return response

    def ask_bytes(self, question: bytes) -> RateLimitResponse:
        """Ask what need be no message that this library could write."""
        answer = self._channel.unary_unary(f"/{SERVICE}/ShouldRateLimit")(question, timeout=30)
        return RateLimitResponse.FromString(answer)

    def close(self) -> None:
        self._channel.close()


def describe(**entries: str) -> RateLimitDescriptor:
    """A descriptor of these entries, in order."""
    return RateLimitDescriptor(
        entries=[RateLimitDescriptor.Entry(key=key, value=value) for key, value in entries.items()]
    )


def someone() -> str:
    """A client whom nobody has met."""
    return f"client{next(_clients)}"


@contextmanager
def serving(text: str, running: bool = False, directory: Path | None = None) -> Iterator[Served]:
    """The limiter with the rules of a document; its clock stands unless it is running. It listens at Unix sockets where
    it has a directory for them."""
    served = Served(text, running, directory)
    thread = threading.Thread(target=served.run)
    thread.start()
    served.wait()
    try:
        yield served
    finally:
        served.end()
        thread.join()
