"""The room on the disk of a SQLite file with a log of writes (WAL). Of its last part no more is kept, so that what
waits can still be replayed, and its end be written."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

RESERVE = 16 * 2**20
"""Bytes that are left of a disk; or a sixteenth of a small one."""
_PART = 16
_PAGES, _FEWEST = 1000, 4
_AROUND = 32 * 2**10
"""Bytes that a request takes beside its own: pages of indices, and what is left of pages."""


class Room:
    """The room around a file that a connection writes to. Raises sqlite3.Error, OSError."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        disk = os.statvfs(path)
        self._path, self._log = path, Path(f"{path}-wal")
        self._connection = connection
        self._reserve = min(RESERVE, disk.f_blocks * disk.f_frsize // _PART)
        self._page = self._read("page_size")
        self._pages = max(_FEWEST, min(_PAGES, self._reserve // 2 // self._page))

    def bound_log(self) -> None:
        """Have what stands in the log come into the file before the log has taken half of the reserve: on a full disk
        only a log that can begin anew, in the room that it has, takes more."""
        self._connection.execute(f"PRAGMA wal_autocheckpoint = {self._pages}")
        self._connection.execute(f"PRAGMA journal_size_limit = {self._pages * self._page}")

    def empty_log(self) -> None:
        """Have all of the log in the file, so that it begins anew."""
        self._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()

    def find_lack(self, size: int = 0) -> str:
        """Why so many bytes would leave too little of the disk; empty if they do not. Pages of the file that have
        become free are taken before the disk."""
        disk = os.statvfs(self._path)
        left, due = disk.f_bavail * disk.f_frsize, size + _AROUND
        spare = self._read("freelist_count") * self._page
        logged = self._log.stat().st_size - self._pages * self._page
        if left - max(0, due - spare) - max(0, size - max(0, logged)) >= self._reserve:
            return ""
        return f"its disk has {left / 2**20:.2f} MiB left, of which {self._reserve / 2**20:.2f} are for what waits"

    def _read(self, pragma: str) -> int:
        number: int = self._connection.execute(f"PRAGMA {pragma}").fetchone()[0]
        return number
