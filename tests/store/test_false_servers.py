"""Who listens at the database's place is no database, and learns no password: a port is free for anybody while the
server is stopped, and hosts on the way may answer in its place."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from netlimit.errors import StoreError
from netlimit.store import Store
from tests.databases import run_postgres

PASSWORD = "a secret of ours"
_TLS, _REFUSED = 80877103, b"N"
_DONE, _CLEAR, _MD5 = (struct.pack("!i", kind) for kind in (0, 3, 5))
ASKING = {
    "for it in clear": [_CLEAR, _DONE],
    "for a hash of it": [_MD5 + b"salt", _DONE],
    "for nothing": [_DONE],
    "for less than it began with": [struct.pack("!i", 10) + b"SCRAM-SHA-256\0\0", _DONE],
}


@contextmanager
def listen(answers: list[bytes]) -> Iterator[tuple[int, bytearray]]:
    """A server that asks so; its port, and what it was told."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_serve, args=(server, answers, heard), daemon=True).start()
        yield server.getsockname()[1], heard
        server.shutdown(socket.SHUT_RDWR)


def _serve(server: socket.socket, answers: list[bytes], heard: bytearray) -> None:
    with suppress(OSError):
        while True:
            asking, _ = server.accept()
            with suppress(OSError), asking:
                _ask(asking, answers, heard)


def _ask(asking: socket.socket, answers: list[bytes], heard: bytearray) -> None:
    asking.settimeout(5)
    while struct.unpack_from("!i", said := asking.recv(4096), 4)[0] == _TLS:
        asking.sendall(_REFUSED)
    heard += said
    for answer in answers:
        asking.sendall(b"R" + struct.pack("!i", 4 + len(answer)) + answer)
        if answer != _DONE:
            heard += asking.recv(4096)
    asking.sendall(b"Z" + struct.pack("!i", 5) + b"I")
    while said := asking.recv(4096):
        heard += said


@pytest.mark.parametrize("asking", ASKING)
@pytest.mark.parametrize("patience", [None, 1.0], ids=["the API", "a controller"])
@pytest.mark.parametrize("where", ["the URL", "the environment"])
def test_a_false_server_hears_no_password_and_is_asked_nothing(
    asking: str, patience: float | None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = PASSWORD.replace(" ", "%20")
    who = f"netlimit:{written}" if where == "the URL" else "netlimit"
    if where == "the environment":
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
    with listen(ASKING[asking]) as (port, heard):
        store = Store(f"postgresql+psycopg://{who}@127.0.0.1:{port}/netlimit", patience=patience)
        with pytest.raises(StoreError, match=r"scram-sha-256|SCRAM"):
            store.revision()
        store.close()
    assert b"netlimit" in heard, "it was reached"
    assert PASSWORD.encode() not in heard
    assert b"md5" not in heard
    assert b"revision" not in heard


def test_a_password_of_a_file_is_not_shown_in_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libpq reads it only when it is asked for it, so nobody knows before whether there is one."""
    file = tmp_path / "pgpass"
    file.write_text(f"*:*:*:*:{PASSWORD}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    with listen(ASKING["for it in clear"]) as (port, heard):
        store = Store(f"postgresql+psycopg://netlimit@127.0.0.1:{port}/netlimit")
        with pytest.raises(StoreError, match="password"):
            store.revision()
        store.close()
    assert b"netlimit" in heard
    assert PASSWORD.encode() not in heard


def test_whoever_says_so_shows_it() -> None:
    """Behind a tunnel of his own, say, with a server that asks LDAP."""
    with listen(ASKING["for it in clear"]) as (port, heard):
        written = PASSWORD.replace(" ", "%20")
        store = Store(f"postgresql+psycopg://netlimit:{written}@127.0.0.1:{port}/netlimit?require_auth=password")
        with pytest.raises(StoreError):
            store.revision()
        store.close()
    assert PASSWORD.encode() in heard


@pytest.fixture(scope="module")
def strict() -> Iterator[str]:
    """A server that asks for the password of `netlimit` on TCP; and the address of a database there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with run_postgres(port) as server:
        access = server.home / "data/pg_hba.conf"
        access.write_text(
            f"{access.read_text()}\n".replace("127.0.0.1/32            trust", "127.0.0.1/32 scram-sha-256")
        )
        name = server.make_database()
        server.run("postgres", f"CREATE ROLE netlimit LOGIN PASSWORD '{PASSWORD}'", "SELECT pg_reload_conf()")
        server.run("postgres", f"ALTER DATABASE {name} OWNER TO netlimit")
        yield f"127.0.0.1:{port}/{name}"


@pytest.mark.parametrize("patience", [None, 1.0], ids=["the API", "a controller"])
def test_the_server_that_knows_the_password_is_the_database(strict: str, patience: float | None) -> None:
    store = Store(f"postgresql+psycopg://netlimit:{PASSWORD.replace(' ', '%20')}@{strict}", patience=patience)
    store.upgrade()
    assert store.revision() == 0
    store.close()
    other = Store(f"postgresql+psycopg://netlimit:wrong@{strict}")
    with pytest.raises(StoreError, match="password authentication failed"):
        other.revision()
    other.close()
