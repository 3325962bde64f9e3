"""What whoever asks is told of a database that cannot do its part: not where it is. The log tells that."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import httpx
import pytest

from api.problems import find_problem
from netlimit.errors import Busy, Slow, StoreError
from netlimit.settings import Settings
from netlimit.store import Store
from netlimit.store.faults import _SENTENCES, explain_fault
from tests.api.server import connect, get, serve

NAME = "postgresql://netlimit@db.internal:5432/rules"
SECRETS = ("db.internal", "10.20.30.40", "netlimit@", "/var/lib/somewhere", "{")


class DriverError(Exception):
    """As a driver raises it."""

    def __init__(self, code: str) -> None:
        super().__init__('connection failed: at "10.20.30.40", port 5432, file /var/lib/somewhere')
        self.sqlstate = code


@pytest.mark.parametrize("code", _SENTENCES)
def test_no_sentence_tells_where_it_is(code: str) -> None:
    error = explain_fault(DriverError(code), NAME)
    assert NAME in str(error)
    problem = find_problem(error)
    assert (problem.status, [each for each in SECRETS if each in problem.detail]) == (503, [])
    assert problem.detail.startswith("The database "), problem.detail
    assert " ." not in problem.detail


def test_nor_does_one_that_is_raised_otherwise() -> None:
    for error in (StoreError(NAME), Busy(NAME, NAME), Slow(NAME, NAME), explain_fault(TimeoutError(NAME), NAME)):
        assert NAME not in find_problem(error).detail


def break_file(path: Path, how: str) -> None:
    if how == "gone":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "none":
        path.write_bytes(b"garbage" * 4096)
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE alembic_version SET version_num = ?", (how,))


@pytest.mark.parametrize("how", ["gone", "empty", "none", "0001", "9999"])
def test_neither_who_may_look_nor_a_stranger_learns_its_path(
    settings: Settings, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "netlimit.db"
    caplog.set_level(logging.DEBUG, "api.access")
    break_file(path, how)
    store = Store(settings.database_url)
    with serve(settings, store) as url, connect(url, "viewer") as client:
        for answer in (client.get("/rules"), client.get("/status"), get(f"{url}/readyz"), get(f"{url}/metrics")):
            assert str(tmp_path) not in answer.text
            assert "netlimit.db" not in answer.text
            if answer.status_code == 503:
                check_problem(answer)
        assert get(f"{url}/readyz").status_code == 503
    lines = [record.getMessage() for record in caplog.records if "/readyz: 503" in record.getMessage()]
    assert lines
    assert all(str(path) in line for line in lines), lines
    store.close()


def check_problem(answer: httpx.Response) -> None:
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert "log of the API" in answer.json()["detail"]
