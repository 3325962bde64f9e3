"""Who may do what: each operation of the document, by each role."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from netlimit.roles import MAY, Act, Role
from netlimit.store import Store
from tests.api.server import TOKENS, ask, connect, get, until

RULE = {"target": "10.1.2.3", "rate": "200 packets/s"}


def needed(method: str, path: str) -> Act:
    """What the issue asks for, told once more and in another way."""
    if path.startswith("/api/v1/tokens"):
        return Act.TOKENS
    if path.startswith("/api/v1/gateways") and method == "DELETE":
        return Act.FORGET
    return Act.READ if method == "GET" else Act.CHANGE


def test_each_role_may_what_the_one_before_it_may() -> None:
    assert MAY[Role.VIEWER] < MAY[Role.OPERATOR] < MAY[Role.ADMIN] == frozenset(Act)


@pytest.mark.parametrize("role", list(Role))
def test_every_operation_asks_for_its_role(url: str, role: Role) -> None:
    document = get(f"{url}/openapi.json").json()
    asked = 0
    with connect(url, role) as client:
        for path, methods in document["paths"].items():
            for method in methods if path.startswith("/api/v1") else ():
                # There is no such rule, token or revision, and no body: enough to be let in, or not.
                address = re.sub(r"{\w+}", "987654", path)
                answer = client.request(method, url + address)
                allowed = needed(method.upper(), path) in MAY[role]
                assert (answer.status_code != 403) == allowed, (role, method, path, answer.text)
                assert answer.status_code not in (401, 500)
                asked += 1
    assert asked >= 17


def test_a_role_that_is_not_known_may_nothing(url: str, store: Store) -> None:
    store._database.engine.raw_connection().cursor().execute("UPDATE tokens SET role = 'king'").connection.commit()
    with connect(url, "admin") as client:
        answer = client.get("/rules")
    assert (answer.status_code, "'king'" in answer.json()["detail"]) == (403, True)


def test_an_admin_makes_lists_and_revokes_tokens(url: str, client: httpx.Client) -> None:
    made = client.post("/tokens", json={"name": "ci", "role": "operator", "ttl": "1h"})
    token = made.json()
    assert (made.status_code, made.headers["Cache-Control"]) == (201, "no-store")
    assert (token["name"], token["role"], token["revoked_at"]) == ("ci", "operator", None)
    listed = client.get("/tokens").json()["items"]
    assert listed[-1] == {name: value for name, value in token.items() if name != "token"}
    assert token["token"] not in client.get("/tokens").text + client.get("/audit").text
    bearer = {"Authorization": f"Bearer {token['token']}"}
    rules = f"{url}/api/v1/rules"
    assert ask("POST", rules, json=RULE, headers=bearer).status_code == 201
    assert client.get("/audit").json()["items"][0]["actor"] == "ci"
    assert client.delete("/tokens/ci").status_code == 204
    assert client.delete("/tokens/ci").status_code == client.delete("/tokens/987").status_code == 404
    until(lambda: get(rules, headers=bearer).status_code == 401)
    assert client.post("/tokens", json={"name": "ci", "role": "viewer"}).status_code == 409


@pytest.mark.parametrize(
    ("field", "sent"),
    [
        ("name", {"role": "viewer"}),
        ("name", {"name": 5, "role": "viewer"}),
        ("name", {"name": "a b", "role": "viewer"}),
        ("name", {"name": "x" * 64, "role": "viewer"}),
        ("name", {"name": "bootstrap", "role": "viewer"}),
        ("role", {"name": "x"}),
        ("role", {"name": "x", "role": "king"}),
        ("role", {"name": "x", "role": ["admin"]}),
        ("ttl", {"name": "x", "role": "viewer", "ttl": "soon"}),
        ("ttl", {"name": "x", "role": "viewer", "ttl": 0}),
        ("ttl", {"name": "x", "role": "viewer", "ttl": "9" * 50 + "d"}),
        ("colour", {"name": "x", "role": "viewer", "colour": "red"}),
    ],
)
def test_a_token_that_cannot_be_is_refused_by_field(client: httpx.Client, field: str, sent: dict[str, Any]) -> None:
    answer = client.post("/tokens", json=sent)
    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert len(client.get("/tokens").json()["items"]) == len(TOKENS)
