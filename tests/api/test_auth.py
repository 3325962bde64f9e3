from __future__ import annotations

import fcntl
import json
import os
import pty
import stat
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from api import description
from api.bootstrap import bootstrap_token, make_first, token_path
from netlimit.roles import Role
from netlimit.settings import Settings
from netlimit.store import Store
from netlimit.tokens import find_handle, hash_token, verify_token
from tests.api.server import ask, connect, get, serve
from tests.databases import DATABASES, find_url

RULE = {"target": "10.1.2.3", "rate": "200 packets/s"}
NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(f"sqlite:///{tmp_path}/new/netlimit.db")) as store:
        store.upgrade()
        yield store


def find_active(store: Store, secret: str) -> list[str]:
    return [token.name for token in store.active_tokens(NOW) if verify_token(secret, token.hash)]


@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer wrong", "Basic YWRtaW46YQ==", "admin-token", "Bearer admin-token x",
               "Bearer tök€n".encode(), "Bearer " + "x" * 9000]
)  # fmt: skip
def test_without_a_known_token_nothing_is_shown(url: str, header: str | bytes | None) -> None:
    for method, address in (("GET", "/rules"), ("POST", "/rules"), ("GET", "/rules/1"), ("GET", "/status")):
        headers = {} if header is None else {"Authorization": header}
        answer = ask(method, f"{url}/api/v1{address}", headers=headers)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"].startswith('Bearer realm="netlimit"')
        assert answer.headers["Content-Type"] == "application/problem+json"


def test_a_viewer_may_only_look(url: str) -> None:
    with connect(url, "viewer") as viewer, connect(url, "operator") as operator:
        assert operator.post("/rules", json=RULE).status_code == 201
        for address in ("/rules", "/rules/1", "/status", "/audit", "/rules/1/counters"):
            assert viewer.get(address).status_code == 200
        for method, address in (("POST", "/rules"), ("POST", "/rules/bulk"), ("PUT", "/rules/1"),
                                ("PATCH", "/rules/1"), ("DELETE", "/rules/1")):  # fmt: skip
            answer = viewer.request(method, address, json=RULE)
            assert answer.status_code == 403
            assert "viewer" in answer.json()["detail"]
        assert operator.delete("/rules/1").status_code == 204


def test_some_doors_are_open(url: str) -> None:
    for address in ("/healthz", "/readyz", "/metrics", "/docs", "/openapi.json"):
        assert get(url + address).status_code == 200, address


