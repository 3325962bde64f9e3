"""A disk that hangs: calls of the file system that neither return nor fail, for as long as it is frozen (fsfreeze, as
the backup of a machine does it), or dies.

Such a call cannot be ended, not even with its process. So each is made in another thread, and whoever waits for it
gives it up when that thread has done nothing for a while: it is alone with its call then, and lets go of what it has
opened once that returns. Until then nothing is written to that disk any more, and little else is tried.

Nor need a call come to an end that works, for who may write a file may put into it what never ends (a view, a trigger).
So whoever waits also bounds the work, tells a call that goes beyond to end, and gives up one that does not.
"""

from __future__ import annotations

import _thread
import math
import os
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")

STALL_SECONDS = 3.0
"""How long a call may do nothing. Who waits for a lock, or works much, takes processor time now and then."""
_LOOK_SECONDS = 0.25
_BEGIN_SECONDS = 10.0
"""How long is waited for a thread to begin."""
_LOOKS = STALL_SECONDS / _LOOK_SECONDS
_READY, _AT_DISK = b"R", b"D"
"""States of a thread (proc(5))."""
_CODE = "NETLIMIT_STALLED"
"""What stands in the place of SQLite's name of an error."""

_lock = threading.Lock()
_hanging: Counter[int | Path] = Counter()
"""How many calls hang, by the device of the disk, and by the file that was to be opened or read."""
_unending: Counter[Path] = Counter()
"""How many calls go on that were told to end, by the file that they read."""
_idle: list[_Worker] = []


class Stalled(sqlite3.OperationalError):
    """The disk has let a call hang, or lets another one hang now."""

    def __init__(self) -> None:
        super().__init__("its disk lets a call hang")
        self.sqlite_errorname = _CODE


