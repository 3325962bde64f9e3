"""A backup: all tables at one moment, in a SQLite file of its own, sealed with a digest of what is in it."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO
from urllib.parse import quote

from sqlalchemy import Connection, Table, delete, insert, select
from sqlalchemy.engine import URL

from netlimit.errors import StoreError
from netlimit.store import clock, migrate, vfs
from netlimit.store.connection import LONGEST_VALUE
from netlimit.store.engine import Database
from netlimit.store.tables import SCHEMA, metadata

_AT_ONCE = 2000
_MAGIC = b"SQLite format 3\0"
_SIZES, _PAGES = 16, slice(12, 16)
"""The header of a SQLite file (sqlite.org/fileformat2.html): the size of a page follows the magic, the number of pages
is twelve bytes further on."""
_CHUNK = 2**20
_LABEL = "CREATE TABLE backup (made_at TEXT, source TEXT, revision INTEGER, digest TEXT)"
_WORKING = (
    "SELECT name FROM sqlite_master WHERE sql NOT LIKE 'CREATE TABLE %' AND sql NOT LIKE 'CREATE TRIGGER %' "
    "AND sql NOT LIKE 'CREATE INDEX %' AND sql NOT LIKE 'CREATE UNIQUE INDEX %' UNION ALL "
    "SELECT m.name || '.' || c.name FROM sqlite_master AS m, pragma_table_xinfo(m.name) AS c "
    "WHERE m.sql LIKE 'CREATE TABLE %' AND c.hidden > 0"
)
"""Views, tables of modules, and generated columns. SQLite goes by the text, whatever else the schema says of it."""
_TRIGGERS = "SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE TRIGGER %'"
_NOT_SEALED = ("backup", "sqlite_sequence")


@dataclass(frozen=True, slots=True)
class Label:
    """What a backup says of itself: when it was made, of which database, and at which revision."""

    made_at: datetime
    source: str
    revision: int


class NoBackup(StoreError):
    """The file is none that `write_backup` has written, or not as it has written it."""


def write_backup(database: Database, path: Path, now: datetime) -> Label:
    """Write a backup to a new file, 0600. Raises StoreError, and OSError where the file cannot be made.

    SQLite opens files by name, so it is made where nobody else may exchange names, and then copied into what was made
    at the path: others may write the directory in which root wants it."""
    with TemporaryDirectory(prefix="netlimit-") as directory, open(path, "xb", opener=_make) as file:
        try:
            made = Path(directory) / "backup.db"
            label = _fill(database, made, now)
            with made.open("rb") as source:
                shutil.copyfileobj(source, file, _CHUNK)
            file.flush()
            os.fsync(file.fileno())
            if not _is_there(file, path):
                raise StoreError(
                    f"Somebody has put something else in the place of {path} while the backup was written: give it a "
                    "name in a directory that nobody else may write."
                )
        except BaseException:
            if _is_there(file, path):
                path.unlink()
            raise
    return label


def _make(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _is_there(file: BinaryIO, path: Path) -> bool:
    """Whether the path is that of the open file."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    return False


@contextmanager
def open_backup(path: Path) -> Iterator[tuple[Label, Connection]]:
    """What is in a backup, at the schema of this code. The file stays as it is: one of an older netlimit is migrated as
    a copy. Raises NoBackup where the file is not just what was written, and OSError where it cannot be read."""
    with TemporaryDirectory(prefix="netlimit-") as directory:
        copy = Path(directory) / "backup.db"
        _copy(path, copy)
        label = _verify(copy, path)
        database = _open(copy)
        try:
            with database.migrating() as connection:
                migrate.upgrade(connection)
            with database.reading() as connection:
                yield label, connection
        finally:
            database.close()


