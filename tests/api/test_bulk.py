from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from api import bulk
from api.problems import Problem
from netlimit.rules import parse_rule
from netlimit.store import Store
from tests.api.server import Controller
from tests.databases import DATABASES

OVER = DATABASES

NDJSON = {"Content-Type": "application/x-ndjson"}
JSON = {"Content-Type": "application/json"}


def rules(number: int) -> list[dict[str, Any]]:
    return [{"target": f"10.7.{i // 256}.{i % 256}", "rate": "200 packets/s"} for i in range(number)]


def lines(items: Sequence[object]) -> str:
    return "\n".join(json.dumps(item) for item in items)


def total(client: httpx.Client) -> int:
    return int(client.get("/rules").json()["total"])


def test_an_array_is_kept_as_one_change(client: httpx.Client) -> None:
    client.post("/rules", json={"target": "10.1.2.3", "action": "block"})
    answer = client.post("/rules/bulk", json=rules(300))
    assert answer.status_code == 201, answer.text
    said = {"added": 300, "revision": 2, "ids": list(range(2, 302)), "state": "pending", "warnings": []}
    assert answer.json() == said
    assert client.get("/rules/301").json()["target"] == "10.7.1.43"
    assert total(client) == 301


@pytest.mark.parametrize("media_type", ["application/x-ndjson", "application/ndjson", "application/jsonl"])
def test_ndjson_may_have_blank_lines(client: httpx.Client, media_type: str) -> None:
    text = "\r\n\n".join(json.dumps(rule) for rule in rules(3)) + "\n\n"
    answer = client.post("/rules/bulk", content=text, headers={"Content-Type": f"{media_type}; charset=utf-8"})
    assert answer.json()["added"] == 3, answer.text


@pytest.mark.parametrize(("content", "headers"), [("[]", JSON), (" [ ] ", JSON), ("", NDJSON), ("\n\n", NDJSON)])
def test_nothing_is_nothing(client: httpx.Client, content: str, headers: dict[str, str]) -> None:
    answer = client.post("/rules/bulk", content=content, headers=headers)
    assert (answer.status_code, answer.json()["added"], answer.json()["ids"]) == (201, 0, [])


@pytest.mark.parametrize("by_line", [False, True])
def test_one_bad_line_of_ten_thousand_keeps_all_out(client: httpx.Client, by_line: bool) -> None:
    sent = rules(10_000)
    sent[6999]["target"] = "10.7.1.2/8"
    content, headers = (lines(sent), NDJSON) if by_line else (json.dumps(sent), JSON)
    answer = client.post("/rules/bulk", content=content, headers=headers)
    problem = answer.json()
    assert answer.status_code == 422
    assert problem["field"] == "target"
    assert problem["detail"].startswith("Line 7000 is wrong, and nothing was kept: The target '10.7.1.2/8' has host")
    assert [(each["line"], each["field"]) for each in problem["errors"]] == [(7000, "target")]
    assert total(client) == 0


def test_every_wrong_line_is_told(client: httpx.Client) -> None:
    sent: list[Any] = rules(6)
    sent[1] = {"target": "10.7.0.1"}
    sent[3] = "10.7.0.3"
    sent[4]["colour"] = "red"
    answer = client.post("/rules/bulk", json=sent)
    assert answer.status_code == 422
    told = [(each["line"], each.get("field")) for each in answer.json()["errors"]]
    assert told == [(2, "rate"), (4, None), (5, "colour")]
    blank = client.post("/rules/bulk", content="\n\n" + "\n\n".join(map(json.dumps, sent)) + "\n{\n", headers=NDJSON)
    assert [each["line"] for each in blank.json()["errors"]] == [5, 9, 11, 14]
    assert total(client) == 0


