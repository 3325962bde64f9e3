"""The limiter's documents through the API."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import yaml
from sqlalchemy import text

from netlimit.l7 import markup
from netlimit.settings import Settings
from netlimit.store import Store, homes
from tests.api.server import connect, serve

TEXT = """\
# Who logs in
domain: auth
descriptors:
- key: auth_type
  Value: login
  rate_limit: {unit: minute, requests_per_unit: 5}
"""
FIELDS = {
    "domain": "auth",
    "descriptors": [
        {"key": "auth_type", "value": "login", "rate_limit": {"unit": "minute", "requests_per_unit": 5}},
    ],
}
YAML, JSON = "application/yaml", "application/json"


@pytest.fixture(scope="module")
def kept(fresh_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store for all tests of this module."""
    path = tmp_path_factory.mktemp("limits") / "netlimit.db"
    shutil.copy(fresh_database, path)
    store = Store(f"sqlite:///{path}")
    yield store
    store.close()


@pytest.fixture(scope="module")
def url(kept: Store) -> Iterator[str]:
    with serve(Settings(host="gw1"), kept) as url:
        yield url


@pytest.fixture
def store(kept: Store) -> Store:
    """The store, without documents and as if there had been none."""
    with kept._database.writing() as connection, homes.by_name(connection):
        connection.execute(text("DELETE FROM limit_documents"))
        connection.execute(text("UPDATE clock SET limits = 0"))
    return kept


@pytest.fixture
def client(url: str, store: Store) -> Iterator[httpx.Client]:
    with connect(url, "admin") as client:
        yield client


def put(
    client: httpx.Client, document: str = TEXT, domain: str = "auth", media_type: str = YAML, **headers: str
) -> httpx.Response:
    return client.put(f"/limits/{domain}", content=document, headers={"Content-Type": media_type, **headers})


def get(client: httpx.Client, accept: str = "*/*", domain: str = "auth") -> httpx.Response:
    return client.get(f"/limits/{domain}", headers={"Accept": accept})


def test_what_is_put_is_kept_with_its_comments(client: httpx.Client, store: Store) -> None:
    made = put(client)
    assert made.status_code == 201, made.text
    assert made.headers["Location"] == "/api/v1/limits/auth"
    said = made.json()
    assert (said["revision"], said["actor"], said["rules"]) == (1, "admin", ["auth_type=login"])
    (warning,) = said["warnings"]
    assert (warning["field"], warning["line"]) == ("descriptors[0].Value", 5)
    found = get(client)
    assert (found.text, found.headers["ETag"], found.headers["Vary"]) == (TEXT, made.headers["ETag"], "Accept")
    assert found.headers["Content-Type"].startswith(YAML)
    line = store.audit()[0]
    assert (line.action, line.actor, line.request) == ("put-limits", "admin", made.headers["X-Request-ID"])


def test_both_ways_out_lead_from_both_ways_in(client: httpx.Client) -> None:
    put(client)
    assert get(client, JSON).json() == FIELDS
    changed = put(client, json.dumps(FIELDS), media_type=JSON)
    assert (changed.status_code, changed.json()["content_type"]) == (200, JSON)
    assert "Location" not in changed.headers
    assert get(client).json() == FIELDS
    written = get(client, YAML)
    assert written.headers["Content-Type"].startswith(YAML)
    assert yaml.safe_load(written.text) == FIELDS
    assert put(client, written.text, media_type="application/x-yaml; charset=utf-8").json()["content_type"] == YAML


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        ("text/yaml", YAML),
        ("application/json;q=0.5, text/x-yaml;q=0.4", JSON),
        ("application/json;q=0.5, application/yaml", YAML),
        ("application/json;q=0", YAML),
        ("text/html, application/json;q=?", JSON),
        ("image/*", YAML),
        ("", YAML),
    ],
)
def test_accept_chooses(client: httpx.Client, accept: str, media_type: str) -> None:
    put(client)
    assert get(client, accept).headers["Content-Type"].startswith(media_type)


def test_wrong_places_are_all_named(client: httpx.Client, store: Store) -> None:
    answer = put(client, "domain: auth\ndesciptors:\n- key: a\n  rate_limit: {unit: minutes, requests_per_unit: -1}\n")
    assert answer.status_code == 422
    problem = answer.json()
    assert [(each["field"], each["line"]) for each in problem["errors"]] == [
        ("desciptors", 2),
        ("descriptors[0].rate_limit.unit", 4),
        ("descriptors[0].rate_limit.requests_per_unit", 4),
    ]
    assert problem["field"] == "desciptors"
    assert problem["detail"].startswith("line 2, desciptors: `desciptors` is not known")
    assert problem["detail"].endswith("(and 2 more)")
    assert store.limits() == (0, [])


