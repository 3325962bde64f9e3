"""A database that does not answer, or takes nothing: since when, and whether it does again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from netlimit.errors import StoreError, say_fault

FIRST_RETRY, LAST_RETRY = 0.5, 30.0
"""Seconds between two attempts; each is twice as long as the one before."""

log = logging.getLogger(__name__)


class Outage:
    """Asks the database again and again, in a thread of its own and ever more seldom: an answer that does not come must
    keep nobody from looking at the kernel. `ask` raises StoreError as long as the database cannot do its part, and
    `read` as long as it cannot even be read."""

    def __init__(self, read: Callable[[], object], ask: Callable[[], object], lasted: float = 0.0) -> None:
        """`lasted`: so many seconds already, as far as is known."""
        self._read, self._ask = read, ask
        self._began = time.monotonic() - lasted
        self._unread_since: float | None = self._began
        self._retry = FIRST_RETRY
        self._next = time.monotonic() + FIRST_RETRY
        self._thread = ThreadPoolExecutor(1, "database")
        self._asked: Future[object] | None = None

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._began

    @property
    def unread(self) -> float:
        """For how many seconds nothing can be read. One that is full, or a replica, goes on telling the rules."""
        since = self._unread_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def wait(self) -> float:
        """Seconds until the next attempt, or until its answer is to be looked for."""
        return max(0.0, self._next - time.monotonic()) if self._asked is None else 0.05

    def over(self) -> bool:
        """Whether the database answers again. Returns at once."""
        if self._asked is None:
            if time.monotonic() >= self._next:
                self._asked = self._thread.submit(self._try)
            return False
        if not self._asked.done():
            return False
        asked, self._asked = self._asked, None
        try:
            asked.result()
        except Exception as error:  # one that nobody expected, too, must keep nobody from looking at the kernel
            said = error if isinstance(error, StoreError) else f"A fault of netlimit's own: {say_fault(error)}."
            self._retry = min(2 * self._retry, LAST_RETRY)
            self._next = time.monotonic() + self._retry
            log.warning("%s Asking again in %.1f s; what is in the kernel stays.", said, self._retry)
            return False
        self._thread.shutdown(wait=False)
        return True

    def _try(self) -> None:
        self._unread_since = self._unread_since or time.monotonic()  # one that says nothing does not tell either
        self._read()
        self._unread_since = None
        self._ask()
