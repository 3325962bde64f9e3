"""Where reads of a SQLite file wait now and then. Its log begins anew only in a moment in which nobody reads by it
(sqlite.org/wal.html, 2.3). Long reads that overlap leave no such moment, and the log would fill the disk.

So where it is long, reads of a process that many read by wait until those that go on have ended, and then it is brought
into the file as a whole. Who reads after that does so without it, until somebody writes, and begins it anew. For a read
of another process, which may not end, it is waited shortly, and again later.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from netlimit.stalls import Stalled
from netlimit.store import mapping
from netlimit.store.room import find_left

LONGEST, SHORT, _PART = 16 * 2**20, 2**20, 4
"""Bytes of the log from which on reads wait: a quarter of what is left of the disk, but no more and no less than
these."""
PATIENCE = 15.0
"""Seconds that are waited for the reads of this process to end; as much longer as the log is longer."""
LONGEST_PATIENCE = 120.0
TRIES = 5
"""How often it is tried to begin the log anew, while others read."""
REST = 5.0
"""Seconds until it is tried again, at least twice as many as it was waited for; the next time more."""
LONGEST_REST = 60.0
_LOOK_SECONDS = 0.25


class Checkpoint:
    """Lets reads through, of all threads. Those that read or write already are never held up."""

    def __init__(self, path: Path, begin_anew: Callable[[], bool]) -> None:
        """`begin_anew` tries to bring the log of the file at `path` into it, so that the next who writes begins it
        anew; whether that has been done. It raises nothing."""
        self._path, self._begin_anew = path, begin_anew
        self._changed = threading.Condition()
        self._inside: Counter[int] = Counter()
        """Transactions by the thread that has begun them; another one may end them."""
        self._reads = 0
        self._is_beginning = False
        self._closed_at: float | None = None
        self._tries = 0
        self._open_until = -math.inf
        self._rest = REST

    @contextmanager
    def reading(self, patience: float) -> Iterator[None]:
        """A read that may be long: waits at most `patience` seconds. Raises TimeoutError."""
        thread = threading.get_ident()
        with self._changed:
            if not self._inside[thread]:
                self._wait(time.monotonic() + patience)
            self._reads += 1
            self._inside[thread] += 1
        try:
            yield
        finally:
            with self._changed:
                self._reads -= 1
                self._leave(thread)
                self._changed.notify_all()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A transaction that waits for nobody, and is not waited for here: it writes, or reads little."""
        thread = threading.get_ident()
        with self._changed:
            self._inside[thread] += 1
        try:
            yield
        finally:
            with self._changed:
                self._leave(thread)

    def _leave(self, thread: int) -> None:
        self._inside[thread] -= 1
        if not self._inside[thread]:
            del self._inside[thread]

    def _wait(self, end: float) -> None:
        """Until reads may go on. Who waits also does what there is to do then: neither who writes nor who has just
        read has to."""
        while self._is_closed():
            if time.monotonic() >= end:
                raise TimeoutError
            if not self._reads and not self._is_beginning and self._try():
                continue
            self._changed.wait(_LOOK_SECONDS)

    def _try(self) -> bool:
        self._is_beginning = True
        self._changed.release()
        try:
            return self._begin_anew()
        finally:
            self._changed.acquire()
            self._is_beginning = False
            self._tries += 1
            self._changed.notify_all()

    def _is_closed(self) -> bool:
        now = time.monotonic()
        if now < self._open_until:
            return False
        excess = self._find_excess()
        if excess < 1:
            self._closed_at, self._tries, self._rest = None, 0, REST
            return False
        self._closed_at = now if self._closed_at is None else self._closed_at
        waited, patience = now - self._closed_at, min(LONGEST_PATIENCE, PATIENCE * excess)
        if waited < patience and self._tries < TRIES:
            return True
        self._open_until = now + max(self._rest, 2 * min(waited, patience))
        self._closed_at, self._tries, self._rest = None, 0, min(2 * self._rest, LONGEST_REST)
        self._changed.notify_all()
        return False

    def _find_excess(self) -> float:
        """How many times as long the log is as it may be; less than one where it is not."""
        try:
            log = mapping.find_log(self._path)
            if log is None or log.is_brought or log.size < SHORT:
                return 0.0
            left = find_left(self._path) or 0
        except (OSError, Stalled):  # what follows tells
            return 0.0
        return log.size / min(LONGEST, max(SHORT, left // _PART))
