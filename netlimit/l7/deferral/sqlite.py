"""Deferred requests in a SQLite file, which several processes of a host may share."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from netlimit.custody import give
from netlimit.l7.deferral.backlog import (
    NOBODY,
    BacklogFull,
    BacklogUnavailable,
    BacklogUnwritten,
    Bounds,
    Claim,
    Load,
    check_domain,
)
from netlimit.l7.deferral.clock import Now, count_uptime, find_boot, open_clock
from netlimit.l7.deferral.request import Deferred, Reply, Report, State, UnreadableRequest, read_head, write_head
from netlimit.l7.deferral.room import Room

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_BUSY_SECONDS = 10.0
_PAUSE = 0.02
_PRIMARY = 0xFF
"""The part of an error code that tells its kind."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS deferred (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    key TEXT NOT NULL,
    state TEXT NOT NULL,
    accepted REAL NOT NULL,
    expires REAL NOT NULL,
    due REAL NOT NULL,  -- claimed by nobody before
    tries INTEGER NOT NULL,
    size INTEGER NOT NULL,  -- of the answer, once it has ended
    head TEXT NOT NULL,
    body BLOB NOT NULL,
    ended REAL,
    reply TEXT,
    reason TEXT NOT NULL DEFAULT '',
    network TEXT NOT NULL DEFAULT '',
    others TEXT NOT NULL DEFAULT '',
    aside INTEGER NOT NULL DEFAULT 0  -- until it is due others of its line pass
);
CREATE TABLE IF NOT EXISTS clock (boot TEXT NOT NULL, origin REAL NOT NULL);  -- one row: when that boot was
CREATE TABLE IF NOT EXISTS served (domain TEXT NOT NULL, only_one INTEGER NOT NULL UNIQUE DEFAULT 1);
"""
_LINES = """
DROP INDEX IF EXISTS deferred_waiting;  -- of former versions
DROP INDEX IF EXISTS deferred_ended;
CREATE INDEX IF NOT EXISTS deferred_answers ON deferred (network, ended, number, size) WHERE state <> 'waiting';
DROP INDEX IF EXISTS deferred_lines;
CREATE INDEX IF NOT EXISTS deferred_groups ON deferred (key, others, number, state) WHERE state = 'waiting';
CREATE INDEX IF NOT EXISTS deferred_aside ON deferred (key, others, due) WHERE state = 'waiting' AND aside;
CREATE INDEX IF NOT EXISTS deferred_tried ON deferred (key, due) WHERE state = 'waiting' AND due > 0 AND NOT aside;
"""
_FORGET = """
    UPDATE weights SET requests = requests - 1, bytes = bytes - old.size
    WHERE key = old.key AND network = old.network;
    DELETE FROM weights WHERE key = old.key AND network = old.network AND requests = 0;
END
"""
_WEIGHTS = (
    """
    CREATE TABLE weights (  -- of what waits: to add it up for each request would take as long as it is much
        key TEXT NOT NULL,
        network TEXT NOT NULL,
        requests INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        PRIMARY KEY (key, network)
    ) WITHOUT ROWID
    """,
    """
    CREATE TRIGGER deferred_comes AFTER INSERT ON deferred WHEN new.state = 'waiting' BEGIN
        INSERT INTO weights VALUES (new.key, new.network, 1, new.size)
        ON CONFLICT DO UPDATE SET requests = requests + 1, bytes = bytes + excluded.bytes;
    END
    """,
    f"""
    CREATE TRIGGER deferred_ends AFTER UPDATE OF state ON deferred
    WHEN old.state = 'waiting' AND new.state <> 'waiting' BEGIN {_FORGET}
    """,
    f"CREATE TRIGGER deferred_goes AFTER DELETE ON deferred WHEN old.state = 'waiting' BEGIN {_FORGET}",
    """
    INSERT INTO weights
    SELECT key, network, count(*), sum(size) FROM deferred WHERE state = 'waiting' GROUP BY key, network
    """,
)
"""Kept by triggers, so that whoever writes to the file keeps them."""
_MOVES = (
    """
    CREATE TRIGGER IF NOT EXISTS deferred_moves AFTER UPDATE OF key, network ON deferred WHEN new.state = 'waiting'
    BEGIN
        INSERT INTO weights VALUES (new.key, new.network, 1, new.size)
        ON CONFLICT DO UPDATE SET requests = requests + 1, bytes = bytes + excluded.bytes;
    END
    """,
    f"""
    CREATE TRIGGER IF NOT EXISTS deferred_moved AFTER UPDATE OF key, network ON deferred WHEN old.state = 'waiting'
    BEGIN {_FORGET}
    """,
)
"""Files of former versions have none of these."""
_PUT = """
INSERT INTO deferred (id, key, state, accepted, expires, due, tries, size, head, body, network, others)
VALUES (?, ?, 'waiting', ?, ?, 0, 0, ?, ?, ?, ?, ?)
"""
_WEIGH = """
SELECT total(requests), total(bytes), total(requests) FILTER (WHERE key = ?1), total(bytes) FILTER (WHERE key = ?1),
    total(requests) FILTER (WHERE network = ?2), total(bytes) FILTER (WHERE network = ?2),
    total(requests) FILTER (WHERE key = ?1 AND network = ?2), total(bytes) FILTER (WHERE key = ?1 AND network = ?2)
