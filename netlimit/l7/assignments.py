"""What the limiter of a gateway enforces in the kernel's place: read from the database, and reported back.

One thread reads the duties whenever something has changed, builds the rules from them, and says that this process has
loaded them; now and then it says that it still runs, and what has been counted. Requests only ever read `rules`.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from netlimit.errors import StoreError
from netlimit.l7.addresses import AddressRules, Count
from netlimit.origins import is_another, is_older
from netlimit.plain import name_of
from netlimit.records import Assigned, Counts, Duties, LimiterReport
from netlimit.rules import OnFailure, Rule

if TYPE_CHECKING:  # for the types alone: the store is handed over
    from netlimit.store import Store, Watch

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
COUNT_SECONDS = 1.0
"""How often what was counted is written."""
_STOP_SECONDS = 0.25
"""Whoever ends the thread waits so long for it at most."""
_FIRST_RETRY, _LAST_RETRY = 0.5, 10.0


class Assignments:
    """The IP rules of one gateway that this process enforces; `rules` are those of the moment.

    Without the database it goes on with what it knows; after `failure_seconds` rules with `on_failure: open` are let
    go. What was counted meanwhile is written once it is back. Another database in its place, or an older file of it, is
    as good as none, until the gateway's controller goes by it. Where `is_absent` says that there is none and none is
    expected, none is missed.
    """

    def __init__(
        self,
        store: Store,
        host: str,
        failure_seconds: float = 60.0,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        is_absent: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rules = AddressRules()
        self._store = store
        self._host = host
        self._failure_seconds = failure_seconds
        self._now = now
        self._is_absent = is_absent
        self._process = f"{name_of(socket.gethostname())}/{os.getpid()}"
        self._since = now()
        self._assigned = Assigned()
        self._duties = Duties()
        self._known: dict[int, Rule] = {}
        self._next_end: datetime | None = None
        self._built = self._since
        self._said: int | None = None
        self._written: dict[int, Counts] = {}
        self._lost: float | None = None
        self._watch: Watch | None = None
        self._due = {"heartbeat": 0.0, "count": 0.0}
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self) -> None:
        """Load everything, if the database answers, and go on in a thread of its own."""
        try:
            self.refresh()
        except StoreError as error:
            self._go_on_without(error)
        self._thread = threading.Thread(target=self._run, name="assignments", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what was counted is written, and the controller hears that nothing is enforced here."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self.write_counts()
            self._store.limiter_ended(self._host, self._process)
        except StoreError as error:
            if not self._is_absent():
                log.error("%s What was counted last is lost.", error)

    def refresh(self) -> None:
        """Take in what has changed, and say so. Raises StoreError."""
        self._say(self.load())

    def load(self) -> datetime:
        """Take in what has changed; the moment that it goes by. Raises StoreError."""
        known = self._duties
        duties = self._store.duties(self._host, known.revision, self._assigned.serial, known.stamp)
        self._refuse_another(duties)
        moment = self._now()
        changed = self._lost is not None or self._is_over(moment) or _differ(duties, self._duties)
        self._take(duties)
        self._lost = None
        if changed:
            self._build(moment)
        return moment

    def _refuse_another(self, duties: Duties) -> None:
        """Raise StoreError where they are of another database than the rules that are known, or an older state."""
        if not self._known or duties.is_gone_by:
            return
        known, found = self._duties.origin._replace(past=(self._duties.revision, self._duties.stamp)), duties.origin
        if is_another(known.identity, found) or (is_older(known, found) and not found.is_server):
            raise StoreError(
                "This is another database than the one of the rules that are known here, or an older state of it, and "
                f"the controller of {self._host} does not go by it (see `netlimit status`)."
            )

    def write_counts(self) -> None:
        """Write what was counted since the last time. Raises StoreError."""
        counts = self.rules.counts.items()
        found = {rule_id: _read(count) for rule_id, count in counts if self._has_grown(rule_id, count)}
        if found:
            gains = {rule_id: _less(total, self._written.get(rule_id, Counts())) for rule_id, total in found.items()}
            self._store.count_requests(self._host, gains, self._now())
            self._written |= found

    def _has_grown(self, rule_id: int, count: Count) -> bool:
        written = self._written.get(rule_id)
        return count.requests != (written.matched_packets if written else 0)

    # -- the thread

    def _run(self) -> None:
        retry = _FIRST_RETRY
        while not self._stopping.is_set():
            try:
                self._turn()
                retry = _FIRST_RETRY
            except StoreError as error:
                self._go_on_without(error)
                self._stopping.wait(retry)
                retry = min(2 * retry, _LAST_RETRY)
        self._stop_watching()

    def _turn(self) -> None:
        if self._watch is None:
            self._watch = self._store.watch()
            self.refresh()
        changed = self._watch.wait(self._rest())
        if changed or self._is_over(self._now()) or time.monotonic() >= self._due["heartbeat"]:
            self.refresh()
        if self._is_due("count", COUNT_SECONDS):
            self.write_counts()

    def _go_on_without(self, error: StoreError) -> None:
        self._stop_watching()
        if self._lost is None and not self._is_absent():
            log.error("%s Going on with the rules that are known.", error)
            self._lost = time.monotonic()
        self._said = None
        self._build(self._now())

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _is_due(self, what: str, every: float) -> bool:
        now = time.monotonic()
        if now < self._due[what]:
            return False
        self._due[what] = now + every
        return True

    def _is_over(self, now: datetime) -> bool:
        """Whether other rules are in force by now: the time of one is over, or a clock that was ahead is set right, by
        which some had ended that have not."""
        return now < self._built or (self._next_end is not None and self._next_end <= now)

    def _rest(self) -> float:
        """Seconds until something is due."""
        wake = min(self._due.values()) - time.monotonic()
        if self._next_end is not None:
            wake = min(wake, (self._next_end - self._now()).total_seconds())
        return min(max(wake, 0.0), _STOP_SECONDS)

    # -- rules

    def _take(self, duties: Duties) -> None:
        if duties.assigned is not None:
            self._assigned = duties.assigned
        if duties.removed is None:
            self._known.clear()
        for rule_id in duties.removed or ():
            self._known.pop(rule_id, None)
        self._known |= {rule.id: rule for rule in duties.rules}
        self._duties = duties

    def _build(self, now: datetime) -> None:
        """Put rules in force together; those that are gone keep what they have counted until it is written."""
        duties = self._duties
        lifted = self._lost is not None and time.monotonic() - self._lost >= self._failure_seconds
        rules = [
            rule
            for rule in self._known.values()
            if rule.in_force(now, self._host) and not (lifted and rule.on_failure is OnFailure.OPEN)
        ]
        ends = [rule.expires_at for rule in rules if rule.expires_at is not None]
        self._next_end = min(ends, default=None)
        self._built = now
        mine = self._assigned.rules
        counts = {i: count for i, count in self.rules.counts.items() if i in mine or self._has_grown(i, count)}
        self._written = {i: total for i, total in self._written.items() if i in counts}
        self.rules = AddressRules(rules, mine, duties.own, duties.safe, counts, self._host)

    def _say(self, now: datetime) -> None:
        """Report what is loaded: at once if that is news, else when it is time."""
        loaded = self._assigned.serial
        news = loaded != self._said
        if news or time.monotonic() >= self._due["heartbeat"]:
            report = LimiterReport(self._host, self._process, loaded, self._since, now)
            self._store.limiter_runs(report, news)
            self._said = loaded
            self._due["heartbeat"] = time.monotonic() + HEARTBEAT_SECONDS


def _differ(new: Duties, old: Duties) -> bool:
    if new.assigned is not None and new.assigned != Assigned():
        return True
    if new.rules or new.removed or (new.revision < 0) != (old.revision < 0):
        return True
    if new.removed is None and new.revision >= 0:  # all of them, of which there are none
        return True
    return (new.own, new.safe) != (old.own, old.safe)


def _read(count: Count) -> Counts:
    return Counts(count.requests, count.bytes, count.refused, count.refused_bytes)


def _less(total: Counts, written: Counts) -> Counts:
    return Counts(
        total.matched_packets - written.matched_packets,
        total.matched_bytes - written.matched_bytes,
        total.dropped_packets - written.dropped_packets,
        total.dropped_bytes - written.dropped_bytes,
    )
