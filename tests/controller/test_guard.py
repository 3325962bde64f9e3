"""The guard over a kernel in memory: a database that hangs, and a controller that goes on without it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import text

from netlimit import guard as guarding
from netlimit.controller import Controller, Setup
from netlimit.errors import StoreError
from netlimit.guard import Guard
from netlimit.records import Outcome
from netlimit.store import Replica, Store, open_replica
from tests.controller.conftest import Clock, Site
from tests.databases import DATABASES

OVER = DATABASES
CLIENT = "10.0.0.1"
SETUP = Setup("gw", "fake")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding, "RECORD_SECONDS", 0.5)
    monkeypatch.setattr(guarding, "CONTROLLER_SECONDS", 0.1)
    monkeypatch.setattr(guarding, "LOOK_SECONDS", 0.05)


class Guarded:
    """A site with a guard that runs in a thread."""

    def __init__(self, site: Site, directory: Path) -> None:
        site.clock = site.controller._now = Now()
        self.site = site
        self.directory = directory
        self.stopping = threading.Event()
        guard = Guard(
            site.store, "gw", lambda: site.kernel, lambda source, kernel: Controller(source, kernel, SETUP), self.copy
        )
        self.thread = threading.Thread(target=guard.run, args=[self.stopping.is_set])

    @contextmanager
    def copy(self) -> Iterator[Replica]:
        replica = open_replica(self.directory / "controller", "gw")
        yield replica
        replica.close()

    def cut(self, seconds: int = 1) -> None:
        """Open a window, see it guarded, and cut the client off."""
        self.site.store.open_window(seconds, "test", datetime.now(UTC))
        time.sleep(0.3)
        self.site.add(target=CLIENT, action="block")
        self.site.controller.sync()
        assert self.site.send(CLIENT) == ["drop"]

    def wait_until_open(self) -> None:
        wait(lambda: self.site.send(CLIENT) == ["accept"])

    @property
    def outcome(self) -> Outcome | None:
        window = self.site.store.window()
        return window.outcome if window else None


class Now(Clock):
    def __call__(self) -> datetime:
        return datetime.now(UTC)


@pytest.fixture
def guarded(site: Site, tmp_path: Path) -> Iterator[Guarded]:
    guarded = Guarded(site, tmp_path)
    guarded.thread.start()
    wait(lambda: site.store.guards(datetime.now(UTC)) == ["gw"])
    yield guarded
    guarded.stopping.set()
    guarded.thread.join(10)
    assert not guarded.thread.is_alive()
    assert site.store.guards(datetime.now(UTC)) == []


def wait(come: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not come():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def locked(store: Store) -> Iterator[None]:
    """Keep everybody else from writing to a database, and on PostgreSQL from reading."""
    database = store._database
    with database._writer.connect() as connection, connection.begin():
        if not database.is_sqlite:
            connection.execute(text("LOCK TABLE clock, windows, rules IN ACCESS EXCLUSIVE MODE"))
        yield


def test_what_nobody_confirms_is_undone_without_a_controller(guarded: Guarded) -> None:
    guarded.cut()
    guarded.wait_until_open()
    wait(lambda: guarded.outcome is Outcome.EXPIRED)
    assert guarded.site.store.select()[1] == 0
    assert guarded.site.store.audit()[0].actor == "guard of gw"


def test_a_database_that_hangs_keeps_nothing_from_coming_back(guarded: Guarded) -> None:
    guarded.cut(seconds=2)
    with locked(guarded.site.store):
        guarded.wait_until_open()
    wait(lambda: guarded.outcome is Outcome.EXPIRED)
    assert guarded.site.send(CLIENT) == ["accept"]
    assert guarded.site.store.revision() == 2


def test_it_does_not_end_while_a_window_is_open(guarded: Guarded) -> None:
    guarded.cut()
    guarded.stopping.set()
    guarded.wait_until_open()
    guarded.thread.join(10)
    assert guarded.outcome is Outcome.EXPIRED


def test_what_was_not_ours_to_begin_with_is_taken_out(guarded: Guarded) -> None:
    store = guarded.site.store
    store.open_window(1, "test", datetime.now(UTC), paused=["gw"])
    guarded.site.add(target=CLIENT, action="block")
    guarded.site.controller.sync()
    guarded.wait_until_open()
    wait(lambda: not guarded.site.kernel.structure().sets)
    assert store.paused("gw")


def test_a_controller_without_its_database_follows_the_guard(guarded: Guarded) -> None:
    """It would take what the guard has written for somebody's drift, and repair it."""
    site = guarded.site
    with guarded.copy() as copy:
        controller = site.controller = Controller(site.store, site.kernel, SETUP, replica=copy)
        controller.sync()
        guarded.cut(seconds=2)
        with locked(site.store):
            assert controller._go_on_without(StoreError("It is gone."))
            guarded.wait_until_open()
            controller.tick()
            assert site.send(CLIENT) == ["accept"]
    wait(lambda: guarded.outcome is Outcome.EXPIRED)
