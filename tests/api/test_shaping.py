"""Rules that shape: how they stand, and what they have counted."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from netlimit.records import L7, Counts, Exceptional, HostStatus, RuleCounters, State
from netlimit.store import Store
from tests.api.server import PATIENCE, Controller, get

SHAPED = {"target": "10.1.0.0/16", "rate": "20 Mbit/s", "ceil": "50 Mbit/s", "per": "host", "action": "shape"}
POLICED = {"target": "10.1.0.0/16", "rate": "200 packets/s", "per": "host"}
NOTE = "Its traffic can leave by wan and wan2."
SINCE = datetime(2030, 1, 1, tzinfo=UTC)


def reading(rule_id: int, packets: int) -> RuleCounters:
    total = Counts(packets, packets * 100, packets // 2, 0, packets * 3)
    return RuleCounters(rule_id, total, total, SINCE, SINCE, packets // 5, packets * 20)


def report(store: Store, host: str = "gw1", backend: str = "iptables") -> None:
    store.report(HostStatus(host=host, backend=backend, applied_revision=store.revision()))


@pytest.mark.parametrize("backend", ["iptables", "fake"])
def test_tc_enforces_what_is_shaped(client: httpx.Client, store: Store, backend: str) -> None:
    client.post("/rules", json=SHAPED)
    client.post("/rules", json=POLICED)
    report(store, backend=backend)
    shaped, policed = (client.get(f"/rules/{number}").json() for number in (1, 2))
    assert (shaped["status"]["state"], shaped["status"]["enforced_by"]) == ("applied", "tc")
    assert (policed["status"]["state"], policed["status"]["enforced_by"]) == ("applied", "iptables")
    assert (shaped["effective_rate"]["text"], shaped["effective_burst"]) == ("20 Mbit/s", None)
    assert (shaped["ceil"]["text"], shaped["per"]) == ("50 Mbit/s", "host")


def test_whole_bytes_a_second_are_held(client: httpx.Client) -> None:
    rule = {**SHAPED, "rate": "1 Mbit/min", "ceil": None}
    draft = client.post("/rules?dry_run=true", json=rule).json()
    assert draft["effective_rate"]["text"] == "999840 bit/min"
    assert draft["rate"]["text"] == "1 Mbit/min"


@pytest.mark.parametrize(("state", "enforced_by"), [(State.APPLIED, "tc"), (State.DEGRADED, "tc"), (State.ERROR, None)])
def test_a_note_goes_with_a_rule(client: httpx.Client, store: Store, state: State, enforced_by: str | None) -> None:
    client.post("/rules", json=SHAPED)
    client.post("/rules", json={**SHAPED, "direction": "to"})
    report(store)
    store.mark("gw1", [Exceptional(1, state, NOTE)], [])
    status = client.get("/rules/1").json()["status"]
    assert (status["state"], status["message"], status["enforced_by"]) == (state.value, NOTE, enforced_by)
    assert 1 in [each["id"] for each in client.get("/rules", params={"state": state.value}).json()["items"]]
    counts = client.get("/status").json()["rules"]
    assert counts["total"] == 2
    assert counts["applied"] == (2 if state is State.APPLIED else 1)
    assert counts[state.value] == (2 if state is State.APPLIED else 1)


def test_a_note_of_one_gateway_is_not_hidden_by_another(client: httpx.Client, store: Store) -> None:
    client.post("/rules", json=SHAPED)
    for host in ("gw1", "gw2"):
        report(store, host)
    store.mark("gw2", [Exceptional(1, State.APPLIED, NOTE)], [])
    status = client.get("/rules/1").json()["status"]
    assert (status["state"], status["message"]) == ("applied", f"gw2: {NOTE}")


def test_what_waits_is_counted(client: httpx.Client, store: Store) -> None:
    client.post("/rules", json=SHAPED)
    store.count("gw1", [reading(1, 10)])
    store.count("gw2", [reading(1, 20)])
    counters = client.get("/rules/1/counters").json()
    assert (counters["delayed"], counters["queued_packets"], counters["queued_bytes"]) == (90, 6, 600)
    assert (counters["matched_bytes"], counters["dropped_packets"], counters["dropped_bytes"]) == (3000, 15, 0)


def test_counters_of_many_are_asked_for_at_once(
    client: httpx.Client, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.counters.READING_SECONDS", PATIENCE)
    asked: list[Any] = []

    def read(argument: dict[str, Any]) -> dict[str, Any]:
        asked.append(argument)
        controller.store.count("gw1", [reading(number, 10 * number) for number in argument["rules"]])
        return {}

    client.post("/rules", json={**SHAPED, "name": "down"})
    client.post("/rules", json={**SHAPED, "direction": "to"})
    client.post("/rules", json={**POLICED, "enabled": False})
    controller.answers["counters"] = read
    controller.start()
    answer = client.get("/counters?rule=2&rule=down&rule=002&rule=nobody&rule=3&rule=99&rule=%00").json()
    assert [(each["rule"], each["name"], each["matched_packets"]) for each in answer["items"]] == [
        (2, None, 20), (1, "down", 10), (3, None, 0),
    ]  # fmt: skip
    assert set(answer["items"][0]) == {"rule", "name"} | set(client.get("/rules/3/counters").json())
    assert answer["missing"] == ["nobody", "99", "\0"]
    assert asked == [{"rules": [1, 2]}]


def test_counters_of_no_rule_are_not_asked_for(client: httpx.Client) -> None:
    for query in ("", "?rule=1&rules=2", "?" + "&".join(["rule=1"] * 1001)):
        answer = client.get(f"/counters{query}")
        assert answer.status_code == 422, query
        assert answer.json()["field"].startswith("rule")
    assert client.get("/counters?rule=1").json() == {"items": [], "missing": ["1"]}


def test_metrics_count_rules_that_have_a_name(url: str, client: httpx.Client, store: Store) -> None:
    client.post("/rules", json={**SHAPED, "name": "down"})
    client.post("/rules", json=POLICED)
    store.count("gw1", [reading(1, 10), reading(2, 20)])
    lines = get(f"{url}/metrics").text.splitlines()
    for name, value in (
        ('packets_total{host="gw1",name="down",rule="1",what="matched"}', 10),
        ('packets_total{host="gw1",name="down",rule="1",what="dropped"}', 5),
        ('bytes_total{host="gw1",name="down",rule="1",what="matched"}', 1000),
        ('delayed_total{host="gw1",name="down",rule="1"}', 30),
        ('queued_packets{host="gw1",name="down",rule="1"}', 2),
        ('queued_bytes{host="gw1",name="down",rule="1"}', 200),
    ):
        assert f"netlimit_rule_{name} {float(value)}" in lines
    assert not any('rule="2"' in line for line in lines)


def test_the_queue_of_a_packet_is_explained(client: httpx.Client, store: Store) -> None:
    client.post("/rules", json={**SHAPED, "direction": "to", "name": "hosts"})
    client.post("/rules", json={"target": "::/0", "rate": "90 Mbit/s", "per": "target", "action": "shape"})
    client.post("/rules", json={**POLICED, "direction": "to"})
    report(store)
    store.mark("gw1", [Exceptional(3, State.ERROR, "xt_hashlimit is missing.")], [])
    answer = client.get("/explain?src=192.0.2.7&dst=10.1.2.3&out=lan").json()
    assert answer["verdict"] == "shaped"
    assert [(step["rule"], step["hits"]) for step in answer["steps"]] == [(1, True), (2, True), (3, False)]
    assert answer["steps"][2]["reason"] == "not enforced: xt_hashlimit is missing."
    store.mark("gw1", [Exceptional(3, State.APPLIED, "xt_hashlimit is missing.", L7)], [])
    answer = client.get("/explain?src=192.0.2.7&dst=10.1.2.3&out=lan").json()
    assert [step["rule"] for step in answer["steps"] if "(by the limiter, on HTTP requests)" in step["reason"]] == [3]
