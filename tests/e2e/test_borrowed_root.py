"""What root does in directories of netlimit's users, while these exchange every name that they may: no file of others
gets another owner, mode or content, and nothing waits for ever."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from netlimit.cli.client import find_token
from netlimit.custody import made_directory
from netlimit.errors import KernelError, NetlimitError, StoreError
from netlimit.kernel.lock import locked
from netlimit.records import Actor
from netlimit.rules import parse_rule
from netlimit.settings import Settings
from netlimit.store import Store, migrate, open_replica
from netlimit.store.connection import connect
from scripts.testbed.namespaces import Lab
from tests.e2e import swapper
from tests.e2e.gateway import COMMAND
from tests.warm import ROOT

USER = pwd.getpwnam("nobody")
GROUP = USER.pw_gid
NOW = datetime(2026, 11, 24, tzinfo=UTC)
SECRET = "root's alone\n"
TRIES = 12


@pytest.fixture
def shared(root: None) -> Iterator[Path]:
    """A directory as that of the database: root's, which the group may write."""
    made = Path(tempfile.mkdtemp(prefix="netlimit-"))
    made.chmod(0o755)
    place = made / "lib"
    place.mkdir()
    os.chown(place, 0, GROUP)
    place.chmod(0o2770)
    yield place
    shutil.rmtree(made)


@pytest.fixture
def others(shared: Path) -> Iterator[Path]:
    """A file that only root may read, in a directory of root's. Nothing of it may have changed in the end."""
    place = shared.parent / "others"
    place.mkdir()
    os.chown(place, 0, 0)
    file = place / "secret"
    file.write_text(SECRET)
    file.chmod(0o640)
    before = describe(place)
    yield file
    assert describe(place) == before


