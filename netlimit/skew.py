"""A gateway whose clock is not the database's: it lives by the one, and its rules end by the other."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from netlimit.liveness import say_span

APART = timedelta(seconds=5)
"""So far the two may be apart without a word."""
PREFIX = "The clock of this gateway is"
_NONE = timedelta(0)

log = logging.getLogger(__name__)


class Skew:
    """How far a gateway's clock is ahead of the database's, at least, as far as its reports show."""

    def __init__(self) -> None:
        self.ahead = _NONE
        """Less than nothing: behind."""

    def note(self, sent: datetime, at: datetime, answered: datetime) -> None:
        """Take note of a report that came `at` a time by the database's clock, between two of the gateway's own."""
        was_told = self.warning is not None
        self.ahead = max(sent - at, min(answered - at, _NONE))
        if self.warning and not was_told:
            log.warning("%s", self.warning)

    @property
    def warning(self) -> str | None:
        """A sentence for the operator while they are apart."""
        if abs(self.ahead) <= APART:
            return None
        where, when = ("ahead of", "early") if self.ahead > _NONE else ("behind", "late")
        return (
            f"{PREFIX} {say_span(abs(self.ahead))} {where} the database's: rules that end do so by it, too {when} if "
            "the database is right. Let chrony or systemd-timesyncd keep both."
        )
