"""The directory of a SQLite database that comes when those who use it run already, for it or its disk was away."""

from __future__ import annotations

import logging
import os
from contextlib import suppress

from netlimit.cli.database import find_file
from netlimit.settings import Settings

log = logging.getLogger(__name__)


class Arrival:
    """Whether such a directory has come since this was made, and is read-only to this process.

    systemd makes all read-only to a unit but what it finds at the unit's start (ReadWritePaths). A disk that is mounted
    later may be written all the same; a directory that is made later only by the unit's next process. One that was
    there before keeps nobody from going on, whoever may write it."""

    def __init__(self, settings: Settings) -> None:
        path = find_file(settings.database_url)
        self._awaited = path.parent if path is not None and not os.path.isdir(path.parent) else None
        self._is_sealed = False

    def is_sealed(self) -> bool:
        """Whether it is, as the log tells. The process is to end then, and be started anew."""
        if self._awaited is not None and os.path.isdir(self._awaited):
            with suppress(OSError):  # it may be gone again
                self._is_sealed = bool(os.statvfs(self._awaited).f_flag & os.ST_RDONLY)
            if self._is_sealed:
                log.warning(
                    "%s has come since this began, and is read-only to it: ending, so that the next may write there.",
                    self._awaited,
                )
            self._awaited = None
        return self._is_sealed
