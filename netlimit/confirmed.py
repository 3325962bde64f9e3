"""A window of confirmation that was confirmed, and is open again: its database has come back as it was before that.
What was acknowledged is not undone then; it is confirmed anew, by whoever has seen the window end.

Nothing else is: not a window that was undone, nor one of another database, nor one of whose changes the database lacks
any, for what is left of them nobody has confirmed. And what was changed in it since it is open again is not confirmed
with it: the window goes on for that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from netlimit.origins import Origin, is_same
from netlimit.records import Actor, Outcome, Window

if TYPE_CHECKING:  # for the types alone: a store is handed over
    from netlimit.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """How the window of that time has ended, which was to bring back revision `base`. `origin` tells which database has
    said so; its `past` is the revision that was left, with its stamp."""

    opened_at: datetime
    base: int
    outcome: Outcome
    origin: Origin

    def is_of(self, window: Window) -> bool:
        """Whether it is this window's."""
        return (self.opened_at, self.base) == (window.opened_at, window.base)

    def confirms(self, window: Window, found: Origin) -> bool:
        """Whether an open window, of a database which tells this of itself, was confirmed, and the database has all
        that was confirmed in it. `found` is asked with the number of the revision that was left."""
        was_confirmed = self.is_of(window) and self.outcome is Outcome.CONFIRMED and window.outcome is None
        has_all = bool(self.origin.past[1]) and self.origin.past == found.past
        return was_confirmed and has_all and is_same(self.origin, found)


def read_ending(source: Store, window: Window) -> Ending | None:
    """How a window has ended, by the database that tells it; None for one that has not, or that left no revision.
    Raises StoreError."""
    if window.outcome is None or window.revision is None:
        return None
    return Ending(window.opened_at, window.base, window.outcome, source.origin(window.revision))


def is_confirmed(source: Store, window: Window, ending: Ending | None) -> bool:
    """Whether an open window of the database was confirmed, as that ending tells, and nothing of it is lost but that.
    Raises StoreError."""
    if ending is None or not ending.is_of(window) or ending.outcome is not Outcome.CONFIRMED:
        return False
    return ending.confirms(window, source.origin(ending.origin.past[0]))


class LastEnd:
    """Knows how the last window has ended that was seen to end. Of others, or where none was seen, it is asked what
    others `recall`."""

    def __init__(self, actor: Actor, recall: Callable[[Window], Ending | None]) -> None:
        self._actor = actor
        self._recall = recall
        self._seen: Window | None = None
        self._ending: Ending | None = None

    def note(self, source: Store, window: Window | None) -> None:
        """The last window of the database is this. Raises StoreError."""
        if window is not None and window.outcome is not None and window != self._seen:
            self._ending = read_ending(source, window)
            self._seen = window

    def confirm_anew(self, source: Store, window: Window) -> bool:
        """Confirm an open window in the database if it was confirmed before; where the rules have changed since, have
        its end undo that alone. Whether the database tells another thing of it now. Raises StoreError."""
        ending = self._ending if self._ending is not None and self._ending.is_of(window) else self._recall(window)
        if ending is None or not is_confirmed(source, window, ending):
            return False
        kept = source.confirm_anew(window, ending.origin.past[0], self._actor, source.now())
        if kept is None:
            return False
        if kept.outcome is None:
            log.warning("The window of confirmation that %s had opened was confirmed at revision %d, but the database "
                        "shows it open again, and rules have changed since: a standby that lagged has taken its place, "
                        "or an older state of it was put back. What was confirmed stays; what has changed since is "
                        "undone unless it is confirmed.", window.actor, kept.base)  # fmt: skip
            return True
        log.warning("The window of confirmation that %s had opened was confirmed, but the database shows it open "
                    "again: a standby that lagged has taken its place, or an older state of it was put back. It is "
                    "confirmed anew, and the rules stay as they are.", window.actor)  # fmt: skip
        return True
