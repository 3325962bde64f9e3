"""Hearing of changes that other processes make, as they happen."""

from __future__ import annotations

import math
import os
import sqlite3
import time
from abc import ABC, abstractmethod
from typing import Any

from netlimit.store.engine import CHANNEL, Database

POLL_SECONDS = 0.02
"""Half of it is what a change waits on average; asking a hundred times a second took one in a hundred of a core."""
QUIET_POLL_SECONDS = 0.05
GRAIN_SECONDS = 0.5
"""From so long after the last write on, the log of a SQLite file is looked at less often."""
LONGEST_REST_SECONDS = 1.0
"""How long a SQLite file is not asked while its log stays as it is."""


class Watch(ABC):
    """Tells whether anything was written since it was last asked, first of all since it was made.

    It may say so once too often (this process writes too), never too seldom. For one thread.
    """

    def changed(self) -> bool:
        """Whether anything was written since it was last asked. Costs microseconds. Raises StoreError."""
        return self.wait(0)

    @abstractmethod
    def wait(self, timeout: float) -> bool:
        """Wait until something is written, at most `timeout` seconds; whether it was. Raises StoreError."""

    @abstractmethod
    def close(self) -> None:
        """Give the connection back."""


def watch(database: Database) -> Watch:
    """Begin to watch a database."""
    return SqliteWatch(database) if database.is_sqlite else PostgresWatch(database)


class SqliteWatch(Watch):
    """Asks for `PRAGMA data_version`, which changes when another connection than this one has committed.

    What was written to the log is a change when the disk has it too, and nobody knows when that will be: the file is
    asked at once, and then again after as long as it has been already. In between the file system is asked whether the
    log has changed again, which costs less.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Any = None
        self._seen = 0
        self._open()

    def wait(self, timeout: float) -> bool:
        """Wait until something is written. Another file in the place of the one that was watched is a change."""
        if self._connection is None or self._database.find_place() != self._place:
            self.close()
            self._open()
            return True
        end = time.monotonic() + timeout
        while not self._has_changed():
            now = time.monotonic()
            if now >= end:
                return False
            pause = QUIET_POLL_SECONDS if now - self._written > GRAIN_SECONDS else POLL_SECONDS
            time.sleep(max(0.0, min(pause, self._due - now, end - now)))
        return True

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.invalidate()
            self._connection = None

    def _open(self) -> None:
        self._place = self._database.find_place()
        self._log = f"{self._database.path}-wal"
        self._log_seen: tuple[int, int] | None = None
        self._written = self._due = -math.inf
        self._connection = self._database.pin()
        self._seen = self._version()

    def _has_changed(self) -> bool:
        """Whether another version is there than was seen, as far as it is time to ask."""
        log, now = self._look(), time.monotonic()
        if log is None or log != self._log_seen:
            self._log_seen, self._written, self._due = log, now, now
        if now < self._due:
            return False
        self._due = now + min(max(now - self._written, POLL_SECONDS), LONGEST_REST_SECONDS)
        seen, self._seen = self._seen, self._version()
        return self._seen != seen

    def _look(self) -> tuple[int, int] | None:
        """When the log was written last (Unix time in ns), and its length; None if there is none."""
        try:
            found = os.stat(self._log)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def _version(self) -> int:
        try:
            cursor = self._connection.cursor()
            return int(cursor.execute("PRAGMA data_version").fetchone()[0])
        except sqlite3.Error as error:
            self.close()  # what has become of it, such as that its memory was cut, would be told for ever
            raise self._database.explain(error) from error


class PostgresWatch(Watch):
    """Listens to the notices that every writing transaction sends as it commits."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Any = None
        self._heard = -math.inf
        self._listen()

    def wait(self, timeout: float) -> bool:
        """Wait until something is written. After a lost connection it is taken that something was."""
        if self._connection is not None and self._database.is_elsewhere(self._connection.info):
            self.close()
        try:
            if self._connection is None:
                self._listen()
                return True
            return self._hear(timeout)
        except self._database.driver_error as error:
            self.close()
            raise self._database.explain(error) from error

    def _hear(self, timeout: float) -> bool:
        """Whether a notice comes. Whoever may connect can send them, and as many as he likes: so shortly after one, all
        that come for a moment are taken for one."""
        driver = self._connection.driver_connection
        rest = min(self._heard + POLL_SECONDS - time.monotonic(), timeout)
        heard = rest > 0 and bool(list(driver.notifies(timeout=rest)))
        heard = heard or bool(list(driver.notifies(timeout=timeout - max(rest, 0.0), stop_after=1)))
        if heard:
            self._heard = time.monotonic()
        return heard

    def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            self._connection.invalidate()
            self._connection = None

    def _listen(self) -> None:
        self._connection = self._database.pin()
        self._connection.driver_connection.autocommit = True
        self._connection.driver_connection.execute(f"LISTEN {CHANNEL}")
