"""Domains that are asked about and that no document of limits has: all that is asked of them passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from time import monotonic

from netlimit.several import name_some

MOST = 8
"""So many are known by name: whoever asks may invent some."""
SECONDS = 3600.0
"""For so long after the last question one is told."""
_LONGEST = 100
"""Letters of a name that are told."""
_KNOWN = 8
"""Of domains that there are so many are named."""

log = logging.getLogger(__name__)


class UnknownDomains:
    """Those of the last hour; the log tells each when it is asked about first. For one thread at a time."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._asked: dict[str, float] = {}
        """By what is told of its name, when each was asked about last."""
        self._more = -SECONDS
        """When one was asked about for which there was no room."""
        self._clock = clock

    def note(self, domain: str, known: Collection[str]) -> None:
        """It is asked about, and is none of those that are known."""
        now, name = self._clock(), _shorten(domain)
        if name not in self._asked:
            if len(self._asked) >= MOST:
                self._forget(now)
            if len(self._asked) >= MOST:
                self._more = now
                return
            log.warning("%s", _describe(name, known))
        self._asked[name] = now

    def list_troubles(self, known: Collection[str]) -> list[str]:
        """What is to be said of them, as sentences; nothing of those that are known by now."""
        now = self._clock()
        self._forget(now)
        if self._asked:
            for domain in known:
                self._asked.pop(_shorten(domain), None)
        troubles = [_describe(name, known) for name in self._asked]
        if now - self._more < SECONDS:
            troubles.append("There are questions about further domains that are in no document of limits: all pass.")
        return troubles

    def _forget(self, now: float) -> None:
        self._asked = {name: asked for name, asked in self._asked.items() if now - asked < SECONDS}


def _shorten(domain: str) -> str:
    return domain if len(domain) <= _LONGEST else f"{domain[:_LONGEST]}…"


def _describe(name: str, known: Collection[str]) -> str:
    there = name_some([repr(_shorten(each)) for each in sorted(known)], _KNOWN) or "none"
    return (
        f"There are questions about the domain {name!r}, which no document of limits has: all of them pass. There is "
        f"{there}. Correct the name where it is asked about (`domain=…`), or write a document of it."
    )
