"""The database itself: its file, its state, and what an operator is told when it is not as it should be."""

from __future__ import annotations

import grp
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import make_url, text

from netlimit.errors import StoreError
from netlimit.store import Store, files, homes
from tests.databases import Postgres
from tests.store.examples import NOW, keep, rule


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "var" / "netlimit.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    """A store over SQLite that is not made yet."""
    with closing(Store(f"sqlite:///{path}")) as store:
        yield store


def test_file_and_directory_are_for_netlimit_only(store: Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "GROUP", "no-such-group")
    store.upgrade()
    keep(store)
    assert mode(path.parent) == "0o700"
    assert mode(path) == "0o660"
    with_log = sorted(child.name for child in path.parent.iterdir())
    assert with_log == ["netlimit.db", "netlimit.db-shm", "netlimit.db-wal"]
    assert {mode(child) for child in path.parent.iterdir()} == {"0o660"}


def test_the_group_gets_the_directory_where_there_is_one(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = os.getgid()
    monkeypatch.setattr(files, "GROUP", grp.getgrgid(group).gr_name)
    store.upgrade()
    assert mode(path.parent) == "0o2770"
    assert path.parent.stat().st_gid == path.stat().st_gid == group


def test_a_directory_that_is_there_stays_as_it_is(store: Store, path: Path) -> None:
    path.parent.mkdir(mode=0o755)
    before = mode(path.parent)
    store.upgrade()
    assert mode(path.parent) == before


def test_a_missing_database_is_said_and_not_made(store: Store, path: Path) -> None:
    with pytest.raises(StoreError, match=r"There is no database at .*/netlimit\.db; `netlimit db upgrade` makes one"):
        store.revision()
    assert not path.parent.exists()


def test_a_database_without_tables_is_said(empty_url: str, store: Store) -> None:
    if empty_url.startswith("sqlite"):
        file = Path(empty_url.removeprefix("sqlite:///"))
        file.parent.mkdir()
        file.touch()
    store = Store(empty_url)
    with pytest.raises(StoreError, match=r"has no tables yet; run `netlimit db upgrade`\."):
        store.revision()
    store.upgrade()
    assert store.revision() == 0
    store.close()


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("0000", "is at schema 0000, but this netlimit needs .*netlimit db upgrade"),
        ("9999", "newer than this netlimit"),
    ],
)
def test_another_schema_is_said(url: str, schema: str, words: str) -> None:
    store = Store(url)
    present = set_schema(store, schema)
    other = Store(url)
    with pytest.raises(StoreError, match=words):
        other.revision()
    with pytest.raises(StoreError, match=words):
        other.watch()
    if schema == "9999":
        with pytest.raises(StoreError, match=words):
            other.upgrade()
    set_schema(store, present)
    store.close()
    other.close()


def set_schema(store: Store, schema: str) -> str:
    with store._database.engine.begin() as connection, homes.by_name(connection):
        former: str = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
        connection.execute(text("UPDATE alembic_version SET version_num = :new"), {"new": schema})
    return former


def test_what_is_no_database_is_said(store: Store, path: Path) -> None:
    path.parent.mkdir()
    path.write_text("not a database at all, but long enough to be looked at " * 100)
    for use in (store.revision, store.upgrade):
        with pytest.raises(StoreError, match=r"is damaged \(file is not a database\)\. .*`netlimit restore FILE`"):
            use()


def test_a_damaged_database_is_said(store: Store, path: Path) -> None:
    store.upgrade()
    store.close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    with pytest.raises(StoreError, match="is damaged"):
        store.revision()


def test_a_database_that_is_moved_away_is_missed_and_found_again(store: Store, path: Path) -> None:
    store.upgrade()
    first = keep(store)
    watch = store.watch()
    kept = path.rename(path.with_name("away.db"))
    for use in (store.revision, store.watch, watch.changed, watch.changed, lambda: keep(store, "10.9.9.9")):
        with pytest.raises(StoreError, match=r"is not there any more; put it back, or restore a backup\."):
            use()
    assert not path.exists()
    kept.rename(path)
    assert watch.changed()
    found = store.find(first.id)
    assert found is not None
    assert found.rule == first
    watch.close()
    store.close()


def test_one_that_comes_back_while_it_is_looked_for_is_written_to_from_then_on(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.upgrade()
    store.close()
    away, check = path.rename(path.with_name("away.db")), files.check_file
    with closing(Store(f"sqlite:///{path}")) as fresh:

        def come_back(place: Path) -> None:
            monkeypatch.undo()
            away.rename(place)
            check(place)

        monkeypatch.setattr(files, "check_file", come_back)
        with pytest.raises(StoreError, match="has been moved just now; try again"):
            keep(fresh)
        keep(fresh)


def test_another_file_in_its_place_is_opened(store: Store, path: Path, tmp_path: Path) -> None:
    store.upgrade()
    keep(store)
    watch = store.watch()
    other = Store(f"sqlite:///{tmp_path}/other.db")
    other.upgrade()
    other.close()
    (tmp_path / "other.db").replace(path)
    with pytest.raises(StoreError, match=r"beside the log of the former \(netlimit\.db-wal\)\. End netlimit"):
        store.revision()
    path.with_name("netlimit.db-wal").unlink()
    assert watch.changed()
    assert not watch.changed()
    assert store.revision() == 0
    watch.close()
    store.close()


LINKED = "is a symbolic link; SQLite would keep its log elsewhere"


def test_a_link_in_the_place_of_the_file_is_refused(store: Store, path: Path, tmp_path: Path) -> None:
    """SQLite keeps the log beside the file itself, where nobody would look for it, nor bound it."""
    store.upgrade()
    link = tmp_path / "link.db"
    link.symlink_to(path)
    with closing(Store(f"sqlite:///{link}")) as linked:
        for ask in (linked.revision, linked.upgrade, partial(keep, linked)):
            with pytest.raises(StoreError, match=LINKED):
                ask()
    keep(store)


def test_a_link_that_leads_nowhere_is_not_taken_for_no_database(tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(tmp_path / "disk" / "netlimit.db")
    with closing(Store(f"sqlite:///{link}")) as linked:
        for ask in (linked.revision, linked.upgrade):
            with pytest.raises(StoreError, match=LINKED):
                ask()
    assert [*tmp_path.iterdir()] == [link]


def test_a_file_that_is_moved_and_linked_to_is_used_no_more(store: Store, path: Path) -> None:
    store.upgrade()
    keep(store)
    away = path.rename(path.with_name("away.db"))
    path.symlink_to(away)
    with pytest.raises(StoreError, match=LINKED):
        keep(store)
    away.replace(path)
    keep(store, "10.0.0.2")


def test_a_link_to_the_directory_is_followed(store: Store, path: Path, tmp_path: Path) -> None:
    store.upgrade()
    (tmp_path / "link").symlink_to(path.parent)
    with closing(Store(f"sqlite:///{tmp_path}/link/{path.name}")) as linked:
        keep(linked)
        assert linked.revision() == store.revision()


def test_a_database_that_others_own_is_said(store: Store, path: Path) -> None:
    store.upgrade()
    path.chmod(0o400)
    path.parent.chmod(0o500)
    said = say_as_nobody(path)
    path.parent.chmod(0o700)
    assert said.startswith(f"This user may not read and write the database {path} and its directory; run as root")


def say_as_nobody(path: Path) -> str:
    """What a process without root's rights is told. It is forked, for it may not even be able to read Python."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            Store(f"sqlite:///{path}").revision()
        except StoreError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def test_a_place_where_nothing_can_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot be made: Not a directory\. Set NETLIMIT_DATABASE_URL"):
        Store(f"sqlite:///{tmp_path}/file/netlimit.db").upgrade()


