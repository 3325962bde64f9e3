"""Two gateways that report by one name, such as clones of one machine: their numbers and states are mixed."""

from __future__ import annotations

import logging
import time
from collections import deque

MANY = 3
"""So many reports of somebody else between one's own are no restart, and no database that was restored."""
WITHIN = 120.0
"""Seconds."""
PREFIX = "Another controller reports by the name"

log = logging.getLogger(__name__)


class Namesakes:
    """Whether others report by this gateway's name, as far as its own reports show."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._has_reported = False
        self._seen: deque[float] = deque(maxlen=MANY)

    def note(self, before: str | None, own: str | None) -> None:
        """Take note of who had reported before one's own report, if that is known."""
        if self._has_reported and before not in (None, own):
            was_told = self.warning
            self._seen.append(time.monotonic())
            if self.warning and not was_told:
                log.warning("%s", self.warning)
        self._has_reported = True

    @property
    def warning(self) -> str | None:
        """A sentence for the operator while there are others."""
        if len(self._seen) < MANY or time.monotonic() - self._seen[0] > WITHIN:
            return None
        return (
            f"{PREFIX} {self._host} to this database: limits are in force on both, but "
            "status, counters and repairs are now of one and now of the other, and a teardown of either has both keep "
            "their hands off: what the other holds is repaired no more. Give each gateway a name of its own "
            "(NETLIMIT_HOST)."
        )
