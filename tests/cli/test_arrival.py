"""A disk or directory of the database that comes when controller and guard run already."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from netlimit.store import Store
from tests.cli.running import Netlimit, settings_in, until

READ_ONLY = "cannot be opened for writing"


@pytest.fixture
def sealed(root: None, directory: Path, make_directory: Callable[[], Path]) -> Iterator[Netlimit]:
    """A place for units whose file system was made read-only when there was no directory of the database."""
    data = make_directory()
    settings = settings_in(
        directory,
        NETLIMIT_DATABASE_URL=f"sqlite:///{data}/database/netlimit.db",
        NETLIMIT_STATE_DIRECTORY=str(directory / "state"),
    )
    seal = f'mount --bind {data} {data} && mount -o remount,ro,bind {data} && exec "$@"'
    place = Netlimit(settings, before=("unshare", "--mount", "sh", "-c", seal, "sh"))
    yield place
    place.end_all()


@pytest.mark.parametrize("part", ["controller", "guard"])
def test_who_may_not_write_what_has_come_ends_so_that_the_next_may(sealed: Netlimit, part: str) -> None:
    began = sealed.start(part)
    until(lambda: "There is no database" in began.said() or began.ended, began.said)
    replace(sealed, before=()).make_database()
    until(lambda: began.ended, began.said)
    assert "has come since this began, and is read-only to it: ending" in began.said()
    said = len(began.said())
    again = sealed.start(part)
    until(lambda: READ_ONLY in again.said()[said:] or again.ended, again.said)
    time.sleep(2)
    assert not again.ended, "a disk that can only be read is no reason to begin anew for ever"


@pytest.mark.parametrize("part", ["controller", "guard"])
def test_who_may_write_what_has_come_goes_on(sealed: Netlimit, part: str) -> None:
    free = replace(sealed, before=())
    began = free.start(part)
    until(lambda: "There is no database" in began.said() or began.ended, began.said)
    free.make_database()
    with closing(Store(sealed.environment["NETLIMIT_DATABASE_URL"])) as store:
        until(lambda: store.hosts() or store.guards() or began.ended, began.said)
    assert not began.ended, began.said()