def test_a_full_disk_is_said(store: Store) -> None:
    store.upgrade()
    with store._database.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")
    batch = [rule(f"10.0.{n >> 8}.{n & 255}", comment="x" * 1000) for n in range(1000)]
    with pytest.raises(StoreError, match="cannot grow: database or disk is full"):
        store.add(batch, "test", NOW)


def test_a_busy_database_is_said(store: Store, path: Path) -> None:
    store.upgrade()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with store._database.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout = 50")
    with pytest.raises(StoreError, match="another process holds it, try again"):
        keep(store)
    other.rollback()
    other.close()
    assert keep(store).id == 1


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "is no database URL; write for example sqlite:////"),
        ("mysql://h/d", "netlimit knows sqlite and postgresql"),
        ("sqlite://", "SQLite needs a file"),
        ("sqlite:///:memory:", "SQLite needs a file"),
        ("sqlite:///var/lib/netlimit/netlimit.db", "behind four slashes: sqlite:////var/lib/netlimit/netlimit.db"),
        ("sqlite:///file:/var/lib/netlimit/netlimit.db?uri=true", "behind four slashes"),
        ("sqlite://host/var/lib/netlimit.db", "behind four slashes"),
        ("postgresql+nodriver://h/d", "is not installed"),
        ("postgresql://netlimit:one@hidden@192.0.2.1/d", "more than one @ before its host,.* write an @ .* as %40"),
        ("postgresql://netlimit:one@hidden/two@192.0.2.1/d", "or another behind it; write an @ .* as %40"),
        ("postgresql://netlimit:one@hidden?two@192.0.2.1/d", "or another behind it; write an @ .* as %40"),
        ("postgresql://netlimit:one@hidden?two=a@192.0.2.1/d", "or another behind it; write an @ .* as %40"),
        ("postgresql://netlimit:one@hidden:/two@192.0.2.1/d", "is no database URL|or another behind it"),
    ],
)
def test_a_url_that_cannot_be_used_is_said(url: str, words: str) -> None:
    with pytest.raises(StoreError, match=words) as caught:
        Store(url)
    assert "hidden" not in str(caught.value)


def test_a_server_that_does_not_answer_is_said_without_the_password(tmp_path: Path) -> None:
    store = Store(f"postgres://netlimit:hidden@/netlimit?host={tmp_path}")
    with pytest.raises(StoreError, match="cannot be reached") as caught:
        store.revision()
    assert "hidden" not in str(caught.value)
    assert "hidden" not in repr(store)


def test_a_path_may_have_any_letters(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/a b/50%?.db".replace("?", "%3F"))
    store.upgrade()
    assert keep(store).revision == 1
    store.close()


@pytest.mark.parametrize("use", [Store.upgrade, Store.revision, Store.hosts])
def test_a_closed_store_opens_again(url: str, use: Callable[[Store], object]) -> None:
    store = Store(url)
    use(store)
    store.close()
    store.add([], "test", NOW)
    store.close()


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_writers_wait_for_each_other_whatever_level_the_server_has(
    postgres: Postgres, postgres_url: str, level: str
) -> None:
    """Under a stricter one the second of two is refused."""
    name = make_url(postgres_url).database
    postgres.run("postgres", f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'")
    store = Store(postgres_url)
    try:
        with store._database.writing() as connection:
            assert connection.exec_driver_sql("SHOW transaction_isolation").scalar_one() == "read committed"
    finally:
        store.close()
