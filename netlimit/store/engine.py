"""One database: how it is opened, how transactions begin on it, and what its errors mean to an operator."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Dialect, Engine, create_engine, event, inspect, select, text
from sqlalchemy.engine import URL, ExceptionContext, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    DisconnectionError,
    IntegrityError,
    NoSuchModuleError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection, QueuePool
from sqlalchemy.schema import CreateTable

from netlimit.errors import Busy, Slow, StoreError
from netlimit.stalls import Overworked, Stalled, find_disk
from netlimit.store import files, homes, mapping
from netlimit.store.allowance import Allowance
from netlimit.store.checkpoint import Checkpoint
from netlimit.store.connection import READ, WRITE, DiskConnection, connect, describe_damage, find_memory, refuse_work
from netlimit.store.faults import BUSY_SECONDS, TooNew, Undone, explain_fault
from netlimit.store.primaries import Primaries, choose_among
from netlimit.store.servers import Names, Reached, find_primary, find_proof, find_servers
from netlimit.store.tables import SCHEMA

CHANNEL = "netlimit"
"""What PostgreSQL's NOTIFY is sent on after each change that somebody may wait for."""
MIGRATION_LOCK_SECONDS = 5
"""How long a migration waits for those who read a table; meanwhile everybody else waits behind it."""
CHECK_SECONDS = 10.0
"""How long a file is looked through at most; 100,000 rules take a fraction of it."""

SHORT_SILENCE = 2.0
"""Seconds that a server may say nothing to who is impatient: longer than he waits for locks, and than what he asks
takes."""

LEAST_WORK = 10.0
"""Seconds that SQLite may work in all, however little is allowed: to write what 100,000 rules have counted takes
some."""

MEMORY = URL.create("sqlite")
"""A database of one process, which needs no file system: it is gone when it is closed."""

LOOK_UP_SECONDS = 3.0
"""How long who is impatient waits for the names of servers to be looked up."""