def describe(place: Path) -> list[tuple[object, ...]]:
    """Everything of a directory and what is in it that root could be made to change."""
    found = [place, *sorted(place.iterdir())]
    stats = [(path, path.lstat()) for path in found]
    return [
        (
            str(path),
            s.st_uid,
            s.st_gid,
            s.st_mode,
            s.st_nlink,
            s.st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path, s in stats
    ]


@contextmanager
def swapping(target: Path, *names: Path) -> Iterator[None]:
    """Somebody exchanges these names meanwhile."""
    words = (USER.pw_name, str(GROUP), str(target), *map(str, names))
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.e2e.swapper import main; main(*sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True, cwd="/")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield
        assert process.poll() is None, "who exchanges names has ended"
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def lead_away(name: Path, target: Path) -> None:
    """A link of the user's."""
    name.symlink_to(target)
    os.chown(name, USER.pw_uid, GROUP, follow_symlinks=False)


def damage(path: Path) -> None:
    """Spoil a database, if it is one at this moment."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        if os.fstat(descriptor).st_nlink == 1 and stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.write(descriptor, b"\xff" * 8192)
        os.close(descriptor)


def prepare(state: Path) -> subprocess.CompletedProcess[str]:
    settings = {"NETLIMIT_BACKEND": "fake", "NETLIMIT_STATE_DIRECTORY": str(state), "NETLIMIT_CONFIG": ""}
    command = (sys.executable, *COMMAND, "prepare", "--user", USER.pw_name)
    return subprocess.run(
        command, env={**os.environ, **settings}, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_link_in_the_place_of_the_controllers_directory_gives_nothing_away(shared: Path, others: Path) -> None:
    lead_away(shared / "controller", others.parent)
    done = prepare(shared / "controller")
    assert f"{shared}/controller cannot be given to nobody" in done.stderr


@pytest.mark.parametrize("name", ["applied.db", "applied.db-journal", "guard.lock"])
@pytest.mark.parametrize("kind", ["link", "hard link", "FIFO"])
def test_nor_does_what_its_owner_puts_there(shared: Path, others: Path, name: str, kind: str) -> None:
    state = shared / "controller"
    state.mkdir(mode=0o700)
    os.chown(state, USER.pw_uid, GROUP)
    if kind == "link":
        lead_away(state / name, others)
    elif kind == "FIFO":
        os.mkfifo(state / name)
        os.chown(state / name, USER.pw_uid, GROUP)
    else:
        os.link(others, state / name)
    done = prepare(state)
    assert done.returncode == 0, done.stderr
    (state / name).unlink(missing_ok=True)


def test_install_gives_no_directory_of_others_away(shared: Path, others: Path) -> None:
    """What scripts/install runs for the controller's directory."""
    lead_away(shared / "controller", others.parent)
    command = (sys.executable, "-m", "netlimit.custody", str(shared / "controller"), USER.pw_name, "root", "700")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{shared}/controller cannot be given to nobody" in done.stderr


@pytest.mark.parametrize("kind", ["link", "nowhere", "FIFO", "hard link"])
def test_a_lock_is_a_plain_file(shared: Path, others: Path, kind: str) -> None:
    state = shared / "controller"
    state.mkdir(mode=0o700)
    os.chown(state, USER.pw_uid, GROUP)
    lock = state / "guard.lock"
    match kind:
        case "link":
            lead_away(lock, others)
        case "nowhere":
            lead_away(lock, others.with_name("made"))
        case "FIFO":
            os.mkfifo(lock)
        case _:
            os.link(others, lock)
    with pytest.raises(KernelError, match="cannot be opened"), locked(str(lock), "try"):
        pass
    lock.unlink()


def test_the_copy_is_opened_with_the_rights_of_its_owner(shared: Path, others: Path) -> None:
    """Root reads and writes it (`apply --last`, `plan`, `teardown`) while its owner exchanges names."""
    state = shared / "controller"
    state.mkdir(mode=0o700)
    os.chown(state, USER.pw_uid, GROUP)
    names = [state / name for name in ("applied.db", "applied.db-journal", "guard.lock")]
    with swapping(others, *names, state):
        for number in range(TRIES):
            with suppress(NetlimitError, OSError), closing(open_replica(state, "gw")) as replica:
                replica.follow_pause(bool(number % 2))
            with suppress(KernelError), locked(str(names[-1]), "try", patience=0.0):
                pass


def test_a_damaged_database_is_put_aside_while_others_exchange_names(shared: Path, others: Path) -> None:
    path, backup = shared / "netlimit.db", shared.parent / "backup"
    with closing(Store(f"sqlite:///{path}")) as store:
        store.upgrade()
        store.add([parse_rule({"target": "10.0.0.1", "rate": "5 packets/s"}, NOW)], "test", NOW)
        store.back_up(backup, NOW)
    assert path.stat().st_mode & 0o777 == 0o660
    names = [shared / name for name in ("netlimit.db", "netlimit.db-wal", "netlimit.db-shm")]
    with swapping(others, *names):
        for number in range(TRIES):
            damage(path)
            with suppress(NetlimitError, OSError), closing(Store(f"sqlite:///{path}")) as store:
                store.restore(backup, Actor("root"), NOW + timedelta(seconds=number), force=True)


DIVERTER = """
import os, sys, time
directory, target, name, delay = *sys.argv[1:4], float(sys.argv[4])
print("begun", flush=True)
end = time.monotonic() + 20
while time.monotonic() < end:
    for each in os.listdir(directory):
        if each.startswith(".netlimit-") and not each.endswith(".aside"):
            time.sleep(delay)
            os.rename(f"{directory}/{each}", f"{directory}/{each}.aside")
            os.mkdir(f"{directory}/{each}")
            os.symlink(target, f"{directory}/{each}/{name}")
            sys.exit()
"""
"""Somebody who puts a directory of his in the place of one that root works in, with a link in it."""


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1, 0.2])
def test_a_backup_is_written_to_no_file_of_others(shared: Path, delay: float) -> None:
    """Where root puts it into the directory of the database. The file is empty, so that SQLite takes it for its own."""
    others = shared.parent / "others"
    others.mkdir(mode=0o700)
    (others / "empty").touch(mode=0o600)
    before = describe(others)
    with closing(Store(f"sqlite:///{shared}/netlimit.db")) as store:
        store.upgrade()
        words = ("setpriv", "--reuid", str(USER.pw_uid), "--regid", str(GROUP), "--clear-groups", sys.executable, "-c",
                 DIVERTER, str(shared), str(others / "empty"), "backup", str(delay))  # fmt: skip
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as diverter:
            assert diverter.stdout is not None
            assert diverter.stdout.readline() == "begun\n"
            with suppress(NetlimitError, OSError):
                store.back_up(shared / "backup", NOW)
            diverter.kill()
    assert describe(others) == before


