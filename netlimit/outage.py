"""A database that does not answer, answers too slowly to be waited for, or takes nothing: since when, and whether it
does again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from netlimit.errors import StoreError, say_fault
from netlimit.exchange import Exchange, News

FIRST_RETRY, LAST_RETRY = 0.5, 30.0
"""Seconds between two attempts; each is twice as long as the one before."""
QUICK_SECONDS = 0.5
"""A database that takes longer to tell what has changed is slow: a pass asks it for ten times as many answers."""

log = logging.getLogger(__name__)


class Outage:
    """Asks the database again and again, in a thread of its own and ever more seldom: an answer that does not come must
    keep nobody from looking at the kernel. `ask` raises StoreError as long as the database cannot do its part, and says
    False as long as it does, but is not to be gone by. `begin` makes what is read from it and, while it is slow, told
    it each time; with `end` that is told to be over, however it went."""

    def __init__(
        self,
        begin: Callable[[], Exchange],
        end: Callable[[Exchange], None],
        ask: Callable[[], bool],
        lasted: float = 0.0,
        lasts: float = 0.0,
    ) -> None:
        """`lasted`: so many seconds already, as far as is known. It `lasts` for so long at least: one that is slow now
        and then is not returned to each time."""
        self._begin, self._end, self._ask = begin, end, ask
        self._began = time.monotonic() - lasted
        self._until = time.monotonic() + lasts
        self._exchange: Exchange | None = None
        self.is_slow = False
        """Whether the database was last found to answer, but slowly."""
        self._unread_since: float | None = self._began
        self._retry = FIRST_RETRY
        self._next = time.monotonic() + FIRST_RETRY
        self._thread = ThreadPoolExecutor(1, "database")
        self._asked: Future[bool] | None = None

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
        if self._asked is None:
            return max(0.0, self._next - time.monotonic())
        return 0.25 if self.is_slow else 0.05

    def close(self) -> None:
        """Ask no more."""
        self._thread.shutdown(wait=False)

    @property
    def news(self) -> News | None:
        """What a slow database has told, and nobody has taken in yet."""
        return self._exchange.news if self._exchange is not None else None

    def take_news(self) -> News | None:
        """What has changed in the rules meanwhile, as far as a slow database has told; once."""
        news = self.news
        if self._exchange is not None and news is not None:
            self._exchange.news = None
        return news

    def over(self) -> bool:
        """Whether the database answers again. Returns at once."""
        if self._asked is None:
            if time.monotonic() >= self._next:
                self._exchange = self._begin()
                self._asked = self._thread.submit(self._try, self._exchange)
            return False
        if not self._asked.done():
            return False
        asked, self._asked = self._asked, None
        if self._exchange is not None:
            self._end(self._exchange)
        try:
            done = asked.result()
        except Exception as error:  # one that nobody expected, too, must keep nobody from looking at the kernel
            said = error if isinstance(error, StoreError) else f"A fault of netlimit's own: {say_fault(error)}."
            self._retry = min(2 * self._retry, LAST_RETRY)
            self._next = time.monotonic() + self._retry
            log.warning("%s Asking again in %.1f s; what is in the kernel stays.", said, self._retry)
            return False
        if not done:
            self._retry = FIRST_RETRY
            self._next = time.monotonic() + FIRST_RETRY
            return False
        return True

    def _try(self, exchange: Exchange) -> bool:
        """Whether it does its part. One that is too slow for that is asked and told all there is."""
        self._unread_since = self._unread_since or time.monotonic()  # one that says nothing does not tell either
        began = time.monotonic()
        exchange.read()
        took = time.monotonic() - began
        self._unread_since = None
        if took <= QUICK_SECONDS and time.monotonic() >= self._until:
            return self._ask()
        if not self.is_slow:
            log.warning(
                "The database answers slowly: it took %.1f s to tell what has changed. What is in the kernel is looked "
                "after meanwhile; the database is asked, and told, beside.",
                took,
            )
        self.is_slow = True
        exchange.go_on()
        return False
