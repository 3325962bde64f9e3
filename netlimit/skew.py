"""A gateway whose clock is not the database's: it lives by the one, and its rules end by the other."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from netlimit.liveness import say_span

APART = timedelta(seconds=5)
"""So far the two may be apart without a word."""
PREFIX = "The clock of this gateway is"
OF_API = "The clock of this API is"
_OF_GATEWAY = "rules that end do so by it, too {when} if the database is right."
_BY_API = "`ttl` and tokens are counted by it, so that rules and tokens end at a wrong time if the database is right."
_NONE = timedelta(0)

log = logging.getLogger(__name__)


class Skew:
    """How far a clock is ahead of the database's, at least: a gateway's, as far as its reports show, or an API's."""

    def __init__(self, is_api: bool = False) -> None:
        self._words = (OF_API, _BY_API) if is_api else (PREFIX, _OF_GATEWAY)
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
        whose, harm = self._words
        return (
            f"{whose} {say_span(abs(self.ahead))} {where} the database's: {harm.format(when=when)} Let chrony or "
            "systemd-timesyncd keep both."
        )
