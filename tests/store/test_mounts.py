"""A disk that is mounted over the directory of a SQLite file while that is open, with a file and a log of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from netlimit.errors import StoreError
from netlimit.store import Store
from tests.store.examples import keep

FORMER = r"beside the log of the former \(netlimit\.db-wal\)"


@pytest.fixture
def path(root: None, tmp_path: Path) -> Iterator[Path]:
    """In a file system of its own, so that what is mounted ends with the test."""
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)
    yield tmp_path / "var" / "netlimit.db"
    subprocess.run(["umount", "--recursive", "--lazy", tmp_path], check=True)


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    """Of a file with one rule, which is open."""
    with closing(Store(f"sqlite:///{path}")) as store:
        store.upgrade()
        keep(store, "10.0.0.1")
        yield store


@pytest.fixture
def newer(path: Path, store: Store) -> Path:
    """A directory with a newer state of the file, of three rules, which a crash has left in its log."""
    disk = path.parent.with_name("disk")
    shutil.copytree(path.parent, disk)
    with closing(Store(f"sqlite:///{disk}/{path.name}")) as store:
        keep(store, "10.0.0.2")
        keep(store, "10.0.0.3")
        shutil.copytree(disk, disk.with_name("crashed"), ignore=shutil.ignore_patterns("*-shm"))
    shutil.rmtree(disk)
    return disk.with_name("crashed")


def mount(over: Path, directory: Path) -> None:
    subprocess.run(["mount", "--bind", over, directory], check=True)


def unmount(directory: Path) -> None:
    subprocess.run(["umount", "--lazy", directory], check=True)


def test_a_newer_file_that_is_mounted_with_its_log_is_used(store: Store, path: Path, newer: Path) -> None:
    """And the older again, with its own, when the disk has gone."""
    watch = store.watch()
    mount(newer, path.parent)
    assert watch.changed()
    assert store.revision() == 3
    keep(store, "10.0.0.4")
    unmount(path.parent)
    assert watch.changed()
    assert store.revision() == 1
    watch.close()
    store.close()
    with closing(Store(f"sqlite:///{newer}/{path.name}")) as found:
        assert found.revision() == 4


def test_one_in_a_directory_that_has_taken_the_place_of_the_former_is_used(
    store: Store, path: Path, newer: Path
) -> None:
    path.parent.rename(path.parent.with_name("aside"))
    newer.rename(path.parent)
    assert store.revision() == 3


def test_no_other_file_is_opened_beside_the_log_of_the_former(store: Store, path: Path, newer: Path) -> None:
    """Be it mounted itself; exchanged in the directory, or in another name of that; or beside the log that was moved.
    Nothing is lost of any."""
    file = newer / path.name
    mount(file, path)
    with pytest.raises(StoreError, match=FORMER):
        store.revision()
    unmount(path)
    assert store.revision() == 1
    other = shutil.copy(file, path.with_name("other.db"))
    aside = path.rename(path.with_name("aside.db"))
    other.rename(path)
    with pytest.raises(StoreError, match=FORMER):
        store.revision()
    mount(path.parent, path.parent)
    with pytest.raises(StoreError, match=FORMER):
        store.revision()
    unmount(path.parent)
    former = path.parent.rename(path.parent.with_name("former"))
    path.parent.mkdir()
    (former / path.name).rename(path)
    Path(f"{former}/{path.name}-wal").rename(f"{path}-wal")
    with pytest.raises(StoreError, match=FORMER):
        store.revision()
    (former / aside.name).replace(path)
    assert store.revision() == 1


def test_nor_beside_the_log_of_one_that_was_mounted(store: Store, path: Path, newer: Path) -> None:
    mount(newer, path.parent)
    assert store.revision() == 3
    shutil.copy(path, path.with_name("other.db")).replace(path)
    with pytest.raises(StoreError, match=FORMER):
        store.revision()


def test_the_log_stays_of_a_file_that_has_the_number_of_the_former(
    store: Store, path: Path, newer: Path, tmp_path: Path
) -> None:
    """SQLite, which removes the log as it closes the former, knows a file by that alone: it is the same in a copy of a
    whole file system."""
    disk = tmp_path / "alike"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", disk], check=True)
    copy, wanted = disk / path.name, path.stat().st_ino
    for number in range(wanted):
        copy = (disk / f"{number}").rename(copy) if take_number(disk / f"{number}") == wanted else copy
    assert copy.stat().st_ino == wanted
    for name in (path.name, f"{path.name}-wal"):
        shutil.copy(newer / name, disk / name)
    watch = store.watch()
    mount(disk, path.parent)
    assert watch.changed()
    assert store.revision() == 3
    watch.close()


def take_number(path: Path) -> int:
    """Make a file, which has the next one of its file system."""
    path.touch()
    return path.stat().st_ino
