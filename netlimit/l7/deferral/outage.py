"""A time in which nothing is kept, from when that is found out until it is over."""

from __future__ import annotations

import logging

from netlimit.l7.deferral.backlog import BacklogUnavailable, BacklogUnwritten

log = logging.getLogger(__name__)
_SERVED = "Who is within his limit is served meanwhile, others are answered 503."
_ASKED = "It is asked again until it can be."


class Outage:
    """Whether a backlog can be asked. Its beginning and its end are logged, each once."""

    def __init__(self) -> None:
        self.goes_on = False
        self.keeps_nothing = False
        """Whether it is certain that nothing would be kept."""

    def begin(self, error: BacklogUnavailable) -> None:
        """The backlog has failed so."""
        told = [error.remedy, _SERVED] if isinstance(error, BacklogUnwritten) else []
        if not self.goes_on:
            log.warning("%s", " ".join(filter(None, [str(error), *told, _ASKED])))
        self.goes_on, self.keeps_nothing = True, bool(told)

    def end(self) -> None:
        """All of it can be done again."""
        if self.goes_on:
            log.warning("Deferred requests can be kept again.")
        self.goes_on = self.keeps_nothing = False
