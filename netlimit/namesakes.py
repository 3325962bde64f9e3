"""Two gateways that report by one name, such as clones of one machine: their numbers and states are mixed."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections import deque

MANY = 3
"""So many reports of somebody else between one's own are no restart, and no database that was restored."""
WITHIN = 120.0
"""Seconds."""
PREFIX = "Another controller reports by the name"

_SIGN = 8
"""Letters that all of one place begin with."""

log = logging.getLogger(__name__)


def make_reporter(place: str) -> str:
    """Another word for each run of a controller, by which its reports are told from those of others."""
    return _sign(place) + secrets.token_hex(_SIGN - len(_sign(place)) // 2)


def reports_from(place: str, reporter: str) -> bool:
    """Whether it is the word of a controller that ran in this place; never where it is not known which place it is."""
    return bool(place) and reporter.startswith(_sign(place))


def _sign(place: str) -> str:
    return hashlib.sha256(place.encode()).hexdigest()[:_SIGN] if place else ""


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
            f"{PREFIX} {self._host} to this database: limits are in force on both, but status, counters and repairs "
            "are now of one and now of the other, and a teardown of either has both keep their hands off: what the "
            "other holds is repaired no more, and goes when its controller starts. Give each gateway a name of its own "
            "(NETLIMIT_HOST)."
        )