def _copy(path: Path, copy: Path) -> None:
    """Copy a file that begins as SQLite's do. Waits for nobody: not for the other end of a FIFO."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise NoBackup(f"{path} is no file, so no backup of netlimit; `netlimit backup` makes one.")
    with open(descriptor, "rb") as source, copy.open("wb") as target:
        if source.read(len(_MAGIC)) != _MAGIC:
            raise NoBackup(f"{path} is no backup of netlimit, or is damaged; `netlimit backup` makes one.")
        # A file with holes, or with more than its header says, would be copied for minutes.
        pages = int.from_bytes(source.read(_SIZES)[_PAGES], "big")
        source.seek(len(_MAGIC))
        size = int.from_bytes(source.read(2), "big")
        if pages * (65536 if size == 1 else size) != found.st_size:
            raise NoBackup(f"The backup {path} is damaged: it is not as long as it says; take another one.")
        _look_for_label(path)
        source.seek(0)
        shutil.copyfileobj(source, target, _CHUNK)


def _look_for_label(path: Path) -> None:
    """Whether it says that it is a backup: some other database of gigabytes is not copied to find out. And whether it
    holds rows only: what is worked out may work without end."""
    vfs.install()  # a FIFO may be in its place by now
    connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
    try:
        working = connection.execute(_WORKING).fetchone()
        connection.execute("SELECT made_at FROM backup").fetchone()
    except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite's own message quotes what it finds in the schema
        raise _refuse_damaged(path, error) from None
    finally:
        connection.close()
    if working is not None:
        raise NoBackup(
            f"{path} is no backup as `netlimit backup` makes them: what {working[0]!r} holds is worked out as it is "
            "read, and nobody knows for how long. Take another one."
        )


def copy_rows(source: Connection, target: Connection, table: Table) -> None:
    """Copy all rows of a table from one database into another."""
    rows = source.execution_options(yield_per=_AT_ONCE).execute(select(table))
    for some in rows.mappings().partitions():
        target.execute(insert(table), [dict(row) for row in some])


def _refuse_working(source: Connection, database: Database) -> None:
    """Raise StoreError where a table of ours holds more than rows: what is worked out as it is read may fill disks."""
    for name in source.exec_driver_sql(_WORKING).scalars():
        if name.partition(".")[0] in metadata.tables:
            raise StoreError(
                f"The database {database} is not as netlimit made it: what {name!r} holds is worked out as it is read, "
                "and nobody knows how much that is. Find out who has done that, and bring back a backup of before."
            )


def _fill(database: Database, path: Path, now: datetime) -> Label:
    target = _open(path)
    try:
        with target.migrating() as connection:
            migrate.upgrade(connection)
            connection.execute(delete(metadata.tables["clock"]))
        with database.reading() as source, target.writing() as connection:
            if database.is_sqlite:
                _refuse_working(source, database)
            for table in metadata.sorted_tables:
                copy_rows(source, connection, table)
            label = Label(now, str(database), clock.revision(source))
    finally:
        target.close()
    _seal(path, label)
    return label


def _seal(path: Path, label: Label) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
    connection.execute(_LABEL)
    row = (label.made_at.isoformat(), label.source, label.revision, _digest(connection))
    connection.execute("INSERT INTO backup VALUES (?, ?, ?, ?)", row)
    connection.commit()
    connection.close()


def _verify(copy: Path, path: Path) -> Label:
    """Read the label, and compare what it says with what is there."""
    connection = sqlite3.connect(copy)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
    try:
        _drop_triggers(connection)
        label, digest = _read_label(connection)
        schema: str = connection.execute("SELECT version_num FROM alembic_version").fetchone()[0]
        sound = connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok" and _digest(connection) == digest
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise _refuse_damaged(path, error) from None
    finally:
        connection.close()
    if not sound:
        raise NoBackup(f"The backup {path} is damaged: it holds something else than was written; take another one.")
    if schema > SCHEMA:
        raise NoBackup(
            f"The backup {path} is of a newer netlimit (schema {schema}; this one knows {SCHEMA}); install that one."
        )
    return label


def _read_label(connection: sqlite3.Connection) -> tuple[Label, str]:
    """The label and the digest beside it, which does not cover the label. Raises sqlite3.Error, TypeError or ValueError
    where it is none."""
    made_at, source, revision, digest = connection.execute("SELECT * FROM backup").fetchone()
    label = Label(datetime.fromisoformat(made_at), source, revision)
    if label.made_at.tzinfo is None or not isinstance(source, str) or not isinstance(revision, int):
        raise ValueError("its label cannot be read")
    return label, digest


def _refuse_damaged(path: Path, error: Exception) -> NoBackup:
    return NoBackup(f"{path} is no backup of netlimit, or is damaged ({error}); `netlimit backup` makes one.")


def _drop_triggers(connection: sqlite3.Connection) -> None:
    """Whatever they would do, and for however long, once the copy is migrated."""
    for (name,) in connection.execute(_TRIGGERS).fetchall():
        connection.execute('DROP TRIGGER "{}"'.format(name.replace('"', '""')))


def _digest(connection: sqlite3.Connection) -> str:
    """Of every row of every table, whatever the schema."""
    found = hashlib.sha256()
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
    for (name,) in names:
        if name not in _NOT_SEALED:
            found.update(name.encode())
            for row in connection.execute(f'SELECT * FROM "{name}" ORDER BY rowid'):  # noqa: S608  # from the file itself
                found.update(repr(row).encode())
    return found.hexdigest()


def _open(path: Path) -> Database:
    return Database(URL.create("sqlite", database=str(path)))
