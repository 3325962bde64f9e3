"""What a broken disk, file or connection means: a sentence, and nothing half kept; then all goes on."""

from __future__ import annotations

import gc
import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from sqlalchemy import text

from netlimit.errors import StoreError
from netlimit.records import Counts, Exceptional, RuleCounters, State
from netlimit.store import Damaged, Store, homes
from netlimit.store.engine import Database, again
from netlimit.store.faults import Undone
from tests.damage import flip
from tests.databases import Postgres
from tests.store.examples import NOW, keep, rule

Result = TypeVar("Result")
RESCUE = r"is damaged \(.*\)\. What is in the kernel stays\. Stop netlimit and bring back a backup"


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Store]:
    """A store of a thousand rules, in a file that lies on a disk of its own, of two megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "netlimit-test", disk], check=True)
    store = Store(f"sqlite:///{disk}/netlimit.db")
    try:
        store.upgrade()
        yield store
    finally:
        store.close()
        subprocess.run(["umount", disk], check=True)


def batch(start: int, size: int = 100) -> list[object]:
    return [rule(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", comment="x" * 200) for n in range(start, start + size)]


def write_until_refused(store: Store) -> int:
    """How many rules there are when the disk is full."""
    for written in range(0, 100_000, 100):
        try:
            store.add(batch(written), "test", NOW)  # type: ignore[arg-type]
        except StoreError:
            return written
    raise AssertionError("the disk is never full")


def test_on_a_full_disk_nothing_is_half_kept(root: None, full: Store) -> None:
    written = write_until_refused(full)
    assert written > 0
    assert full.revision() == written // 100
    assert full.select(limit=1)[1] == written
    with pytest.raises(StoreError, match="room"):
        full.add(batch(written), "test", NOW)  # type: ignore[arg-type]
    path = full._database.path
    assert path is not None
    subprocess.run(["mount", "-o", "remount,size=8m", path.parent], check=True)
    full.add(batch(written), "test", NOW)  # type: ignore[arg-type]
    assert full.select(limit=1)[1] == written + 100
    full._database.check_pages()


@pytest.fixture
def path(sqlite_store: Store) -> Path:
    """The file of a database that holds rules."""
    for start in range(0, 500, 100):
        sqlite_store.add(batch(start), "test", NOW)  # type: ignore[arg-type]
    sqlite_store.close()
    path = sqlite_store._database.path
    assert path is not None
    return path


def write_over(path: Path, start: int, length: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(os.urandom(length))


HARM: dict[str, Callable[[Path], None]] = {
    "garbage in its pages": lambda path: write_over(path, 8 * 4096, path.stat().st_size // 2),
    "garbage in one page": lambda path: write_over(path, path.stat().st_size // 2 // 4096 * 4096, 4096),
    "a letter of its schema": lambda path: flip(path, b"CREATE TABLE tokens", 10),
    "garbage in its head": lambda path: write_over(path, 0, 100),
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2 // 4096 * 4096),
    "not a database": lambda path: path.write_text("something else " * 1000) and None,  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM.keys())
def test_damage_is_found_at_the_start(path: Path, harm: Callable[[Path], None]) -> None:
    harm(path)
    before = path.read_bytes()
    store = Store(f"sqlite:///{path}")
    with pytest.raises(Damaged, match=RESCUE):
        store.upgrade()
    assert path.read_bytes() == before
    store.close()


def test_an_empty_file_has_no_tables_yet(path: Path) -> None:
    path.write_bytes(b"")
    store = Store(f"sqlite:///{path}")
    with pytest.raises(StoreError, match="has no tables yet"):
        store.revision()
    store.close()


def test_damage_that_comes_later_is_said_in_the_same_words(path: Path) -> None:
    store = Store(f"sqlite:///{path}")
    store.revision()
    store.close()  # what was read is remembered as long as the file is open
    write_over(path, 2 * 4096, path.stat().st_size - 2 * 4096)
    with pytest.raises(Damaged, match=RESCUE):
        store.select(limit=1000)
    store.close()


def test_looking_through_a_file_ends_in_time_and_says_nothing_then(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.store.engine.CHECK_SECONDS", -1.0)
    monkeypatch.setattr("netlimit.store.engine._CHECK_STEPS", 1)
    Database(f"sqlite:///{path}").check_pages()


def test_a_file_that_is_moved_away_in_a_change_undoes_it(path: Path) -> None:
    store = Store(f"sqlite:///{path}")
    moved = path.with_name("elsewhere.db")

    def alter(before: object) -> object:
        path.rename(moved)
        return rule("10.9.9.9")

    with pytest.raises(StoreError, match="was moved away meanwhile; nothing was changed"):
        store.change(1, alter, "test", NOW)  # type: ignore[arg-type]
    moved.rename(path)
    assert store.revision() == 5
    store.close()


def cut(postgres: Postgres, database: str) -> None:
    """End every connection to a database."""
    postgres.run(
        database,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )


def test_a_connection_that_is_lost_in_a_change_undoes_it(postgres: Postgres, postgres_url: str, migrated: str) -> None:
    store = Store(postgres_url)
    keep(store)

    def alter(before: object) -> object:
        cut(postgres, migrated)
        return rule("10.9.9.9")

    with pytest.raises(StoreError, match="look at NETLIMIT_DATABASE_URL and the server"):
        store.change(1, alter, "test", NOW)  # type: ignore[arg-type]
    assert store.revision() == 1
    assert len(store.audit()) == 1
    assert keep(store, "10.0.0.2").revision == 2
    store.close()


@pytest.mark.parametrize("read", [0, 1], ids=["before the first rule", "between two"])
def test_a_connection_that_is_lost_while_rules_are_streamed_leaves_no_cursor(
    postgres: Postgres, postgres_url: str, migrated: str, read: int
) -> None:
    store = Store(postgres_url)
    store.add([rule(f"10.0.{number // 250}.{number % 250}") for number in range(2500)], "test", NOW)
    _, _, rules = store.load_stamped("gw1")
    for _ in range(read):
        next(rules)
    cut(postgres, migrated)
    with pytest.raises(StoreError, match="look at NETLIMIT_DATABASE_URL and the server"):
        list(rules)
    del rules
    gc.collect()  # an open cursor says so when it goes, and pytest hears it
    store.close()


def test_those_who_write_the_same_rows_wait_for_each_other_and_no_more(postgres_url: str) -> None:
    """Whatever the order in which they are given, rows are locked in one: there is no deadlock, of one second each."""
    store = Store(postgres_url)
    rules = [keep(store, f"10.0.0.{number}").id for number in range(40)]
    states = [Exceptional(number, State.ERROR, "as it is") for number in rules]
    counts = [RuleCounters(number, Counts(), Counts(), NOW, NOW) for number in rules]

    def write(number: int) -> None:
        step = 1 if number % 2 else -1
        store.mark("gw1", states[::step], [])
        store.count("gw1", counts[::step])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(40)))
    assert len(store.marked("gw1")) == 40
    store.close()


def do_in_the_way(url: str, work: Callable[[], Result]) -> Result:
    """Do something while another transaction holds what it needs, and then wants what it has."""
    change = "UPDATE rule_states SET message = 'between' WHERE rule_id = "
    other = Database(url)
    with ThreadPoolExecutor(1) as pool, other.engine.connect() as connection:
        with connection.begin(), homes.by_name(connection):
            connection.execute(text(change + "2"))
            working = pool.submit(work)
            while not connection.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar_one():
                assert not working.done()
            connection.execute(text("SET LOCAL deadlock_timeout = '10s'"))  # the other one shall notice first
            connection.execute(text(change + "1"))
        done = working.result(120)
    other.close()
    return done


def test_what_the_server_undid_for_another_is_done_again(postgres_url: str) -> None:
    store = Store(postgres_url)
    store.mark("gw1", [Exceptional(number, State.ERROR, "before") for number in (1, 2)], [])
    after = [Exceptional(number, State.ERROR, "after") for number in (1, 2)]
    do_in_the_way(postgres_url, lambda: store.mark("gw1", after, []))
    assert {each.message for each in store.marked("gw1").values()} == {"after"}
    store.close()


def test_a_window_ends_though_its_rules_are_in_use(postgres_url: str) -> None:
    store = Store(postgres_url)
    window = store.open_window(60, "test", NOW)
    keep(store)
    keep(store, "10.0.0.2")
    store.mark("gw1", [Exceptional(number, State.ERROR, "before") for number in (1, 2)], [])
    ended = do_in_the_way(postgres_url, lambda: store.expire(window, "guard", NOW))
    assert ended is not None
    assert ended.outcome == "expired"
    assert store.select() == ([], 0)
    store.close()


def test_what_is_undone_for_ever_is_an_error() -> None:
    class Unlucky:
        tried = 0

        @again
        def work(self) -> None:
            self.tried += 1
            raise Undone("again")

    unlucky = Unlucky()
    with pytest.raises(Undone):
        unlucky.work()
    assert unlucky.tried == 5


URLS = [
    "postgresql://netlimit:hidden@127.0.0.1:1/netlimit",
    "postgresql://netlimit:hidden@/netlimit?host=/nowhere",
    "postgresql://netlimit:hidden@no.such.host.invalid/netlimit",
    "postgresql://netlimit:hidden@127.0.0.1:1/netlimit?sslmode=nonsense",
    "postgresql://netlimit:hidden@127.0.0.1:1/netlimit?colour=red",
    "postgresql://netlimit:hidden@127.0.0.1:port/netlimit",
    "postgresql://netlimit:hid%den@[::1/netlimit",
    "postgresql://127.0.0.1:1/netlimit?user=netlimit&password=hidden&sslpassword=hidden",
    "postgresql://127.0.0.1:1/netlimit?user=netlimit&pasword=hidden",
]


@pytest.mark.parametrize("url", URLS)
def test_a_password_is_never_shown(url: str) -> None:
    with pytest.raises(StoreError) as caught:
        Store(url).revision()
    error: BaseException | None = caught.value
    while error is not None:
        assert "hid" not in str(error), repr(error)
        error = error.__cause__


def test_rights_that_lack_are_said(postgres: Postgres, postgres_url: str, migrated: str) -> None:
    postgres.run(
        migrated,
        "DROP ROLE IF EXISTS stranger",
        "CREATE ROLE stranger LOGIN",
    )
    store = Store(postgres_url.replace("postgres@", "stranger@"))
    with pytest.raises(StoreError, match="does not let this user do that"):
        store.revision()
    store.close()


def test_a_standby_is_told(postgres: Postgres, postgres_url: str, migrated: str) -> None:
    postgres.run("postgres", f"ALTER DATABASE {migrated} SET default_transaction_read_only = on")
    store = Store(postgres_url)
    try:
        assert store.revision() == 0
        with pytest.raises(StoreError, match="let NETLIMIT_DATABASE_URL name the primary server"):
            keep(store)
    finally:
        store.close()
        postgres.run("postgres", f"ALTER DATABASE {migrated} RESET default_transaction_read_only")


def test_a_reader_that_does_not_end_keeps_a_migration_out_but_not_for_ever(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.store.test_migrations import take

    monkeypatch.setattr("netlimit.store.engine.MIGRATION_LOCK_SECONDS", 0.3)
    name = postgres.make_database()
    store = Store(postgres.url(name))
    take(store, "0002")
    other = Database(postgres.url(name))
    with other.engine.connect() as reader, homes.by_name(reader):
        reader.execute(text("SELECT * FROM audit"))
        with pytest.raises(StoreError, match="another session holds a lock on it, try again"):
            store.upgrade()
        with pytest.raises(StoreError, match="is at schema 0002"):
            store.revision()
    store.upgrade()
    assert store.revision() == 0
    store.close()
    other.close()
    postgres.drop_database(name)


def test_a_file_in_a_directory_that_cannot_be_written(root: None, tmp_path: Path, sqlite_store: Store) -> None:
    """Even for root: the directory lies on a disk that is mounted read-only."""
    path = sqlite_store._database.path
    assert path is not None
    sqlite_store.close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    subprocess.run(["mount", "--bind", path.parent, path.parent], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", path.parent], check=True)
    try:
        with pytest.raises(StoreError, match=r"may not read and write|cannot be opened for writing"):
            keep(sqlite_store)
    finally:
        sqlite_store.close()
        subprocess.run(["umount", path.parent], check=True)
    assert keep(sqlite_store).revision == 1
