"""Backlogs in SQLite and in a real Redis."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from netlimit.l7.deferral.backlog import Backlog, Bounds
from netlimit.l7.deferral.redis import RedisBacklog
from netlimit.l7.deferral.request import Deferred
from netlimit.l7.deferral.sqlite import SqliteBacklog
from tests.l7.deferral.backlogs import OpenBacklog, Spoil


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["sqlite", "redis"])
async def open_backlog(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenBacklog]:
    opened: list[Backlog] = []
    server = request.getfixturevalue("server") if request.param == "redis" else None
    if server is not None:
        for name in server.client.scan_iter("nl:{deferred}:*"):
            server.client.delete(name)

    def open_one(**bounds: Any) -> Backlog:
        backlog: Backlog
        if server is not None:
            backlog = RedisBacklog(server.url, Bounds(**bounds))
        else:
            backlog = SqliteBacklog(tmp_path / "deferred.db", Bounds(**bounds))
        opened.append(backlog)
        return backlog

    yield open_one
    for backlog in opened:
        await backlog.aclose()


@pytest.fixture
def spoil(request: pytest.FixtureRequest, tmp_path: Path) -> Spoil:
    def spoil(deferred: Deferred, garbage: bytes) -> None:
        if not (tmp_path / "deferred.db").exists():
            request.getfixturevalue("server").client.hset(f"nl:{{deferred}}:request:{deferred.id}", "head", garbage)
            return
        with closing(sqlite3.connect(tmp_path / "deferred.db")) as connection, connection:
            query = "UPDATE deferred SET head = CAST(? AS TEXT) WHERE id = ?"
            connection.execute(query, (garbage, deferred.id))

    return spoil
