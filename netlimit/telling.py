"""What a controller has to tell the database, kept until that takes it: who holds a lock there must not keep the kernel
from being looked at."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from netlimit.errors import Busy, StoreError
from netlimit.namesakes import Namesakes
from netlimit.records import HostStatus, Repair, RuleCounters
from netlimit.skew import Skew

if TYPE_CHECKING:  # for the types alone: a store is handed over
    from netlimit.store import Store

MOST_REPAIRS = 200
"""So many repairs are kept until they can be told, the newest; the database keeps no more either."""
REST_SECONDS = 2.0
"""After the database was busy, it is let alone for so long."""

log = logging.getLogger(__name__)


class Telling:
    """The status, the counters and the repairs of one gateway that were not told yet. Of a status, and of the counters
    of a rule, only the newest is kept."""

    def __init__(self, host: str, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._host = host
        self._now = now
        self._status: HostStatus | None = None
        self._counts: dict[int, RuleCounters] = {}
        self._repairs: deque[Repair] = deque(maxlen=MOST_REPAIRS)
        self._rests_until = 0.0
        self._namesakes = Namesakes(host)
        self._skew = Skew()

    @property
    def warnings(self) -> tuple[str | None, ...]:
        """What is wrong with how this gateway is told of, where something is."""
        return self._namesakes.warning, self._skew.warning

    @property
    def waits(self) -> bool:
        """Whether there is something that was not told yet."""
        return bool(self._status or self._counts or self._repairs)

    def report(self, status: HostStatus) -> None:
        """Note what the controller says of itself."""
        self._status = status

    def count(self, counts: Iterable[RuleCounters]) -> None:
        """Note what rules have counted."""
        self._counts |= {each.rule_id: each for each in counts}

    def repair(self, repair: Repair) -> None:
        """Note what was put right."""
        self._repairs.append(repair)

    def tell(self, store: Store) -> None:
        """Tell all that was noted, unless the database is busy, or was a moment ago. Raises StoreError for all else
        that it says; after any other error all is forgotten, for what cannot be told must not be in the way of what
        can."""
        if time.monotonic() < self._rests_until:
            return
        try:
            self._tell_all(store)
        except Busy as error:
            self.rest(error)
        except StoreError:
            raise
        except Exception:
            self._forget()
            raise
        else:
            self._rests_until = 0.0

    def rest(self, error: Busy) -> None:
        """The database was found busy: let it alone for a while."""
        if not self._rests_until:
            log.warning("%s What is to be told waits; limits are kept in force meanwhile.", error)
        self._rests_until = time.monotonic() + REST_SECONDS

    def _forget(self) -> None:
        self._repairs.clear()
        self._counts.clear()
        self._status = None

    def tell_copy(self, copy: Store) -> None:
        """Tell a copy, in place of a database that is away or slow: that one hears of repairs and counters later."""
        if self._status is not None:
            copy.report(self._status)
        self._status = None

    @property
    def untold(self) -> tuple[list[Repair], dict[int, RuleCounters]]:
        """The repairs and the counters that were not told yet."""
        return list(self._repairs), dict(self._counts)

    def note_told(self, repairs: Iterable[Repair], counts: Iterable[RuleCounters]) -> None:
        """These were told in another way."""
        told = set(map(id, repairs))
        self._repairs = deque((each for each in self._repairs if id(each) not in told), MOST_REPAIRS)
        for each in counts:
            if self._counts.get(each.rule_id) is each:
                del self._counts[each.rule_id]

    def drop_counts(self) -> None:
        """What was counted is asked for anew."""
        self._counts.clear()

    def _tell_all(self, store: Store) -> None:
        if self._repairs:
            store.note_repairs(self._host, list(self._repairs))
            self._repairs.clear()
        if self._counts:
            store.count(self._host, list(self._counts.values()))
            self._counts.clear()
        if self._status is not None:
            sent = self._now()
            received = store.report(self._status)
            self._skew.note(sent, received.at, self._now())
            self._namesakes.note(received.before, self._status.reporter)
            self._status = None
