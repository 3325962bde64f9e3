"""One suite over every database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from netlimit.store import Store


@pytest.fixture
def url(database_url: str) -> str:
    """A migrated database with nothing in it."""
    return database_url


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = Store(url)
    yield store
    store.close()


@pytest.fixture
def sqlite_store(sqlite_url: str) -> Iterator[Store]:
    store = Store(sqlite_url)
    yield store
    store.close()
