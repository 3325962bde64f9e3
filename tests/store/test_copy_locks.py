"""A copy that somebody keeps locked."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from netlimit.errors import Busy
from netlimit.store import open_replica


def test_it_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else root's commands, and the units at boot, would wait twice as long as it is said."""
    monkeypatch.setattr("netlimit.store.engine.BUSY_SECONDS", 6)
    open_replica(tmp_path, "gw").close()
    with closing(sqlite3.connect(tmp_path / "applied.db", isolation_level=None)) as keeper:
        keeper.execute("BEGIN EXCLUSIVE")
        begun = time.monotonic()
        with pytest.raises(Busy):
            open_replica(tmp_path, "gw")
        assert time.monotonic() - begun < 11