FROM weights
"""
_MOVE = """
UPDATE deferred SET key = ?, others = ?, network = ?, head = ?, size = ? WHERE id = ? AND state = 'waiting'
"""
_BEHIND = """
SELECT 1 FROM deferred WHERE state = 'waiting' AND key = ?1 AND (others = ?2 OR others NOT IN (
    SELECT others FROM deferred WHERE state = 'waiting' AND key = ?1 AND aside AND due > ?3
)) LIMIT 1
"""
_CLAIM = """
WITH heads AS (
    SELECT min(number) AS first FROM deferred AS each INDEXED BY deferred_groups
    WHERE state = 'waiting' AND key NOT IN (
        SELECT key FROM deferred INDEXED BY deferred_tried
        WHERE state = 'waiting' AND due > 0 AND due > ?3 AND NOT aside
    ) AND NOT EXISTS (
        SELECT 1 FROM deferred AS other INDEXED BY deferred_aside
        WHERE other.state = 'waiting' AND other.aside AND other.key = each.key AND other.others = each.others
        AND other.due > ?3
    ) GROUP BY key
)
UPDATE deferred SET due = ?1, tries = tries + 1, aside = 0 WHERE number = (
    SELECT number FROM deferred JOIN heads ON number = first LEFT JOIN (
        SELECT json_extract(value, '$[0]') AS owner, json_extract(value, '$[1]') AS has FROM json_each(?2)
    ) ON owner = network WHERE coalesce(has, 0) < ?4 ORDER BY coalesce(has, 0), number LIMIT 1
) RETURNING id, CAST(head AS BLOB), CAST(body AS BLOB), tries
"""
_PROBE = "INSERT INTO served (domain, only_one) VALUES ('', 2)", "DELETE FROM served WHERE only_one = 2"
"""Written, though it leaves all as it was; an UPDATE that does is not."""
_NO_ROOM = sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR
"""Kinds of errors for want of room: the second is that of a quota."""
_FINISH = """
UPDATE deferred SET state = ?, ended = ?, reply = ?, body = ?, reason = ?, size = length(key) + ?, head = ''
WHERE id = ? AND state = 'waiting'
"""
_SWEEP = """
WITH answers AS (
    SELECT number, ended, size, row_number() OVER (PARTITION BY network ORDER BY ended DESC, number DESC) AS place
    FROM deferred WHERE state <> 'waiting'
), weighed AS (
    SELECT number, ended, sum(max(size * :most, :most_bytes)) OVER (ORDER BY place, ended DESC, number DESC) AS weight
    FROM answers
)
DELETE FROM deferred WHERE number IN (SELECT number FROM weighed WHERE ended < :since OR weight > :most * :most_bytes)
"""
"""The newest of each network stay, as many of each: one does not push out what others were answered."""


class SqliteBacklog:
    """A file with the mode 0600, for there are credentials in it. What is put is on the disk before it is answered.

    Raises OSError or sqlite3.Error where there can be no such file.
    """

    def __init__(self, path: Path, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self.lease = self.bounds.lease
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            give(file, -1, -1, 0o600, of=(os.geteuid(),))  # SQLite gives the same mode to what it puts beside
        finally:
            os.close(file)
        self._connection = _open(path)
        self.now = _insist(self._prepare)
        self._path = path
        self._room = Room(path, self._connection)
        self._room.bound_log()
        self._thread = ThreadPoolExecutor(1, "deferred")
        # What each request asks does not wait for what others have written.
        self._reader = _open(path)
        self._reading = ThreadPoolExecutor(1, "deferred")

    def serve(self, domain: str) -> None:
        """Keep those of one domain alone."""
        self._connection.execute("INSERT OR IGNORE INTO served (domain) VALUES (?)", (domain,))
        check_domain(self._connection.execute("SELECT domain FROM served").fetchone()[0], domain)

    async def weigh(self, key: str, network: str) -> Load:
        """How much waits when a request of this key and network comes."""
        row = await self._ask(_WEIGH, key, network)
        assert row is not None  # sums are always one row
        return Load(*map(int, row))

    async def put(self, request: Deferred) -> None:
        """Keep a request for good. Raises BacklogFull."""
        await self._run(lambda: self._put(request))

    async def check(self) -> None:
        """Raise BacklogUnwritten if a request could not be put now."""
        await self._run(self._check)

    async def withdraw(self, request: Deferred) -> bool:
        """Take back a request that has just been put; whether it is kept no more."""
        query = "DELETE FROM deferred WHERE id = ? AND state = 'waiting' AND tries = 0"
        await self._run(lambda: self._connection.execute(query, (request.id,)))
        return await self.find(request.id) is None

    async def is_waiting(self, key: str) -> bool:
        """Whether requests of a key wait."""
        query = "SELECT 1 FROM deferred WHERE state = 'waiting' AND key = ? LIMIT 1"
        return await self._ask(query, key) is not None

    async def comes_behind(self, key: str, others: str) -> bool:
        """Whether one that comes now is to wait behind others of its line."""
        return await self._ask(_BEHIND, key, others, self.now()) is not None

    async def claim(self, now: float, places: Mapping[str, int] = NOBODY, most: int = 1) -> Claim | None:
        """A request whose turn it is, or None."""
        told = now + self.lease, json.dumps([*places.items()]), now, most
        while rows := await self._run(lambda: self._connection.execute(_CLAIM, told).fetchall()):
            identity, head, body, tries = rows[0]
            try:
                return Claim(read_head(identity, head, body), tries)
            except UnreadableRequest as error:
                log.error("%s", error)
                await self._end(identity, State.FAILED, now, None, str(error))
        return None

    async def renew(self, request: Deferred, now: float) -> None:
        """Let a claim last a whole lease from now."""
        query = "UPDATE deferred SET due = ? WHERE id = ? AND state = 'waiting'"
        await self._run(lambda: self._connection.execute(query, (now + self.lease, request.id)))

    async def postpone(self, request: Deferred, until: float, tried: bool, aside: bool = False) -> None:
        """Give a claim back."""
        query = "UPDATE deferred SET due = ?, tries = tries - ?, aside = ? WHERE id = ? AND state = 'waiting'"
        await self._run(lambda: self._connection.execute(query, (until, 0 if tried else 1, aside, request.id)))

    async def move(self, request: Deferred, moved: Deferred) -> bool:
        """Put a request into another line, in which it has its place by when it came."""
        head = write_head(moved)
        told = moved.key, moved.others, moved.network, head, len(head) + len(moved.body), moved.id
        return bool((await self._run(lambda: self._connection.execute(_MOVE, told))).rowcount)

    async def finish(self, request: Deferred, state: State, now: float, reply: Reply | None, reason: str) -> None:
        """A request's end."""
        await self._end(request.id, state, now, reply, reason)

    async def find(self, identity: str) -> Report | None:
        """What has become of a request."""
        query = "SELECT state, accepted, expires, tries, reply, body, reason FROM deferred WHERE id = ?"
        row = await self._ask(query, identity)
        if row is None:
            return None
        state, accepted, expires, tries, told, body, reason = row
        reply = None
        if told is not None:
            status, headers, truncated = json.loads(told)
            reply = Reply(status, tuple((name, value) for name, value in headers), body, truncated)
        return Report(State(state), accepted, expires, tries, reply, reason)

    async def sweep(self, now: float) -> None:
        """Forget what has ended long ago, and more than can be remembered."""
        told = {"since": now - self.bounds.keep, "most": self.bounds.most, "most_bytes": self.bounds.most_bytes}
        await self._run(lambda: self._connection.execute(_SWEEP, told))

    async def aclose(self) -> None:
        """Close the file."""
        await self._run(self._connection.close)
        await self._run(self._reader.close, self._reading)
        self._thread.shutdown()
        self._reading.shutdown()

    async def _end(self, identity: str, state: State, now: float, reply: Reply | None, reason: str) -> None:
        told = None if reply is None else json.dumps([reply.status, reply.headers, reply.truncated])
        body = b"" if reply is None else reply.body
        row = (state, now, told, body, reason, len(told or "") + len(body) + len(reason), identity)
        await self._run(lambda: self._connection.execute(_FINISH, row))

    def _prepare(self) -> Now:
        """Have all in the file that this version needs, whatever of it is there already; its clock."""
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.executescript(_SCHEMA)
        self._add_columns()
        self._connection.executescript(_LINES)
        self._add_weights()
        return self._open_clock()

    def _add_columns(self) -> None:
        """Have a file of a former version tell whose each request is, and who stands aside."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            known = {name for _, name, *_ in connection.execute("PRAGMA table_info(deferred)")}
            if "others" not in known:
                connection.execute("ALTER TABLE deferred ADD COLUMN others TEXT NOT NULL DEFAULT ''")
                connection.execute("ALTER TABLE deferred ADD COLUMN aside INTEGER NOT NULL DEFAULT 0")
            if "network" not in known:
                connection.execute("ALTER TABLE deferred ADD COLUMN network TEXT NOT NULL DEFAULT ''")
                query = "SELECT id, CAST(head AS BLOB) FROM deferred WHERE state = 'waiting'"
                for identity, head in connection.execute(query).fetchall():
                    with suppress(UnreadableRequest):  # it is dropped when its turn comes
                        network = read_head(identity, head, b"").network
                        connection.execute("UPDATE deferred SET network = ? WHERE id = ?", (network, identity))
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    def _add_weights(self) -> None:
        """Have a file tell how much waits in it, also one of a former version."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            if not connection.execute("PRAGMA table_info(weights)").fetchall():
                for statement in _WEIGHTS:
                    connection.execute(statement)
            for statement in _MOVES:
                connection.execute(statement)
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    def _open_clock(self) -> Now:
        """The clock of all processes that have the file open since the machine has booted; each new boot has a new one,
        by the time of day at its first opening. Who had claimed something before is dead."""
        boot = find_boot()
        if boot is None:
            return open_clock()
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            known: dict[str, float] = dict(connection.execute("SELECT boot, origin FROM clock"))
            if boot not in known:
                if known:
                    connection.execute("DELETE FROM clock")
                    connection.execute("UPDATE deferred SET due = 0 WHERE state = 'waiting'")
                known[boot] = time.time() - count_uptime()
                connection.execute("INSERT INTO clock (boot, origin) VALUES (?, ?)", (boot, known[boot]))
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        origin = known[boot]
        return lambda: origin + count_uptime()

    def _check(self) -> None:
        self._check_room(0)
        with self._writing() as connection:
            for statement in _PROBE:
                connection.execute(statement)

    def _check_room(self, size: int) -> None:
        """Raise BacklogUnwritten where so many bytes would take what is left for replaying."""
        if lack := self._room.find_lack(size):
            raise BacklogUnwritten(lack, self._remedy, lasts=not size or bool(self._room.find_lack()))

    @property
    def _remedy(self) -> str:
        return f"Make room on the disk of {self._path}."

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # SQLite itself ends one for which there is no room
                connection.execute("ROLLBACK")
            raise

    def _put(self, request: Deferred) -> None:
        head = write_head(request)
        size = len(head) + len(request.body)
        self._check_room(size)
        with self._writing() as connection:
            load = Load(*map(int, connection.execute(_WEIGH, (request.key, request.network)).fetchone()))
            if not self.bounds.have_room(load, size, request.shared):
                raise BacklogFull
            told = request.id, request.key, request.accepted, request.expires, size, head, request.body
            connection.execute(_PUT, (*told, request.network, request.others))

    async def _ask(self, query: str, *told: object) -> tuple[Any, ...] | None:
        """The first row of what a query finds."""
        row: tuple[Any, ...] | None = await self._run(
            lambda: self._reader.execute(query, told).fetchone(), self._reading
        )
        return row

    async def _run(self, work: Callable[[], _T], thread: ThreadPoolExecutor | None = None) -> _T:
        """Do something in a thread, by default in that which writes."""
        reads = thread is not None
        try:
            return await asyncio.get_running_loop().run_in_executor(
                thread or self._thread, work if reads else partial(self._write, work)
            )
        except (sqlite3.Error, OSError) as error:
            if reads:
                raise BacklogUnavailable(error) from error
            raise BacklogUnwritten(error, self._remedy if _lacks_room(error) else "") from error

    def _write(self, work: Callable[[], _T]) -> _T:
        """Do what writes; where there is no room for it, once more when the log has begun anew, in its own room."""
        try:
            return work()
        except sqlite3.Error as error:
            if not _lacks_room(error):
                raise
            with suppress(sqlite3.Error):
                self._room.empty_log()
            return work()


def _lacks_room(error: BaseException) -> bool:
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & _PRIMARY in _NO_ROOM


def _insist(prepare: Callable[[], _T]) -> _T:
    """Do what another process may be doing at this moment, too. Then SQLite waits for some locks and fails at others at
    once, in a file that is no WAL yet."""
    ending = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            return prepare()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & _PRIMARY != sqlite3.SQLITE_BUSY or time.monotonic() >= ending:
                raise
        time.sleep(_PAUSE)


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
