"""A journal that somebody has written beside a SQLite file, as if a crash had left it, names a file to be removed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from netlimit.errors import StoreError
from netlimit.store import Store
from tests.store.examples import NOW, rule

MAGIC = bytes.fromhex("d9d505f920a163d7")
SECTOR, NONCE = 512, 0x1234
PENDING = 0x40000000
"""The byte that locks are on: nothing is ever kept in its page, so that its number marks the record of a name."""


def write_journal(path: Path, named: Path) -> None:
    """A hot journal (sqlite.org/fileformat.html, 3) of the first page as it is, one part of what `named` was all of."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = path.read_bytes()
    size = int.from_bytes(whole[16:18], "big")
    first, name = whole[:size], bytes(named)
    numbers = (1, NONCE, len(whole) // size, SECTOR, size)
    head = MAGIC + b"".join(number.to_bytes(4, "big") for number in numbers)
    total = (NONCE + sum(first[at] for at in range(size - 200, 0, -200))) % 2**32
    record = (1).to_bytes(4, "big") + first + total.to_bytes(4, "big")
    last = (PENDING // size + 1).to_bytes(4, "big") + name + len(name).to_bytes(4, "big")
    last += (sum(name) % 2**32).to_bytes(4, "big") + MAGIC
    Path(f"{path}-journal").write_bytes(head.ljust(SECTOR, b"\0") + record + last)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "netlimit.db"
    with closing(Store(f"sqlite:///{path}")) as store:
        store.upgrade()
        store.add([rule()], "test", NOW)
    return path


@pytest.mark.parametrize("name", ["guard.lock", "other.db-journal"])
def test_what_a_journal_names_stays(path: Path, tmp_path: Path, name: str) -> None:
    with closing(Store(f"sqlite:///{tmp_path}/other.db")) as other:
        other.upgrade()
    named = tmp_path / name
    named.write_text("not SQLite's")
    write_journal(path, named)
    with closing(Store(f"sqlite:///{path}")) as store, pytest.raises(StoreError, match="cannot be read or written"):
        store.revision()
    assert named.read_text() == "not SQLite's"


def test_a_journal_that_names_nothing_is_undone(path: Path, tmp_path: Path) -> None:
    """As a crash leaves it while the file is made."""
    write_journal(path, tmp_path / "gone")
    with closing(Store(f"sqlite:///{path}")) as store:
        assert store.revision() == 1
    assert not Path(f"{path}-journal").exists()
