"""A Redis that answers without end, or announces more than anybody has room for, is one that is away."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, repeat

import pytest

from netlimit.l7.breaker import State
from netlimit.l7.deferral.backlog import BacklogUnavailable
from netlimit.l7.deferral.redis import RedisBacklog
from netlimit.l7.limit import Limit
from netlimit.l7.redis.bounds import Bound, TooMuch
from netlimit.l7.redis.policy import find_eviction
from netlimit.l7.redis.url import read_url
from tests.l7.redis.driving import guarded, hit, make_rule

FLOOD = 64 * 2**20
"""Bytes that are sent at most."""
SAID = {
    "an array": b"*2147483647\r\n",
    "arrays in an array": b"*4\r\n" + b"*16000\r\n" * 100_000,
    "a map": b"%1073741823\r\n",
    "a text": b"$2147483647\r\n",
    "a depth": b"*1\r\n" * 2_000_000,
    "numbers": b":1\r\n" * 1_000_000,
    "a number": b":" + b"1" * 1_000_000,
    "a large number": b"(" + b"1" * 1_000_000,
    "a line": b"+" + b"x" * 1_000_000,
}
ENDLESS = ("a text", "numbers", "a number", "a line")

WHY = ("more than", "more answers than questions", "Max nesting depth exceeded")


class Hostile:
    """A server on loopback that says +OK `civil` times on each connection, and then the same for ever, or as often as
    it may."""

    def __init__(self, said: bytes, civil: int, endless: bool) -> None:
        self._said, self._civil, self._endless = said, civil, endless
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._connection = self._listening
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                self._connection, _ = self._listening.accept()
                with suppress(OSError), self._connection:
                    self._answer(self._connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        left, asked = self._civil, connection.recv(65536).count(b"CLIENT")
        while left and asked:  # redis-py tells who it is
            connection.sendall(b"+OK\r\n" * min(left, asked))
            left -= min(left, asked)
            asked = asked if self._civil == 1 else connection.recv(65536).count(b"CLIENT")
        sent = 0
        for chunk in chain([self._said], repeat(b"x" * 65536 if self._said[:1] == b"$" else self._said)):
            connection.sendall(chunk)
            sent += len(chunk)
            if not self._endless or sent > FLOOD:
                break
        while connection.recv(65536):
            pass

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)


@contextmanager
def hostile(what: str, civil: int = 0) -> Iterator[Hostile]:
    server = Hostile(SAID[what], civil, what in ENDLESS)
    try:
        yield server
    finally:
        server.close()


class Pulse:
    """How long this event loop has stood still at most."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            self.longest = max(self.longest, time.monotonic() - before)

    async def stop(self) -> float:
        await asyncio.sleep(0.02)
        self._task.cancel()
        return self.longest


@pytest.mark.parametrize("civil", [0, 1, 2], ids=["at the login", "later in it", "to a question"])
@pytest.mark.parametrize("what", SAID)
def test_such_an_answer_to_the_limiter_is_none_and_holds_nobody_up(what: str, civil: int) -> None:
    rule = make_rule(Limit(3, 86_400))

    async def ask() -> None:
        with hostile(what, civil) as server:
            pulse = Pulse()
            async with guarded(f"redis://127.0.0.1:{server.port}?timeout_ms=3000&probe_ms=60000") as store:
                began = time.monotonic()
                assert [(await hit(store, rule)).admitted for _ in range(4)] == [True] * 3 + [False]
                assert store.state is State.OPEN
                assert store.decided_here == 4
                if civil == 2:
                    assert time.monotonic() - began < 2  # long before the time-out
                    assert any(why in store.troubles[0] for why in WHY)
            assert await pulse.stop() < 2

    asyncio.run(ask())


@pytest.mark.parametrize("what", SAID)
def test_nor_do_those_to_other_questions(what: str) -> None:
    async def ask() -> None:
        pulse = Pulse()
        with hostile(what, 2) as server:
            assert await find_eviction(read_url(f"redis://127.0.0.1:{server.port}")) is None
        with hostile(what, 2) as server:
            async with guarded(f"redis+cluster://127.0.0.1:{server.port}?timeout_ms=1000&probe_ms=60000") as store:
                assert (await hit(store, make_rule(Limit(3, 86_400)))).admitted
                assert store.state is State.OPEN
        assert await pulse.stop() < 2

    asyncio.run(ask())


@pytest.mark.parametrize("what", ["an array", "arrays in an array", "a depth", "a map"])
def test_nor_do_those_about_deferred_requests(what: str) -> None:
    async def ask() -> None:
        pulse = Pulse()
        with hostile(what, 2) as server:
            backlog = RedisBacklog(f"redis://127.0.0.1:{server.port}")
            with pytest.raises(BacklogUnavailable):
                await backlog.is_waiting("alice")
            await backlog.aclose()
        assert await pulse.stop() < 2

    asyncio.run(ask())


def test_what_nobody_asked_for_ends_the_connection() -> None:
    """Else the next answer would be taken for that to another question."""
    rule = make_rule(Limit(3, 86_400))

    async def ask() -> None:
        server = Hostile(b"*3\r\n:1\r\n:2\r\n:1000000\r\n*3\r\n:1\r\n:2\r\n:1000000\r\n", 2, False)
        async with guarded(f"redis://127.0.0.1:{server.port}?timeout_ms=3000&probe_ms=60000") as store:
            await hit(store, rule)
            assert store.state is State.OPEN
            assert "more answers than questions" in store.troubles[0]
        server.close()

    asyncio.run(ask())


def test_what_stays_within_the_bounds_passes_however_it_is_cut() -> None:
    answer = b"*2\r\n:1\r\n$5\r\n*99\r\n\r\n+OK\r\n-ERR *9\r\n*-1\r\n$-1\r\n*0\r\n$0\r\n\r\n"
    for size in range(1, len(answer) + 1):
        bound = Bound(len(answer), 2)
        for start in range(0, len(answer), size):
            bound.take(answer[start : start + size])
        with pytest.raises(TooMuch):
            bound.take(b"\r\n")
        bound.begin()
        bound.take(b"*2\r\n$1000")
        with pytest.raises(TooMuch):
            bound.take(b"\r\n")  # it announces more bytes than there may be
    with pytest.raises(TooMuch):
        Bound(100, 2).take(b"*2\r\n*1\r\n:1\r\n")
