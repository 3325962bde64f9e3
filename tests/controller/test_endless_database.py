"""Somebody has put into the database what never ends: what is wrong in the kernel is put right all the same, and a
controller that is told to end does."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.controller.test_locked_database import Running, until
from tests.endless import put_triggers, put_view, take_away

SOON = 20.0
"""Seconds in which drift is repaired: some three of processor time until the database is given up, whoever else needs
the processor."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "netlimit.db"


@pytest.fixture
def running(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr("netlimit.store.engine.LEAST_WORK", 2.0)
    running = Running(sqlite_url, tmp_path)
    running.thread.start()
    running.add("10.0.0.1")
    yield running
    running.stop()


def test_a_trigger_that_the_reports_meet(running: Running, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put_triggers(path, "hosts")
    until(lambda: "answers too slowly" in caplog.text)
    assert "Going on without it" in caplog.text
    assert running.drift() < SOON  # also while it is tried again, beside
    take_away(path, "hosts")
    running.add("10.0.0.2")  # and it follows the database again


def test_a_view_that_hides_the_rules(running: Running, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put_view(path, "clock")
    until(lambda: "Going on without it" in caplog.text)
    assert running.drift() < SOON


def test_who_asks_beside_ends_with_the_controller(
    running: Running, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its process would not."""
    monkeypatch.setattr("netlimit.store.connection.WORK_SECONDS", 100_000)
    put_triggers(path, "hosts")
    until(lambda: running.controller._outage is not None)
    asked = running.controller._outage
    assert asked is not None
    until(lambda: is_written(path))
    running.stopping.set()
    until(lambda: asked._asked is not None and asked._asked.done())


def is_written(path: Path) -> bool:
    """Whether somebody is about to change something."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
    return False
