"""Several processes open the same file at the same moment, as the workers of a server do when it starts."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import Timer

import pytest

from netlimit.l7.deferral import sqlite
from netlimit.l7.deferral.sqlite import SqliteBacklog

PROCESSES, FILES = 8, 40


def open_each(folder: Path, together: Barrier, told: SimpleQueue[str]) -> None:
    for number in range(FILES):
        together.wait(60)
        try:
            backlog = SqliteBacklog(folder / f"{number}.db")
            backlog.serve("app")
            asyncio.run(backlog.aclose())
        except Exception as error:
            told.put(repr(error))
        else:
            told.put("opened")


def test_of_many_that_make_a_file_at_once_none_fails(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    together, told = context.Barrier(PROCESSES), context.SimpleQueue()
    processes = [context.Process(target=open_each, args=(tmp_path, together, told)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    try:
        assert {told.get() for _ in range(PROCESSES * FILES)} == {"opened"}
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    for number in range(FILES):
        with closing(sqlite3.connect(tmp_path / f"{number}.db")) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@contextmanager
def written_to(path: Path, seconds: float) -> Iterator[None]:
    """Another writes to a file that is no WAL yet."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as connection:
        connection.execute("CREATE TABLE another (one)")
        connection.execute("BEGIN IMMEDIATE")
        timer = Timer(seconds, lambda: connection.execute("ROLLBACK"))
        timer.start()
        yield
        timer.join()


@pytest.mark.anyio
async def test_who_is_there_first_is_waited_for(tmp_path: Path) -> None:
    with written_to(tmp_path / "deferred.db", 0.5):
        backlog = SqliteBacklog(tmp_path / "deferred.db")
        await backlog.aclose()


def test_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_BUSY_SECONDS", 0.2)
    with written_to(tmp_path / "deferred.db", 1.0), pytest.raises(sqlite3.OperationalError, match="is locked"):
        SqliteBacklog(tmp_path / "deferred.db")


def test_what_is_no_file_of_sqlite_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "deferred.db").write_bytes(b"something else, and long enough to be a header" * 100)
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        SqliteBacklog(tmp_path / "deferred.db")
