"""A connection of SQLite. What root opens by name others may have exchanged for a link, so each call is made with the
rights of those who could have: SQLite opens its log, and what else it puts beside a file, whenever it needs them."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import quote

from netlimit.custody import Rights, find_rights, is_exchangeable, opened, opening_as
from netlimit.store import vfs

P = ParamSpec("P")
Owner = TypeVar("Owner", bound=sqlite3.Connection | sqlite3.Cursor)
Result = TypeVar("Result")


def connect(path: Path, patience: float) -> sqlite3.Connection:
    """Open a file, of which a lock is waited for so long, in seconds; any thread may use it. Raises sqlite3.Error, also
    where it cannot be looked at, or the rights of others cannot be had."""
    # `mode=rw` keeps SQLite from making the file, which it would make readable to all.
    address = f"file:{quote(str(path))}?mode=rw"
    try:
        vfs.install()
        rights = _judge(path)
        with opening_as(rights):
            connection = sqlite3.connect(
                address, uri=True, timeout=patience, isolation_level=None, check_same_thread=False,
                cached_statements=64, factory=sqlite3.Connection if rights is None else _Connection,
            )  # fmt: skip
    except OSError as error:
        raise sqlite3.OperationalError(f"unable to open database file: {error.strerror}") from error
    if isinstance(connection, _Connection):
        connection.rights = rights
    return connection


def _judge(path: Path) -> Rights | None:
    """With whose rights a file is opened; where root's own will do though others could exchange its directory, it is
    opened in the one that is there now. Raises OSError."""
    rights, directory, is_root = find_rights(path), path.parent.resolve(), os.geteuid() == 0
    exchangeable = is_root and rights is None and is_exchangeable(directory)
    if exchangeable or vfs.is_held(directory):
        with opened(directory, directory=True) as place:
            found = os.fstat(place)
            if exchangeable and found.st_uid != 0:
                rights = Rights(found.st_uid, found.st_gid)
            vfs.hold(directory, place)
    return rights


def _with_rights(method: Callable[Concatenate[Owner, P], Result]) -> Callable[Concatenate[Owner, P], Result]:
    @wraps(method)
    def call(self: Owner, /, *arguments: P.args, **named: P.kwargs) -> Result:
        connection = self.connection if isinstance(self, sqlite3.Cursor) else self
        with opening_as(getattr(connection, "rights", None)):
            return method(self, *arguments, **named)

    return call


class _Connection(sqlite3.Connection):
    rights: Rights | None = None

    def cursor(self, *arguments: Any, **named: Any) -> Any:
        return super().cursor(*(arguments or (_Cursor,)), **named)

    execute = _with_rights(sqlite3.Connection.execute)
    commit = _with_rights(sqlite3.Connection.commit)
    rollback = _with_rights(sqlite3.Connection.rollback)
    close = _with_rights(sqlite3.Connection.close)


class _Cursor(sqlite3.Cursor):
    execute = _with_rights(sqlite3.Cursor.execute)
    executemany = _with_rights(sqlite3.Cursor.executemany)
    executescript = _with_rights(sqlite3.Cursor.executescript)
    fetchone = _with_rights(sqlite3.Cursor.fetchone)
    fetchmany = _with_rights(sqlite3.Cursor.fetchmany)
    fetchall = _with_rights(sqlite3.Cursor.fetchall)
    close = _with_rights(sqlite3.Cursor.close)
