"""Fixtures of the API's tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from netlimit.settings import Settings
from netlimit.store import Store
from tests.api.server import HANDLES, HASHES, Controller, connect, serve
from tests.databases import copy_fresh, find_url


@pytest.fixture(scope="session")
def fresh_database(fresh_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without rules that knows the tokens."""
    path = tmp_path_factory.mktemp("known") / "netlimit.db"
    store = Store(copy_fresh(fresh_file, path))
    _add_tokens(store)
    store.close()
    return path


@pytest.fixture
def settings(tmp_path: Path, fresh_database: Path, database: str, request: pytest.FixtureRequest) -> Settings:
    if database == "sqlite":
        shutil.copy(fresh_database, tmp_path / "netlimit.db")
        return Settings(database_url=f"sqlite:///{tmp_path}/netlimit.db", host="gw1")
    url = find_url(database, request, tmp_path)
    store = Store(url)
    _add_tokens(store)
    store.close()
    return Settings(database_url=url, host="gw1")


def _add_tokens(store: Store) -> None:
    for role, kept in HASHES.items():
        store.add_token(role, kept, role, datetime.now(UTC), handle=HANDLES[role])


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    store = Store(settings.database_url)
    yield store
    store.close()


@pytest.fixture
def url(settings: Settings, store: Store) -> Iterator[str]:
    with serve(settings, store) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with connect(url, "admin") as client:
        yield client


@pytest.fixture
def controller(settings: Settings) -> Iterator[Controller]:
    store = Store(settings.database_url)
    controller = Controller(store)
    yield controller
    controller.stop()
    store.close()
