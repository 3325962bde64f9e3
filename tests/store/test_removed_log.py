"""Somebody removes the log of a SQLite file (`-wal`, `-shm`) while it is in use."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import text

from netlimit.errors import StoreError
from netlimit.store import Store
from netlimit.store.engine import Database
from tests.store.examples import NOW, keep, rule

REMOVED = r"\(-wal, -shm\) was removed while it was in use\."
OTHER = """
import sys, time
from netlimit.errors import StoreError
from netlimit.store import Store
from tests.store.examples import keep
url, doing = sys.argv[1:]
store = Store(url)
if doing == "watch":
    watch = store.watch()
    keep(store, "10.0.9.9")
print("ready", flush=True)
end = time.monotonic() + 60
while time.monotonic() < end:
    try:
        if doing == "watch":
            watch.wait(0.2)
        elif doing == "sleep":
            store.revision()
            time.sleep(60)
        else:
            store.revision()
            time.sleep(0.1)
    except StoreError as error:
        print(error, file=sys.stderr, flush=True)
        time.sleep(0.1)
"""


@pytest.fixture
def path(sqlite_store: Store) -> Path:
    path = sqlite_store.path
    assert path is not None
    return path


@pytest.fixture
def store(sqlite_store: Store) -> Store:
    """One that has the file open, which holds a rule of which the log alone knows."""
    keep(sqlite_store, "10.0.0.1")
    return sqlite_store


def remove(path: Path, *endings: str) -> None:
    for ending in endings or ("-wal", "-shm"):
        path.with_name(path.name + ending).unlink()


@contextmanager
def other(path: Path, doing: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the file open."""
    command = [sys.executable, "-c", OTHER, f"sqlite:///{path}", doing]
    here = Path(__file__).parents[2]
    process = subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def try_long(work: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            work()
        except StoreError:
            if time.monotonic() > end:
                raise
        else:
            return


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


ENDINGS = [("-wal", "-shm"), ("-wal",), ("-shm",)]


@pytest.mark.parametrize("endings", ENDINGS, ids="".join)
def test_what_was_acknowledged_is_kept(store: Store, path: Path, endings: tuple[str, ...]) -> None:
    kept = keep(store, "10.0.0.2")
    remove(path, *endings)
    with pytest.raises(StoreError, match=REMOVED + " What it held is in the database now; try again"):
        keep(store, "10.0.0.3")
    assert keep(store, "10.0.0.4").id == kept.id + 1
    store.close()
    assert store.revision() == 3
    assert store._database.check_pages() is None


def test_it_is_told_once_in_the_log(store: Store, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remove(path)
    with pytest.raises(StoreError):
        store.revision()
    store.revision()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"The log of the database {path} (-wal, -shm) was removed while it was in use." in caplog.text


def test_one_that_is_removed_in_a_change_undoes_it(store: Store, path: Path) -> None:
    def alter(before: object) -> object:
        remove(path)
        return rule("10.9.9.9")

    with pytest.raises(StoreError, match=r"\(-wal, -shm\) was removed meanwhile; nothing was changed"):
        store.change(1, alter, "test", NOW)  # type: ignore[arg-type]
    try_long(store.revision)
    assert (store.revision(), len(store.audit())) == (1, 1)


def test_a_watch_hears_of_it(store: Store, path: Path) -> None:
    watch = store.watch()
    threading.Timer(0.3, remove, [path]).start()
    began = time.monotonic()
    with pytest.raises(StoreError, match=REMOVED):
        watch.wait(60)
    assert time.monotonic() - began < 30
    assert watch.wait(0)
    assert not watch.wait(0.05)
    assert store.revision() == 1
    watch.close()


def test_one_who_only_looks_saves_it_too(store: Store, path: Path) -> None:
    remove(path)
    with pytest.raises(StoreError, match=REMOVED):
        store.heed()
    store.heed()
    assert not path.with_name("netlimit.db-wal").exists()
    assert store.revision() == 1


@pytest.mark.parametrize("doing", ["watch", "ask"])
def test_all_who_have_it_open_come_together_again(store: Store, path: Path, doing: str) -> None:
    with other(path, doing):
        before = store.revision()
        remove(path)
        try_long(lambda: keep(store, "10.0.0.2"))
        with closing(sqlite3.connect(path)) as later:
            assert later.execute("SELECT revision FROM clock").fetchone() == (before + 1,)
        with closing(Store(f"sqlite:///{path}")) as late:
            assert late.revision() == before + 1
        store._database.check_pages()


def test_who_comes_begins_no_log_while_another_is_in_use(store: Store, path: Path) -> None:
    with other(path, "sleep") as process:
        time.sleep(0.5)
        remove(path)
        with pytest.raises(StoreError, match=REMOVED):
            store.revision()
        for use in (store.revision, store.upgrade, Store(f"sqlite:///{path}").revision):
            with pytest.raises(StoreError, match=rf"{REMOVED} Process {process.pid} still uses it"):
                use()
        assert not path.with_name("netlimit.db-wal").exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert store.revision() == 1
    assert len(store.select()[0]) == 1


def test_one_that_another_program_has_begun_is_not_written_into(store: Store, path: Path) -> None:
    keep(store, "10.0.0.2")
    remove(path)
    foreign = subprocess.Popen(
        [sys.executable, "-c",
         "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('CREATE TABLE more (a)'); c.commit();"
         "print('ready', flush=True); sys.stdin.read()", str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert foreign.stdout is not None
    assert foreign.stdout.readline() == "ready\n"
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(StoreError, match=REMOVED + " Another program has begun a log in its place"):
            keep(store, "10.0.0.3")
    assert path.read_bytes() == before
    foreign.kill()
    foreign.communicate()
    with pytest.raises(StoreError, match="Another program has begun a log"):
        store.revision()
    remove(path)
    with pytest.raises(StoreError, match="What it held is in the database now"):
        store.revision()
    assert store.revision() == 2
    store._database.check_pages()


def test_threads_that_are_at_work_lose_nothing(store: Store, path: Path) -> None:
    kept: set[int] = set()
    stopped = threading.Event()

    def work(number: int) -> None:
        for turn in range(100_000):
            if stopped.is_set():
                return
            with suppress(StoreError):
                kept.add(keep(store, f"10.{number}.{turn >> 8}.{turn & 255}").id)

    with ThreadPoolExecutor(8) as pool:
        working = [pool.submit(work, number) for number in range(1, 9)]
        try:
            for _ in range(3):
                before = len(kept)
                wait_for(lambda before=before: len(kept) > before + 20)  # type: ignore[misc]
                remove(path)
        finally:
            stopped.set()
        for each in working:
            each.result(60)
    try_long(store.revision)
    store.close()
    assert kept <= {each.rule.id for each in store.select(limit=100_000)[0]}
    store._database.check_pages()


def test_one_who_has_just_come_must_let_go_too(sqlite_url: str, path: Path) -> None:
    """SQLite has one index for all connections of a process: a new log would be read by that of the removed one."""
    database, ask = Database(sqlite_url, patience=0.2), text("SELECT revision FROM clock")
    with ExitStack() as stack:
        with database.reading() as first:
            first.execute(ask)
            stack.enter_context(database.reading()).execute(ask)  # another connection, for the first time
        remove(path)
        for words in ("What it held is in the database", "", ""):
            with pytest.raises(StoreError, match=REMOVED + ".*" + words), database.reading():
                pass
        assert not path.with_name("netlimit.db-wal").exists()
    with database.reading() as again:
        assert again.execute(ask).scalar_one() == 0
    assert path.with_name("netlimit.db-wal").exists()
    database.close()


def test_logs_that_come_and_go_by_themselves_are_no_matter(
    store: Store, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last one who closes the file removes its log; whoever comes next begins another."""
    for number in range(20):
        store.close()
        assert not path.with_name("netlimit.db-wal").exists()
        keep(store, f"10.2.0.{number}")
        with closing(Store(f"sqlite:///{path}")) as other:
            keep(other, f"10.3.0.{number}")
    assert not caplog.records


def test_processes_that_come_and_go_see_no_log_removed(store: Store, path: Path) -> None:
    program = (
        "import sys; from netlimit.store import Store; from tests.store.examples import keep; url, at = sys.argv[1:]\n"
        "for n in range(12):\n"
        "    store = Store(url); store.revision(); keep(store, f'10.{at}.0.{n}'); store.close()"
    )
    store.close()
    here = Path(__file__).parents[2]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, f"sqlite:///{path}", str(at)], cwd=here, stderr=subprocess.PIPE, text=True
        )
        for at in range(20, 24)
    ]
    for process in running:
        assert process.communicate(timeout=120)[1] == ""
    assert store.revision() == 49


def test_one_that_is_put_back_is_gone_on_with(store: Store, path: Path) -> None:
    for ending in ("-wal", "-shm"):
        os.rename(f"{path}{ending}", f"{path}{ending}.away")
        os.rename(f"{path}{ending}.away", f"{path}{ending}")
    assert keep(store, "10.0.0.2").revision == 2
