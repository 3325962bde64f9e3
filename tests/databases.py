"""Databases to test over: SQLite, and a PostgreSQL server that the tests start for themselves."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from netlimit.store import Store
from netlimit.store.tables import metadata

DATABASES = ("sqlite", "postgres")
_SETTINGS = {"listen_addresses": "", "fsync": "off", "max_connections": "200"}


@dataclass
class Postgres:
    """A server in a directory of its own, where its socket is too; and at a port of an address, if it has one: of
    loopback, or of one that the network namespace has in which it runs, open to all who come there."""

    home: Path
    numbers: Iterator[int]
    port: int | None = None
    process: subprocess.Popen[bytes] | None = None
    address: str = "127.0.0.1"
    namespace: str | None = None

    def url(self, database: str) -> str:
        port = "" if self.port is None else f"&port={self.port}"
        return f"postgresql+psycopg://postgres@/{database}?host={self.home}{port}"

    def start(self) -> None:
        settings = _SETTINGS | {"unix_socket_directories": str(self.home)}
        if self.port is not None:
            settings |= {"listen_addresses": self.address, "port": str(self.port)}
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        with (self.home / "log").open("w") as log:
            self.process = self._run(
                "postgres", "-D", str(self.home / "data"), *arguments, output=log, namespace=self.namespace
            )
        end = time.monotonic() + 30
        while "ready to accept" not in (self.home / "log").read_text():
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail("PostgreSQL did not start: " + (self.home / "log").read_text())
            time.sleep(0.02)

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """End it at once: what is not committed is lost."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(30)

    def make(self) -> None:
        """Make the directory's files."""
        assert not self._run("initdb", "-D", str(self.home / "data"), *_NEW).wait(60)
        if self.namespace is not None:
            with (self.home / "data/pg_hba.conf").open("a") as trusted:
                trusted.write("host all all all trust\n")

    def copy(self, primary: Postgres) -> None:
        """Make them from those of another that runs, as its standby."""
        arguments = ("-h", str(primary.home), "-U", "postgres", "-D", str(self.home / "data"), "-R", "-c", "fast")
        assert not self._run("pg_basebackup", *arguments, "--no-sync").wait(60)

    def make_database(self, encoding: str = "UTF8") -> str:
        name = f"test{next(self.numbers)}"
        self.run("postgres", f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0")
        return name

    def drop_database(self, name: str) -> None:
        self.run("postgres", f"DROP DATABASE {name} WITH (FORCE)")

    def clear(self, name: str) -> None:
        """Make a migrated database as it was."""
        self.run(
            name,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()",
            "SET session_replication_role = replica",  # the audit lets nobody truncate it
            f"TRUNCATE {', '.join(metadata.tables)} RESTART IDENTITY",
            "INSERT INTO clock (id, revision, last_rule, pruned, identity) VALUES (1, 0, 0, 0, md5(random()::text))",
        )

    def run(self, database: str, *statements: str) -> None:
        engine = create_engine(self.url(database), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            for statement in statements:
                connection.execute(text(statement))
        engine.dispose()

    def _run(
        self, program: str, *arguments: str, output: object = subprocess.DEVNULL, namespace: str | None = None
    ) -> subprocess.Popen[bytes]:
        """As another user than root: the server refuses to run as root."""
        user = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
        argv = [_binaries() / program, *arguments]
        if namespace is not None:  # which root alone may enter
            become = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")
            user, argv = {}, ["ip", "netns", "exec", namespace, *become, *argv]
        return subprocess.Popen(argv, stdout=output, stderr=output, cwd=self.home, **user)  # type: ignore[call-overload, no-any-return]


_NEW = ("-U", "postgres", "--auth=trust", "--no-sync", "-E", "UTF8", "--locale=C")


def _binaries() -> Path:
    """Debian keeps PostgreSQL's programs out of the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    where = str(found[-1]) if found else shutil.which("initdb")
    if where is None:
        pytest.fail("These tests need Debian's package `postgresql`; scripts/setup installs it.")
    return Path(where).parent


@contextmanager
def run_postgres(
    port: int | None = None, address: str = "127.0.0.1", namespace: str | None = None
) -> Iterator[Postgres]:
    """A server, until the block ends."""
    home = Path(tempfile.mkdtemp(prefix="netlimit-postgres-"))
    if os.geteuid() == 0:
        os.chown(home, pwd.getpwnam("postgres").pw_uid, pwd.getpwnam("postgres").pw_gid)
        home.chmod(0o755)  # the API's user goes to the socket
    server = Postgres(home, count(), port, address=address, namespace=namespace)
    server.make()
    try:
        server.start()
        yield server
        server.stop()
    finally:
        shutil.rmtree(home)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with run_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def migrated(postgres: Postgres) -> str:
    """A database that the tests use one after the other: making one for each takes too long."""
    name = postgres.make_database()
    store = Store(postgres.url(name))
    store.upgrade()
    store.close()
    return name


@pytest.fixture(scope="session")
def fresh_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite database with nothing in it: copying it is quicker than making one."""
    path = tmp_path_factory.mktemp("fresh") / "netlimit.db"
    store = Store(f"sqlite:///{path}")
    store.upgrade()
    store.close()
    return path


@pytest.fixture
def sqlite_url(fresh_file: Path, tmp_path: Path) -> str:
    """A migrated SQLite database with nothing in it."""
    return copy_fresh(fresh_file, tmp_path / "netlimit.db")


@pytest.fixture
def postgres_url(postgres: Postgres, migrated: str) -> Iterator[str]:
    """A migrated database of the server, with nothing in it."""
    yield postgres.url(migrated)
    postgres.clear(migrated)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module says over which databases its tests run: OVER = DATABASES. The others run over SQLite."""
    if "database" in metafunc.fixturenames and hasattr(metafunc.module, "OVER"):
        metafunc.parametrize("database", metafunc.module.OVER)


@pytest.fixture
def database() -> str:
    """The kind of database that a test runs over."""
    return "sqlite"


@pytest.fixture(params=DATABASES)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without tables (SQLite: not even a file)."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/empty/netlimit.db"
        return
    server: Postgres = request.getfixturevalue("postgres")
    name = server.make_database()
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A migrated database with nothing in it."""
    return find_url(request.param, request, tmp_path)


def find_url(kind: str, request: pytest.FixtureRequest, directory: Path) -> str:
    """A migrated database of a kind with nothing in it."""
    if kind == "postgres":
        address: str = request.getfixturevalue("postgres_url")
        return address
    (directory / "db").mkdir(exist_ok=True)
    return copy_fresh(request.getfixturevalue("fresh_file"), directory / "db/netlimit.db")


def copy_fresh(fresh: Path, path: Path) -> str:
    """Copy an SQLite database to a place; its URL."""
    shutil.copy(fresh, path)
    return f"sqlite:///{path}"
