"""One suite over every database."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture
def disk(tmp_path: Path, root: None, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of its own, of as many MiB as the module says: DISK."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={request.module.DISK}m", "none", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)
