"""Errors that nobody expected: told, counted, and gone on after."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from netlimit.errors import NetlimitError, say_fault

QUIET_SECONDS = 60.0
"""The same error is not told again for so long."""

log = logging.getLogger(__name__)


class Mishaps:
    """What has gone wrong in one process since it began, though nobody expected it; `count` says how often."""

    def __init__(self) -> None:
        self.count = 0
        self._told: dict[str, float] = {}

    def note(self, error: Exception, follows: str, extra: Mapping[str, object] | None = None) -> str:
        """Log an error, with what follows from it, and count it; a sentence for whoever looks at the status."""
        self.count += 1
        said, now = say_fault(error), time.monotonic()
        if now - self._told.get(said, -QUIET_SECONDS) >= QUIET_SECONDS:
            log.error("A fault of netlimit's own: %s. %s", said, follows, exc_info=error, extra=dict(extra or {}))
            self._told = {text: at for text, at in self._told.items() if now - at < QUIET_SECONDS} | {said: now}
        return f"A fault of netlimit's own ({said}); the log says more."

    def survive(self, part: Callable[[], None], follows: str) -> None:
        """Do what the rest can do without. Raises NetlimitError: those are expected."""
        try:
            part()
        except NetlimitError:
            raise
        except Exception as error:
            self.note(error, follows)
