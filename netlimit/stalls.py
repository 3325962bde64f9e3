"""A disk that hangs: calls of the file system that neither return nor fail, for as long as it is frozen (fsfreeze, as
the backup of a machine does it), or dies.

Such a call cannot be ended, not even with its process. So each is made in another thread, and whoever waits for it
gives it up when that thread has done nothing for a while: it is alone with its call then, and lets go of what it has
opened once that returns. Until then nothing is written to that disk any more, and little else is tried.
"""

from __future__ import annotations

import _thread
import os
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

STALL_SECONDS = 3.0
"""How long a call may do nothing. Who waits for a lock, or works much, takes processor time now and then."""
_LOOK_SECONDS = 0.25
_CODE = "NETLIMIT_STALLED"
"""What stands in the place of SQLite's name of an error."""

_lock = threading.Lock()
_hanging: Counter[int | Path] = Counter()
"""How many calls hang, by the device of the disk, and by the file that was to be opened or read."""
_idle: list[_Worker] = []


class Stalled(sqlite3.OperationalError):
    """The disk has let a call hang, or lets another one hang now."""

    def __init__(self) -> None:
        super().__init__("its disk lets a call hang")
        self.sqlite_errorname = _CODE


def find_disk(path: Path) -> Disk:
    """The disk of a file or directory, or of the first directory above that is there. Raises OSError."""
    for each in (path, *path.absolute().parents):
        with suppress(FileNotFoundError):
            return Disk(each.stat().st_dev)
    raise FileNotFoundError(path)


class Disk:
    """A device, as its calls go."""

    def __init__(self, device: int) -> None:
        self._device = device

    @property
    def hangs(self) -> bool:
        """Whether a call that this process has made on it does not return."""
        return _hanging[self._device] > 0

    def call(
        self, work: Callable[[], T], leave: Callable[[T | None], object] = lambda result: None, file: Path | None = None
    ) -> T:
        """What `work` gives; raises Stalled where the disk keeps it from going on. Whatever comes of it then, `leave`
        is told of (None for an error), in the thread that made the call. Of a `file`, which may still be read while
        the disk takes no writes, one call hangs at most: nobody waits in vain for what is known."""
        if file is not None and _hanging[file] > 0:
            raise Stalled
        call = _Call(work, leave, (self._device,) if file is None else (self._device, file))
        try:
            worker = _idle.pop()
        except IndexError:
            try:
                worker = _Worker()
            except RuntimeError:  # no room for a thread
                return work()
        worker.give(call)
        call.wait(worker)
        return call.result()


class _Call(Generic[T]):
    def __init__(
        self, work: Callable[[], T], leave: Callable[[T | None], object], concerned: tuple[int | Path, ...]
    ) -> None:
        self._work, self._leave, self._concerned = work, leave, concerned
        self._done = _thread.allocate_lock()
        self._done.acquire()
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._has_ended = self._is_given_up = False

    def wait(self, worker: _Worker) -> None:
        """Wait for the end. Raises Stalled."""
        looks, spent = 0, -1.0
        while not self._done.acquire(timeout=_LOOK_SECONDS):
            now = worker.find_spent()
            # Looks are counted, not seconds: while this process is stopped, or starved, nobody looks.
            looks = looks + 1 if now == spent and not worker.is_ready() else 0
            spent = now
            if looks >= STALL_SECONDS / _LOOK_SECONDS and self._give_up():
                raise Stalled

    def result(self) -> T:
        """What came of it."""
        error, self._error = self._error, None  # it refers to the frames that hold this call
        if error is not None:
            raise error
        return self._results.pop()

    def make(self, worker: _Worker) -> None:
        """Make the call; the worker is free for another one before anybody hears of the end."""
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error
        with _lock:
            self._has_ended = True
            given_up = self._is_given_up
            if given_up:
                _hanging.subtract(self._concerned)
        if given_up:
            with suppress(Exception):
                self._leave(self._results.pop() if self._results else None)
        _idle.append(worker)
        self._done.release()

    def _give_up(self) -> bool:
        with _lock:
            if not self._has_ended:
                self._is_given_up = True
                _hanging.update(self._concerned)
            return self._is_given_up


def dismiss() -> None:
    """End the threads that make calls: those to come have the rights that this process has by then."""
    while _idle:
        _idle.pop().end()


class _Worker:
    """A thread that makes one call after the other."""

    def __init__(self) -> None:
        """Raises RuntimeError where there is no room for a thread."""
        self._call: _Call[object] | None = None
        self._given = _thread.allocate_lock()
        self._given.acquire()
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        # A thread that took a signal for a process which waits for it (`sigwait`) would end that instead.
        heeded = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heeded)

    def give(self, call: _Call[T]) -> None:
        """Have it make a call."""
        self._call = call  # type: ignore[assignment]  # what a call gives is no matter here
        self._given.release()

    def end(self) -> None:
        """Have it end, and wait for that."""
        self._given.release()
        self._thread.join()

    def find_spent(self) -> float:
        """The processor time that it took so far, in seconds."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def is_ready(self) -> bool:
        """Whether it would go on if others left it the processor."""
        try:
            said = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_bytes()
        except OSError:
            return False
        return said.rpartition(b")")[2].split()[:1] == [b"R"]

    def _run(self) -> None:
        while True:
            self._given.acquire()
            call, self._call = self._call, None
            if call is None:
                return
            call.make(self)
            del call


def _forget() -> None:
    """A copy of this process has none of its threads."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()
    _hanging.clear()


os.register_at_fork(after_in_child=_forget)
