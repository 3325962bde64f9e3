"""What a kernel may take long to tell, read in a thread: any user can have a million sockets, and it lists them all; a
full table of routes has as many."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

PATIENCE = 0.1
"""Seconds that a reading may hold up who asks first; who asks after that gets what was found the last time."""
RESTS = 4.0
"""After a reading that took longer, none begins for so many times as long."""
T = TypeVar("T")


class Background(Generic[T]):
    """What `read` gives, without a long wait. For one thread. `patience` and `rests` are for others than most."""

    def __init__(self, read: Callable[[], T], patience: float = PATIENCE, rests: float = RESTS) -> None:
        self._read = read
        self._patience = patience
        self._rests = rests
        self._thread: threading.Thread | None = None
        self._found: tuple[T] | None = None
        self._error: Exception | None = None
        self._rests_until = 0.0

    def get(self) -> T:
        """What there is, or was when it was last looked; the first time it is waited for. Raises what `read` has
        raised since the last question, and OSError where nothing is known and no thread can be had."""
        begins = self._begin()
        if self._thread is not None:
            self._thread.join(None if self._found is None else self._patience * begins)
            if not self._thread.is_alive():
                self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        assert self._found is not None
        return self._found[0]

    @property
    def goes_on(self) -> bool:
        """Whether a reading was begun of which nothing was given yet."""
        return self._thread is not None

    def _begin(self) -> bool:
        """Whether a reading begins now, which is waited for a little."""
        if self._thread is None and (self._found is None or time.monotonic() >= self._rests_until):
            thread = threading.Thread(target=self._look, name="reading", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the host has no room for one; it may have soon
                if self._found is None:
                    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
            else:
                self._thread = thread
                return True
        return False

    def _look(self) -> None:
        began = time.monotonic()
        try:
            self._found = (self._read(),)
        except Exception as error:  # it is raised in the thread that asks
            self._error = error
        took = time.monotonic() - began
        if took > self._patience:
            self._rests_until = time.monotonic() + self._rests * took
