"""A copy that somebody keeps locked, or writes who is another gateway."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from netlimit.errors import Busy
from netlimit.store import Store, open_replica
from tests.store.examples import keep


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


def test_what_another_gateway_has_written_is_not_added_to(store: Store, tmp_path: Path) -> None:
    """Two network namespaces with one directory of state."""
    keep(store, "10.0.0.1", hosts=["gw1"])
    keep(store, "10.0.0.2", hosts=["gw2"])
    with closing(open_replica(tmp_path, "gw1")) as one, closing(open_replica(tmp_path, "gw2")) as other:
        assert (one.follow(store), other.follow(store)) == (True, True)
        since = store.revision()
        keep(store, "10.0.0.3", hosts=["gw1"])
        changes = store.changes(since, "gw1")
        assert changes is not None
        assert not one.keep(since, changes)
        assert one.follow(store)
        assert one.owner == "gw1"
        found, _ = one.select()
        assert [str(each.rule.target) for each in found] == ["10.0.0.1/32", "10.0.0.3/32"]
