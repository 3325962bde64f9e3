"""What the copy of a gateway lacks of what is applied, and writing it until it lacks nothing.

A machine that starts without its database begins with the copy: one that is behind brings back rules that were removed,
and lacks those that came since. So it is told until it is written again; limits are in force all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from netlimit.errors import Busy, Slow, StoreError
from netlimit.forgotten import find_told
from netlimit.liveness import SILENCE, is_recent
from netlimit.records import Changes, HostStatus

if TYPE_CHECKING:  # for the types alone: the copy is handed over
    from netlimit.store import Replica, Store

PREFIX = "The copy of the applied rules"
UNWRITTEN = f"{PREFIX} cannot be written"
SAFE_SECONDS = 300.0
"""How often the copy is told when those who are safe were seen last."""

log = logging.getLogger(__name__)


def refuse_window(reports: Iterable[HostStatus]) -> str | None:
    """Why no window of confirmation is to be opened, going by what the gateways say: one whose copy lacks what would
    come back goes back further if it starts meanwhile, or cannot bring it back if its guard hangs; and one that holds
    what a new database does not know would come back to nothing."""
    reports = tuple(reports)
    forgotten = find_told(reports)
    if forgotten is not None:
        return f"{forgotten} No window of confirmation is opened meanwhile: it would bring back nothing."
    behind = sorted(
        each.host
        for each in reports
        if is_recent(each.silence, SILENCE) and any(note.startswith(UNWRITTEN) for note in each.notes)
    )
    if not behind:
        return None
    return (
        f"{UNWRITTEN} on {', '.join(behind)}, so it may lack what a window of confirmation would bring back, and no "
        "window is opened. Make room on its disk first (`netlimit status` says what is wrong), or do without."
    )


class Copying:
    """The copy of one gateway, if there is one. With `reopen`, which raises StoreError, one that could not be opened,
    or whose file is gone or damaged, is opened anew."""

    def __init__(self, replica: Replica | None, reopen: Callable[[], Replica] | None = None) -> None:
        self.replica = replica
        self._reopen = reopen
        self._behind = False
        self._rules_fault: str | None = None
        self._safe_fault: str | None = None
        self._safe: frozenset[str] | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for the operator while the copy is behind."""
        if self._rules_fault is not None:
            return (
                f"{UNWRITTEN}: {self._rules_fault.rstrip('.')}. Limits are in force; but whoever begins "
                "on the copy (a boot, `netlimit apply --last`, a controller without its database) brings back what was "
                "applied before. It is tried again every few seconds.",
            )
        if self._safe_fault is not None:
            return (
                f"{PREFIX} cannot be told who is safe now: {self._safe_fault.rstrip('.')}. Whoever begins on it (a "
                "boot, a controller without its database) goes by whom it knew before. It is tried again every few "
                "seconds.",
            )
        return ()

    def note_change(self) -> None:
        """Something else is applied than the copy has."""
        self._behind = True

    def follow(self, source: Store) -> None:
        """Bring the copy up to date, if it is behind, but not while a window of confirmation is open: a machine that
        starts again then returns to what was before. Without a copy, the rules are no less in force. Raises Slow, or
        Busy once it is noted, if that is the source."""
        self._look_after()
        if self.replica is None or not self._behind:
            return
        try:
            self._behind = not self.replica.follow(source)
        except StoreError as error:
            if isinstance(error, Slow) and error.name != self.replica.name:  # that is none of the copy's faults
                raise
            self._rules_fault = self._tell(error, self._rules_fault)
            if isinstance(error, Busy) and error.name != self.replica.name:
                raise
        else:
            self._note_kept()

    def _note_kept(self) -> None:
        self._rules_fault = self._rules_fault if self._behind else None

    @property
    def is_behind(self) -> bool:
        """Whether something else is applied than the copy has."""
        return self._behind

    @property
    def lacks(self) -> tuple[int, int] | None:
        """Since which revision, with its stamp, the copy lacks what is applied; None if it lacks nothing, or nobody
        knows."""
        return self.replica.copied if self._behind and self.replica is not None else None

    def keep(self, since: int, changes: Changes) -> None:
        """Have the copy follow what was read from a database that is too slow for `follow`. One that cannot stays
        behind."""
        self._behind = True
        try:
            if self.replica is not None:
                self._behind = not self.replica.keep(since, changes)
                self._note_kept()
        except StoreError as error:
            self._rules_fault = self._tell(error, self._rules_fault)

    def keep_safe(self, status: HostStatus, is_due: bool) -> None:
        """Have the copy know who is safe, and the other gateways, where they are others than it knows or it `is_due`:
        whoever begins on it asks no database for them, nor for the clients of the API, and would lock them out."""
        others = frozenset((*status.safe_reasons, *status.peers))
        if self.replica is None or (others == self._safe and not is_due):
            return
        try:
            self.replica.keep_report(status)
        except StoreError as error:
            self._safe_fault, self._safe = self._tell(error, self._safe_fault), None
        else:
            self._safe_fault, self._safe = None, others

    def close(self) -> None:
        """Let go of the copy; it is opened again when it is needed."""
        if self.replica is not None:
            self.replica.close()

    def _look_after(self) -> None:
        """Open the copy anew where there is none, or where its file is another, damaged, or gone."""
        if self._reopen is None:
            return
        if self.replica is not None and self.replica.is_lost():
            log.warning("%s is begun anew: its file is damaged, or somebody has taken it away.", PREFIX)
            self._let_go()
        if self.replica is None:
            try:
                self.replica = self._reopen()
            except StoreError as error:
                self._rules_fault = self._tell(error, self._rules_fault)

    def _let_go(self) -> None:
        self.close()
        self.replica, self._behind, self._safe = None, True, None

    def _tell(self, error: StoreError, told: str | None) -> str:
        """Log what is new; the rest the status tells."""
        if str(error) != told:
            log.error("%s The copy of the applied rules stays as it was.", error)
        return str(error)
