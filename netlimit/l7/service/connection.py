"""Connections of the HTTP service: HTTP/1.1, read by httptools, without a framework and without a task too many.

What uvicorn's own protocol does besides (ASGI's messages, a timer for each answer, upgrades) takes longer than a
decision.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.server import ServerState

from netlimit.l7.listening import Receive
from netlimit.l7.service.answers import CLOSE, TEXT, Answer
from netlimit.l7.service.exchange import AGE, LEFT, Exchange, Scope, write_answer
from netlimit.l7.service.pace import Pace
from netlimit.l7.service.questions import LARGEST, REMEMBERED, SHORT
from netlimit.l7.service.room import BODY_SECONDS, HEAD_SECONDS, IDLE_SECONDS, TAKE_SECONDS, Room

HEAD_BYTES = LARGEST
"""The head of a request has so many bytes at most, as many as a body: proxies hand on all fields of a client's."""
_MOST_BYTES = 8 * LARGEST
"""What is read of one message at most, also of what nobody reads any more."""
_PIECE, _LINES, _SHORT = 4096, 64, 256
"""What comes is read in pieces of so many bytes that have so many lines, or else of so few: each line costs. So to read
a piece costs about what an answer does."""
_PLAIN = 512
"""A query of more bytes may name so many keys that its answer takes as long as thirty others: those come first."""
_END = b"\r\n\r\n"
"""The end of a head. The parser takes no other, so where a piece ends with the next one, few requests are in it."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_IDLE, _HEAD, _BODY = range(3)
_INFO_BYTES = 56
"""The beginning of `struct tcp_info`; its last four bytes are `tcpi_last_data_recv`."""

Respond = Callable[[Scope, Receive], Awaitable[Answer]]

log = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """A connection to a proxy or application. It answers one request after the other."""

    def __init__(
        self,
        config: object,
        server_state: ServerState,
        app_state: object,
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        respond: Respond,
        room: Room,
        pace: Pace,
    ) -> None:
        """As uvicorn makes one, but for what it is told beforehand: who answers, the room for all connections, and
        their pace."""
        self._respond = respond
        self._room = room
        self._pace = pace
        self._state = server_state
        self._loop = _loop or asyncio.get_event_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._peer: tuple[str, int] | None = None
        self._part = _IDLE
        self._since = room.now
        self._stalled: int | None = None
        self._came = 0.0
        self._drained: asyncio.Future[None] | None = None
        self._size = self._chunk = self._first = 0
        self._problem = Answer(400, [TEXT], b"Invalid HTTP request received.")
        self._current: Exchange | None = None
        self._last: Exchange | None = None
        self._pipeline: deque[Exchange] = deque()
        self._ending = self._paused = self._reading = False
        self._rest, self._at = b"", 0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects = False

    # -- what the room asks

    @property
    def began(self) -> int | None:
        """Since when something has been waited for that the other end is to do."""
        answering = self._current is not None and not self._current.more_body and self._stalled is None
        return None if answering else self._since

    @property
    def half_sent(self) -> bool:
        """Whether a part of a request has come."""
        return self._part != _IDLE

    def look(self, now: int) -> None:
        """Close if the time is over: for a head, for a body, for another request, for taking what has been sent."""
        past = now - self._since
        if self._transport.is_closing():
            if past > TAKE_SECONDS:
                self._transport.abort()
        elif self._stalled is not None and now - self._stalled > TAKE_SECONDS:
            self._transport.abort()
        elif self.began is None:
            return
        elif self._part == _IDLE:
            if past > IDLE_SECONDS and self._current is None:
                self._since = now
                self._transport.close()
        elif past >= (HEAD_SECONDS if self._part == _HEAD else BODY_SECONDS):
            self._transport.abort()

    def drop(self) -> None:
        """End it at once."""
        self._transport.abort()

    # -- what the event loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is none by its class
        peer = transport.get_extra_info("peername")
        self._peer = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else None
        self._state.connections.add(self)  # type: ignore[arg-type]  # uvicorn calls `shutdown` of it, and no more
        self._room.enter(self)

    def connection_lost(self, error: Exception | None) -> None:
        """End."""
        self._state.connections.discard(self)
        self._room.leave(self)
        self._pipeline.clear()
        self._rest = b""
        if self._current is not None:
            self._current.lose()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        """Read on: at once what is one piece, as questions are; else piece by piece."""
        if self._peer is None:
            self._came = self._room.find_arrival(time.monotonic())
        if self._rest or (len(data) > _SHORT and not _is_piece(data)):
            self._keep(data)
            return
        self._feed(data)
        if self._current is None and self._pipeline:
            self._begin()

    def pause_writing(self) -> None:
        """The other end takes nothing for now."""
        self._stalled = self._room.now

    def resume_writing(self) -> None:
        """The other end has taken something."""
        self._stalled = None
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def shutdown(self) -> None:
        """The server is about to end (uvicorn)."""
        self._ending = True
        if self._current is None and not self._pipeline:
            self._transport.close()

    # -- what the parser tells

    def on_message_begin(self) -> None:
        """A request begins."""
        self._part, self._since, self._size, self._first = _HEAD, self._room.now, 0, self._chunk
        self._url = b""
        self._headers = []
        self._expects = False

    def on_url(self, url: bytes) -> None:
        """A part of its target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of its head. Those that follow a body nobody reads."""
        if self._part == _HEAD:
            name = name.lower()
            self._headers.append((name, value))
            if name == b"expect" and value.lower() == b"100-continue":
                self._expects = True

    def on_headers_complete(self) -> None:
        """All of its head has come."""
        if self._first + self._size > HEAD_BYTES and self._measure_head() > HEAD_BYTES:
            self._problem = _too_large()
            raise ValueError("the head is too large")
        parser = self._parser
        path, query = _read_target_again(self._url) if len(self._url) <= SHORT else _read_target(self._url)
        version = parser.get_http_version()
        scope: dict[str, Any] = {
            "type": "http",
            "client": self._peer,
            "method": parser.get_method().decode("ascii"),
            "path": path,
            "query_string": query,
            "headers": self._headers,
            AGE: self._find_age,
            LEFT: self._has_left,
        }
        keeps = version != "1.0" and parser.should_keep_alive() and not parser.should_upgrade()
        self._part, self._since = _BODY, self._room.now
        self._last = Exchange(scope, keeps, self._go_on)
        self._pipeline.append(self._last)
        if self._current is not None:
            self._pause()

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        if self._last is not None and self._last.take(body):
            self._pause()

    def on_message_complete(self) -> None:
        """All of it has come."""
        self._part, self._since, self._expects = _IDLE, self._room.now, False
        if self._last is not None:
            self._last.end_body()

    # -- what has come

    def _keep(self, data: bytes) -> None:
        """Read it by the piece, when it is its turn; nothing more comes in before that has been read."""
        if self._part == _IDLE:
            self._since = self._room.now
        self._rest, self._at = self._rest[self._at :] + data, 0
        if not self._reading:
            self._reading = True
            self._pace.begin(Connection._read_on, self)
        if self._rest:
            self._pause()

    def _read_on(self) -> None:
        """Read a piece, and one more of a body, and begin to answer. What was sent ahead of an answer stays as
        it is until then: so it costs no more than it takes to hold it, whatever it is."""
        self._reading = False
        if self._transport.is_closing():
            return
        if self._rest and self._may_read():
            self._feed(self._cut())
            if self._part == _BODY and self._rest and self._may_read():
                self._feed(self._cut())
        if self._current is None and self._pipeline:
            self._current = self._pipeline.popleft()
            self._start(self._current)
        if self._may_read():
            self._resume()

    def _may_read(self) -> bool:
        """Whether more can be taken in: not while a whole request waits for its answer, or as much as is held."""
        current = self._current
        if self._pipeline or (current is not None and current.is_full):
            return False
        return current is None or current.more_body or not self._rest  # whether the other end goes is heard meanwhile

    def _cut(self) -> bytes:
        """The next piece of what has come."""
        rest, begin = self._rest, self._at
        found = rest.find(_END, begin, begin + _PIECE)
        end = found + len(_END) if found >= 0 else min(begin + _PIECE, len(rest))
        if end - begin > _SHORT and rest.count(b"\n", begin, end) > _LINES:
            end = begin + _SHORT
        self._at = end
        if end == len(rest):
            self._rest, self._at = b"", 0
        return rest[begin:end]

    def _feed(self, piece: bytes) -> None:
        self._chunk = len(piece)
        self._size += self._chunk
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._rest = b""  # nobody speaks anything else here: the request is answered, and the connection ends
        except httptools.HttpParserError:
            self._refuse(self._problem)
            return
        if self._size > HEAD_BYTES:
            if self._part == _HEAD:
                self._refuse(_too_large())
            elif self._part == _BODY and self._size > _MOST_BYTES:
                self._transport.abort()

    # -- answering

    def _begin(self) -> None:
        """Answer the next request."""
        self._current = self._pipeline.popleft()
        if len(self._current.scope["query_string"]) > _PLAIN:
            self._pace.follow(partial(self._start, self._current))
        else:
            self._pace.begin(self._start, self._current)

    def _start(self, exchange: Exchange) -> None:
        if exchange.gone:  # before its turn
            self._current = None
            return
        self._state.tasks.add(self._loop.create_task(self._answer(exchange)))

    async def _answer(self, exchange: Exchange) -> None:
        try:
            answer = await self._respond(exchange.scope, exchange.receive)
            if self._stalled is not None and not exchange.gone:
                await self._wait_until_taken()
            self._write(exchange, answer)
        except Exception:
            log.exception("An answer could not be sent; this is a fault of netlimit's own.")
            self._transport.abort()
        finally:  # a callback would take a round of the event loop
            self._state.tasks.discard(asyncio.current_task(self._loop))

    async def _wait_until_taken(self) -> None:
        """Wait until the other end has taken what it was answered before, or has gone."""
        self._drained = self._loop.create_future()
        await self._drained

    def _write(self, exchange: Exchange, answer: Answer) -> None:
        exchange.answered = True
        self._current = None
        if exchange.gone or self._transport.is_closing():
            return
        keeps = exchange.keeps and not self._ending and (answer.status < 400 or CLOSE not in answer.headers)
        bare = exchange.scope["method"] == "HEAD"
        self._transport.write(write_answer(answer, self._state.default_headers, keeps, bare))
        self._state.total_requests += 1
        if self._part != _BODY or not keeps:
            self._since = self._room.now
        if not keeps:
            self._transport.close()
        elif (self._pipeline or self._rest) and not self._reading:
            self._reading = True
            self._pace.follow(self._read_on)
        elif self._paused:
            self._resume()

    def _go_on(self) -> None:
        """Have the other end send more of the body."""
        if self._expects and self._part == _BODY:
            self._transport.write(_CONTINUE)
            self._expects = False
        if self._paused:
            self._resume()

    def _find_age(self) -> float:
        """Seconds since the last that was read has come to this host, where it may have lain before. Of a Unix socket
        the kernel does not tell it."""
        ends = self._transport.get_extra_info("socket")
        try:
            told = ends.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES) if ends is not None else b""
        except (OSError, ValueError):  # it has ended (uvloop says the latter, or has none), or is none of TCP
            told = b""
        if not told:
            return time.monotonic() - self._came if self._came else 0.0
        return int.from_bytes(told[-4:], sys.byteorder) / 1000

    def _has_left(self) -> bool:
        """Whether the other end has closed; what it has sent before is read first, so nothing else tells it yet."""
        ends = self._transport.get_extra_info("socket")
        if ends is None:
            return True
        poll = select.poll()
        try:
            poll.register(ends.fileno(), select.POLLRDHUP)
        except (OSError, ValueError):
            return True
        return bool(poll.poll(0))

    def _pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        """Read what has come, then what comes."""
        if self._rest:
            if not self._reading:
                self._reading = True
                self._pace.follow(self._read_on)
        elif self._paused:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _refuse(self, answer: Answer) -> None:
        """Answer what is no request, after those before it, and close."""
        self._rest = b""
        if not self._transport.is_closing():
            self._transport.write(write_answer(answer, self._state.default_headers, False, False))
            self._since = self._room.now
            self._transport.close()

    def _measure_head(self) -> int:
        return len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)


def _is_piece(data: bytes) -> bool:
    return len(data) <= _PIECE and data.find(_END, 0, -1) < 0 and data.count(b"\n") <= _LINES


def _read_target(url: bytes) -> tuple[str, bytes]:
    """The path and the query of a target. Raises httptools.HttpParserInvalidURLError."""
    parts = httptools.parse_url(url)
    path = parts.path.decode("ascii")
    return unquote(path) if "%" in path else path, parts.query or b""


_read_target_again = lru_cache(REMEMBERED)(_read_target)


def _too_large() -> Answer:
    return Answer(431, [TEXT], b"The head of the request is too large: %d bytes are the most." % HEAD_BYTES)
