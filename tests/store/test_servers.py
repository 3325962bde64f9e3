"""Where the server of a database was found, whatever its URL calls it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from netlimit.errors import StoreError
from netlimit.store import Store
from tests.databases import Postgres


@pytest.fixture
def port(postgres: Postgres) -> Iterator[int]:
    """Of 127.0.0.2, from where all is led to the server's socket."""
    with socket.create_server(("127.0.0.2", 0)) as server:
        threading.Thread(target=_lead, args=(server, str(postgres.home / ".s.PGSQL.5432")), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def _lead(server: socket.socket, path: str) -> None:
    with suppress(OSError):
        while True:
            one, _ = server.accept()
            other = socket.socket(socket.AF_UNIX)
            other.connect(path)
            threading.Thread(target=_join, args=(one, other), daemon=True).start()


def _join(one: socket.socket, other: socket.socket) -> None:
    with one, other:
        back = threading.Thread(target=_copy, args=(other, one), daemon=True)
        back.start()
        _copy(one, other)
        back.join()


def _copy(here: socket.socket, there: socket.socket) -> None:
    with suppress(OSError):
        while part := here.recv(65536):
            there.sendall(part)
    with suppress(OSError):
        there.shutdown(socket.SHUT_RDWR)


def test_where_a_service_file_leads_is_known_once_a_connection_was_made(
    postgres: Postgres, migrated: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = tmp_path / "services"
    services.write_text(f"[netlimit]\nhost=127.0.0.2\nport={port}\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    store = Store(f"postgresql+psycopg://postgres@/{migrated}?service=netlimit")
    assert store.reached() == {}
    assert store.revision() >= 0
    assert store.reached() == {"127.0.0.2": ""}
    store.close()
    by_socket = Store(postgres.url(migrated))
    assert by_socket.revision() >= 0
    assert by_socket.reached() == {"": ""}
    by_socket.close()


def test_a_file_is_reached_by_no_network(sqlite_url: str) -> None:
    store = Store(sqlite_url)
    assert store.reached() == {"": ""}
    store.close()


@pytest.fixture
def liar(postgres: Postgres) -> Iterator[Callable[[str], dict[str, str]]]:
    """Defines a function of PostgreSQL's own anew; where the server was reached then."""
    name = postgres.make_database()

    def reach(function: str) -> dict[str, str]:
        postgres.run(name, f"CREATE OR REPLACE FUNCTION pg_catalog.{function}")
        store = Store(postgres.url(name))
        with pytest.raises(StoreError, match="no tables yet"):
            store.revision()
        store.close()
        return store.reached()

    yield reach
    postgres.drop_database(name)


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("'172.18.0.2'", "172.18.0.2"),
        ("'fd00::2'", "fd00::2"),
        ("'::ffff:172.18.0.2'", "172.18.0.2"),
        ("NULL", ""),
        *((f"'{nobody}'", "") for nobody in ("127.0.0.1", "::1", "224.0.0.1", "ff02::1", "0.0.0.0", "::")),  # noqa: S104
        *((f"'{nobody}'", "") for nobody in ("255.255.255.255", "240.0.0.1", "::ffff:127.0.0.1")),
    ],
)
def test_what_a_server_calls_its_own_address(liar: Callable[[str], dict[str, str]], said: str, heard: str) -> None:
    assert liar(f"inet_server_addr() RETURNS inet LANGUAGE sql AS $$SELECT {said}::inet$$") == {"": heard}


@pytest.mark.parametrize(
    "said",
    ["'0.0.0.0/0'", "'::/0'", "'172.18.0.0/16'", "'everybody'", "''", "repeat('1', 1000000)", "'fe80::1%eth0'"],
)
def test_what_a_server_says_that_is_no_address(liar: Callable[[str], dict[str, str]], said: str) -> None:
    assert liar(f"host(inet) RETURNS text LANGUAGE sql AS $$SELECT {said}::text$$") == {"": ""}


def test_a_server_that_does_not_tell_its_address(liar: Callable[[str], dict[str, str]]) -> None:
    refuse = "BEGIN RAISE insufficient_privilege; END"
    assert liar(f"inet_server_addr() RETURNS inet LANGUAGE plpgsql AS $${refuse}$$") == {"": ""}
