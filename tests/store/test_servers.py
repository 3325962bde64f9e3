"""Where the server of a database was found, whatever its URL calls it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

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
    assert store.reached() == ()
    assert store.revision() >= 0
    assert store.reached() == ("127.0.0.2",)
    store.close()
    by_socket = Store(postgres.url(migrated))
    assert by_socket.revision() >= 0
    assert by_socket.reached() == ()
    by_socket.close()
