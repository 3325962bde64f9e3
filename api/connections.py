"""Connections to the API: who is let in, and how long each may keep it waiting."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from netlimit.l7.identity import find_network, read_address

from .buckets import Buckets
from .problems import Problem
from .room import Guest, Room, Standing

HEAD_SECONDS = 10.0
"""TLS must be agreed on so long after the connection was made, and the head of a request be complete so long after that
(or after its first byte came)."""
SEND_SECONDS = 30.0
"""An answer must be taken in so long, ..."""
DRAIN_SECONDS = 2.0
"""... and so much longer for each time that the other end has taken most of what is held for it (48 KiB)."""
IDLE_SECONDS = 5
"""A connection is kept so long for another request."""
NEW_A_SECOND, NEW_AT_ONCE = 32, 96
"""Connections that strangers of one network may make, ..."""
ALL_NEW_A_SECOND, ALL_NEW_AT_ONCE = 256, 384
"""... and all strangers together: a connection costs a third of a millisecond, in which nobody else is served."""
MOST_FIELDS = 128
"""A head has so many lines at most, and so has what follows a body in chunks."""
_HEAD_END = re.compile(rb"\n\r?\n")
_SLICE = 1024
_NETWORKS = 4096
_AT_ONCE = 8
"""So many come in before those who are in get their turn; the others wait in the kernel, in their order.
Were all let in at once, who came first would have to go for the last before he could say anything."""
_REFUSED_IN_A_ROW = 64
"""So many are refused before others get their turn."""

FindStanding = Callable[[str | None, str | None], Standing]


class _Inside(socket.socket):
    """A connection that says when it is closed."""

    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        """Close it."""
        closing, self.on_close = self.on_close, None
        if closing is not None:
            closing()
        super().close()


class Door(socket.socket):
    """A listening socket that lets in so many connections as there is room for. A `Connection` begins only when TLS has
    been agreed on, so it is here that they are counted."""

    def __init__(self, listening: socket.socket, find_standing: FindStanding) -> None:
        """Take the place of `listening`."""
        super().__init__(fileno=listening.detach())
        self.room = Room()
        self._find_standing = find_standing
        self._come = 0
        self._newcomers = Buckets(NEW_A_SECOND, NEW_AT_ONCE, _NETWORKS)
        self._all_newcomers = Buckets(ALL_NEW_A_SECOND, ALL_NEW_AT_ONCE, 1)
        self._guests: dict[tuple[str, int], tuple[Guest, asyncio.TimerHandle | None]] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. Raises BlockingIOError where there is none or enough have come in for now, and
        ConnectionAbortedError after some that were refused."""
        if self._come >= _AT_ONCE:
            raise BlockingIOError
        if not self._come and _call_later(0.0, self._go_on) is None:
            self._come = -1
        self._come += 1
        for _ in range(_REFUSED_IN_A_ROW):
            descriptor, address = self._accept()  # type: ignore[attr-defined]  # as socket.accept does
            connection = _Inside(fileno=descriptor)
            if self._let_in(connection, address[:2]):
                return connection, address
            connection.close()
        raise ConnectionAbortedError

    def _go_on(self) -> None:
        self._come = 0

    def meet(self, client: tuple[str, int] | None, drop: Callable[[], None]) -> Guest | None:
        """The guest who is now ready to speak; `drop` ends his connection at once."""
        guest, timer = self._guests.get(client, (None, None)) if client else (None, None)
        if timer is not None:
            timer.cancel()
        if guest is not None:
            guest.drop = drop
        return guest

    def _let_in(self, connection: _Inside, client: tuple[str, int]) -> bool:
        place = read_address(client[0])
        with suppress(OSError):
            connection.getpeername()  # who has reset it is not even looked at: any local user can come so without end
            here = read_address(connection.getsockname()[0])
            standing = self._find_standing(place, here)
            if standing is Standing.STRANGER and self._come_too_often(place):
                return False
            guest = self.room.enter(place, standing, lambda: _shut(connection))
            if guest is None:
                return False
            connection.on_close = lambda: self._leave(client, guest)
            self._guests[client] = guest, _call_later(HEAD_SECONDS, lambda: _shut(connection))
            return True
        return False  # it has gone again

    def _come_too_often(self, place: str | None) -> bool:
        return bool(self._newcomers.take(find_network(place or "")) or self._all_newcomers.take(None))

    def _leave(self, client: tuple[str, int], guest: Guest) -> None:
        self.room.leave(guest)
        known, timer = self._guests.get(client, (None, None))
        if known is guest:
            del self._guests[client]
            if timer is not None:
                timer.cancel()