def test_the_page_of_the_api_lists_every_call_and_loads_nothing(url: str) -> None:
    page = get(f"{url}/docs")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none';")
    for what in ("<script", "<link", "<img", "src=", "url(", "@import", "http:", "https:", "//"):
        assert what not in page.text, what
    for path, methods in get(f"{url}/openapi.json").json()["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}</code>" in page.text
    assert get(f"{url}/redoc").status_code == 404
    assert get(f"{url}/docs", headers={"If-None-Match": page.headers["ETag"]}).status_code == 304


def test_the_description_is_written_once_for_all_who_ask(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token is needed for it: who asks for it again and again must cost the others little."""
    written: list[object] = []

    def dumps(what: object, **how: Any) -> str:
        written.append(what)
        return json.dumps(what, **how)

    monkeypatch.setattr(description, "json", SimpleNamespace(dumps=dumps))
    with serve(settings, store) as url:
        first, second = get(f"{url}/openapi.json"), get(f"{url}/openapi.json")
        known = get(f"{url}/openapi.json", headers={"If-None-Match": first.headers["ETag"]})
    assert first.json()["info"]["title"] == "netlimit"
    assert (first.content, first.headers["ETag"]) == (second.content, second.headers["ETag"])
    assert (known.status_code, known.content) == (304, b"")
    assert len(written) == 1


@pytest.mark.parametrize(
    ("listen", "status"),
    [
        ("0.0.0.0:0", 401),
        ("[::]:0", 401),
        ("gw1:0", 401),
        ("[::1]:0", 200),
        ("localhost:0", 200),
        ("127.9.9.9:0", 200),
    ],
)
def test_metrics_are_open_on_this_host_only(settings: Settings, store: Store, listen: str, status: int) -> None:
    with serve(Settings(database_url=settings.database_url, listen=listen), store) as url:  # type: ignore[arg-type]
        assert get(f"{url}/metrics").status_code == status
        assert get(f"{url}/healthz").status_code == 200
        with connect(url, "viewer") as viewer:
            assert viewer.get(f"{url}/metrics").status_code == 200


def test_a_token_that_is_revoked_is_refused_within_a_second(
    url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.doorkeeper._FRESH_SECONDS", 0)
    token, secret = store.issue_token("guest", Role.VIEWER, datetime.now(UTC), None, "test")
    headers = {"Authorization": f"Bearer {secret}"}
    with connect(url, "viewer") as client:
        assert client.get("/rules", headers=headers).status_code == 200
        store.revoke_token(token.id, datetime.now(UTC))
        assert client.get("/rules", headers=headers).status_code == 401


def test_a_token_that_has_expired_is_refused(url: str, store: Store) -> None:
    now = datetime.now(UTC)
    _, brief = store.issue_token("brief", Role.VIEWER, NOW, now - timedelta(seconds=1), "test")
    _, longer = store.issue_token("longer", Role.VIEWER, NOW, now + timedelta(hours=1), "test")
    for secret, status in ((brief, 401), (longer, 200)):
        headers = {"Authorization": f"Bearer {secret}"}
        assert get(f"{url}/api/v1/rules", headers=headers).status_code == status


def test_a_hash_is_salted_and_says_how_it_was_made() -> None:
    first, second = hash_token("secret"), hash_token("secret")
    assert first != second
    assert first.startswith("scrypt$16384$8$1$")
    assert "secret" not in first
    assert verify_token("secret", first)
    assert verify_token("secret", second)
    assert not verify_token("Secret", first)
    assert not verify_token("secret", "plain")
    assert not verify_token("secret", "scrypt$a$b$c$d$e")


def test_the_first_start_makes_a_token(empty: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path}/new/netlimit.db")
    bootstrap_token(empty, settings, NOW)
    path = tmp_path / "new" / "admin.token"
    secret = path.read_text().strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (token,) = empty.tokens()
    assert (token.name, token.role, token.handle) == ("bootstrap", "admin", find_handle(secret))
    assert token.handle is not None
    assert secret not in token.hash
    assert find_active(empty, secret) == ["bootstrap"]
    assert capsys.readouterr().out == ""
    bootstrap_token(empty, settings, NOW)
    assert path.read_text().strip() == secret
    assert len(empty.tokens()) == 1


def test_who_locks_the_directory_does_not_keep_the_first_start_waiting(empty: Store, tmp_path: Path) -> None:
    """Who may read a directory may lock it."""
    path = tmp_path / "new" / "admin.token"
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(make_first, empty, path, NOW)
            try:
                assert made.result(timeout=30) == path.read_text().strip()
            finally:
                fcntl.flock(directory, fcntl.LOCK_UN)
    finally:
        os.close(directory)
    assert [each.name for each in path.parent.iterdir() if "token" in each.name] == ["admin.token"]


class Race:
    """Stores of a database that add their tokens so many at a time."""

    def __init__(self, address: str, together: int) -> None:
        start = threading.Barrier(together)

        class Racing(Store):
            def add_token(self, *arguments: Any, **named: Any) -> Any:
                start.wait(60)
                return super().add_token(*arguments, **named)

        self.enter = partial(Racing, address)


@pytest.mark.parametrize("database", DATABASES)
def test_of_several_that_start_at_once_one_makes_the_token(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Each in a place of its own, but for two that share one."""
    address = find_url(database, request, tmp_path)
    places = [tmp_path / "one", tmp_path / "two", tmp_path / "shared", tmp_path / "shared"]
    race = Race(address, len(places))

    def begin(place: Path) -> None:
        place.mkdir(exist_ok=True)
        with closing(race.enter()) as store:
            make_first(store, place / "admin.token", NOW)

    with ThreadPoolExecutor(len(places)) as pool:
        list(pool.map(begin, places))
    (file,) = tmp_path.glob("*/admin.token*")
    with closing(Store(address)) as store:
        assert find_active(store, file.read_text().strip()) == ["bootstrap"]
        assert len(store.tokens()) == 1


@pytest.mark.parametrize("database", DATABASES)
def test_several_that_start_at_once_may_be_given_one_token(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    address = find_url(database, request, tmp_path)
    settings = Settings(database_url=address, bootstrap_token=SecretStr("of all"))
    race = Race(address, 3)

    def begin(_: int) -> None:
        with closing(race.enter()) as store:
            bootstrap_token(store, settings, NOW)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(begin, range(3)))
    with closing(Store(address)) as store:
        assert find_active(store, "of all") == ["bootstrap"]
        assert len(store.tokens()) == 1


def test_a_terminal_is_shown_the_token(empty: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        bootstrap_token(empty, Settings(database_url=f"sqlite:///{tmp_path}/new/netlimit.db"), NOW)
        terminal.flush()
    monkeypatch.undo()
    assert (tmp_path / "new" / "admin.token").read_text().strip() in os.read(ours, 1000).decode()
    os.close(ours)


def test_the_token_of_the_settings_is_the_admins(empty: Store, tmp_path: Path) -> None:
    def start(secret: str) -> None:
        bootstrap_token(empty, Settings(database_url="sqlite:////x", bootstrap_token=SecretStr(secret)), NOW)

    start("first")
    start("first")
    assert find_active(empty, "first") == ["bootstrap"]
    assert not (tmp_path / "new" / "admin.token").exists()
    start("second")
    assert find_active(empty, "first") == []
    assert len(find_active(empty, "second")) == 1
    start("first")
    assert (len(find_active(empty, "first")), len(find_active(empty, "second"))) == (0, 1), "who is replaced stays out"
    start("third")
    assert (len(find_active(empty, "third")), len(find_active(empty, "second"))) == (1, 0)
    assert len(empty.active_tokens(NOW)) == 1


def test_a_token_of_the_settings_that_was_revoked_stays_so(empty: Store, caplog: pytest.LogCaptureFixture) -> None:
    def start(secret: str) -> None:
        bootstrap_token(empty, Settings(database_url="sqlite:////x", bootstrap_token=SecretStr(secret)), NOW)

    start("leaked")
    (token,) = empty.tokens()
    empty.revoke_token(token.id, NOW, "admin")
    start("leaked")
    assert find_active(empty, "leaked") == []
    assert "NETLIMIT_BOOTSTRAP_TOKEN was revoked" in caplog.text
    assert "leaked" not in caplog.text
    start("another")
    start("leaked")
    assert len(find_active(empty, "another")) == 1, "what is refused takes nobody's place"
    assert find_active(empty, "leaked") == []


def test_the_token_lies_beside_the_database() -> None:
    assert token_path("sqlite:////var/lib/netlimit/netlimit.db") == Path("/var/lib/netlimit/admin.token")
    assert token_path("sqlite:///a%20b/netlimit.db?mode=rw") == Path("a%20b/admin.token")
    assert token_path("postgresql+psycopg://u:p@db/netlimit") == Path("/var/lib/netlimit/admin.token")
