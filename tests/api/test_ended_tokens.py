"""A token that has ended while its request was under way changes nothing, wherever it was ended."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from sqlalchemy import update

from netlimit.records import HostStatus
from netlimit.roles import Role
from netlimit.store import Store
from netlimit.store.tables import tokens
from tests.api.server import PATIENCE, Controller, ask, get, until
from tests.databases import DATABASES

RULE = {"target": "10.1.2.3", "rate": "200 packets/s"}
LIMITS = {"domain": "auth", "descriptors": [{"key": "user", "rate_limit": {"unit": "second", "requests_per_unit": 5}}]}
CHANGES: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/tokens", {"name": "again", "role": "admin"}),
    ("DELETE", "/tokens/viewer", None),
    ("POST", "/rules", {**RULE, "target": "10.1.2.4"}),
    ("POST", "/rules/bulk?force=true", [{**RULE, "target": "10.1.2.4"}]),
    ("PUT", "/rules/1", {**RULE, "rate": "1 packets/s"}),
    ("PATCH", "/rules/1", {"rate": "1 packets/s"}),
    ("DELETE", "/rules/1", None),
    ("PUT", "/limits/auth", LIMITS),
    ("DELETE", "/limits/other", None),
    ("POST", "/revisions/0/rollback", None),
    ("POST", "/confirmation", {"seconds": 60}),
    ("PUT", "/confirmation", None),
    ("DELETE", "/confirmation", None),
    ("DELETE", "/gateways/gone", None),
)
LOOKS: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/rules?dry_run=true", {**RULE, "target": "10.1.2.4"}),
    ("PUT", "/limits/auth?dry_run=true", LIMITS),
)


def revoke(store: Store, name: str) -> None:
    """What an admin does at another gateway, or on the command line."""
    token = store.token(name)
    assert token is not None
    assert store.revoke_token(token.id, datetime.now(UTC))


def expire(store: Store, name: str) -> None:
    alter(store, name, expires_at=datetime.now(UTC))


def demote(store: Store, name: str) -> None:
    alter(store, name, role="viewer")


def alter(store: Store, name: str, **values: object) -> None:
    with store._database.writing() as connection:
        connection.execute(update(tokens).where(tokens.c.name == name).values(**values))


def list_kept(store: Store) -> object:
    """All that those requests could change."""
    windows = [window.opened_at for window in [store.window()] if window is not None]
    hosts = [host.host for host in store.hosts()]
    return store.revision(), store.select(), store.limits(), windows, hosts, store.tokens(), store.audit()


@pytest.fixture
def changeable(store: Store, client: httpx.Client, controller: Controller) -> Store:
    """With something of everything that can be changed."""
    controller.start()
    store.report(HostStatus(host="gone", backend="iptables"), datetime.now(UTC) - timedelta(days=1))
    assert client.post("/rules", json=RULE).status_code == 201
    assert client.put("/limits/other", json={**LIMITS, "domain": "other"}).status_code == 201
    return store


def make_admin(store: Store, number: int) -> tuple[str, dict[str, str]]:
    """The name of a new token, and its header."""
    name = f"admin-{number}"
    _, text = store.issue_token(name, Role.ADMIN, datetime.now(UTC), None, "test")
    return name, {"Authorization": f"Bearer {text}"}


@contextmanager
def sending(url: str, method: str, path: str, body: object, headers: Mapping[str, str]) -> Iterator[Callable[[], int]]:
    """A request whose token was looked at, and whose body is still to come: what is yielded sends it, and returns the
    status of the answer."""
    place, content = urlsplit(url), json.dumps(body).encode()
    said = {
        "Host": "x",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "Expect": "100-continue",
        **headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in said.items())
    with socket.create_connection((place.hostname, place.port), timeout=PATIENCE) as connection:
        connection.sendall(f"{method} /api/v1{path} HTTP/1.1\r\n{lines}\r\n".encode())
        with closing(connection.makefile("rb")) as answer:
            assert answer.readline().split()[1] == b"100"  # the body is asked for, so the token has been looked at
            assert answer.readline() == b"\r\n"
            connection.sendall(content[:1])

            def finish() -> int:
                connection.sendall(content[1:])
                return int(answer.readline().split()[1])

            yield finish


@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("end", [revoke, expire, demote])
def test_whoever_sends_the_body_slowly_changes_nothing_after_the_end(
    url: str, changeable: Store, end: Callable[[Store, str], None]
) -> None:
    for number, (method, path, body) in enumerate(change for change in CHANGES if change[2] is not None):
        name, headers = make_admin(changeable, number)
        with sending(url, method, path, body, headers) as finish:
            end(changeable, name)
            before = list_kept(changeable)
            assert finish() == 401, (method, path)
        assert list_kept(changeable) == before, (method, path)


@pytest.mark.parametrize("database", DATABASES)
def test_what_the_api_remembers_of_a_token_changes_nothing(url: str, changeable: Store) -> None:
    for number, (method, path, body) in enumerate(CHANGES):
        name, headers = make_admin(changeable, number)
        assert get(f"{url}/api/v1/rules", headers=headers).status_code == 200
        revoke(changeable, name)
        before = list_kept(changeable)
        answer = ask(method, f"{url}/api/v1{path}", json=body, headers=headers)
        assert answer.status_code == 401, (method, path, answer.text)
        assert answer.headers["WWW-Authenticate"] == 'Bearer realm="netlimit", error="invalid_token"'
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert list_kept(changeable) == before, (method, path)


@pytest.mark.parametrize(("method", "path", "body"), LOOKS)
def test_whoever_sends_the_body_slowly_sees_nothing_a_second_after_the_end(
    url: str, changeable: Store, method: str, path: str, body: object
) -> None:
    name, headers = make_admin(changeable, 1)
    with sending(url, method, path, body, headers) as finish:
        revoke(changeable, name)
        until(lambda: get(f"{url}/api/v1/rules", headers=headers).status_code == 401)
        assert finish() == 401


@pytest.mark.parametrize(("method", "path", "body"), LOOKS)
def test_a_slow_body_of_a_good_token_is_taken(
    url: str, changeable: Store, method: str, path: str, body: object
) -> None:
    with sending(url, method, path, body, make_admin(changeable, 1)[1]) as finish:
        time.sleep(1.1)  # longer than the API remembers which tokens are good
        assert finish() == 200


def test_what_has_begun_is_answered_to_the_end(url: str, changeable: Store, controller: Controller) -> None:
    controller.stop()  # nobody applies it, so it waits
    name, headers = make_admin(changeable, 1)
    new, rules = {**RULE, "target": "10.1.2.4"}, f"{url}/api/v1/rules"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, "POST", rules, json=new, headers={**headers, "Prefer": "wait=2"})
        until(lambda: changeable.revision() == 2)
        revoke(changeable, name)
        until(lambda: get(rules, headers=headers).status_code == 401)
        assert answer.result().status_code == 201


def test_a_token_revokes_itself(url: str, changeable: Store) -> None:
    name, headers = make_admin(changeable, 1)
    assert ask("DELETE", f"{url}/api/v1/tokens/{name}", headers=headers).status_code == 204
    new = {**RULE, "target": "10.1.2.4"}
    assert ask("POST", f"{url}/api/v1/rules", json=new, headers=headers).status_code == 401
