"""A window of confirmation that nobody has ended: its guard hangs, or is gone. The controller, which sees the window
too, does then what the guard would."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from netlimit.confirmed import Ending, LastEnd
from netlimit.kernel.base import Kernel
from netlimit.records import Actor, Outcome, Window
from netlimit.teardown import restore_nothing

if TYPE_CHECKING:  # for the types alone: a store is handed over
    from netlimit.store import Replica, Store

OVERDUE_SECONDS = 3.0
"""How long after the end of a window its guard is waited for."""

log = logging.getLogger(__name__)


def read_clock() -> float:
    """Seconds since the machine started, asleep or awake: no wall clock, which may be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Overdue:
    """Watches over the window of confirmation, for the gateway `host`. In the database a window is undone once, however
    many see that it is overdue; in the kernel each gateway does its part. One that is open again though it was
    confirmed is confirmed anew: besides what was seen here, the copy may know that (`recall`)."""

    def __init__(
        self,
        host: str,
        clock: Callable[[], float] = read_clock,
        recall: Callable[[Window], Ending | None] = lambda window: None,
    ) -> None:
        self._host = host
        self._actor = Actor(f"controller of {host}")
        self._ends = LastEnd(self._actor, recall)
        self._clock = clock
        self._window: Window | None = None
        self._end = 0.0
        self._copied = False

    def look(self, store: Store, kernel: Kernel, patience: float = OVERDUE_SECONDS) -> None:
        """See whether a window is open, or has ended; undo one that has been over for so many seconds, for then its
        guard hangs, or cannot have done it. What comes back into force in the kernel the next pass takes in. Raises
        StoreError, KernelError."""
        last = self._find_last(store)
        if last is not None and last.outcome is None:
            self._follow(last, store)
        elif self._window is not None:
            self._end_with(last)
        if self._window is None or not self._is_late(patience):
            return
        window = self._window
        if not self._record(store, window, patience):
            return
        if self._host in window.paused and store.paused(self._host):
            # Asked again once nobody else writes: an `apply` may have ended the pause.
            restore_nothing(store, kernel, self._host, lambda: kernel.is_put_off() or store.paused(self._host))
        self._window = None

    def note(self, store: Store) -> None:
        """See whether a window is open: asked after rules were read and before they are written, lest they be taken for
        what holds though the database goes away at once. Raises StoreError."""
        last = self._find_last(store)
        if last is not None and last.outcome is None:
            self._follow(last, store)

    def _find_last(self, store: Store) -> Window | None:
        """The last window. One that is followed is looked at once more before it is undone."""
        last = store.window()
        if last is None or last.outcome is not None:
            self._ends.note(store, last)
            return last
        is_followed = self._window is not None and self._window.opened_at == last.opened_at
        return store.window() if not is_followed and self._ends.confirm_anew(store, last) else last

    def record(self, store: Store) -> None:
        """Have a database that is away, as far as is known, undo a window that is over, if it does not know yet that it
        has ended: one that cannot take that is not gone by, for it tells what nobody has confirmed. In a thread of its
        own. Raises StoreError."""
        window = self._window
        if window is not None and window.outcome is None and self._is_late(patience=0.0):
            self._record(store, window, patience=0.0)

    def _record(self, store: Store, window: Window, patience: float) -> bool:
        """Undo a window in the database, unless that is done; False if by the database it is not over."""
        now = store.now()
        if not self._is_late() and window.left(now) > 0:
            return False  # its end was reckoned from an answer that took long, or the database's clock was set back
        last = store.window()
        if last is not None and last.opened_at == window.opened_at and self._ends.confirm_anew(store, last):
            return False  # the next look finds it confirmed
        ended = store.expire(window, self._actor, now)
        if ended is not None and not patience:
            log.warning("The window of confirmation that %s has opened is over: revision %d has come back as revision "
                        "%s.", window.actor, window.base, ended.revision)  # fmt: skip
        elif ended is not None:
            log.error("The guard has not ended the window of confirmation that %s has opened: revision %d has come "
                      "back as revision %s. Does a guard run that hangs?",
                      window.actor, window.base, ended.revision)  # fmt: skip
        return True

    def look_alone(self, copy: Replica, kernel: Kernel, told: Callable[[], Window | None]) -> bool:
        """The same without the database. The copy of what was applied last has not followed the window; whether it is
        to be taken for what holds now. A slow database may have `told` of the window what nobody has taken in yet.
        Raises KernelError, StoreError."""
        if self._window is None or self._copied or not self._is_late():
            return False
        window = self._window  # it is kept: once it is back, the database is told at once

        def is_unconfirmed() -> bool:
            heard = told()
            if heard is None or window.is_forgotten(heard):
                return True
            return heard == window or heard.outcome in (Outcome.EXPIRED, Outcome.ABANDONED)

        if not is_unconfirmed():
            return False
        if self._host in window.paused:
            restore_nothing(copy, kernel, self._host, is_unconfirmed)
            self._copied = is_unconfirmed()
            return False
        revision = copy.revision()
        self._copied = True
        if revision != window.base:
            log.error("The window of confirmation is over, but the copy lacks revision %d, which is to come back. The "
                      "controller leaves the kernel as the guard puts it, until the database tells what may hold.",
                      window.base)  # fmt: skip
            return False
        log.error(
            "The guard has not ended the window of confirmation: revision %d comes back from the copy.", window.base
        )
        return True

    def forbids(self, revision: int, is_told: bool = False) -> bool:
        """Whether a revision must not be written to the kernel any more, as far as is known here: it came in a window
        that is over, and nobody has told how that ended. Where this gateway is to be paused again, none may; of who
        `is_told` by the database, only as long as that does not know the end."""
        window = self._window
        if window is None or not self._is_late(patience=0.0) or (is_told and window.outcome is not None):
            return False
        return revision > window.base or self._host in window.paused

    def warn(self, revision: int) -> Iterator[str]:
        """What an operator must know while the revision that is known is forbidden."""
        if self._window is not None and self.forbids(revision):
            yield (
                f"The window of confirmation that {self._window.actor} has opened is over, and the database does not "
                f"tell how it ended. The guard brings back what was before, revision {self._window.base}, which is not "
                "at hand here: the controller leaves the kernel as it is, and repairs nothing, until the database "
                "answers."
            )

    @property
    def watches(self) -> bool:
        """Whether a window is known to be open, or to be overdue."""
        return self._window is not None

    def hear(self, last: Window | None, end: float) -> None:
        """The last window is this, and ends then by `read_clock`: so another has heard, who does not ask here."""
        if last is not None and last.outcome is None:
            if self._window is None or self._window.opened_at != last.opened_at:
                self._end, self._copied = end, False
            self._window = last
        elif self._window is not None:
            self._end_with(last)

    def _follow(self, window: Window, store: Store) -> None:
        if self._window is None or self._window.opened_at != window.opened_at:
            self._end, self._copied = self._clock() + window.left(store.now()), False
        self._window = window

    def _end_with(self, last: Window | None) -> None:
        """Somebody has ended the window. Unless it was confirmed, a gateway that was paused is to be so again, which is
        the guard's part."""
        assert self._window is not None
        undone = last is not None and last.opened_at == self._window.opened_at and last.outcome is not Outcome.CONFIRMED
        if undone and self._host in self._window.paused:
            self._window, self._end = last, min(self._end, self._clock())
        else:
            self._window = None

    def _is_late(self, patience: float = OVERDUE_SECONDS) -> bool:
        return self._clock() >= self._end + patience