def test_a_backup_that_is_taken_away_while_it_is_written_is_an_error(
    shared: Path, others: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not "Wrote …"; and what is in its place stays."""
    backup = shared / "backup"

    def exchange(*told: Any) -> Any:
        backup.rename(shared / "elsewhere")
        backup.symlink_to(others)
        return upgrade(*told)

    with closing(Store(f"sqlite:///{shared}/netlimit.db")) as store:
        store.upgrade()
        upgrade = migrate.upgrade
        monkeypatch.setattr(migrate, "upgrade", exchange)
        with pytest.raises(StoreError, match="Somebody has put something else in the place of"):
            store.back_up(backup, NOW)
    assert backup.is_symlink()


@pytest.mark.parametrize("ending", ["-journal", "-wal", "-shm"])
def test_nobody_waits_at_a_fifo_beside_a_database(shared: Path, ending: str) -> None:
    """SQLite opens what is there."""
    url = f"sqlite:///{shared}/netlimit.db"
    with closing(Store(url)) as store:
        store.upgrade()
    (shared / f"netlimit.db{ending}").unlink(missing_ok=True)
    os.mkfifo(shared / f"netlimit.db{ending}")
    command = (sys.executable, *COMMAND, "db", "upgrade")
    done = subprocess.run(
        command,
        env={**os.environ, "NETLIMIT_DATABASE_URL": url}, cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"{shared}/netlimit.db{ending}, beside the database, is no plain file" in done.stderr


@pytest.mark.parametrize("ending", ["", "-journal", "-wal", "-shm"])
@pytest.mark.parametrize("kind", ["FIFO", "link to a FIFO"])
def test_nor_at_one_that_comes_after_the_look(shared: Path, ending: str, kind: str) -> None:
    """As in a race: nothing looks before SQLite opens what is there."""
    path = shared / "netlimit.db"
    with closing(Store(f"sqlite:///{path}")) as store:
        store.upgrade()
    planted = path.with_name(path.name + ending)
    planted.unlink(missing_ok=True)
    os.mkfifo(planted if kind == "FIFO" else shared / "elsewhere")
    if kind != "FIFO":
        planted.symlink_to(shared / "elsewhere")
    code = f"""
from pathlib import Path
from netlimit.store.connection import connect
connect(Path({str(path)!r}), 1).execute("PRAGMA user_version")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert "OperationalError" in done.stderr, done.stderr


def test_a_directory_that_comes_after_the_look_is_not_gone_to(shared: Path) -> None:
    """Root's own below one that others may write: SQLite goes on in that of before, whatever has its name. The second
    name of the file is for SQLite's own look whether it has been moved, after which there is a moment, too."""
    state, elsewhere = shared / "controller", shared.parent / "elsewhere"
    state.mkdir(mode=0o700)
    elsewhere.mkdir(mode=0o755)
    open_replica(state, "gw").close()
    with closing(connect(state / "applied.db", 1.0)) as connection:
        connection.execute("SELECT * FROM clock").fetchone()
        state.rename(shared / "aside")
        os.link(shared / "aside" / "applied.db", elsewhere / "applied.db")
        before = elsewhere.stat()
        lead_away(state, elsewhere)
        with suppress(sqlite3.OperationalError):  # it cannot take its journal away
            connection.execute("UPDATE clock SET revision = 7")
    assert elsewhere.stat().st_mtime_ns == before.st_mtime_ns
    state.unlink()
    state.mkdir(mode=0o700)
    with closing(open_replica(state, "gw")) as replica:
        assert replica.revision() == 0, "a new one of root's is gone to"
    assert (state / "applied.db").exists()


@pytest.mark.parametrize("kind", ["link", "hard link", "FIFO"])
def test_what_its_user_puts_in_the_place_of_the_token_is_not_shown(shared: Path, others: Path, kind: str) -> None:
    """To the API, which is that user's."""
    token = shared / "admin.token"
    settings = Settings(database_url=f"sqlite:///{shared}/netlimit.db")
    match kind:
        case "link":
            lead_away(token, others)
        case "hard link":
            os.link(others, token)
        case _:
            os.mkfifo(token)
    assert find_token(settings) is None
    token.unlink()
    token.write_text("nl_1_2\n")
    assert find_token(settings) == "nl_1_2"


def test_the_token_that_the_api_has_made_as_its_own_user_is_root_s_too(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where systemd starts it. One of anybody else is not shown to the API."""
    token = shared / "admin.token"
    token.write_text("nl_1_2\n")
    os.chown(token, USER.pw_uid, USER.pw_gid)
    settings = Settings(database_url=f"sqlite:///{shared}/netlimit.db")
    assert find_token(settings) is None
    monkeypatch.setattr("netlimit.cli.client.USER", USER.pw_name)
    assert find_token(settings) == "nl_1_2"


def test_a_lock_that_the_controllers_user_has_planted_is_not_followed(lab: Lab, shared: Path, others: Path) -> None:
    """`netlimit prepare`, in a directory that a former version had given to that user."""
    command = shlex.join([sys.executable, *COMMAND, "prepare", "--user", USER.pw_name])
    place = "mkdir -p /run/netlimit && mount -t tmpfs -o mode=750 none /run/netlimit && chown nobody /run/netlimit"
    planted = " && ".join(
        f"ln -s {others} /run/netlimit/{name}" for name in ("prepare.lock", "capabilities.new", "ssh-ports.new")
    )
    settings = {"NETLIMIT_BACKEND": "iptables", "NETLIMIT_STATE_DIRECTORY": str(shared / "controller")}
    script = f"{place} && {planted} && {command} && stat -c '%a %U %n' /run/netlimit /run/netlimit/*"
    done = lab.gateway.run("sh", "-c", script, env=settings, cwd=ROOT, timeout=120)
    assert done.stdout.splitlines() == [
        "750 root /run/netlimit",
        "750 root /run/netlimit/bpf",
        "640 root /run/netlimit/capabilities.json",
        "640 root /run/netlimit/ssh-ports",
    ]


def test_a_directory_is_made_where_it_is_missing(shared: Path) -> None:
    with made_directory(shared / "a" / "b") as descriptor:
        assert os.fstat(descriptor).st_mode & 0o777 == 0o700


def test_who_exchanges_names_does_so(shared: Path, others: Path) -> None:
    """Else the tests above would try nothing."""
    file = shared / "one"
    file.touch()
    os.chown(file, USER.pw_uid, GROUP)
    seen: set[str] = set()
    with swapping(others, file):
        for _ in range(200_000):
            with suppress(OSError):
                mode = file.lstat().st_mode
                seen.add("link" if stat.S_ISLNK(mode) else "file")
            if {"link", "file"} <= seen:
                break
    assert {"link", "file"} <= seen
    assert swapper.SECONDS >= 30
