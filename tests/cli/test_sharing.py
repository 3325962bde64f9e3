"""Whoever has the database open goes on while root lets others have it: at each step of it, it can be opened."""

from __future__ import annotations

import os
import pwd
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from netlimit.cli.database import share
from netlimit.cli.preparing import give_state
from netlimit.settings import Settings
from netlimit.stalls import Disk
from netlimit.store import Store, open_replica
from netlimit.store import connection as connections
from netlimit.store.connection import DiskConnection, connect


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is done after each change of an owner or of rights, and after a look at what a directory holds."""
    asked: list[Callable[[], object]] = []
    busy: list[bool] = []
    for name in ("fchown", "fchmod", "listdir"):
        change = getattr(os, name)

        def step(*arguments: Any, change: Callable[..., Any] = change) -> Any:
            found = change(*arguments)
            if not busy:
                busy.append(True)
                for each in asked:
                    each()
                busy.clear()
            return found

        monkeypatch.setattr(os, name, step)
    return asked


def test_the_database_can_be_opened_at_each_step_of_sharing_it(
    root: None, directory: Path, steps: list[Callable[[], object]]
) -> None:
    path = directory / "database" / "netlimit.db"
    path.parent.mkdir(mode=0o700)
    url = f"sqlite:///{path}"
    store = Store(url)
    store.upgrade()
    seen = list[int]()

    def read() -> None:
        fresh = Store(url)
        try:
            seen.append(fresh.revision() + store.revision())
        finally:
            fresh.close()

    steps.append(read)
    share(path, pwd.getpwnam("nobody"))
    store.close()
    assert len(seen) >= 2
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o7777) == (0o660, 0o2770)


@pytest.mark.parametrize("begins", ["BEGIN", "BEGIN IMMEDIATE", ""])
def test_who_has_opened_it_before_goes_on_by_the_rights_of_those_who_have_it_then(
    root: None, directory: Path, begins: str
) -> None:
    """SQLite opens the log at the first question, not with the file: the rights of the former group lead nowhere."""
    path = make_another_s(directory)
    with closing(connect(path, 5)) as connection:
        share(path, pwd.getpwnam("nobody"))
        if begins:
            connection.execute(begins)
        assert connection.execute("SELECT count(*) FROM rules").fetchone() == (0,)
        connection.rollback()


def test_what_was_read_by_half_is_not_read_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite begins no answer anew: the rest would pass for all."""
    path = directory / "database" / "netlimit.db"
    with closing(Store(f"sqlite:///{path}")) as store:
        store.upgrade()
    monkeypatch.setattr(DiskConnection, "_judge_anew", lambda self: True)
    with closing(connect(path, 5)) as connection:

        def fail_at_three(number: int) -> int:
            if number == 3:
                raise OSError
            return number

        connection.create_function("f", 1, fail_at_three)
        cursor = connection.cursor()
        cursor.execute("WITH n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 9) SELECT f(i) FROM n")
        with pytest.raises(sqlite3.OperationalError):
            cursor.fetchall()
        connection.execute("CREATE TEMP TABLE kept (number)")
        with pytest.raises(sqlite3.OperationalError):
            cursor.executemany("INSERT INTO kept SELECT f(?)", [(1,), (2,), (3,)])
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (2,), "none is written twice"


def test_nor_does_it_matter_if_that_was_just_before(
    root: None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_another_s(directory)
    look = connections.find_disk

    def find_disk(place: Path) -> Disk:
        """Looked for when the rights of those who have the file are known, but it is not open yet."""
        monkeypatch.setattr(connections, "find_disk", look)
        share(path, pwd.getpwnam("nobody"))
        return look(place)

    monkeypatch.setattr(connections, "find_disk", find_disk)
    with closing(connect(path, 5)) as connection:
        assert connection.execute("SELECT count(*) FROM rules").fetchone() == (0,)


@pytest.mark.parametrize("step", range(3))
def test_logs_that_come_while_it_is_shared_are_shared_too(
    root: None, directory: Path, steps: list[Callable[[], object]], step: int
) -> None:
    path = make_another_s(directory)
    taken, readers = [0], []

    def open_once() -> None:
        taken[0] += 1
        if taken[0] == step + 1:
            readers.append(connect(path, 5))
            readers[0].execute("SELECT count(*) FROM rules")

    steps.append(open_once)
    share(path, pwd.getpwnam("nobody"))
    (reader,) = readers
    with closing(reader):
        assert {each.stat().st_gid for each in path.parent.iterdir()} == {pwd.getpwnam("nobody").pw_gid}
        with closing(connect(path, 5)) as connection:
            assert connection.execute("SELECT count(*) FROM rules").fetchone() == (0,)


def make_another_s(directory: Path) -> Path:
    """A database that root has let the group of another user have."""
    path = directory / "database" / "netlimit.db"
    store = Store(f"sqlite:///{path}")
    store.upgrade()
    store.close()
    another = pwd.getpwnam("daemon")
    os.chown(path, another.pw_uid, another.pw_gid)
    os.chown(path.parent, 0, another.pw_gid)
    path.parent.chmod(0o2770)
    return path


def test_so_can_the_copy_while_the_controller_s_user_gets_it(
    root: None, directory: Path, steps: list[Callable[[], object]]
) -> None:
    settings = Settings(state_directory=directory / "state")
    nobody = pwd.getpwnam("nobody")
    settings.state.mkdir(mode=0o700)
    seen = list[int]()
    with closing(open_replica(settings.state, "gw1")) as former:

        def read() -> None:
            with closing(open_replica(settings.state, "gw1")) as fresh:
                seen.append(former.revision() + fresh.revision())

        steps.append(read)
        give_state(settings, nobody)
    assert len(seen) >= 2
    assert {each.stat().st_uid for each in (settings.state, *settings.state.iterdir())} == {nobody.pw_uid}


def test_of_what_else_lies_beside_the_copy_nothing_is_looked_at(root: None, directory: Path) -> None:
    """The controller's user could put a million files there, and root would not be done with them."""
    settings = Settings(state_directory=directory / "state")
    nobody = pwd.getpwnam("nobody")
    settings.state.mkdir(mode=0o700)
    others, own = [settings.state / f"other{number}" for number in range(3)], settings.state / "guard.lock"
    for each in (*others, own):
        each.touch()
    give_state(settings, nobody)
    assert {each.stat().st_uid for each in others} == {0}
    assert {each.stat().st_uid for each in (settings.state, settings.state / "applied.db", own)} == {nobody.pw_uid}


def test_a_database_in_somebody_s_own_directory_is_shared(root: None, directory: Path) -> None:
    """As when an operator starts it by sudo."""
    path = directory / "own" / "netlimit.db"
    path.parent.mkdir()
    operator = pwd.getpwnam("daemon")
    os.chown(path.parent, operator.pw_uid, operator.pw_gid)
    with closing(Store(f"sqlite:///{path}")) as store:
        store.upgrade()
    share(path, pwd.getpwnam("nobody"))
    assert path.parent.stat().st_uid == path.stat().st_uid == operator.pw_uid
    assert {each.stat().st_gid for each in (path, path.parent)} == {pwd.getpwnam("nobody").pw_gid}