_LONGEST_LOG = 4 * 2**20
"""Bytes of SQLite's log that stay when it begins anew: what a large change has taken, others may need; and where others
have left nothing of the disk, who revokes a token has that."""
_LOG_SECONDS = 0.5
"""How long who brings the log into the file waits for others, and they for him; controllers wait for a second."""
_LONG, _BREATH = 0.5, 0.2
"""After a transaction of so many seconds the next one of this process waits so long: in that time each of another
process comes, which SQLite has look again every tenth of a second."""
_BEGIN = "netlimit_begin"
_SERVER = "netlimit_server"
"""Under what is kept of a connection which of several servers it leads to."""
_ATTEMPTS = 5
_CHECK_STEPS = 100_000
_PATIENCE = {
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
"""How PostgreSQL's client notices a server that has gone without a word (libpq, 32.1.2); the URL may say otherwise."""
_ENCODING = "UTF8"
"""Of PostgreSQL's, the one that has every letter."""
_SHOWN = {
    *("host", "hostaddr", "port", "dbname", "user", "service", "passfile", "application_name", "client_encoding"),
    *("keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count"),
    *("connect_timeout", "tcp_user_timeout", "target_session_attrs", "load_balance_hosts"),
    *("sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "channel_binding", "gssencmode", "options"),
}
"""What a URL may say behind its question mark (libpq, 32.1.2) and everybody read: a password may stand behind another
word that is misspelt."""

_POOL: dict[str, Any] = {"pool_size": 16, "max_overflow": 8}
"""What is over the size is closed again when it is given back. Making a connection costs a server more than all that is
asked on it, and changes of rules wait for each other anyway: so a few that stay, and who finds none free waits."""

_STAY = "SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'idle_session_timeout'"
"""Who waits to hear of changes is idle, however short the server would have that be. PostgreSQL 13 does not know it."""

_READ_ONLY = "25006"
"""SQLSTATE (PostgreSQL, appendix A) of who is asked for a change and takes none."""

_HIDE_NOTHING = "SET row_security = off"
"""Rows that policies hide would be taken for rules that are gone: where there are some, the server is to refuse."""

Dial = Callable[..., Any]
Reach = Callable[[Dial, ConnectionPoolEntry, dict[str, Any]], Any]

P = ParamSpec("P")
Owner = TypeVar("Owner")
Result = TypeVar("Result")


def again(method: Callable[Concatenate[Owner, P], Result]) -> Callable[Concatenate[Owner, P], Result]:
    """Make a transaction again, a few times, when the server has undone it to let another one pass."""

    @wraps(method)
    def attempt(self: Owner, /, *arguments: P.args, **named: P.kwargs) -> Result:
        for number in range(1, _ATTEMPTS):
            try:
                return method(self, *arguments, **named)
            except Undone:
                time.sleep(0.01 * number)
        return method(self, *arguments, **named)

    return attempt


class Database:
    """The engine behind a Store. Opens nothing until it is used.

    `reading()` and `writing()` are transactions; each sees one consistent snapshot. SQLite's writers take their turn
    at the start (BEGIN IMMEDIATE): a transaction that reads first and then writes would fail at once when another
    process has written in between. Those of one process queue up before that, for SQLite knows no queue: who waits
    looks again now and then, and with many of them some would wait for ever.

    `wal` gives a SQLite file a write-ahead log, so that readers go on while one writes. Without it, the file can be
    read on a disk without room. `MEMORY` for its URL needs no file.

    With `patience`, in seconds, a lock is waited for only so long, and a server that says nothing for a few seconds is
    given up: for who has other things to do. Without it, locks are waited for as long as the longest change takes, and
    a server as long as `silence` says, in seconds; without that, for ever: for who asks one thing, and may wait.

    `crowded`: many threads read, for whoever asks; their reads may overlap without end, and wait now and then so that
    the log of a SQLite file does not grow without end, too.
    """

    def __init__(
        self,
        url: str | URL,
        wal: bool = True,
        patience: float | None = None,
        silence: float | None = None,
        crowded: bool = False,
    ) -> None:
        self._patience = BUSY_SECONDS if patience is None else patience
        self.url = url if isinstance(url, URL) else _parse_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.path = Path(self.url.database) if self.is_sqlite and self.url.database else None
        self.allow: Callable[[float | None], None] = lambda seconds: None
        """How long the calling thread may wait for a server from now on, in seconds, for all answers together, or may
        have SQLite work (None: without end, but for SQLite's bound of each statement). Then its connection is given up,
        or what it asks broken off, and it hears Slow. Of a server's, who is not impatient is asked nothing."""
        self._allowance = Allowance(refuse_work)
        self.primaries = choose_among(self.url)
        if self.path:
            self.engine = _open_sqlite(partial(connect, self.path, self._patience, self._allowance), self._patience)
            self.allow = self._allow_work
        elif self.is_sqlite:
            self.engine = _open_sqlite(find_memory(self._patience), self._patience)
        else:
            self.engine = _open_postgres(self.url, patience, str(self))
            reach = partial(_reach, self.primaries)
            if silence is not None or patience is not None:
                looked_up = find_servers(self.url) if patience is not None else ()
                self.allow = _be_impatient(self.engine, looked_up, silence or SHORT_SILENCE, reach)
            elif self.primaries is not None:
                event.listen(self.engine, "do_connect", partial(_be_patient, reach))
            if self.primaries is not None:
                event.listen(self.engine, "checkout", self._refuse_other)
        self.reached = Reached(by_file=self.is_sqlite)
        if not self.is_sqlite:
            event.listen(self.engine, "connect", self.reached.note)
        snapshot = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ"}
        # Whatever the server's own level: writers wait for each other, and under a stricter one they would be refused.
        waiting = {} if self.is_sqlite else {"isolation_level": "READ COMMITTED"}
        self.driver_error: type[Exception] = self.engine.dialect.loaded_dbapi.Error
        self._reader = self.engine.execution_options(**snapshot)
        self._writer = self.engine.execution_options(**{_BEGIN: WRITE}, **waiting)
        self._checked = False
        self._place: files.Place | None = None
        self._surroundings = files.Surroundings(None, None)
        self._turn, self._line = threading.Lock(), threading.Lock()
        self._journal = ("WAL" if wal else "DELETE") if self.path else "MEMORY"
        is_held_up = crowded and self._journal == "WAL"
        self._checkpoint = Checkpoint(self.path, self._begin_log_anew) if self.path and is_held_up else None

    def __str__(self) -> str:
        if self.is_sqlite:
            return str(self.path or "in memory")
        shown = {name: value if name in _SHOWN else "***" for name, value in self.url.query.items()}
        return self.url.set(query=shown).render_as_string(hide_password=True)

    @contextmanager
    def reading(self, little: bool = False) -> Iterator[Connection]:
        """A transaction that only reads: if but a `little`, it waits for nobody where it is crowded. Raises Busy."""
        self._check()
        with (
            self._waiting_for_log(little),
            self._in_words(),
            self._reader.connect() as connection,
            connection.begin(),
        ):
            yield connection

    @contextmanager
    def _waiting_for_log(self, little: bool) -> Iterator[None]:
        if self._checkpoint is None:
            yield
            return
        with ExitStack() as stack:
            try:
                stack.enter_context(self._checkpoint.passing() if little else self._checkpoint.reading(self._patience))
            except TimeoutError:
                raise Busy(
                    f"The database {self} was busy for {self._patience:g} seconds: its log is long, and reads that go "
                    "on keep it from beginning anew; try again.",
                    str(self),
                ) from None
            yield

    @contextmanager
    def writing(self, wake: bool = True, behind: bool = False) -> Iterator[Connection]:
        """A transaction that writes; `wake` tells those who watch (SQLite's watchers see every write). `behind`: those
        of this process that are not wait for one such at most, besides the one that is under way."""
        self._check()
        with self._taking_turns(behind), self._waiting_for_log(little=True):
            began = time.monotonic()
            try:
                with self._in_words(), self._writer.connect() as connection, connection.begin():
                    place = self._place
                    yield connection
                    self._conclude(connection, place, wake)
            finally:
                self._cut_log()
                if self.path and time.monotonic() - began > _LONG:
                    time.sleep(_BREATH)

    def _cut_log(self) -> None:
        """Give back what a large change has taken for the log of a SQLite file, and does not need, be it undone. That
        file stays as large as it was, and may have filled the disk, so that nothing can be brought from it into the
        database either."""
        if self.path is None or self._journal != "WAL":
            return
        with suppress(OSError, StoreError):
            if self.path.with_name(f"{self.path.name}-wal").stat().st_size <= 2 * _LONGEST_LOG:
                return
            with self._in_words(), self._writer.connect() as writer, writer.begin():  # nobody adds to it meanwhile
                log = mapping.find_log(self.path)
                if log is not None:
                    cut = partial(files.cut_log, self.path, max(_LONGEST_LOG, log.size))
                    find_disk(self.path).call(cut)  # it may be frozen by now

    def _begin_log_anew(self) -> bool:
        """Bring the log into the file as a whole, so that who writes next begins it anew; whether that has been done.
        Most of it nobody waits for, and for the rest who writes waits shortly: for reads that others have begun."""
        with suppress(StoreError), self._in_words(), self.engine.connect() as connection:
            connection.execution_options(**{_BEGIN: None})
            used = connection.connection.driver_connection
            assert isinstance(used, DiskConnection)
            used.try_disk()
            connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")
            if not self._turn.acquire(timeout=_LOG_SECONDS):
                return False
            try:
                connection.exec_driver_sql(f"PRAGMA busy_timeout={round(1000 * _LOG_SECONDS)}")
                return not connection.exec_driver_sql("PRAGMA wal_checkpoint(RESTART)").one()[0]
            finally:
                self._turn.release()
                connection.exec_driver_sql(f"PRAGMA busy_timeout={round(1000 * self._patience)}")
        return False

    def is_elsewhere(self, info: Mapping[Any, Any]) -> bool:
        """Whether the connection that this is kept of leads to another server than all are to lead to now."""
        return self.primaries is not None and not self.primaries.is_used(info.get(_SERVER))

    def _refuse_other(self, _connection: Any, entry: ConnectionPoolEntry, _proxy: PoolProxiedConnection) -> None:
        if self.is_elsewhere(entry.info):
            raise DisconnectionError  # the pool makes another one
        if self.primaries is not None:
            self.primaries.note_answer()

    def _conclude(self, connection: Connection, place: files.Place | None, wake: bool) -> None:
        if self.is_elsewhere(connection.info):
            raise Undone(
                f"Another server of the database {self} is used since this began; nothing was changed, try again.",
                "Another server of the database is used since this began; nothing was changed, try again.",
            )
        if self.find_place() != place:
            raise StoreError(f"The file of the database {self} was moved away meanwhile; nothing was changed.")
        if wake and not self.is_sqlite:
            connection.execute(text("SELECT pg_catalog.pg_notify(:channel, '')"), {"channel": CHANNEL})

    @contextmanager
    def migrating(self) -> Iterator[Connection]:
        """A writing transaction on a database in whatever state, alone: a second one waits here for the first.

        One that must wait too long for who else uses the database raises StoreError, and has changed nothing.
        """
        if self.path:
            files.check_names(self.path)
            self._make_file(self.path)
            files.check_file(self.path)
        self._checked = False
        with self._in_words():
            if self.is_sqlite:
                self._choose_journal()
            with self._writer.connect() as connection, connection.begin():
                if not self.is_sqlite:
                    self._refuse_encoding(connection)
                found = schema(connection)
                self._refuse_newer(found or "")
                if not self.is_sqlite and found != SCHEMA:  # who has nothing to do waits for nobody
                    self._lock_schema(connection)
                place = self.find_place()
                yield connection
                self._conclude(connection, place, wake=True)

    def _lock_schema(self, connection: Connection) -> None:
        """Be the only one who migrates, until the transaction ends. What is locked are tables, for which others need
        rights: an advisory lock whoever may connect could hold."""
        homes.look_again(connection, str(self))
        is_empty = homes.find_home(connection) is None
        homes.enter(connection, str(self))
        if is_empty:
            with suppress(IntegrityError), connection.begin_nested():  # another has made it, for whom this has waited
                connection.execute(CreateTable(homes.versions, if_not_exists=True))
            homes.look_again(connection, str(self))
        connection.execute(text(f"LOCK TABLE {homes.versions.name} IN EXCLUSIVE MODE"))
        found = schema(connection)
        self._refuse_newer(found or "")
        connection.execute(text(f"SET LOCAL lock_timeout = '{MIGRATION_LOCK_SECONDS}s'"))
        if found not in (None, SCHEMA):
            # Changes of rules begin with the clock: so do we, for else each could wait for the other.
            connection.execute(text("LOCK TABLE clock IN ACCESS EXCLUSIVE MODE"))

    def _make_file(self, path: Path) -> None:
        """Make it, where it is missing. Raises StoreError."""
        if path.is_file():
            return
        with self._in_words():
            find_disk(path.parent).call(partial(files.make_file, path))

    def check_pages(self) -> None:
        """Look through a SQLite file for damage, as far as that goes in some seconds. Raises Damaged."""
        if not self.path:
            return
        files.check_names(self.path)
        if not self.path.exists() or not self.path.stat().st_size:
            return
        end = time.monotonic() + CHECK_SECONDS
        with self._in_words():
            connection = connect(self.path, BUSY_SECONDS, self._allowance)
            connection.set_progress_handler(lambda: time.monotonic() > end, _CHECK_STEPS)
            try:
                found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            except sqlite3.OperationalError as error:
                if error.sqlite_errorname != "SQLITE_INTERRUPT":
                    raise
                return
            finally:
                connection.close()
        if found != "ok":
            raise self.explain(describe_damage(found))

    def put_aside(self, now: datetime) -> Path:
        """Put an empty SQLite file in the place of a damaged one, which stays under the name that is returned. Raises
        OSError."""
        assert self.path is not None
        self.close()
        aside = files.put_aside(self.path, now)
        self._place, self._checked = None, False
        return aside

    def try_tables(self, names: Iterable[str]) -> None:
        """Raise StoreError unless these tables can be read and written now, whoever has locked them."""
        with self.writing(wake=False) as connection:
            if not self.is_sqlite:
                connection.execute(text(f"LOCK TABLE {homes.name_tables(connection, names)} IN ROW EXCLUSIVE MODE"))

    def pin(self) -> PoolProxiedConnection:
        """A connection of the driver's own kind, outside transactions, until it is closed."""
        self._check()
        with self._in_words():
            return self.engine.raw_connection()

    def explain(self, error: BaseException) -> StoreError:
        """What an error of the driver means."""
        return explain_fault(error, str(self), self._patience)

    def close(self) -> None:
        """Close every connection. What comes next looks at the file anew: its log may be another by then."""
        self._checked = False
        self.engine.dispose()

    def _allow_work(self, seconds: float | None) -> None:
        self._allowance.grant(None if seconds is None else max(seconds, LEAST_WORK))

    def break_off(self) -> None:
        """Have end what SQLite works at now, in whatever thread: who asked hears Slow."""
        self._allowance.break_off()

    def _choose_journal(self) -> None:
        """It is a property of the file, so set once."""
        with self.engine.connect() as connection:
            connection.execution_options(**{_BEGIN: None}).exec_driver_sql(f"PRAGMA journal_mode={self._journal}")

    def find_place(self) -> files.Place | None:
        """Which file SQLite's is now; None when there is none, and for a server."""
        return files.find_place(self.path) if self.path else None

    def _check(self) -> None:
        """Raise StoreError unless the database is there and at the schema that this code was written for.

        Asked for every transaction: a file that was moved away would be written to for ever, by whoever has it open.
        After an error the schema is looked at again, for somebody may have brought the database to another.
        """
        if self.primaries is not None:
            self.primaries.look()
        place = self.find_place()
        if self.path:
            files.check_names(self.path)
        if self._place not in (None, place):
            self.close()
        if self._checked:
            return
        if self.path:
            if self._place not in (None, place):
                files.check_exchange(self.path, self._surroundings)
            files.check_file(self.path)
        with self._in_words(), self._reader.connect() as connection:
            self._refuse_encoding(connection)
            found = schema(connection)
        if found is None:
            if not self.is_sqlite:
                self.close()  # where they will be is looked for as a connection is made
            raise StoreError(
                f"The database {self} has no tables yet; run `netlimit db upgrade`.",
                "The database has no tables yet; run `netlimit db upgrade`.",
            )
        self._refuse_newer(found)
        if found < SCHEMA:
            raise StoreError(
                f"The database {self} is at schema {found}, but this netlimit needs {SCHEMA}; "
                "run `netlimit db upgrade`.",
                "The database is at an older schema than this netlimit needs; run `netlimit db upgrade`.",
            )
        surroundings = files.find_surroundings(self.path) if self.path else self._surroundings
        if self.find_place() != place:  # it came or went while it was looked at: it is not known which one was read
            self.close()
            raise StoreError(f"The file of the database {self} has been moved just now; try again.")
        self._place, self._surroundings, self._checked = place, surroundings, True

    def _refuse_encoding(self, connection: Connection) -> None:
        if self.is_sqlite:
            return
        encoding = connection.execute(text("SHOW server_encoding")).scalar_one()
        if encoding != _ENCODING:
            raise StoreError(
                f"The database {self} has the encoding {encoding}, which cannot hold every text; make one that can: "
                f"`createdb --encoding {_ENCODING} --locale C --template template0 NAME`. What is in this one, "
                "`pg_dump` and `psql` bring there."
            )

    def _refuse_newer(self, found: str) -> None:
        if found > SCHEMA:
            raise TooNew(
                f"The database {self} is at schema {found}, newer than this netlimit knows ({SCHEMA}); "
                "install the newer netlimit here too, or go back to a backup from before the upgrade.",
                "The database is at a newer schema than this netlimit knows.",
            )

    @contextmanager
    def _taking_turns(self, behind: bool) -> Iterator[None]:
        """Wait for the other threads that write to the same SQLite file; a server has locks of its own."""
        if not self.is_sqlite:
            yield
            return
        if not (self._wait_in_line() if behind else self._turn.acquire(timeout=self._patience)):
            raise Busy(f"The database {self} was busy for {self._patience:g} seconds; try again.", str(self))
        try:
            yield
        finally:
            self._turn.release()

    def _wait_in_line(self) -> bool:
        """Wait for the turn as the only one of all who are `behind`; whether it has come in time."""
        end = time.monotonic() + self._patience
        if not self._line.acquire(timeout=self._patience):
            return False
        try:
            return self._turn.acquire(timeout=max(0.0, end - time.monotonic()))
        finally:
            self._line.release()

    def _doubt(self, error: BaseException) -> StoreError:
        """What an error means. After any but that of a slow server, the schema is looked at again."""
        # What was cut is given back when nobody has it any more; and a name may lead from a standby to the primary now.
        if mapping.is_lost() or getattr(error, "sqlstate", None) == _READ_ONLY:
            self.close()
        said = self.explain(error)
        self._checked = self._checked and isinstance(said, Slow)
        return said

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            raise self._doubt(error.orig or error) from error
        except self.driver_error as error:
            raise self._doubt(error) from error
        except PoolTimeout as error:
            raise StoreError(
                f"All connections to the database {self} that this process may have were in use for "
                f"{self._patience:g} seconds; try again."
            ) from error
        except SQLAlchemyError as error:
            raise StoreError(f"The database {self} cannot do this: {error}") from error


def schema(connection: Connection) -> str | None:
    """The newest migration that a database has; None for one without tables."""
    home = homes.find_home(connection)
    if home is None and connection.dialect.name != "sqlite":
        return None
    if not inspect(connection).has_table(homes.versions.name, schema=home):
        return None
    return connection.execute(select(homes.versions.c.version_num)).scalar_one_or_none()


def name_hosts(url: str) -> tuple[str, ...]:
    """The hosts that the database may be on, by name or address. Raises StoreError for what is no URL of one."""
    return find_servers(_parse_url(url))


def leave_out_secrets(url: str) -> tuple[str, bool]:
    """The URL of a database without its password, and without what else may be one; and whether that is the whole of
    it. Raises StoreError for what is no URL of one."""
    whole = _parse_url(url)
    known = {name: value for name, value in whole.query.items() if name in _SHOWN}
    rest = URL.create(whole.drivername, whole.username, None, whole.host, whole.port, whole.database, known)
    return rest.render_as_string(hide_password=False), rest == whole


def _parse_url(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise StoreError(
            "NETLIMIT_DATABASE_URL (not shown, it may hold a password) is no database URL; write for example "
            "sqlite:////var/lib/netlimit/netlimit.db or postgresql+psycopg://user:password@host/netlimit."
        ) from None
    if "@" in (url.host or "") or (url.password is not None and text.count("@") > 1):
        # What stands before the last is a part of the password, if that has a / or ? behind an @, too: neither an error
        # nor the resolver may be told.
        raise StoreError(
            "NETLIMIT_DATABASE_URL (not shown, it may hold a password) has more than one @ before its host, or another "
            "behind it; write an @ of the user, the password or anything else as %40."
        )
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise StoreError(f"NETLIMIT_DATABASE_URL begins with {url.drivername!r}; netlimit knows sqlite and postgresql.")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise StoreError("SQLite needs a file, which several processes share: sqlite:////var/lib/netlimit/netlimit.db.")
    if url.get_backend_name() == "sqlite" and (url.host or not str(url.database).startswith("/")):
        raise StoreError(
            "NETLIMIT_DATABASE_URL names a file of SQLite from wherever a command is started, so that each would have "
            "a database of its own. Write its path from the root, behind four slashes: "
            "sqlite:////var/lib/netlimit/netlimit.db."
        )
    return url


def _open_sqlite(creator: Callable[[], sqlite3.Connection], patience: float) -> Engine:
    pool = _POOL | {"pool_size": 40, "pool_timeout": patience, "poolclass": QueuePool}  # as many as the API has threads
    engine = create_engine("sqlite://", creator=creator, hide_parameters=True, **pool)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    event.listen(engine, "handle_error", _leave_stalled)
    return engine


def _leave_stalled(context: ExceptionContext) -> None:
    """A connection whose call does not end is of no use any more; the others are."""
    used = context.connection.connection.driver_connection if context.connection is not None else None
    is_given_up = isinstance(context.original_exception, Stalled | Overworked)
    if is_given_up and isinstance(used, DiskConnection) and used.is_lost:
        context.is_disconnect, context.invalidate_pool_on_disconnect = True, False


def _prepare_sqlite(connection: sqlite3.Connection, _entry: ConnectionPoolEntry) -> None:
    connection.text_factory = _read_text  # else one text that is no UTF-8 hides all rows that are asked for with it
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA mmap_size=0")  # what is mapped of the file itself, who may write it may cut
    connection.execute(f"PRAGMA journal_size_limit={_LONGEST_LOG}")
    connection.execute("PRAGMA temp_store=MEMORY")  # else large changes need room in /var/tmp, which anybody can fill


def _begin_sqlite(connection: Connection) -> None:
    """Begin as we want it: the driver is told (isolation_level=None) to begin nothing by itself."""
    begin = connection.get_execution_options().get(_BEGIN, READ)
    if begin:
        connection.exec_driver_sql(begin)


def _open_postgres(url: URL, patience: float | None, name: str) -> Engine:
    chosen = _PATIENCE if patience is None else _PATIENCE | {"connect_timeout": "2"}  # the least that libpq knows
    defaults = {name: value for name, value in chosen.items() if name not in url.query}
    defaults |= find_proof(url) | find_primary(url)
    defaults["client_encoding"] = _ENCODING  # whatever the URL, the environment or the database say
    pool = _POOL | {"pool_timeout": BUSY_SECONDS if patience is None else patience}
    try:
        engine = create_engine(
            url, connect_args=defaults, hide_parameters=True, pool_pre_ping=True, use_native_hstore=False, **pool
        )
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise StoreError(
            f"The driver for {url.drivername} is not installed ({error}); install `netlimit[postgres]`."
        ) from error
    wait = round(1000 * (BUSY_SECONDS if patience is None else patience))
    event.listen(engine, "connect", partial(_prepare_postgres, wait, name), insert=True)  # before anything is asked
    event.listen(engine, "engine_connect", homes.use_home)
    event.listen(engine, "handle_error", _close_lost_cursor)
    return engine


def _reach(primaries: Primaries | None, dial: Dial, entry: ConnectionPoolEntry, how: dict[str, Any]) -> Any:
    """A connection by the driver's own `dial`; of several servers to the one that is used."""
    if primaries is None:
        return dial(**how)
    entry.info[_SERVER], connection = primaries.connect(dial, how)
    return connection


def _be_patient(reach: Reach, dialect: Dialect, entry: ConnectionPoolEntry, where: Any, how: dict[str, Any]) -> Any:
    return reach(partial(dialect.connect, *where), entry, how)


def _be_impatient(
    engine: Engine, looked_up: tuple[str, ...], silence: float, reach: Reach
) -> Callable[[float | None], None]:
    """Have connections be given up when the server says nothing for so long, or answers too slowly for what the
    returned function grants; nor are names of servers waited for that are to be `looked_up`."""
    from psycopg import OperationalError  # the driver is not everywhere

    from netlimit.store.silence import ImpatientConnection, TooSlow

    names, allowance = Names(looked_up), Allowance(TooSlow)

    def connect(_dialect: Any, entry: ConnectionPoolEntry, where: Any, how: dict[str, Any]) -> ImpatientConnection:
        allowance.spend(0.0)  # who has nothing left need not begin
        began = time.monotonic()
        if not names.are_answered(LOOK_UP_SECONDS):
            raise OperationalError(f"the resolver has not answered for {LOOK_UP_SECONDS:g} seconds")
        connection: ImpatientConnection = reach(partial(ImpatientConnection.connect, *where), entry, how)
        try:
            allowance.spend(time.monotonic() - began)
        except OperationalError:
            connection.close()
            raise
        connection.silence, connection.allowance = silence, allowance
        return connection

    event.listen(engine, "do_connect", connect)
    return allowance.grant


def _prepare_postgres(milliseconds: int, name: str, connection: Any, entry: ConnectionPoolEntry) -> None:
    try:
        homes.settle(connection, entry.info, name)
    except StoreError:
        connection.close()
        raise
    connection.execute(f"SET lock_timeout = {milliseconds}; {_HIDE_NOTHING}; {_STAY}")
    connection.commit()


def _close_lost_cursor(context: ExceptionContext) -> None:
    """SQLAlchemy leaves a cursor open whose connection was lost; one that the server keeps complains when it goes."""
    statement = context.execution_context
    if context.is_disconnect and statement is not None:
        with suppress(Exception):
            statement.cursor.close()


def _read_text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")
