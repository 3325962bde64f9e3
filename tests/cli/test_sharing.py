"""Whoever has the database open goes on while root lets others have it: at each step of it, it can be opened."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from netlimit.cli.database import share
from netlimit.cli.preparing import give_state
from netlimit.settings import Settings
from netlimit.store import Store, open_replica


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is done after each change of an owner or of rights."""
    asked: list[Callable[[], object]] = []
    for name in ("fchown", "fchmod"):
        change = getattr(os, name)

        def step(*arguments: int, change: Callable[..., None] = change) -> None:
            change(*arguments)
            for each in asked:
                each()

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
