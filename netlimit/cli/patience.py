"""A stderr for which nobody waits.

A terminal, a pipe or a journal that nobody reads is full some time, and who writes to it is stopped there: what only
wanted to tell something would enforce nothing any more. What finds no room is held instead, and lost if it is too much.

All of it is done by who writes. A thread would not do, for each thread gives up capabilities by itself. So what is held
goes out with the next line, or at the end.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TextIO

from netlimit.cli.backlog import Backlog
from netlimit.plain import show_text

ROOM_SECONDS = 0.1
"""How long is waited for room at most; not at all while others wait before."""
WAITING_SHARE = 0.1
"""How much of all time may be spent on waiting: who reads slowly holds up nobody, either."""
LAST_SECONDS = 1.0
"""How long is waited for a reader at the end."""

_PIPE_BYTES = select.PIPE_BUF
"""A pipe takes so much at once or not at all (pipe(7)): lines of several writers are not mixed."""
_TERMINAL_BYTES = 1
"""A terminal with any room takes one character, whatever it makes of it. Of more it may take some only, and wait."""

Outlet = tuple[Callable[[bytes], int], Callable[[], None]]
"""How to send what there is room for, and how to close what was opened for it."""


def tell_loss(lines: int, who: str = "netlimit") -> str:
    """How many lines of whom were lost, as a sentence."""
    return f"{lines} {'line was' if lines == 1 else 'lines were'} lost here: nobody read what {who} said."


class ImpatientStream:
    """Stands for a text stream, and waits for no reader. A reader who is gone is no error, and nothing that is written
    is obeyed by a terminal.

    `send` writes what there is room for, and raises BlockingIOError where there is none; `descriptor` is asked for room
    (poll(2)); `close` closes what was opened for this. A forked copy of this process writes to the stream itself: what
    was opened here may be closed there, and what is held is not the copy's to tell.
    """

    def __init__(
        self,
        stream: TextIO,
        send: Callable[[bytes], int],
        descriptor: int,
        close: Callable[[], None],
        word_loss: Callable[[int], str] = tell_loss,
    ) -> None:
        self.stream = stream
        self._send = send
        self._close = close
        self._room = select.poll()
        self._room.register(descriptor, select.POLLOUT)
        self._backlog = Backlog(self._encode, word_loss)
        self._begun = ""
        self._maker = os.getpid()
        self._lock = threading.RLock()
        self._sending = False
        self._closed = False
        self._patience = ROOM_SECONDS
        self._waited_at = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Send lines, or hold them; an unfinished one waits for its end."""
        length, text = len(text), show_text(text)
        if self._is_copied():
            self.stream.write(text)
            return length
        with self._lock:
            lines, end, self._begun = (self._begun + text).rpartition("\n")
            for some in _split(lines + end):
                self._write(some)
        return length

    def flush(self) -> None:
        """Send what there is room for now."""
        if self._is_copied():
            self.stream.flush()
            return
        with self._lock:
            self._drain(time.monotonic())

    def close(self) -> None:
        """Send what is held, if it is read within a moment. What is written afterwards is lost."""
        if self._closed:
            return
        if not self._is_copied():
            with self._lock:
                if self._begun:
                    self._backlog.add(f"{self._begun}\n")
                self._drain(time.monotonic() + LAST_SECONDS)
        self._closed = True
        self._close()

    def _is_copied(self) -> bool:
        return os.getpid() != self._maker

    def _encode(self, text: str) -> bytes:
        return text.encode(self.stream.encoding, self.stream.errors or "strict")

    def _write(self, lines: str) -> None:
        now = time.monotonic()
        self._patience = min(ROOM_SECONDS, self._patience + WAITING_SHARE * (now - self._waited_at))
        patience = 0.0 if self._backlog else self._patience
        self._backlog.add(lines)
        self._drain(now + patience)
        self._waited_at = time.monotonic()
        self._patience -= self._waited_at - now

    def _drain(self, end: float) -> None:
        """Send what is held; wait for room until `end` (time.monotonic)."""
        if self._sending or self._closed:  # garbage that is collected meanwhile may have something to say
            return
        self._sending = True
        try:
            while self._backlog and self._send_some(end):
                pass
        finally:
            self._sending = False

    def _send_some(self, end: float) -> bool:
        """Whether there was room."""
        try:
            sent = self._send(self._backlog.peek())
        except BlockingIOError:
            left = end - time.monotonic()
            return left > 0 and bool(self._room.poll(left * 1000))
        except OSError:
            self._backlog.lose()
            return False
        self._backlog.advance(sent)
        return sent > 0


def make_impatient(
    stream: TextIO | ImpatientStream, word_loss: Callable[[int], str] = tell_loss
) -> TextIO | ImpatientStream:
    """What to write to in the place of a stream: the stream itself if it is a file, or has no descriptor."""
    plain = stream.stream if isinstance(stream, ImpatientStream) else stream
    try:
        descriptor = plain.fileno()
        mode = os.fstat(descriptor).st_mode
    except (AttributeError, OSError, ValueError):  # there is none (None), it is closed, or it is in memory
        return plain
    if not (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        return plain
    try:
        send, close = _open_socket(descriptor) if stat.S_ISSOCK(mode) else _open_again(descriptor)
    except OSError:  # it belongs to another user, say
        most = _PIPE_BYTES if stat.S_ISFIFO(mode) else _TERMINAL_BYTES
        send, close = partial(_write_if_ready, descriptor, most), _close_nothing
    return ImpatientStream(plain, send, descriptor, close, word_loss)


def _open_again(descriptor: int) -> Outlet:
    """A pipe or a terminal as a file description of our own: others, who share the one there is, may want to wait."""
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return partial(os.write, own), partial(os.close, own)


def _open_socket(descriptor: int) -> Outlet:
    """A socket is told not to wait with all that is sent."""
    own = socket.socket(fileno=os.dup(descriptor))
    return lambda data: own.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL), own.close


def _write_if_ready(descriptor: int, most: int, data: bytes) -> int:
    """Write what surely finds room. Raises BlockingIOError; waits only where another takes the room in that moment."""
    ready = select.poll()
    ready.register(descriptor, select.POLLOUT)
    if not ready.poll(0):
        raise BlockingIOError
    return os.write(descriptor, data[:most])


def _close_nothing() -> None:
    """The descriptor is the stream's own."""


def _split(text: str) -> Iterable[str]:
    """What is to be sent as one, if it can: all of it, or else each line."""
    if len(text) <= _PIPE_BYTES:
        return [text] if text else []
    return text.splitlines(keepends=True)
