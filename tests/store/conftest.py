"""One suite over every database: SQLite, and a PostgreSQL server that the tests start for themselves."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from netlimit.store import Store
from netlimit.store.tables import metadata


@dataclass
class Postgres:
    """A running server: `socket` is the directory of its socket."""

    socket: Path
    numbers: Iterator[int]

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@/{database}?host={self.socket}"

    def make_database(self) -> str:
        name = f"test{next(self.numbers)}"
        self.run("postgres", f"CREATE DATABASE {name}")
        return name

    def drop_database(self, name: str) -> None:
        self.run("postgres", f"DROP DATABASE {name} WITH (FORCE)")

    def run(self, database: str, *statements: str) -> None:
        engine = create_engine(self.url(database), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            for statement in statements:
                connection.execute(text(statement))
        engine.dispose()


def _binaries() -> Path:
    """Debian keeps PostgreSQL's programs out of the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    where = str(found[-1]) if found else shutil.which("initdb")
    if where is None:
        pytest.fail("These tests need Debian's package `postgresql`; scripts/setup installs it.")
    return Path(where).parent


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    binaries = _binaries()
    home = Path(tempfile.mkdtemp(prefix="netlimit-postgres-"))
    user: dict[str, str] = {}
    if os.geteuid() == 0:  # the server refuses to run as root
        user = {"user": "postgres", "group": "postgres"}
        os.chown(home, pwd.getpwnam("postgres").pw_uid, pwd.getpwnam("postgres").pw_gid)
    data = home / "data"
    subprocess.run(
        [binaries / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--no-sync", "-E", "UTF8", "--locale=C"],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=home,
        **user,  # type: ignore[call-overload]
    )
    options = {
        "listen_addresses": "",
        "unix_socket_directories": str(home),
        "fsync": "off",
        "max_connections": "200",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    with (home / "log").open("w") as log:
        server = subprocess.Popen(
            [binaries / "postgres", "-D", data, *arguments],
            stdout=log,
            stderr=log,
            cwd=home,
            **user,  # type: ignore[call-overload]
        )
    try:
        _wait_for(home, server)
        yield Postgres(home, count())
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
        shutil.rmtree(home)


def _wait_for(home: Path, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 30
    while "ready to accept connections" not in (home / "log").read_text():
        if server.poll() is not None or time.monotonic() > end:
            pytest.fail("PostgreSQL did not start: " + (home / "log").read_text())
        time.sleep(0.05)


@pytest.fixture(scope="session")
def migrated(postgres: Postgres) -> str:
    """A database that the tests use one after the other: making one for each takes too long."""
    name = postgres.make_database()
    store = Store(postgres.url(name))
    store.upgrade()
    store.close()
    return name


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without tables (SQLite: not even a file)."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/db/netlimit.db"
        return
    server: Postgres = request.getfixturevalue("postgres")
    name = server.make_database()
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A migrated database with nothing in it."""
    if request.param == "sqlite":
        address = f"sqlite:///{tmp_path}/db/netlimit.db"
        store = Store(address)
        store.upgrade()
        store.close()
        yield address
        return
    server: Postgres = request.getfixturevalue("postgres")
    name: str = request.getfixturevalue("migrated")
    yield server.url(name)
    server.run(
        name,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()",
        f"TRUNCATE {', '.join(metadata.tables)} RESTART IDENTITY",
        "INSERT INTO clock (id, revision, last_rule, pruned) VALUES (1, 0, 0, 0)",
    )


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = Store(url)
    yield store
    store.close()


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path}/db/netlimit.db")
    store.upgrade()
    yield store
    store.close()
