"""Somebody has put into a SQLite file what never ends: whoever asks there is told so in time, and the file can be used
as far as it is in order."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from netlimit.errors import Slow, StoreError
from netlimit.records import HostStatus
from netlimit.store import Store, open_replica
from netlimit.store.allowance import Allowance
from netlimit.store.connection import connect, refuse_work
from tests.endless import LARGE, MUCH, ROWS, STEP, put_triggers, put_view
from tests.store.examples import keep
from tests.warm import ROOT

LONGEST = 120.0
"""Seconds in which an end comes on any machine."""
READS: dict[str, Callable[[Store], object]] = {
    "alembic_version": Store.revision,
    "clock": Store.revision,
    "hosts": Store.hosts,
    "pauses": lambda store: store.paused("gw"),
    "rules": lambda store: sum(1 for _ in store.load_stamped("gw")[2]),
    "saved_roots": lambda store: store.saved_roots("gw"),
}
WRITES: dict[str, Callable[[Store], object]] = {
    "hosts": lambda store: store.report(HostStatus("gw", "fake")),
    "pauses": lambda store: store.pause("gw", True, "test"),
    "rules": keep,
}
HEAVY = """
import resource, sys
from netlimit.errors import Slow
from netlimit.store import Store
store = Store(f"sqlite:///{sys.argv[1]}")
for _ in range(2):
    try:
        store.hosts()
    except Slow as error:
        print(error, flush=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
store.close()
"""
ALONE = """
import sys
import netlimit.store.connection
from netlimit.errors import Slow
from netlimit.store import Store
netlimit.store.connection.WORK_SECONDS = 1.0
store, other = (Store(f"sqlite:///{path}") for path in sys.argv[1:])
for _ in range(2):
    try:
        store.hosts()
    except Slow as error:
        print(error, flush=True)
other.pause("gw", True, "test")
print(other.paused("gw"))
store.close()
"""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.store.connection.WORK_SECONDS", 1.0)


@pytest.fixture
def path(sqlite_store: Store) -> Path:
    assert sqlite_store.path is not None
    return sqlite_store.path


@pytest.fixture
def store(sqlite_store: Store) -> Store:
    return sqlite_store


@pytest.mark.parametrize("table", READS)
def test_a_view_in_the_place_of_a_table(store: Store, path: Path, table: str) -> None:
    put_view(path, table)
    for _ in range(2):
        with pytest.raises(Slow, match=r"answers too slowly \(what it was asked was broken off after 1.* of work\)"):
            READS[table](store)


@pytest.mark.parametrize("table", ["hosts", "rules"])
def test_a_view_of_endless_rows(store: Store, path: Path, table: str) -> None:
    """Each is there at once."""
    put_view(path, table, ROWS)
    with pytest.raises(Slow):
        READS[table](store)


@pytest.mark.parametrize("table", WRITES)
def test_triggers_of_a_table(store: Store, path: Path, table: str) -> None:
    rule = keep(store, "10.0.0.9")
    put_triggers(path, table)
    with pytest.raises(Slow, match="answers too slowly"):
        WRITES[table](store)
    assert [kept.rule for kept in store.select()[0]] == [rule]
    with closing(Store(f"sqlite:///{path}", patience=0.1)) as other:  # what was begun is undone, and nothing is locked
        other.mark("gw", [], [rule.id])


def test_a_value_that_would_take_all_memory(store: Store, path: Path) -> None:
    put_view(path, "hosts", LARGE)
    with pytest.raises(StoreError, match="too big"):
        store.hosts()


def test_rows_that_would_take_all_memory(path: Path) -> None:
    put_view(path, "hosts", ROWS, MUCH)
    command = [sys.executable, "-c", HEAVY, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, check=True)
    *said, most = done.stdout.splitlines()
    assert len(said) == 2
    assert all(" MiB of memory)" in each for each in said), said
    assert int(most) < 2500


def test_one_function_that_heeds_nobody(store: Store, path: Path, tmp_path: Path) -> None:
    """In a process of its own, whose thread goes on with it. The files beside can be written, and the process ends."""
    other = tmp_path / "other.db"
    with closing(Store(f"sqlite:///{other}")) as beside:
        beside.upgrade()
    put_view(path, "hosts", STEP)
    words = [sys.executable, "-c", ALONE, str(path), str(other)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, check=True)
    assert done.stdout.splitlines() == [
        f"The database {path} answers too slowly (what it was asked does not end, though it was told to).",
        f"The database {path} answers too slowly (what it was asked before does not end).",
        "True",
    ]


def test_who_may_wait_for_so_long_in_all(store: Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.store.connection.WORK_SECONDS", 1000 * LONGEST)
    put_view(path, "hosts")
    store.allow(0.5)
    with pytest.raises(Slow):
        store.hosts()
    with pytest.raises(Slow):
        store.revision()  # all answers together
    store.allow(None)
    assert store.revision() == 0


def test_what_is_asked_beside_is_broken_off(store: Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.store.connection.WORK_SECONDS", 1000 * LONGEST)
    put_view(path, "hosts")
    heard: list[BaseException] = []

    def ask() -> None:
        try:
            store.hosts()
        except StoreError as error:
            heard.append(error)

    store.allow(1000 * LONGEST)
    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():  # it may not have asked yet
        store.break_off()
        thread.join(0.1)
    assert isinstance(heard[0], Slow)
    assert store.revision() == 0


def test_a_lock_that_is_waited_for_is_no_work(store: Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.store.connection.WORK_SECONDS", 0.5)
    store.revision()
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as keeper:
        keeper.execute("BEGIN IMMEDIATE")
        ending = threading.Timer(1.5, keeper.rollback)
        ending.start()
        assert keep(store).id == 1
        ending.join()


@pytest.mark.parametrize(("put", "table"), [(put_triggers, "pauses"), (put_view, "alembic_version")])
def test_a_copy(tmp_path: Path, put: Callable[[Path, str], None], table: str) -> None:
    with closing(open_replica(tmp_path, "gw")) as replica:
        replica.pause("gw", True, "test")
    put(tmp_path / "applied.db", table)
    with pytest.raises(StoreError), closing(open_replica(tmp_path, "gw")) as replica:
        replica.follow_pause(False)


def test_statements_of_many_rows_are_bounded_each_for_itself(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not all that a process has ever written."""
    monkeypatch.setattr("netlimit.store.connection.WORK_SECONDS", 0.2)
    rows = [(number,) for number in range(10_000)]
    with closing(connect(path, 5.0, Allowance(refuse_work))) as connection:
        connection.execute("CREATE TEMP TABLE many (number INTEGER)")
        connection.execute("BEGIN IMMEDIATE")
        for _ in range(150):
            connection.cursor().executemany("INSERT INTO many VALUES (?)", rows)
        assert connection.execute("SELECT count(*) FROM many").fetchone() == (1_500_000,)
