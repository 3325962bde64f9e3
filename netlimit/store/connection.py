"""A connection of SQLite. What root opens by name others may have exchanged for a link, so each call is made with the
rights of those who could have: SQLite opens its log, and what else it puts beside a file, whenever it needs them. Each
call may meet a disk that hangs: then it is given up, and the connection with it. And who may write the file can make
statements that never end of ours (a view, a trigger), so each works for so long and no longer."""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import quote

from netlimit.custody import Rights, find_rights, is_exchangeable, opened, opening_as
from netlimit.stalls import Disk, Overworked, Stalled, find_disk
from netlimit.store import mapping, vfs
from netlimit.store.allowance import Allowance
from netlimit.store.burden import Burden
from netlimit.store.files import Place, find_place

P = ParamSpec("P")
Owner = TypeVar("Owner", bound=sqlite3.Connection | sqlite3.Cursor)
Result = TypeVar("Result")

READ, WRITE = "BEGIN", "BEGIN IMMEDIATE"
"""They begin a transaction: one that reads first, which calls no disk yet, and one that writes."""
WORK_SECONDS = 300.0
"""How long a statement may work, all its rows together; the longest, of 100,000 rules, takes about four, and a slow
disk makes that much more."""
_AHEAD = 200
"""Rows that are read at a time."""
LONGEST_VALUE = 2**27
"""Bytes. One function makes a value of a thousand million, in one step that nobody can end."""


def refuse_work(seconds: float) -> Overworked:
    """The error for who has had a database work for so long, in seconds."""
    return Overworked(f"what it was asked was broken off after {seconds:g} seconds of work")


def describe_damage(found: str) -> sqlite3.DatabaseError:
    """The error for a file that is damaged, as SQLite raises it; `found` tells how."""
    error = sqlite3.DatabaseError(" ".join(found.split()))
    error.sqlite_errorname = "SQLITE_CORRUPT"
    return error


def connect(path: Path, patience: float, allowance: Allowance | None = None) -> DiskConnection:
    """Open a file, of which a lock is waited for so long, in seconds; any thread may use it. It may work for so long
    as the `allowance` says, if there is one. Raises sqlite3.Error, also where it cannot be looked at, the rights of
    others cannot be had, or its disk hangs."""
    try:
        vfs.install()
        rights, disk = _judge(path), find_disk(path.parent)
        try:
            connection = disk.call(partial(_open, path, patience, rights), _close_late, path)
        except Stalled:
            raise
        except sqlite3.OperationalError:
            before, rights = rights, _judge(path)
            if rights == before:
                raise
            # The directory has changed hands in between.
            connection = disk.call(partial(_open, path, patience, rights), _close_late, path)
    except OSError as error:
        raise sqlite3.OperationalError(f"unable to open database file: {error.strerror}") from error
    connection.place(path, disk, rights, allowance or Allowance(refuse_work))
    return connection


def find_memory(patience: float) -> Callable[[], sqlite3.Connection]:
    """What opens a new database in the memory of this process, each time: it is in no file system, which others could
    fill, and gone with its last connection. Who reads, too, waits for who writes."""
    address = f"file:/netlimit-{secrets.token_hex(8)}?vfs=memdb"  # the slash lets connections share it
    return partial(
        sqlite3.connect, address, uri=True, timeout=patience, isolation_level=None, check_same_thread=False,
        cached_statements=64,
    )  # fmt: skip


def _open(path: Path, patience: float, rights: Rights | None) -> DiskConnection:
    # `mode=rw` keeps SQLite from making the file, which it would make readable to all.
    address = f"file:{quote(str(path))}?mode=rw"
    with opening_as(rights):
        before = find_place(path)
        connection = sqlite3.connect(
            address, uri=True, timeout=patience, isolation_level=None, check_same_thread=False,
            cached_statements=64, factory=DiskConnection,
        )  # fmt: skip
        connection.opened = before if find_place(path) == before else None
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
    return connection


def _close_late(connection: DiskConnection | None) -> None:
    if connection is not None:
        sqlite3.Connection.close(connection)


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


def _on_disk(
    method: Callable[Concatenate[Owner, P], Result], again: bool = False
) -> Callable[Concatenate[Owner, P], Result]:
    """The method as a call that may hang, or work without end. `again`: it is all or nothing, and so may be made a
    second time."""

    @wraps(method)
    def call(self: Owner, /, *arguments: P.args, **named: P.kwargs) -> Result:
        connection = self.connection if isinstance(self, sqlite3.Cursor) else self
        assert isinstance(connection, DiskConnection)
        bound = self.statement if isinstance(self, _Cursor) else Burden()
        return connection.work(partial(method, self, *arguments, **named), bound, again)

    return call