class Overworked(sqlite3.OperationalError):
    """A call has worked for longer than it may."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.sqlite_errorname = "NETLIMIT_OVERWORKED"


class Bound(Protocol):
    """How long a call may work: seconds of processor time, and of waiting for its disk. Not for locks: who waits for
    those says himself how long."""

    def is_passed(self, worked: float) -> bool:
        """Whether a call that has worked for so long, and has not ended, is to end now."""

    def spend(self, worked: float) -> None:
        """A call has ended that has worked for so long."""

    def end(self) -> None:
        """Tell the call to end. It is told again while it does not."""


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
        self,
        work: Callable[[], T],
        leave: Callable[[T | None], object] = lambda result: None,
        file: Path | None = None,
        bound: Bound | None = None,
    ) -> T:
        """What `work` gives; raises Stalled where the disk keeps it from going on, and Overworked where it does not
        heed its bound. Whatever comes of it then, `leave` is told of (None for an error), in the thread that made the
        call. Of a `file`, which may still be read while the disk takes no writes, one call hangs at most: nobody waits
        in vain for what is known."""
        if file is not None and _hanging[file] > 0:
            raise Stalled
        if file is not None and _unending[file] > 0:
            raise Overworked("what it was asked before does not end")
        call = _Call(work, leave, self._device, file, bound)
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
        self,
        work: Callable[[], T],
        leave: Callable[[T | None], object],
        device: int,
        file: Path | None,
        bound: Bound | None,
    ) -> None:
        self._work, self._leave, self._bound = work, leave, bound
        self._device, self._file = device, file
        self._done = _thread.allocate_lock()
        self._done.acquire()
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._has_ended = self._is_given_up = False
        self._blamed: Counter[Any] = Counter()
        self._concerned: list[int | Path] = []
        self._began = math.inf
        self._read = 0.0

    def wait(self, worker: _Worker) -> None:
        """Wait for the end. Raises Stalled and Overworked. What keeps from waiting (a signal, a fault of the bound)
        goes on once the call has ended, for it works with what others will use next."""
        try:
            self._watch(worker)
        except BaseException as error:
            if not self._is_given_up and not self._break_off():
                raise Overworked("what it was asked does not end, though it was told to") from error
            raise

    def _break_off(self) -> bool:
        """Have it end; False if it does not, and is given up."""
        for _ in range(math.ceil(_LOOKS)):
            if self._bound is not None:
                self._bound.end()
            if self._done.acquire(timeout=_LOOK_SECONDS):
                return True
        return not self._give_up(_unending, self._file)

    def _watch(self, worker: _Worker) -> None:
        looks, told, spent = 0, 0, -1.0
        while not self._done.acquire(timeout=_LOOK_SECONDS):
            now, state = worker.find_spent(), worker.find_state()
            # Looks are counted, not seconds: while this process is stopped, or starved, nobody looks.
            looks = looks + 1 if now == spent and state != _READY else 0
            spent = now
            if looks >= _LOOKS and self._give_up(_hanging, self._device, self._file):
                raise Stalled
            self._read += _LOOK_SECONDS if state == _AT_DISK else 0.0
            if self._bound is None or not self._bound.is_passed(self._find_worked(now)):
                continue
            self._bound.end()
            told += 1
            if told > _LOOKS and self._give_up(_unending, self._file):
                raise Overworked("what it was asked does not end, though it was told to")

    def result(self) -> T:
        """What came of it."""
        error, self._error = self._error, None  # it refers to the frames that hold this call
        if error is not None:
            raise error
        return self._results.pop()

    def make(self, worker: _Worker) -> None:
        """Make the call; the worker is free for another one before anybody hears of the end."""
        self._began = time.thread_time()
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error
        with _lock:
            self._has_ended = True
            given_up = self._is_given_up
            if given_up:
                self._blamed.subtract(self._concerned)
        if self._bound is not None and not given_up:
            self._bound.spend(self._find_worked(time.thread_time()))
        if given_up:
            with suppress(Exception):
                self._leave(self._results.pop() if self._results else None)
        _idle.append(worker)
        self._done.release()

    def _find_worked(self, spent: float) -> float:
        """How long it has worked, in seconds, when its thread has spent so much processor time."""
        return max(0.0, spent - self._began) + self._read

    def _give_up(self, blamed: Counter[Any], *concerned: int | Path | None) -> bool:
        with _lock:
            if not self._has_ended:
                self._is_given_up = True
                self._blamed, self._concerned = blamed, [each for each in concerned if each is not None]
                blamed.update(self._concerned)
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
        self._given, self._begun, self._ended = (_thread.allocate_lock() for _ in range(3))
        for lock in (self._given, self._begun, self._ended):
            lock.acquire()
        self._ident = self._number = 0
        # A thread that took a signal for a process which waits for it (`sigwait`) would end that instead.
        # One that it causes itself (of memory that others have cut) it must take, or the process ends.
        heeded = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGBUS})
        try:
            # Not by `threading`, which waits for ever for a thread that had no memory left to begin.
            _thread.start_new_thread(self._run, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heeded)
        if not self._begun.acquire(timeout=_BEGIN_SECONDS):
            self._given.release()  # should it begin yet, it ends
            raise RuntimeError("no thread has begun")

    def give(self, call: _Call[T]) -> None:
        """Have it make a call."""
        self._call = call  # type: ignore[assignment]  # what a call gives is no matter here
        self._given.release()

    def end(self) -> None:
        """Have it end, and wait for that."""
        self._given.release()
        self._ended.acquire()

    def find_spent(self) -> float:
        """The processor time that it took so far, in seconds."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._ident))

    def find_state(self) -> bytes:
        """What it does, as proc(5) has it: whether it would go on if others left it the processor, say."""
        try:
            said = Path(f"/proc/self/task/{self._number}/stat").read_bytes()
        except OSError:
            return b""
        return said.rpartition(b")")[2].split()[0]

    def _run(self) -> None:
        self._ident, self._number = _thread.get_ident(), _thread.get_native_id()
        self._begun.release()
        while True:
            self._given.acquire()
            call, self._call = self._call, None
            if call is None:
                break
            call.make(self)
            del call
        self._ended.release()


def _forget() -> None:
    """A copy of this process has none of its threads."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()
    _hanging.clear()
    _unending.clear()


os.register_at_fork(after_in_child=_forget)
