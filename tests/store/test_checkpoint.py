"""Reads that overlap without end keep the log of a SQLite file from beginning anew: it stays short all the same."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import text

from netlimit.errors import Busy
from netlimit.records import Actor
from netlimit.store import Store, checkpoint
from netlimit.store.room import Leave, NoRoom
from tests.store.examples import NOW, keep

DISK = 64
"""MiB; four of them are kept."""
MB = 2**20
READ_SECONDS = 0.3
READ = """
import sys, time
from netlimit.store import Store
store = Store(sys.argv[1], crowded=sys.argv[3] == "True")
print(flush=True)
while True:
    with store._database.reading() as connection:
        connection.exec_driver_sql("SELECT revision FROM clock").one()
        time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def small(disk: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{disk}/netlimit.db", crowded=True)
    store.upgrade()
    keep(store)
    yield store
    store.close()


@contextmanager
def reading_elsewhere(store: Store, seconds: float, crowded: bool = False) -> Iterator[None]:
    """Another process reads, each time for so long."""
    command = [sys.executable, "-c", READ, f"sqlite:///{store.path}", str(seconds), str(crowded)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


@contextmanager
def overlapping(store: Store, readers: int = 3) -> Iterator[list[int]]:
    """Reads of which one begins before the other ends; how many there have been."""
    ended, done = threading.Event(), [0] * readers

    def read(number: int) -> None:
        time.sleep(READ_SECONDS * number / readers)
        while not ended.is_set():
            with store._database.reading() as connection:
                connection.execute(text("SELECT revision FROM clock")).one()
                time.sleep(READ_SECONDS)
            done[number] += 1

    threads = [threading.Thread(target=read, args=(number,)) for number in range(readers)]
    for thread in threads:
        thread.start()
    try:
        yield done
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def write(store: Store, seconds: float, size: int = 150_000, each: Callable[[], object] = lambda: None) -> int:
    """Write to and fro, which the file has room for; how long the log was at most, in bytes."""
    log, longest, end = Path(f"{store.path}-wal"), 0, time.monotonic() + seconds
    with store._database.writing() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS large AS SELECT zeroblob(200000) AS x"))
    while time.monotonic() < end:
        with store._database.writing() as connection:
            connection.execute(text("UPDATE large SET x = randomblob(:size)"), {"size": size})
        each()
        longest = max(longest, log.stat().st_size)
        time.sleep(0.01)
    return longest


def fill(disk: Path, left: int) -> None:
    """Other programs leave so many bytes."""
    (disk / "others").write_bytes(bytes(shutil.disk_usage(disk).free - left))


def test_the_log_stays_short_while_reads_overlap(small: Store) -> None:
    with overlapping(small) as done:
        longest = write(small, 12)
    assert 8 * MB < longest < 30 * MB
    assert min(done) > 8, done


def test_it_stays_shorter_where_the_disk_has_little_room(small: Store, disk: Path) -> None:
    """So there is room in it for who revokes a token, though the disk has none."""
    token = small.add_token("viewer", "hash of it", "viewer", NOW)
    fill(disk, 2 * MB)
    with overlapping(small) as done:
        longest = write(small, 12, 5_000)
        began = time.monotonic()
        assert small.revoke_token(token.id, NOW)
        assert time.monotonic() - began < 3
    assert longest < 3 * MB
    assert min(done) > 8, done


@pytest.mark.parametrize(("seconds", "crowded"), [(0.1, False), (0.5, True)])
def test_reads_of_other_processes_are_waited_for(small: Store, seconds: float, crowded: bool) -> None:
    """Short ones; where many read, long ones, too."""
    elsewhere = partial(reading_elsewhere, small, seconds, crowded)
    with elsewhere(), elsewhere(), overlapping(small):
        longest = write(small, 20, 60_000)
    assert longest < 34 * MB


def test_a_read_that_does_not_end_elsewhere_keeps_nobody_waiting_for_long(small: Store) -> None:
    """A backup, say: it is tried for some seconds, and then reads go on for a while."""
    waits, longest_change = [], 0.0
    with reading_elsewhere(small, 60), overlapping(small, 2) as done:
        write(small, 4)
        began = time.monotonic()
        while time.monotonic() - began < 12:
            asked = time.monotonic()
            small.rules_at(1)
            waits.append(time.monotonic() - asked)
            asked = time.monotonic()
            small.note("apply", "test", NOW)
            longest_change = max(longest_change, time.monotonic() - asked)
    assert max(waits) < checkpoint.TRIES * 1.5 + 2
    assert sorted(waits)[len(waits) // 2] < 0.5
    assert longest_change < 2
    assert min(done) > 5, done
    with overlapping(small, 2):
        small.note("apply", "test", NOW)
        assert Path(f"{small.path}-wal").stat().st_size > checkpoint.LONGEST


@contextmanager
def held(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A read goes on, and the log is too long by now, until the event is set."""
    for name in ("LONGEST", "SHORT"):
        monkeypatch.setattr(checkpoint, name, 100_000)
    began, ended = threading.Event(), threading.Event()

    def read() -> None:
        with store._database.reading() as connection:
            connection.execute(text("SELECT revision FROM clock")).one()
            began.set()
            ended.wait(60)

    thread = threading.Thread(target=read)
    thread.start()
    began.wait()
    write(store, 0.5)
    try:
        yield ended
    finally:
        ended.set()
        thread.join()


def test_who_takes_power_away_and_who_reads_little_does_not_wait(small: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    token = small.add_token("viewer", "hash of it", "viewer", NOW)
    small.guarded("gw1")
    with held(small, monkeypatch) as ended:
        waiting = threading.Thread(target=small.rules_at, args=(1,))
        waiting.start()
        began = time.monotonic()
        assert small.token("viewer") == token
        assert small.active_tokens(NOW) == [token]
        small.open_window(60, Actor("admin"), small.now())
        assert small.guards() == ["gw1"]
        small.confirm("admin", small.now())
        small.hosts()
        assert small.revoke_token(token.id, NOW)
        assert time.monotonic() - began < 1
        assert waiting.is_alive()
        ended.set()
        waiting.join(5)
        assert not waiting.is_alive()


def test_who_reads_already_goes_on(small: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a transaction that writes, and where what was begun is ended by another thread."""
    with held(small, monkeypatch) as ended:
        with small._database.writing():
            assert small.find("1")
        ended.set()
        _, rules = small.load("gw1")
    with held(small, monkeypatch) as ended:
        assert small.find("1")  # by the thread that holds `rules`
        closing = threading.Thread(target=lambda: list(rules))
        closing.start()
        closing.join()
        ended.set()
    assert small.find("1")


def test_who_waits_for_too_long_is_told(small: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(f"sqlite:///{small.path}", crowded=True)
    monkeypatch.setattr(store._database, "_patience", 1.0)
    with held(store, monkeypatch), pytest.raises(Busy, match="busy for 1 seconds: its log is long"):
        store.rules_at(1)
    assert store.rules_at(1)
    store.close()


def test_a_read_that_never_ends_is_given_up(small: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PATIENCE", 0.02)
    with held(small, monkeypatch):
        began = time.monotonic()
        for _ in range(5):
            assert small.rules_at(1)
        assert time.monotonic() - began < 10


def test_only_where_many_read_anybody_waits(small: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard, a controller, a command: theirs are few."""
    store = Store(f"sqlite:///{small.path}")
    with held(small, monkeypatch):
        began = time.monotonic()
        assert store.rules_at(1)
        assert time.monotonic() - began < 1
    store.close()


def test_who_asks_controllers_leaves_room(small: Store, disk: Path) -> None:
    fill(disk, 3 * MB)
    for _ in range(3):
        with pytest.raises(NoRoom, match="are kept"):
            small.ask("gw1", "counters", {"rules": list(range(1000))})
    assert small.questions("gw1") == []
    question = small.ask("gw1", "counters", {"rules": [1]}, Leave.HALF)
    small.answer(question, {"said": 1})
    assert small.answered(question) == {"said": 1}
