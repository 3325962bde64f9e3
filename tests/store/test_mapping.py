"""Somebody who may write beside a SQLite file cuts what its connections share (`-shm`): that ends no process."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from netlimit.store import Store

SECONDS = 3.0
WORK = """
import sys, threading
from netlimit.errors import StoreError
from netlimit.store import Store
from tests.store.examples import NOW, rule

store, told, ended = Store(sys.argv[1]), set(), threading.Event()

def work(part):
    number = 0
    while not ended.is_set():
        number += 1
        try:
            store.add([rule(f"10.{part}.{number >> 8}.{number & 255}")], "test", NOW)
            store.rules_at(store.revision())
        except StoreError as error:
            told.add(str(error))
        print(number, flush=True)

threads = [threading.Thread(target=work, args=(part,)) for part in (1, 2)]
for thread in threads:
    thread.start()
sys.stdin.read()
ended.set()
for thread in threads:
    thread.join()
store.add([rule("10.9.9.9")], "test", NOW)
store.close()
print(*told, sep="\\n", file=sys.stderr)
"""
FILL = """
import os, sys
from netlimit.errors import StoreError
from netlimit.store import Store
from tests.store.examples import NOW, rule

store, (path, fill) = Store(f"sqlite:///{sys.argv[1]}"), sys.argv[1:]
store.add([rule("10.0.0.1")], "test", NOW)
with open(fill, "wb", buffering=0) as whole:
    os.truncate(f"{path}-shm", 0)
    try:
        while True:
            whole.write(bytes(4096))
    except OSError:
        pass
    try:
        print(len(store.rules_at(store.revision())))
    except StoreError as error:
        print(error)
os.unlink(fill)
for _ in range(3):
    try:
        store.add([rule("10.0.0.2")], "test", NOW)
        break
    except StoreError as error:
        print(error)
print(len(store.rules_at(store.revision())))
store.close()
"""
WATCH = """
import os, sys
from netlimit.errors import StoreError
from netlimit.store import Store

store = Store(f"sqlite:///{sys.argv[1]}")
watch = store.watch()
os.truncate(f"{sys.argv[1]}-shm", 0)
try:
    watch.wait(0)
except StoreError:
    print("cut")
print(watch.wait(0), watch.wait(0))
watch.close()
store.close()
"""
STRANGER = """
import mmap, os, sys
from netlimit.store import Store

Store(f"sqlite:///{sys.argv[1]}").revision()
with open(sys.argv[2], "w+b") as file:
    file.truncate(mmap.PAGESIZE)
    memory = mmap.mmap(file.fileno(), 0)
    file.truncate(0)
    memory[0]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "netlimit.db"
    with closing(Store(f"sqlite:///{path}")) as store:
        store.upgrade()
    return path


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file in a file system of two megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "netlimit-test", disk], check=True)
    try:
        with closing(Store(f"sqlite:///{disk}/netlimit.db")) as store:
            store.upgrade()
        yield disk / "netlimit.db"
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def run(program: str, *arguments: object) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", program, *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_who_is_cut_off_from_it_goes_on(path: Path) -> None:
    process = run(WORK, f"sqlite:///{path}")
    assert process.stdout is not None
    process.stdout.readline()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        os.truncate(f"{path}-shm", 0)
        time.sleep(0.002)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert any(" was lost for a moment (somebody cut the memory " in each for each in told.splitlines()), told
    with closing(Store(f"sqlite:///{path}")) as store:
        assert "10.9.9.9/32" in [str(each.rule.target) for each in store.rules_at(store.revision())]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_who_watches_is_told_once(path: Path) -> None:
    process = run(WATCH, path)
    said, errors = process.communicate(timeout=60)
    assert (process.returncode, said.split()) == (0, ["cut", "True", "False"]), errors


def test_where_it_cannot_be_made_whole_that_is_told_until_there_is_room(small: Path) -> None:
    process = run(FILL, small, small.parent / "fill")
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    first, *others, last = said.strip().splitlines()
    assert "cut the memory that its connections share" in first
    assert all("cut the memory" in each for each in others)
    assert last == "2"


def test_memory_that_is_no_database_s_ends_its_process_as_ever(path: Path, tmp_path: Path) -> None:
    process = run(STRANGER, path, tmp_path / "mine")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGBUS
