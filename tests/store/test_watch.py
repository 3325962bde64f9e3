from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Timer

import pytest

from netlimit.errors import StoreError
from netlimit.records import HostStatus
from netlimit.store import Store, Watch
from netlimit.store.watch import SqliteWatch
from tests.databases import Postgres
from tests.store.examples import NOW, keep


@pytest.fixture
def watch(url: str) -> Iterator[Watch]:
    """A watch of another process than the one whose store the tests write with."""
    watching = Store(url)
    watch = watching.watch()
    yield watch
    watch.close()
    watching.close()


def drain(watch: Watch) -> None:
    while watch.wait(0.3):
        pass


CHANGES: dict[str, Callable[[Store], object]] = {
    "rule": keep,
    "pause": lambda store: store.pause("gw1", True),
    "question": lambda store: store.ask("gw1", "plan", {}),
    "answer": lambda store: store.answer(store.ask("gw1", "plan", {}), {}),
    "report": lambda store: store.report(HostStatus("gw1", "fake")),
    "token": lambda store: store.add_token("ci", "hash", "admin", NOW),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_heard_of_once(store: Store, watch: Watch, change: Callable[[Store], object]) -> None:
    assert not watch.changed()
    change(store)
    assert watch.wait(60)
    drain(watch)  # one notice for each of several transactions is fine
    assert not watch.changed()


def test_reading_is_no_change(store: Store, watch: Watch) -> None:
    store.select()
    list(store.load("gw1")[1])
    assert not watch.wait(0.05)


def test_what_was_undone_is_no_change(store: Store, watch: Watch) -> None:
    keep(store)
    drain(watch)
    with pytest.raises(Exception, match="limited already"):
        keep(store)
    assert not watch.wait(0.05)


def test_waiting_ends_when_something_is_written(store: Store, watch: Watch) -> None:
    later = Timer(0.2, keep, [store])
    began = time.monotonic()
    later.start()
    assert watch.wait(60)
    assert 0.15 < time.monotonic() - began < 40
    later.join()
    assert len(store.select()[0]) == 1


def test_waiting_ends_after_its_time(watch: Watch) -> None:
    began = time.monotonic()
    assert not watch.wait(0.2)
    assert 0.2 <= time.monotonic() - began < 40


def test_a_lost_server_is_an_error_and_its_return_counts_as_a_change(postgres: Postgres, migrated: str) -> None:
    store = Store(postgres.url(migrated))
    watch = store.watch()
    postgres.run(migrated, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
    with pytest.raises(StoreError, match="look at NETLIMIT_DATABASE_URL and the server"):
        watch.wait(60)
    assert watch.wait(0)
    assert not watch.wait(0.05)
    store.pause("gw1", False)
    assert watch.wait(60)
    watch.close()
    store.close()


@pytest.fixture
def hasty(postgres: Postgres, migrated: str) -> Iterator[str]:
    """A database that ends sessions which are idle; other tests use it afterwards."""
    postgres.run(migrated, f"ALTER DATABASE {migrated} SET idle_session_timeout = '200ms'")
    yield migrated
    postgres.run(migrated, f"ALTER DATABASE {migrated} RESET idle_session_timeout")


def test_a_server_that_ends_idle_sessions_does_not_end_a_watch(postgres: Postgres, hasty: str) -> None:
    store = Store(postgres.url(hasty))
    watch = store.watch()
    assert not watch.wait(1)
    store.pause("gw1", False)
    assert watch.wait(60)
    watch.close()
    store.close()


def test_watching_costs_little(sqlite_store: Store) -> None:
    watch = sqlite_store.watch()
    began = time.thread_time()
    for _ in range(1000):
        watch.changed()
    assert time.thread_time() - began < 0.5
    watch.close()


class Counted(SqliteWatch):
    """Counts how often the file is asked."""

    asked = 0

    def _version(self) -> int:
        self.asked += 1
        return super()._version()


def test_a_file_that_nobody_writes_is_seldom_asked(sqlite_store: Store) -> None:
    keep(sqlite_store)
    watch = Counted(sqlite_store._database)
    drain(watch)
    time.sleep(2)
    watch.changed()
    before, began = watch.asked, time.monotonic()
    while time.monotonic() - began < 2:
        assert not watch.wait(0.1)
    assert 1 <= watch.asked - before <= 3
    sqlite_store.pause("gw1", True)
    assert watch.changed()  # at once, however long it was not asked
    watch.close()