class _Bound:
    """Of one call: by its statement, and by what the thread that makes it may wait in all."""

    def __init__(self, connection: DiskConnection, statement: Burden, allowance: Allowance) -> None:
        """Raises what a call does that may not even begin."""
        allowance.spend(0.0)
        if statement.worked > WORK_SECONDS:
            raise refuse_work(WORK_SECONDS)
        if excess := statement.find_excess(statement.worked):
            raise excess
        self._connection, self._statement, self._allowance = connection, statement, allowance
        self._breaks = allowance.breaks
        self.is_told = False
        self.worked = 0.0
        self._excess: Overworked | None = None

    def is_passed(self, worked: float) -> bool:
        self._excess = self._excess or self._statement.find_excess(self._statement.worked + worked)
        if self._excess is not None:
            return True
        left = min(WORK_SECONDS - self._statement.worked, self._allowance.find_left())
        return worked > left or self._allowance.breaks != self._breaks

    def spend(self, worked: float) -> None:
        self.worked = worked
        self._statement.worked += worked

    def find_reason(self) -> Overworked:
        """Why it was told to end."""
        return self._excess or refuse_work(round(self.worked, 1))

    def end(self) -> None:
        self.is_told = True
        self._connection.interrupt()


class DiskConnection(sqlite3.Connection):
    """One whose calls may hang. After the first it is lost: every other raises Stalled, and what was under way is
    undone as soon as the disk answers, unless it was being committed."""

    opened: Place | None = None
    """The file; None where it is not known which one had the name just then."""
    _path: Path
    _disk: Disk
    _rights: Rights | None = None
    _allowance: Allowance
    _is_lost = _writes = False
    _cuts: int | None = None
    """How often shared memory had been found cut when the transaction began."""

    @property
    def is_lost(self) -> bool:
        """Whether a call hangs, or has hung."""
        return self._is_lost

    def place(self, path: Path, disk: Disk, rights: Rights | None, allowance: Allowance) -> None:
        """Say of which file it is, where that lies, with whose rights calls are made, and how long they may work."""
        self._path, self._disk, self._rights, self._allowance = path, disk, rights, allowance

    def work(self, work: Callable[[], Result], statement: Burden, again: bool = False) -> Result:
        """What `work`, which is of a statement, gives within its bound; `again` as for `call`. Raises Stalled, and
        Overworked and Cut: then what was being written is undone. What is damaged raises sqlite3.Error, too."""
        bound = _Bound(self, statement, self._allowance)
        if self._cuts is None:
            self._cuts = mapping.count_cuts()
        try:
            result = self.call(work, again, bound)
            self._refuse_cut()
            return result
        except sqlite3.OperationalError as error:
            if bound.is_told and getattr(error, "sqlite_errorname", None) == "SQLITE_INTERRUPT":
                raise bound.find_reason() from error
            raise
        except UnicodeDecodeError as error:  # SQLite's message quotes the schema, and Python cannot make a text of it
            raise describe_damage("malformed database schema: it is not in UTF-8") from error
        finally:
            self._allowance.note(bound.worked)

    def call(self, work: Callable[[], Result], again: bool = False, bound: _Bound | None = None) -> Result:
        """What `work` gives, which may be made `again` with the rights of whoever has the directory by then. Raises
        Stalled, and Overworked where it does not heed its bound."""
        if self._is_lost:
            raise Stalled
        try:
            return self._disk.call(
                partial(self._act, work, again), lambda _: self._act(partial(_close_late, self)), self._path, bound
            )
        except (Stalled, Overworked):
            self._is_lost = True
            raise

    def try_disk(self) -> None:
        """See that the disk takes writes before a transaction takes the lock, which others would wait for in vain; and
        once more before it is committed. Where it does not, the connection is not lost, and can be read by. Raises
        Stalled."""
        if self._disk.hangs or self._is_lost:
            raise Stalled
        self._disk.call(partial(self._act, self._touch))

    def begin_writing(self) -> None:
        """Say that what follows writes. Raises Stalled."""
        self.try_disk()
        self._writes = True

    def cursor(self, *arguments: Any, **named: Any) -> Any:
        """One whose calls may hang, too."""
        return super().cursor(*(arguments or (_Cursor,)), **named)

    def commit(self) -> None:
        """Raises Stalled; where that comes of the commit itself, it may come about later. Raises Cut."""
        if not self._writes:
            return self._unlock(super().commit)
        self._refuse_cut()
        self.try_disk()
        try:
            self.call(super().commit, again=True)
            if self._is_cut():
                mapping.void_indexes()
        finally:
            self._writes, self._cuts = False, None

    def rollback(self) -> None:
        """Raises Stalled; what was lost before is undone anyway."""
        writes, self._writes, self._cuts = self._writes, False, None
        if not self._is_lost:
            (self.call if writes else self._unlock)(super().rollback)

    def close(self) -> None:
        """Where the disk hangs, that is done once it answers."""
        if not self._is_lost:
            with suppress(Stalled):
                self.call(super().close)

    def _unlock(self, end: Callable[[], None]) -> None:
        """End a transaction that has written nothing: that calls no disk. Raises Stalled."""
        if self._is_lost:
            raise Stalled
        self._cuts = None
        end()

    def _refuse_cut(self) -> None:
        """Neither the read nor the written is to be trusted where the index of the log was gone in between."""
        if self._is_cut():
            mapping.void_indexes()
            raise mapping.Cut
        if mapping.is_lost():
            raise mapping.Cut

    def _is_cut(self) -> bool:
        return self._cuts not in (None, mapping.count_cuts())

    def _act(self, work: Callable[[], Result], again: bool = False) -> Result:
        begun = self.in_transaction
        try:
            with opening_as(self._rights), vfs.working_at(self._path, self.opened):
                return work()
        except sqlite3.OperationalError:
            # An error may have undone the transaction: what is done again would not be within it.
            if not self._judge_anew() or not again or self.in_transaction != begun:
                raise
        with opening_as(self._rights), vfs.working_at(self._path, self.opened):
            return work()

    def _judge_anew(self) -> bool:
        """Whether the directory has changed hands since: what SQLite has not opened yet it could not open."""
        before = self._rights
        with suppress(OSError):
            self._rights = _judge(self._path)
        return self._rights != before

    def _touch(self) -> None:
        with suppress(OSError):  # where it may only be read, say; what follows tells
            os.utime(self._path, follow_symlinks=False)

    execute = _on_disk(sqlite3.Connection.execute, again=True)