@pytest.mark.parametrize(
    ("status", "document", "media_type"),
    [
        (400, "domain: [", YAML),
        (400, "{", JSON),
        (400, "domain: \x00", YAML),
        (400, "- " * 1000, YAML),
        (413, "#" * (markup.LARGEST + 1), YAML),
        (415, TEXT, "text/plain"),
        (422, "", YAML),
        (422, "domain: other", YAML),
        (422, '{"domain": "auth", "domain": "auth"}', JSON),
    ],
)
def test_what_is_no_document_is_refused(
    client: httpx.Client, store: Store, status: int, document: str, media_type: str
) -> None:
    answer = put(client, document, media_type=media_type)
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert store.limits() == (0, [])


def test_bytes_that_are_no_utf_8_are_refused(client: httpx.Client) -> None:
    answer = client.put("/limits/auth", content=b"domain: \xff", headers={"Content-Type": YAML})
    assert (answer.status_code, answer.json()["detail"]) == (400, "Byte 8 is not UTF-8.")


def test_two_clients_do_not_overwrite_each_other(client: httpx.Client) -> None:
    first = put(client, "domain: auth", **{"If-Match": '"1"'})
    assert (first.status_code, put(client, "domain: auth", **{"If-Match": "*"}).status_code) == (412, 412)
    tag = put(client).headers["ETag"]
    assert put(client, "domain: auth", **{"If-Match": f'"7", {tag}'}).status_code == 200
    stale = put(client, TEXT, **{"If-Match": tag})
    assert stale.status_code == 412
    assert "at revision 2, not at 1" in stale.json()["detail"]
    assert client.delete("/limits/auth", headers={"If-Match": tag}).status_code == 412
    assert put(client, "domain: auth", **{"If-Match": "*"}).headers["ETag"] == '"2"'
    assert client.delete("/limits/auth", headers={"If-Match": '"2"'}).status_code == 204
    assert client.delete("/limits/auth").status_code == 404


def test_what_is_to_be_new_takes_the_place_of_nothing(client: httpx.Client) -> None:
    assert put(client, "domain: auth", **{"If-None-Match": "*"}).status_code == 201
    second = put(client, TEXT, **{"If-None-Match": "*"})
    assert second.status_code == 412
    assert "they are at revision 1, and were to be new" in second.json()["detail"]
    assert client.get("/limits/auth").text == "domain: auth"
    assert put(client, TEXT, **{"If-None-Match": "*", "If-Match": '"1"'}).status_code == 412
    assert put(client, TEXT, **{"If-None-Match": '"1"'}).status_code == 422
    assert client.delete("/limits/auth", headers={"If-None-Match": "*"}).status_code == 412
    assert client.get("/limits/auth").text == "domain: auth"


def test_a_dry_run_keeps_nothing(client: httpx.Client, store: Store) -> None:
    said = put(client, domain="auth?dry_run=true")
    assert said.status_code == 200
    assert (said.json()["rules"], said.json()["revision"]) == (["auth_type=login"], None)
    assert put(client, "domain: x", "auth?dry_run=true").status_code == 422
    assert store.limits() == (0, [])
    assert put(client, domain="auth?dry_run=yes").status_code == 422


@pytest.mark.parametrize("domain", ["default/eg/http", "Ärger mit?allem#", "bulk", "..x"])
def test_domains_may_be_called_anything(client: httpx.Client, domain: str) -> None:
    path = quote(domain)
    made = put(client, json.dumps({"domain": domain}), path, JSON)
    assert made.status_code == 201, made.text
    assert client.get(made.headers["Location"].removeprefix("/api/v1")).json() == {"domain": domain}
    assert [each["domain"] for each in client.get("/limits").json()["items"]] == [domain]
    assert client.delete(f"/limits/{path}").status_code == 204


def test_what_is_not_there_is_not_found(client: httpx.Client) -> None:
    for domain in ("auth", "a%00b", "a/b"):
        assert client.get(f"/limits/{domain}").status_code == 404
        assert client.delete(f"/limits/{domain}").status_code == 404
    assert client.get("/limits?x=1").status_code == 422
    assert client.get("/limits").json() == {"items": [], "revision": 0}


def test_viewers_look_and_operators_change(url: str, client: httpx.Client) -> None:
    with connect(url, "viewer") as viewer, connect(url, "operator") as operator:
        assert put(viewer).status_code == 403
        assert put(operator).status_code == 201
        assert get(viewer).text == TEXT
        listed: Any = viewer.get("/limits").json()
        assert [(each["domain"], each["actor"]) for each in listed["items"]] == [("auth", "operator")]
        assert viewer.delete("/limits/auth").status_code == 403
        assert operator.delete("/limits/auth").status_code == 204