class Connection(H11Protocol):
    """One connection, which is cut off when it keeps the API waiting. Bodies are timed by `api.admission`."""

    def __init__(
        self, *arguments: Any, door: Door | None = None, on_end: Callable[[], None] | None = None, **options: Any
    ) -> None:
        """`on_end` is called when the server is told to end while there is this connection."""
        super().__init__(*arguments, **options)
        self._door = door
        self._on_end = on_end
        self._guest: Guest | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._send_end = 0.0
        self._lines, self._last = 0, b""  # of the head that is coming: how many, and its last bytes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin."""
        super().connection_made(transport)
        # Kept apart from the address of the request, which a proxy that is trusted names.
        self.app_state = {**self.app_state, "neighbour": self.client[0] if self.client else None}
        if self._door is not None:
            self._guest = self._door.meet(self.client, transport.abort)
            if self._guest is not None:
                self._guest.find_owner = self._find_owner
        self._expect_something()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_waiting()
        self._stop_sending()
        super().connection_lost(exc)
        turn = self._find_state().get("turn")
        if turn is not None:
            turn.leave()

    def shutdown(self) -> None:
        """The server is told to end: this connection does so after the answer that is under way."""
        super().shutdown()
        if self._on_end is not None:
            self._on_end()

    def data_received(self, data: bytes) -> None:
        """Read on, but no more fields than `MOST_FIELDS`: each costs as much as a thousand bytes."""
        while data and not self.transport.is_closing():
            size = self._find_portion(data)
            if not size:
                self._refuse_fields()
                break
            super().data_received(data[:size])
            data = data[size:]
        self._answer_once()
        self._look()

    def _find_portion(self, data: bytes) -> int:
        """How much of it can be read now: a head by itself, a body in chunks by the slice, for such a one ends with
        fields, too. 0 if it has too many."""
        if self.conn.their_state is h11.IDLE:
            text = self._last + data
            end = _HEAD_END.search(text)
            size = end.end() - len(self._last) if end else len(data)
            self._lines += data.count(b"\n", 0, size)
            if self._lines > MOST_FIELDS:
                return 0
            self._lines, self._last = (0, b"") if end else (self._lines, text[-2:])
            return size
        if self.conn.their_state is not h11.SEND_BODY or not self._has("transfer-encoding"):
            return len(data)
        return _SLICE if self.conn.trailing_data[0].count(b"\n") <= MOST_FIELDS else 0

    def _has(self, *fields: str) -> bool:
        """Whether the request has all these fields."""
        return {name.encode() for name in fields} <= {name for name, _ in (self.scope or {}).get("headers", ())}

    def _refuse_fields(self) -> None:
        """In a head, say so."""
        if self.conn.their_state is not h11.IDLE or self.conn.our_state is not h11.IDLE:
            self.transport.abort()
            return
        answer = Problem(431, f"The head has too many lines: at most {MOST_FIELDS} are read.").response()
        fields = [*answer.raw_headers, (b"connection", b"close")]
        body = bytes(answer.body)
        for event in (h11.Response(status_code=431, headers=fields), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        """Go on after an answer."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            if self.transport.is_closing():
                self.pause_writing()
        else:
            self._stop_sending()
        self._look()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also when the other end does not take the rest of the answer."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def pause_writing(self) -> None:
        """The other end takes nothing for now."""
        super().pause_writing()
        if self._sending is None:
            self._send_end = self.loop.time() + SEND_SECONDS
            self._sending = self.loop.call_at(self._send_end, self._judge_reader)

    def resume_writing(self) -> None:
        """The other end has taken something: a reader that takes a byte now and then gains little time by that."""
        super().resume_writing()
        self._send_end += DRAIN_SECONDS

    def _judge_reader(self) -> None:
        self._sending = None
        if self.loop.time() < self._send_end:
            self._sending = self.loop.call_at(self._send_end, self._judge_reader)
        elif self.transport.get_write_buffer_size():
            self.transport.abort()

    def _answer_once(self) -> None:
        """A stranger makes a connection for each request: how often he may, the door counts. By connections that are
        kept he could ask without end, and keep others waiting. And who says in two ways where a body ends may have been
        understood otherwise by a proxy: what comes behind it is not asked (RFC 9112, 6.1)."""
        stranger = self._guest is not None and self._guest.standing is Standing.STRANGER
        is_last = stranger or self._has("transfer-encoding", "content-length")
        if is_last and self.cycle is not None and not self.cycle.response_started:
            self.cycle.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]

    def _find_owner(self) -> object:
        """Whose request is being answered, as `api.admission` has found."""
        return self._find_state().get("client")

    def _find_state(self) -> dict[str, Any]:
        """What was found out about the request that came last."""
        return (self.scope or {}).get("state", {})

    def _look(self) -> None:
        """Wait patiently while a request is under way, or nothing has begun; else only so long."""
        answering = self.cycle is not None and not self.cycle.response_complete
        idle = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if self._door is not None and self._guest is not None:
            has_all = answering and self.conn.their_state is not h11.SEND_BODY
            (self._door.room.answer if has_all else self._door.room.wait)(self._guest)
        if answering or idle or self.transport.is_closing():
            self._stop_waiting()
        else:
            self._expect_something()

    def _expect_something(self) -> None:
        """The rest of a head, or of a body that nobody reads any more."""
        self._patience = self._patience or self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None


def _shut(connection: socket.socket) -> None:
    """End a connection that may belong to the event loop: it closes what the other end seems to have closed."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _call_later(seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle | None:
    try:
        return asyncio.get_running_loop().call_later(seconds, call)
    except RuntimeError:  # no loop runs: whoever accepts looks after time himself
        return None
