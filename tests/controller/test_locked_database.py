"""Somebody holds a lock on the database, or its server has stopped: what is wrong in the kernel is put right all the
same, and told when that can be."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from netlimit.controller import Controller, Setup
from netlimit.kernel.fake import FakeKernel
from netlimit.rules import parse_rule
from netlimit.store import Store, open_replica
from tests.awake import Awake
from tests.databases import Postgres, find_url

PATIENCE = 120.0
SOON = 2.5
"""Seconds in which drift is repaired, whatever the database does: one to wait for it, and one from look to look."""
ALL = "clock, rules, pauses, requests, hosts, numbers, repairs, counters, windows"


class Running:
    """A controller that runs over a kernel in memory, with a copy, as impatient as the process is."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.store = Store(url, patience=1.0)
        self.kernel = FakeKernel()
        self.replica = open_replica(directory / "controller", "gw")
        self.controller = Controller(self.store, self.kernel, Setup("gw", "fake"), replica=self.replica)
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.controller.run, args=[self.stopping.is_set])

    def add(self, target: str) -> None:
        store = Store(self.url)
        now = datetime.now(UTC)
        revision = store.add([parse_rule({"target": target, "action": "block"}, now)], "test", now)[0].revision
        until(lambda: any(each.applied_revision == revision for each in store.hosts()))
        store.close()

    def drift(self) -> float:
        """Take everything out of the kernel; the seconds until it is back."""
        kept = dict(self.kernel.chains), dict(self.kernel.hooks)
        with Awake() as awake:
            self.kernel.hooks.clear()
            self.kernel.chains.clear()
            until(lambda: (self.kernel.chains, self.kernel.hooks) == kept)
        return awake.seconds

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        self.replica.close()
        self.store.close()


def until(come: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not come():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def running(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    running = Running(find_url(database, request, tmp_path), tmp_path)
    running.thread.start()
    running.add("10.0.0.1")
    yield running
    running.stop()


@contextmanager
def locked(url: str, tables: str) -> Iterator[None]:
    """Somebody else's lock: of SQLite's file, or of PostgreSQL's tables."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("BEGIN IMMEDIATE" if url.startswith("sqlite") else "BEGIN"))
        if not url.startswith("sqlite"):
            connection.execute(text(f"LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE"))
        yield
        connection.execute(text("ROLLBACK"))
    engine.dispose()


@pytest.mark.parametrize(
    ("database", "tables"),
    [("sqlite", ALL), ("postgres", ALL), ("postgres", "hosts"), ("postgres", "repairs"), ("postgres", "clock")],
)
def test_drift_is_repaired_while_the_database_is_locked_and_told_afterwards(running: Running, tables: str) -> None:
    with locked(running.url, tables):
        took = [running.drift()]
        time.sleep(0.5)
        took.append(running.drift())
    assert max(took) < SOON, took
    store = Store(running.url)
    # The second may have been put right by the pass that takes in everything once the database is back.
    until(lambda: any(each.kind == "chains" for each in store.repairs("gw", 10)))
    until(lambda: next(each.drift for each in store.hosts() if each.host == "gw") >= 1)
    store.close()
    running.add("10.0.0.2")  # and it follows the database again


@pytest.mark.parametrize("database", ["postgres"])
def test_drift_is_repaired_while_the_server_has_stopped(running: Running, postgres: Postgres) -> None:
    """It is asked twice before it is given up, and its kernel takes new connections for it: two seconds for each."""
    assert postgres.process is not None
    pids = [postgres.process.pid, *_children(postgres.process.pid)]
    try:
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        took = running.drift()
    finally:
        for pid in pids:
            _signal(pid, signal.SIGCONT)
    assert took < 5 * SOON
    running.add("10.0.0.2")


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # one that served a connection which has ended since
        os.kill(pid, number)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
