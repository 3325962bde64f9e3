"""The processes of `netlimit serve`: its parts, and what it has tried beside them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkProcess

from netlimit.cli.errors import word
from netlimit.cli.privileges import end_with_parent
from netlimit.errors import Busy, NetlimitError, Slow, Unavailable

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
"""The signals for which who watches over the processes waits, and has blocked."""
PAUSE_SECONDS = 2.0
"""So long after an attempt that has failed another is made."""
_LONG_PAUSE = 30.0
"""The same, where nobody knows why it has failed: the log tells it each time."""
_PASSING = (Busy, Slow, Unavailable)
_DONE, _PASSES, _STAYS = b"+", b"~", b"!"
"""What an attempt tells who watches it; how it has failed goes before the sentence."""
_LONGEST = 2**16

log = logging.getLogger(__name__)


def start(name: str, run: Callable[[], None]) -> ForkProcess:
    """Start a part that ends when this process does, however that ends."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(run, os.getpid()), name=name)
    process.start()
    return process


def _run(run: Callable[[], None], parent: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    try:
        end_with_parent(parent)
        run()
    except (NetlimitError, OSError) as error:
        log.error("%s", word(error))
        sys.exit(1)
    except Exception:
        log.exception("This is a fault of netlimit's own.")
        sys.exit(1)
    finally:
        logging.shutdown()  # Python leaves that out where a process is a fork


class Attempt:
    """Something that a process of its own tries, which may fail, or hang: limits are kept meanwhile, and it is tried
    again. `run` is given what it calls once it has done its part, and may go on then; if it ends before, it has failed,
    unless it `is_to_end`: then it has done its part when it ends without an error."""

    def __init__(self, name: str, run: Callable[[Callable[[], None]], None], is_to_end: bool = False) -> None:
        self.process: ForkProcess | None = None
        """The last attempt, until it is found to have failed."""
        self.is_done = False
        """Whether it has done its part."""
        self.failure = ""
        """Why the last one has failed, in a sentence; empty while none has."""
        self.is_passing = True
        """Whether that may pass: a database that does not answer now, say."""
        self._name, self._run_it, self._is_to_end = name, run, is_to_end
        self._reader, self._heard = -1, b""
        self._due = 0.0

    def go_on(self) -> bool:
        """Begin it, or look how it goes; whether it has failed since this was asked last."""
        if self.process is None:
            if time.monotonic() >= self._due:
                self._begin()
            return False
        has_ended = self.process.exitcode is not None  # first: what it has told is whole then
        self._hear()
        self.is_done = self.is_done or (self._is_to_end and self.process.exitcode == 0)
        if self.is_done or not has_ended:
            return False
        self._fail()
        return True

    def _begin(self) -> None:
        self._reader, writer = os.pipe()
        self._heard = b""
        os.set_blocking(self._reader, False)
        try:
            self.process = start(self._name, lambda: _attempt(self._run_it, writer))
        finally:
            os.close(writer)

    def _hear(self) -> None:
        if self._reader < 0:
            return
        with suppress(BlockingIOError):
            while said := os.read(self._reader, _LONGEST):
                self._heard += said
            self._leave_off()
        self.is_done = self.is_done or self._heard.startswith(_DONE)

    def _leave_off(self) -> None:
        os.close(self._reader)
        self._reader = -1

    def _fail(self) -> None:
        assert self.process is not None
        if self._reader >= 0:
            self._leave_off()
        kind, said = self._heard[:1], self._heard[1:].decode(errors="replace")
        status, self.process = self.process.exitcode, None
        self.failure = said or f"The {self._name} has ended with status {status} before it had begun."
        self.is_passing = kind == _PASSES
        self._due = time.monotonic() + (PAUSE_SECONDS if said else _LONG_PAUSE)


def _attempt(run: Callable[[Callable[[], None]], None], writer: int) -> None:
    """Tell by the pipe that it is done; what is wrong before goes there instead of into the log, which would be told
    each time."""
    told: list[bytes] = []

    def tell(said: bytes = _DONE) -> None:
        told.append(said)
        with suppress(BrokenPipeError):
            os.write(writer, said[:_LONGEST])

    try:
        run(tell)
    except (NetlimitError, OSError) as error:
        if told:
            raise
        tell((_PASSES if isinstance(error, _PASSING) else _STAYS) + word(error).encode(errors="replace"))
        sys.exit(1)