class _Cursor(sqlite3.Cursor):
    _execute = _on_disk(sqlite3.Cursor.execute, again=True)
    _executemany = _on_disk(sqlite3.Cursor.executemany)
    _executescript = _on_disk(sqlite3.Cursor.executescript)
    _fetchmany = _on_disk(sqlite3.Cursor.fetchmany)
    _fetchall = _on_disk(sqlite3.Cursor.fetchall)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._begin()

    def _begin(self) -> None:
        self.statement = Burden()
        self._ahead: deque[Any] = deque()
        """Rows that are read and not asked for yet: a call of its own for each takes longer than the row."""
        self._is_read = False

    def fetchone(self) -> Any:
        """Raises Stalled and Overworked."""
        if not self._ahead and not self._is_read:
            self._ahead.extend(self._fetchmany(_AHEAD))
            self._is_read = len(self._ahead) < _AHEAD
        return self._ahead.popleft() if self._ahead else None

    def fetchmany(self, size: int | None = 1) -> Any:
        """Raises Stalled and Overworked."""
        wanted = size or self.arraysize
        rows = [self._ahead.popleft() for _ in range(min(wanted, len(self._ahead)))]
        return rows + self._fetchmany(wanted - len(rows)) if len(rows) < wanted else rows

    def fetchall(self) -> Any:
        """Raises Stalled and Overworked."""
        rows = [*self._ahead, *self._fetchall()]
        self._ahead.clear()
        return rows

    def executemany(self, sql: str, *arguments: Any) -> Any:
        """Raises Stalled and Overworked."""
        self._begin()
        return self._executemany(sql, *arguments)

    def executescript(self, script: str) -> Any:
        """Raises Stalled and Overworked."""
        self._begin()
        return self._executescript(script)

    def execute(self, sql: str, *arguments: Any) -> Any:
        """Raises Stalled and Overworked."""
        if sql == READ:
            return super().execute(sql, *arguments)
        self._begin()
        if sql == WRITE and isinstance(self.connection, DiskConnection):
            self.connection.begin_writing()
        return self._execute(sql, *arguments)

    def close(self) -> None:
        """Not where a call of it hangs."""
        connection = self.connection
        if not (isinstance(connection, DiskConnection) and connection.is_lost):
            super().close()
