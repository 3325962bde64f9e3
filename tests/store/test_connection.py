"""A connection of SQLite: its cursors read ahead, and nobody notices."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from netlimit.stalls import Disk
from netlimit.store.connection import DiskConnection, connect

ROWS = 1000


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskConnection]:
    path = Path(tmp_path_factory.mktemp("rows")) / "rows.db"
    with closing(sqlite3.connect(path)) as made:
        made.execute("CREATE TABLE numbers (number)")
        made.executemany("INSERT INTO numbers VALUES (?)", [(n,) for n in range(ROWS)])
        made.commit()
    with closing(connect(path, 1.0)) as connection:
        yield connection


STEPS = st.lists(st.one_of(st.just("one"), st.just("all"), st.integers(1, 450)), max_size=12)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.sampled_from([0, 1, 199, 200, 201, 400, ROWS]), steps=STEPS)
def test_rows_come_in_order_however_they_are_asked_for(
    connection: DiskConnection, size: int, steps: list[str | int]
) -> None:
    cursor = connection.cursor()
    cursor.execute("SELECT number FROM numbers ORDER BY number LIMIT ?", (size,))
    found: list[tuple[int]] = []
    for step in (*steps, "all"):
        if step == "one":
            found.extend(filter(None, [cursor.fetchone()]))
        elif step == "all":
            found.extend(cursor.fetchall())
        else:
            rows = cursor.fetchmany(step)
            assert len(rows) == min(int(step), size - len(found))
            found.extend(rows)
    assert found == [(n,) for n in range(size)]
    assert cursor.fetchone() is None


def test_another_statement_begins_with_its_own_rows(connection: DiskConnection) -> None:
    cursor = connection.cursor()
    cursor.execute("SELECT number FROM numbers ORDER BY number")
    assert cursor.fetchone() == (0,)
    cursor.execute("SELECT number FROM numbers ORDER BY number DESC LIMIT 1")
    assert (cursor.fetchone(), cursor.fetchone()) == ((ROWS - 1,), None)
    cursor.execute("SELECT number FROM numbers ORDER BY number")
    assert cursor.fetchone() == (0,)
    with suppress(sqlite3.OperationalError):
        cursor.execute("SELECT nothing FROM numbers")
    assert cursor.fetchone() is None


def test_many_rows_take_few_calls(connection: DiskConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    call = Disk.call
    monkeypatch.setattr(Disk, "call", lambda *arguments: calls.append(arguments) or call(*arguments))
    cursor = connection.cursor()
    cursor.execute("SELECT number FROM numbers")
    assert len(list(iter(cursor.fetchone, None))) == ROWS
    assert len(calls) <= 7
