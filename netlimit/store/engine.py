"""One database: how it is opened, how transactions begin on it, and what its errors mean to an operator."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection, QueuePool

from netlimit.errors import StoreError
from netlimit.store import files
from netlimit.store.tables import SCHEMA

BUSY_SECONDS = 20
"""How long a writer of SQLite waits for its turn; the longest change, 100,000 rules, takes about two."""
CHANNEL = "netlimit"
"""What PostgreSQL's NOTIFY is sent on after each change that somebody may wait for."""

_BEGIN = "netlimit_begin"


class Database:
    """The engine behind a Store. Opens nothing until it is used.

    `reading()` and `writing()` are transactions; each sees one consistent snapshot. SQLite's writers take their turn
    at the start (BEGIN IMMEDIATE): a transaction that reads first and then writes would fail at once when another
    process has written in between.
    """

    def __init__(self, url: str) -> None:
        self.url = _parse_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.path = Path(self.url.database or "") if self.is_sqlite else None
        self.engine = _open_sqlite(self.path) if self.path else _open_postgres(self.url)
        snapshot = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ"}
        self.driver_error: type[Exception] = self.engine.dialect.loaded_dbapi.Error
        self._reader = self.engine.execution_options(**snapshot)
        self._writer = self.engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
        self._checked = False
        self._place: files.Place | None = None

    def __str__(self) -> str:
        return str(self.path) if self.path else self.url.render_as_string(hide_password=True)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        self._check()
        with self._in_words(), self._reader.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self, wake: bool = True) -> Iterator[Connection]:
        """A transaction that writes; `wake` tells those who watch (SQLite's watchers see every write)."""
        self._check()
        with self._in_words(), self._writer.connect() as connection, connection.begin():
            yield connection
            if wake and not self.is_sqlite:
                connection.execute(text("SELECT pg_notify(:channel, '')"), {"channel": CHANNEL})

    @contextmanager
    def migrating(self) -> Iterator[Connection]:
        """A writing transaction on a database in whatever state, alone: a second one waits here for the first."""
        if self.path:
            files.make_file(self.path)
            files.check_file(self.path)
        self._checked = False
        with self._in_words():
            if self.is_sqlite:
                self._use_wal()
            with self._writer.connect() as connection, connection.begin():
                if not self.is_sqlite:
                    connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:channel))"), {"channel": CHANNEL})
                self._refuse_newer(schema(connection) or "")
                yield connection

    def pin(self) -> PoolProxiedConnection:
        """A connection of the driver's own kind, outside transactions, until it is closed."""
        self._check()
        with self._in_words():
            return self.engine.raw_connection()

    def say(self, error: BaseException | None) -> str:
        """Say what an error of the driver means, and what helps."""
        lines = str(error).strip().splitlines()
        return self._say(lines[0] if lines else type(error).__name__)

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    def _use_wal(self) -> None:
        """Write-ahead logging lets readers go on while one writes. It is a property of the file, so set once."""
        with self.engine.connect() as connection:
            connection.execution_options(**{_BEGIN: None}).exec_driver_sql("PRAGMA journal_mode=WAL")

    def find_place(self) -> files.Place | None:
        """Which file SQLite's is now; None when there is none, and for a server."""
        return files.find_place(self.path) if self.path else None

    def _check(self) -> None:
        """Raise StoreError unless the database is there and at the schema that this code was written for.

        Asked for every transaction: a file that was moved away would be written to for ever, by whoever has it open.
        """
        place = self.find_place()
        if self._checked and place == self._place:
            return
        if self._checked:
            self._checked = False
            self.close()
        if self.path:
            if self._place not in (None, place):
                files.check_exchange(self.path)
            files.check_file(self.path)
        with self._in_words(), self._reader.connect() as connection:
            found = schema(connection)
        if found is None:
            raise StoreError(f"The database {self} has no tables yet; run `netlimit db upgrade`.")
        self._refuse_newer(found)
        if found < SCHEMA:
            raise StoreError(
                f"The database {self} is at schema {found}, but this netlimit needs {SCHEMA}; "
                "run `netlimit db upgrade`."
            )
        self._place, self._checked = place, True

    def _refuse_newer(self, found: str) -> None:
        if found > SCHEMA:
            raise StoreError(
                f"The database {self} is at schema {found}, newer than this netlimit knows ({SCHEMA}); "
                "install the newer netlimit here too, or go back to a backup from before the upgrade."
            )

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            raise StoreError(self.say(error.orig)) from error
        except self.driver_error as error:
            raise StoreError(self.say(error)) from error
        except SQLAlchemyError as error:
            raise StoreError(f"The database {self} cannot do this: {error}") from error

    def _say(self, reason: str) -> str:
        if "is locked" in reason:
            return f"The database {self} was busy for {BUSY_SECONDS} seconds; another process holds it, try again."
        if "not a database" in reason or "malformed" in reason:
            return f"The database {self} is damaged ({reason}); restore a backup, or move it away and begin anew."
        if "unable to open" in reason or "readonly" in reason:
            return f"The database {self} cannot be opened for writing ({reason}); look at the rights of its directory."
        if "disk is full" in reason or "No space left" in reason:
            return f"The database {self} cannot grow: {reason}; make room on its disk."
        if "connection" in reason:
            return f"The database {self} cannot be reached ({reason}); look at NETLIMIT_DATABASE_URL and the server."
        return f"The database {self} refused: {reason}."


def schema(connection: Connection) -> str | None:
    """The newest migration that a database has; None for one without tables."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()


def _parse_url(text: str) -> URL:
    try:
        url = make_url(text)
    except ArgumentError:
        raise StoreError(
            "NETLIMIT_DATABASE_URL (not shown, it may hold a password) is no database URL; write for example "
            "sqlite:////var/lib/netlimit/netlimit.db or postgresql+psycopg://user:password@host/netlimit."
        ) from None
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise StoreError(f"NETLIMIT_DATABASE_URL begins with {url.drivername!r}; netlimit knows sqlite and postgresql.")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise StoreError("SQLite needs a file, which several processes share: sqlite:////var/lib/netlimit/netlimit.db.")
    return url


def _open_sqlite(path: Path) -> Engine:
    """`mode=rw` keeps SQLite from making the file, which it would make readable to all."""
    address = f"file:{quote(str(path))}?mode=rw"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(
            address, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=64
        )

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, pool_size=8, max_overflow=56)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: sqlite3.Connection, _entry: ConnectionPoolEntry) -> None:
    connection.execute("PRAGMA foreign_keys=ON")


def _begin_sqlite(connection: Connection) -> None:
    """Begin as we want it: the driver is told (isolation_level=None) to begin nothing by itself."""
    begin = connection.get_execution_options().get(_BEGIN, "BEGIN")
    if begin:
        connection.exec_driver_sql(begin)


def _open_postgres(url: URL) -> Engine:
    try:
        return create_engine(url, pool_pre_ping=True, pool_size=8, max_overflow=56)
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise StoreError(
            f"The driver for {url.drivername} is not installed ({error}); install `netlimit[postgres]`."
        ) from error
