"""Hearing of changes that other processes make, as they happen."""

from __future__ import annotations

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
"""What was written to the log of a SQLite file is a change when the disk has it too: for so long the file is asked, and
then the file system, which costs less, and less often."""


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
    """Polls `PRAGMA data_version`, which changes when another connection than this one has committed."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Any = None
        self._seen = 0
        self._log_seen: tuple[int, int] | None = None
        self._open()

    def wait(self, timeout: float) -> bool:
        """Wait until something is written. Another file in the place of the one that was watched is a change."""
        if self._connection is None or self._database.find_place() != self._place:
            self.close()
            self._open()
            return True
        end = time.monotonic() + timeout
        while (version := self._version()) == self._seen:
            quiet = self._is_quiet()
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(QUIET_POLL_SECONDS if quiet else POLL_SECONDS, left))
                quiet = self._is_quiet()
                if not quiet:
                    break
            else:
                return False
        self._seen = version
        return True

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.invalidate()
            self._connection = None

    def _open(self) -> None:
        self._place = self._database.find_place()
        self._log = f"{self._database.path}-wal"
        self._connection = self._database.pin()
        self._seen = self._version()

    def _is_quiet(self) -> bool:
        """Whether nobody has written since the version was asked. A clock that was set may say so wrongly; the next
        `wait` asks anyway."""
        log = self._look()
        return log is not None and log == self._log_seen and time.time() - log[0] / 1e9 > GRAIN_SECONDS

    def _look(self) -> tuple[int, int] | None:
        """When the log was written last (Unix time in ns), and its length; None if there is none yet."""
        try:
            found = os.stat(self._log)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def _version(self) -> int:
        self._log_seen = self._look()
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
        self._listen()

    def wait(self, timeout: float) -> bool:
        """Wait until something is written. After a lost connection it is taken that something was."""
        if self._connection is not None and self._database.is_elsewhere(self._connection.info):
            self.close()
        try:
            if self._connection is None:
                self._listen()
                return True
            return bool(list(self._connection.driver_connection.notifies(timeout=timeout, stop_after=1)))
        except self._database.driver_error as error:
            self.close()
            raise self._database.explain(error) from error

    def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            self._connection.invalidate()
            self._connection = None

    def _listen(self) -> None:
        self._connection = self._database.pin()
        self._connection.driver_connection.autocommit = True
        self._connection.driver_connection.execute(f"LISTEN {CHANNEL}")
