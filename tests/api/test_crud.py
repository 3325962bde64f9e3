from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from netlimit.records import Exceptional, HostStatus, State
from netlimit.rules import parse_rule
from netlimit.store import Store
from tests.api.server import connect
from tests.databases import DATABASES

OVER = DATABASES

RULE = {"target": "10.1.2.3", "rate": "200 packets/s"}


def add(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/rules", json={**RULE, **fields})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def ids(client: httpx.Client, **query: Any) -> list[int]:
    answer = client.get("/rules", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.json()["total"] == len(answer.json()["items"])
    return [rule["id"] for rule in answer.json()["items"]]


def test_a_rule_is_returned_with_everything(client: httpx.Client) -> None:
    answer = client.post(
        "/rules",
        json={
            "name": "web",
            "target": "10.1.0.0/16",
            "direction": "to",
            "protocol": "tcp",
            "ports": "443,80,8000-8100",
            "interface": "eth0",
            "rate": "20 Mbit/s",
            "burst": "2500 kB",
            "per": "host",
            "hosts": ["gw2", "gw1"],
            "labels": {"site": "office"},
            "comment": "a note",
        },
    )
    assert answer.status_code == 201
    assert answer.headers["Location"] == "/api/v1/rules/1"
    assert answer.headers["ETag"] == '"1"'
    assert "Preference-Applied" not in answer.headers
    rule = answer.json()
    assert datetime.fromisoformat(rule.pop("created_at")) == datetime.fromisoformat(rule.pop("updated_at"))
    assert rule.pop("status")["state"] == "pending"
    assert rule.pop("effective_rate") == {
        "text": "20001152 bit/s",
        "amount": 20001152,
        "unit": "bits",
        "seconds": 1,
    }
    assert rule == {
        "id": 1,
        "name": "web",
        "target": "10.1.0.0/16",
        "direction": "to",
        "protocol": "tcp",
        "ports": [80, 443, "8000-8100"],
        "source_ports": [],
        "interface": "eth0",
        "rate": {"text": "20 Mbit/s", "amount": 20_000_000, "unit": "bits", "seconds": 1},
        "burst": 2_500_000,
        "per": "host",
        "action": "drop",
        "ceil": None,
        "on_failure": "closed",
        "enabled": True,
        "expires_at": None,
        "hosts": ["gw1", "gw2"],
        "labels": {"site": "office"},
        "comment": "a note",
        "forced_by": None,
        "revision": 1,
        "effective_burst": 2_500_143,
        "warnings": [],
    }


@pytest.mark.parametrize(
    ("sent", "returned"),
    [("10.1.2.3/32", "10.1.2.3"), ("2001:DB8::1", "2001:db8::1"), ("2001:db8::1/128", "2001:db8::1")],
)
def test_one_address_stands_without_its_length(client: httpx.Client, sent: str, returned: str) -> None:
    assert add(client, target=sent)["target"] == returned


@pytest.mark.parametrize(
    ("fields", "effective", "burst"),
    [
        ({"rate": "3 packets/s"}, {"text": "3 packets/s", "amount": 3, "unit": "packets", "seconds": 1}, 3),
        (
            {"rate": "300 packets/s", "burst": 40},
            {"text": "300.03 packets/s", "amount": 300.03, "unit": "packets", "seconds": 1},
            40,
        ),
        (
            {"rate": "7 connections/h", "protocol": "tcp"},
            {"text": "7 connections/h", "amount": 7, "unit": "connections", "seconds": 3600},
            5,
        ),
        (
            {"rate": "50 connections"},
            {"text": "50 connections", "amount": 50, "unit": "connections", "seconds": None},
            None,
        ),
        ({"rate": None, "action": "block"}, None, None),
    ],
)  # fmt: skip
def test_the_effective_rate_is_what_the_kernel_holds(
    client: httpx.Client, fields: dict[str, Any], effective: object, burst: int | None
) -> None:
    rule = add(client, **fields)
    if effective is not None and isinstance(rule["effective_rate"]["amount"], float):
        assert rule["effective_rate"]["amount"] == round(rule["effective_rate"]["amount"], 3)
    assert (rule["effective_rate"], rule["effective_burst"]) == (effective, burst)


def test_a_limit_of_connections_at_once_says_which_it_does_not_count(client: httpx.Client) -> None:
    (warning,) = add(client, rate="50 connections")["warnings"]
    assert warning.startswith("Connections that are open already are never counted")
    assert add(client, target="10.9.0.1", rate="50 connections/s")["warnings"] == []
    _, dear = add(client, target="10.9.0.2", rate="20000 connections", per="target")["warnings"]
    assert "makes the kernel look through all of them" in dear


def test_a_rule_is_found_by_id_and_by_name(client: httpx.Client) -> None:
    rule = add(client, name="guests")
    assert rule.pop("warnings") == []  # of the change, not of the rule
    assert client.get("/rules/1").json() == client.get("/rules/guests").json() == rule
    assert client.get("/rules/1").headers["ETag"] == '"1"'


@pytest.mark.parametrize("key", ["2", "guests", "9" * 5000, "0", "-1", "%00", "a%2Fb", "٣", "1.5", "A"])
def test_what_is_not_kept_is_not_found(client: httpx.Client, key: str) -> None:
    for method in ("GET", "DELETE"):
        answer = client.request(method, f"/rules/{key}")
        assert answer.status_code == 404, answer.text
        assert answer.headers["Content-Type"] == "application/problem+json"


def test_a_rule_is_removed(client: httpx.Client) -> None:
    add(client)
    answer = client.delete("/rules/1")
    assert (answer.status_code, answer.content) == (204, b"")
    assert client.get("/rules/1").status_code == 404
    assert client.delete("/rules/1").status_code == 404


def test_a_returned_rule_can_be_put_back(client: httpx.Client) -> None:
    rule = add(client, target="10.1.0.0/16", per="/24", protocol="udp", ports=["53-54", 99], burst=50, ttl="1h")
    rule["comment"] = "changed"
    answer = client.put("/rules/1", json=rule)
    assert answer.status_code == 200, answer.text
    again = answer.json()
    changed = {key for key in rule if rule[key] != again[key]}
    assert changed == {"revision", "updated_at"}
    assert answer.headers["ETag"] == '"2"'


def test_put_puts_what_is_left_out_back_to_its_default(client: httpx.Client) -> None:
    add(client, name="guests", comment="a note", burst=50)
    rule = client.put("/rules/guests", json={"target": "10.1.2.4", "rate": "5 MB/s"}).json()
    assert (rule["id"], rule["name"], rule["comment"], rule["burst"]) == (1, None, "", None)
    assert (rule["target"], rule["rate"]["text"]) == ("10.1.2.4", "5 MB/s")


def test_only_put_takes_what_netlimit_alone_sets(client: httpx.Client) -> None:
    rule = add(client)
    assert client.post("/rules", json={**rule, "target": "10.1.2.4"}).json()["field"] == "created_at"
    assert client.patch("/rules/1", json={"revision": 7}).json()["field"] == "revision"
    assert client.put("/rules/1", json={**rule, "colour": "red"}).json()["field"] == "colour"


def test_patch_changes_what_it_names(client: httpx.Client) -> None:
    before = add(client, name="guests", burst=50, labels={"site": "office", "owner": "ann"}, comment="a note")
    headers = {"Content-Type": "application/merge-patch+json"}
    answer = client.patch(
        "/rules/guests", content=b'{"burst": null, "labels": {"owner": null, "floor": "2"}}', headers=headers
    )
    assert answer.status_code == 200, answer.text
    after = answer.json()
    assert {key for key in before if before[key] != after[key]} == {
        "burst", "labels", "revision", "updated_at", "effective_burst",
    }  # fmt: skip
    assert (after["burst"], after["labels"]) == (None, {"site": "office", "floor": "2"})


def test_patch_with_a_ttl_moves_the_end(client: httpx.Client) -> None:
    first = datetime.fromisoformat(add(client, ttl="1h")["expires_at"])
    second = datetime.fromisoformat(client.patch("/rules/1", json={"ttl": "3h"}).json()["expires_at"])
    assert timedelta(hours=1, minutes=50) < second - first < timedelta(hours=2, minutes=10)
    assert client.patch("/rules/1", json={"expires_at": None}).json()["expires_at"] is None
    both = client.patch("/rules/1", json={"ttl": 60, "expires_at": "2035-01-01T00:00:00Z"})
    assert (both.status_code, both.json()["field"]) == (422, "ttl")


def test_patch_checks_the_whole_rule(client: httpx.Client) -> None:
    add(client)
    answer = client.patch("/rules/1", json={"ports": [53]})
    assert (answer.status_code, answer.json()["field"]) == (422, "ports")
    assert client.patch("/rules/1", json={"protocol": "udp", "ports": [53]}).json()["ports"] == [53]


def test_a_stale_change_is_refused(client: httpx.Client) -> None:
    etag = client.post("/rules", json=RULE).headers["ETag"]
    newer = client.patch("/rules/1", json={"comment": "x"}, headers={"If-Match": etag}).headers["ETag"]
    for method, body in (("PUT", RULE), ("PATCH", {"comment": "y"}), ("DELETE", None)):
        for stale in (etag, 'W/"2"', '"x"', "2", f"{etag}, W/{newer}", ""):
            answer = client.request(method, "/rules/1", json=body, headers={"If-Match": stale})
            assert answer.status_code == 412, (method, stale, answer.text)
            assert "revision 2" in answer.json()["detail"]
    assert client.get("/rules/1").json()["comment"] == "x"
    several = {"If-Match": f'"99", {newer}'}
    assert client.patch("/rules/1", json={"comment": "y"}, headers=several).status_code == 200
    assert client.put("/rules/1", json=RULE, headers={"If-Match": "*"}).status_code == 200
    assert client.delete("/rules/1", headers={"If-Match": '"4"'}).status_code == 204


def test_what_is_to_be_new_changes_no_rule_that_is_there(client: httpx.Client) -> None:
    """RFC 9110, 13.1.2. No rule is made by these methods, so there is none that this lets pass."""
    etag = client.post("/rules", json=RULE).headers["ETag"]
    changed = {**RULE, "rate": "300 packets/s"}
    for method, body in (("PUT", changed), ("PATCH", {"comment": "y"}), ("DELETE", None)):
        for address in ("/rules/1", "/rules/1?dry_run=true"):
            if (method, address) == ("DELETE", "/rules/1?dry_run=true"):
                continue
            for more in ({}, {"If-Match": etag}, {"If-Match": "*"}):
                answer = client.request(method, address, json=body, headers={"If-None-Match": "*", **more})
                assert answer.status_code == 412, (method, address, more, answer.text)
                assert "it is at revision 1, and was to be new" in answer.json()["detail"]
        assert client.request(method, "/rules/7", json=body, headers={"If-None-Match": "*"}).status_code == 404
        unread = client.request(method, "/rules/1", json=body, headers={"If-None-Match": etag})
        assert (unread.status_code, "*" in unread.json()["detail"]) == (422, True), (method, unread.text)
    assert client.get("/rules/1").headers["ETag"] == etag


def test_the_same_traffic_twice_names_the_other_rule(client: httpx.Client) -> None:
    add(client, name="guests")
    answer = client.post("/rules", json={**RULE, "rate": "300 packets/s"})
    assert answer.status_code == 409
    assert answer.json()["rule"] == {"id": 1, "name": "guests"}
    assert "guests" in answer.json()["detail"]
    add(client, target="10.1.2.4")
    answer = client.patch("/rules/2", json={"target": "10.1.2.3"})
    assert (answer.status_code, answer.json()["rule"]["id"]) == (409, 1)
    assert client.get("/rules/2").json()["target"] == "10.1.2.4"


def test_a_name_that_is_taken_is_refused(client: httpx.Client) -> None:
    add(client, name="guests")
    answer = client.post("/rules", json={"target": "10.9.9.9", "action": "block", "name": "guests"})
    assert (answer.status_code, answer.json()["rule"]["id"]) == (409, 1)
    answer = client.post("/rules", json={**RULE, "target": "10.9.9.9", "name": "bulk"})
    assert (answer.status_code, answer.json()["field"]) == (422, "name")


def test_a_dry_run_keeps_nothing(client: httpx.Client) -> None:
    answer = client.post("/rules", params={"dry_run": "true"}, json=RULE)
    assert answer.status_code == 200
    rule = answer.json()
    assert (rule["id"], rule["status"], rule["per"]) == (None, None, "host")
    assert "netlimit serve" in rule["preview"]["message"]
    assert client.post("/rules?dry_run=true", json={"target": "10.1.2.3/8"}).status_code == 422
    assert client.get("/rules").json() == {"items": [], "next": None, "total": 0}
    assert client.post("/rules?dry_run=yes", json=RULE).json()["field"] == "dry_run"
    assert client.post("/rules?dryrun=true", json=RULE).json()["field"] == "dryrun"
    assert client.get("/status").json()["wanted_revision"] == 0


def test_rules_are_listed_by_what_they_are(client: httpx.Client) -> None:
    add(client, labels={"site": "office", "floor": "1"})
    add(client, target="10.1.0.0/16", per="host", labels={"site": "office", "floor": "2"})
    add(client, target="2001:db8::/48", per="/64")
    add(client, target="203.0.113.7", rate=None, action="block")
    add(client, target="10.2.2.2", labels={"floor": "1"}, name="guests", enabled=False)
    assert ids(client) == [1, 2, 3, 4, 5]
    assert ids(client, contains="10.1.2.3") == [1, 2]
    assert ids(client, contains="10.1.9.9") == [2]
    assert ids(client, contains="2001:db8:0:1::1") == [3]
    assert ids(client, target="10.1.0.0/16") == [2]
    assert ids(client, target="10.1.2.3/32") == [1]
    assert ids(client, label="site=office") == [1, 2]
    assert ids(client, label=["site=office", "floor=2"]) == [2]
    assert ids(client, action="block") == [4]
    assert ids(client, name="guests") == [5]
    assert ids(client, name="guests", contains="10.2.2.2", label="floor=1", state="disabled") == [5]
    assert ids(client, name="guests", action="block") == ids(client, name="guests", state="applied") == []
    assert ids(client, name="5") == ids(client, name="Guests") == []
    assert ids(client, action="drop", contains="10.1.2.3", label="floor=1") == [1]


@pytest.mark.parametrize(
    "query",
    [
        "contains=here", "contains=10.1.2.3%00", "target=10.1.2.3/8", "target=", "label=site", "label=a%3D1%00",
        "&".join(f"label=k{number}%3Dv" for number in range(17)),
        "label=a%3D1&label=a%3D2", "action=stop", "state=good", "limit=0", "limit=1001", "limit=many", "cursor=2",
        "cursor=%F0%9F%98%80", "colour=red", "names=guests",
    ],
)  # fmt: skip
def test_a_filter_that_cannot_be_meant_is_refused(client: httpx.Client, query: str) -> None:
    answer = client.get(f"/rules?{query}")
    assert answer.status_code == 422, answer.text
    assert answer.json()["field"] == query.partition("=")[0]
    assert answer.json()["detail"][-1] in ".?"


def test_pages_follow_each_other(client: httpx.Client) -> None:
    for number in range(7):
        add(client, target=f"10.1.2.{number}")
    seen: list[int] = []
    cursor: str | None = ""
    while cursor is not None:
        page = client.get("/rules", params={"limit": 3, **({"cursor": cursor} if cursor else {})}).json()
        assert page["total"] == 7
        seen += [rule["id"] for rule in page["items"]]
        cursor = page["next"]
    assert seen == [1, 2, 3, 4, 5, 6, 7]


def test_a_state_is_looked_for_without_reading_every_rule(
    client: httpx.Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    for number in range(12):
        add(client, target=f"10.1.2.{number}", enabled=number % 6 != 0, hosts=[["gw1"], ["gw2"], []][number % 3])
    store.add([parse_rule({**RULE, "target": "10.1.3.1", "expires_at": now.isoformat()}, now)], "test", now)
    for host, applied in (("gw1", 20), ("gw2", 8)):
        store.report(HostStatus(host, "iptables", applied_revision=applied), now)
    wrong = [Exceptional(number, State.ERROR, "wrong") for number in (2, 4, 7)]
    store.mark("gw1", [*wrong, Exceptional(10, State.DEGRADED, "so so"), Exceptional(1, State.APPLIED, "note")], [])
    store.mark("gw2", [Exceptional(3, State.APPLIED, "note")], [])
    standing = {rule["id"]: rule["status"]["state"] for rule in client.get("/rules").json()["items"]}
    monkeypatch.delattr("netlimit.store.Store.select")
    found = {state: ids(client, state=state) for state in State}
    assert found == {state: [number for number in standing if standing[number] == state] for state in State}
    assert all(found.values()), found
    assert ids(client, state="error", contains="10.1.2.3") == [4]


def test_pages_of_a_state_follow_each_other(client: httpx.Client) -> None:
    for number in range(20):
        add(client, target=f"10.1.2.{number}", enabled=number % 3 != 0)
    first = client.get("/rules", params={"state": "disabled", "limit": 4}).json()
    second = client.get("/rules", params={"state": "disabled", "limit": 4, "cursor": first["next"]}).json()
    assert [rule["id"] for rule in first["items"] + second["items"]] == [1, 4, 7, 10, 13, 16, 19]
    assert (first["total"], second["total"], second["next"]) == (7, 7, None)
    assert client.get("/rules", params={"state": "pending", "contains": "10.1.2.1"}).json()["total"] == 1


def test_the_audit_tells_who_changed_what(url: str, client: httpx.Client) -> None:
    add(client)
    with connect(url, "operator") as operator:
        operator.patch("/rules/1", json={"rate": "300 packets/s"})
        operator.delete("/rules/1")
    first = client.get("/audit", params={"limit": 2}).json()
    second = client.get("/audit", params={"limit": 2, "cursor": first["next"]}).json()
    removed, replaced, added, made = first["items"] + second["items"]
    assert made["action"] == "create-token"
    assert [(entry["actor"], entry["action"]) for entry in (removed, replaced, added)] == [
        ("operator", "remove"), ("operator", "replace"), ("admin", "add"),
    ]  # fmt: skip
    assert (replaced["rule"], replaced["old"]["rate"], replaced["new"]["rate"]) == (1, "200 packets/s", "300 packets/s")
    assert added["old"] is None
    assert removed["new"] is None
    assert datetime.now(UTC) - datetime.fromisoformat(removed["at"]) < timedelta(minutes=1)


def test_what_was_kept_with_more_than_a_rule_may_have_can_be_changed(client: httpx.Client, store: Store) -> None:
    """Before there was a bound."""
    now = datetime.now(UTC)
    labels = tuple((f"a{number:03}", "") for number in range(140))
    rule = replace(parse_rule({"target": "10.0.0.1", "action": "block"}, now), labels=labels)
    kept = store.add([rule], "test", now)[0]
    answer = client.patch(f"/rules/{kept.id}", json={"enabled": False})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["enabled"], len(answer.json()["labels"])) == (False, 140)
    assert client.patch(f"/rules/{kept.id}", json={"labels": {"b": ""}}).status_code == 422
