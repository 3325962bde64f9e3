"""A database of one process, which is in no file system."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import text

from netlimit.errors import StoreError
from netlimit.rules import parse_rule
from netlimit.store import Replica, Store, take_snapshot

NOW = datetime(2026, 7, 1, tzinfo=UTC)


@pytest.fixture
def source(tmp_path: Path) -> Store:
    store = Store(f"sqlite:///{tmp_path}/netlimit.db")
    store.upgrade()
    store.add([parse_rule({"target": f"10.0.{n}.0/24", "action": "block"}, NOW) for n in range(200)], "test", NOW)
    return store


def test_it_holds_what_a_copy_in_a_file_would(source: Store) -> None:
    snapshot = take_snapshot(source, "gw", source.revision(), paused=False)
    with closing(source), closing(Replica(None, "gw")) as copy:
        copy.upgrade()
        copy.hold(snapshot, None)
        assert take_snapshot(copy, "gw", copy.revision(), paused=False).rules == snapshot.rules
        assert copy.follow(source)
        assert not copy.is_lost()
        assert (copy.path, copy.name) == (None, "in memory")


def test_nothing_of_it_is_in_a_file(source: Store) -> None:
    snapshot = take_snapshot(source, "gw", source.revision(), paused=False)
    source.close()
    before = _list_open()
    with closing(Replica(None, "gw")) as copy:
        copy.upgrade()
        copy.hold(snapshot, None)
        assert _list_open() <= before


def test_each_is_its_own_and_gone_when_it_is_closed() -> None:
    with closing(Replica(None, "gw")) as one, closing(Replica(None, "gw")) as other:
        one.upgrade()
        assert one.revision() == 0
        with pytest.raises(StoreError, match="no tables yet"):
            other.revision()
        one.close()
        with pytest.raises(StoreError):
            one.revision()


def test_threads_share_it_and_who_writes_is_waited_for() -> None:
    with closing(Replica(None, "gw")) as copy:
        copy.upgrade()
        with copy._database.writing() as connection:
            connection.execute(text("UPDATE clock SET revision = 7"))
            found: list[int] = []
            reading = threading.Thread(target=lambda: found.append(copy.revision()))
            reading.start()
            reading.join(0.2)
            assert not found
        reading.join()
        assert found == [7]


def _list_open() -> set[str]:
    """The files that this process has open, by what they are."""
    links = (Path("/proc/self/fd") / each for each in os.listdir("/proc/self/fd"))
    return {os.readlink(each) for each in links if each.is_symlink()}