@pytest.mark.parametrize("by_line", [False, True])
def test_of_endlessly_many_wrong_lines_some_are_told(client: httpx.Client, by_line: bool) -> None:
    """The rest is not even looked at: 64 MiB of them would take more memory than a gateway has."""
    content, headers = ("1\n" * 30_000, NDJSON) if by_line else ("[" + "1," * 30_000 + "1]", JSON)
    problem = client.post("/rules/bulk", content=content, headers=headers).json()
    assert problem["detail"].startswith("10000 lines at least are wrong, and nothing was kept. The first is line 1: ")
    assert [each["line"] for each in problem["errors"]] == list(range(1, 10_001))


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[", "[{}", "[{},", "[{},]", "[{} {}]", "[] []", "[NaN]", '[{"a": 1, "a": 2}]', "[1",
     "[" * 100_000, "null"],
)  # fmt: skip
def test_what_is_no_array_is_400(client: httpx.Client, content: str) -> None:
    answer = client.post("/rules/bulk", content=content, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert total(client) == 0


def test_lines_that_are_no_json_are_400(client: httpx.Client) -> None:
    answer = client.post("/rules/bulk", content=lines(rules(2)) + '\n{"target"\nNaN\n', headers=NDJSON)
    assert (answer.status_code, [each["line"] for each in answer.json()["errors"]]) == (400, [3, 4])


def test_conflicts_name_line_and_rule(client: httpx.Client) -> None:
    client.post("/rules", json={**rules(3)[2], "name": "third"})
    sent = [*rules(4), rules(1)[0], {"target": "10.8.8.8", "action": "block", "name": "third"}]
    answer = client.post("/rules/bulk", content="\n" + lines(sent), headers=NDJSON)
    errors = answer.json()["errors"]
    assert answer.status_code == 409
    assert [each["line"] for each in errors] == [4, 6, 7]
    assert errors[0]["rule"] == errors[2]["rule"] == {"id": 1, "name": "third"}
    single = client.post("/rules/bulk", json=rules(3)[2:])
    assert (single.status_code, single.json()["errors"][0]["line"]) == (409, 1)
    assert single.json()["rule"]["id"] == 1
    assert total(client) == 1


def test_more_kinds_than_a_gateway_holds_are_refused(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one as together; rules for other gateways, and other rates of the same ports, find room."""
    monkeypatch.setattr("netlimit.crowding.MOST_KINDS", 3)
    web = {"target": "10.1.2.3", "rate": "1 packets/s", "protocol": "tcp"}
    assert client.post("/rules/bulk", json=[{**web, "ports": port} for port in (80, 443)]).status_code == 201
    assert client.post("/rules", json={**web, "ports": 25}).status_code == 201
    for answer in (
        client.post("/rules", json={**web, "ports": 22}),
        client.post("/rules", json={**web, "ports": 22}, params={"dry_run": True}),
        client.post("/rules/bulk", json=[{**web, "ports": 22}]),
    ):
        assert answer.status_code == 422
        assert "there are 4 kinds of IPv4; a host holds 3" in answer.text
    assert total(client) == 3
    for fields in (
        {"rate": "2 packets/min", "target": "10.9.9.9", "ports": 25},
        {"ports": 22, "target": "2001:db8::1"},
    ):
        assert client.post("/rules", json={**web, **fields}).status_code == 201


def test_what_buckets_may_come_to_is_told_and_beyond_the_bound_refused(client: httpx.Client) -> None:
    """One by one, together, by a change or for a dry run; what is kept can still be changed and made less."""
    wide = [{"target": f"{n}.16.0.0/12", "per": "host", "rate": f"{n} packets/day"} for n in range(20, 53)]
    assert client.post("/rules", json=wide[0]).json()["warnings"] == []
    assert client.post("/rules/bulk", json=wide[1:3]).status_code == 201
    for params in ({"dry_run": True}, {}):
        (warning,) = client.post("/rules", json={**wide[3], "name": "fourth"}, params=params).json()["warnings"]
        assert "on a gateway could come to 512 MB of kernel memory" in warning
    (warning,) = client.post("/rules/bulk", json=wide[4:32]).json()["warnings"]
    assert "4 GB of kernel memory" in warning
    one = wide[32]
    assert client.post("/rules", json={**one, "per": "target", "name": "wider"}).json()["warnings"] == []
    off = client.post("/rules", json={**one, "name": "off", "direction": "to", "enabled": False})
    assert (off.status_code, off.json()["warnings"]) == (201, [])
    new = {**one, "protocol": "tcp"}
    held = total(client)
    merge = {"Content-Type": "application/merge-patch+json"}
    for answer in (
        client.post("/rules", json=new),
        client.post("/rules", json=new, params={"dry_run": True}),
        client.post("/rules", json=new, params={"force": True}),
        client.post("/rules/bulk", json=[new]),
        client.put("/rules/wider", json=one),
        client.put("/rules/wider", json=one, params={"dry_run": True}),
        client.patch("/rules/wider", content=json.dumps({"per": "host"}), headers=merge),
        client.patch("/rules/off", content=json.dumps({"enabled": True}), headers=merge),
        client.post("/rules", json={**new, "hosts": ["gw2"]}),
    ):
        assert answer.status_code == 422, answer.text
        assert "could come to 4.1 GB of kernel memory, and netlimit asks for 4 GB" in answer.text
        assert "`per: /n`" in answer.text
        assert "Nothing was kept." in answer.text
    assert "on gw2 could" in answer.text, "the last of them"
    assert total(client) == held
    same = client.patch("/rules/fourth", content=json.dumps({"comment": "x"}), headers=merge)
    assert (same.status_code, same.json()["warnings"]) == (200, []), "it takes no more than before"
    finer = json.dumps({"target": "23.16.0.0/13", "rate": "19 packets/day"})
    (warning,) = client.patch("/rules/fourth", content=finer, headers=merge).json()["warnings"]
    assert "3.9 GB of kernel memory" in warning
    assert client.patch("/rules/fourth", content=json.dumps({"per": "target"}), headers=merge).status_code == 200
    assert client.post("/rules", json=new).status_code == 201
    revision = client.get("/rules/fourth").json()["revision"]
    assert client.post(f"/revisions/{revision - 1}/rollback").status_code == 200, "what was taken once may return"


def test_all_rules_are_looked_at_while_others_write_and_what_came_since_in_turn(
    client: httpx.Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What somebody else keeps between the look and the change counts too; what the change replaces does not."""
    now = datetime.now(UTC)
    wide = [{"target": f"{n}.16.0.0/12", "per": "host", "rate": f"{n} packets/day"} for n in range(20, 53)]
    assert client.post("/rules/bulk", json=wide[:31]).status_code == 201
    look = Store.look_at_meters

    def look_before(store: Store, when: datetime) -> object:
        seen = look(store, when)
        store.add([parse_rule({**wide[31], "name": "meanwhile"}, now)], "x", now)
        return seen

    with monkeypatch.context() as patch:
        patch.setattr(Store, "look_at_meters", look_before)
        refused = client.post("/rules", json=wide[32])
    assert refused.status_code == 422
    assert "4.1 GB" in refused.text
    replaced = client.put("/rules/meanwhile", json=wide[32])
    assert replaced.status_code == 200
    assert "4 GB of kernel memory" in replaced.json()["warnings"][0]


def test_a_batch_can_wait_for_the_kernel(client: httpx.Client, controller: Controller) -> None:
    controller.start()
    answer = client.post("/rules/bulk", json=rules(100), headers={"Prefer": "wait=60"})
    assert answer.headers["Preference-Applied"] == "wait=60"
    assert answer.json()["state"] == "applied"
    assert client.get("/rules/100").json()["status"]["state"] == "applied"


def test_a_batch_stands_as_the_worst_of_its_rules(client: httpx.Client, controller: Controller) -> None:
    controller.start()
    controller.store.pause("gw1", True)
    wait = {"Prefer": "wait=60"}
    assert client.post("/rules/bulk", json=rules(2), headers=wait).json()["state"] == "pending"
    controller.store.pause("gw1", False)
    off = [{**rule, "direction": "to", "enabled": False} for rule in rules(2)]
    assert client.post("/rules/bulk", json=off, headers=wait).json()["state"] == "disabled"
    elsewhere = [{**rule, "per": "peer", "hosts": ["gw2"][:number]} for number, rule in enumerate(rules(2))]
    assert client.post("/rules/bulk", json=elsewhere, headers=wait).json()["state"] == "pending"


def test_more_than_can_be_added_at_once_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MOST_RULES", 3)
    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert len(bulk.read_batch(bulk.Sent(lines(rules(3)).encode(), by_line=True), now).rules) == 3
    for sent in (bulk.Sent(lines(rules(4)).encode(), by_line=True), bulk.Sent(json.dumps(rules(4)).encode(), False)):
        with pytest.raises(Problem, match="At most 3 rules") as refused:
            bulk.read_batch(sent, now)
        assert refused.value.status == 413


def test_a_batch_that_the_memory_does_not_suffice_for_is_refused(
    client: httpx.Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([64 * 2**20, 20 * 2**20, 16 * 2**20])
    monkeypatch.setattr(bulk, "find_headroom", lambda: next(left))
    lines = "\n".join(f'{{"target": "10.{n >> 8}.{n & 255}.1", "action": "block"}}' for n in range(2000))
    refused = client.post("/rules/bulk", content=lines, headers={"Content-Type": "application/x-ndjson"})
    assert refused.status_code == 413
    assert "does not suffice for more than 1000 of these rules" in refused.json()["detail"]
    assert store.select()[1] == 0


def test_who_has_no_memory_left_says_so(client: httpx.Client, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(bulk, "read_batch", fail)
    refused = client.post("/rules/bulk", content="{}", headers={"Content-Type": "application/x-ndjson"})
    assert refused.status_code == 413
    assert "Send smaller ones" in refused.json()["detail"]


def test_more_kinds_of_limits_than_a_host_can_hold_are_refused_whole(client: httpx.Client) -> None:
    ports = [{"target": "10.7.0.1", "rate": "9 packets/s", "protocol": "udp", "ports": 1 + n} for n in range(4097)]
    answer = client.post("/rules/bulk", json=ports)
    assert answer.status_code == 422, answer.text
    assert "4097 kinds of IPv4; a host holds 4096" in answer.json()["detail"]
    assert "Nothing was kept." in answer.json()["detail"]
    assert total(client) == 0


def test_so_many_names_and_labels_are_written_at_once_and_no_more(client: httpx.Client) -> None:
    """They take longer than the rules, and nobody can change anything meanwhile."""
    names = [f"gw{number}" for number in range(256)]
    labels = {f"key{number}": "value" for number in range(128)}
    rules = [
        {"target": f"10.{1 + number // 250}.{number % 250}.1", "action": "block", "hosts": names, "labels": labels}
        for number in range(1303)
    ]
    refused = client.post("/rules/bulk", json=rules)
    assert refused.status_code == 413
    assert "At most 500,000 names of gateways and labels" in refused.json()["detail"]
    assert client.get("/rules").json()["total"] == 0
    assert client.post("/rules/bulk", json=rules[:200]).status_code == 201
