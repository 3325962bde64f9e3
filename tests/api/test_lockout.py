"""Rules that would hit who is safe are refused, with the reason, unless an admin forces them."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from netlimit.lockout import Havens
from netlimit.records import HostStatus, SafeReason
from netlimit.rules import parse_rule
from netlimit.store import Store
from tests.api.server import connect

NOW = datetime.now(UTC)
SEEN = NOW.timestamp() + 3600  # however long the tests before this one take
WHY = {
    "198.51.100.7": (SafeReason("SSH session", SEEN), "where an SSH session to gw1 comes from"),
    "198.51.100.8": (SafeReason("API client", SEEN), "where somebody speaks to the API of gw1 from"),
    "10.2.0.1": (SafeReason("default gateway", SEEN), "a default gateway of gw1"),
    "203.0.113.5": (SafeReason("database host", SEEN), "where gw1 has its database"),
    "203.0.113.6": (SafeReason("counter store (Redis) host", SEEN), "where gw1 has its counter store (Redis)"),
    "2001:db8::7": (
        SafeReason("SSH session", NOW.timestamp() - 600),
        "where an SSH session to gw1 comes from, or did a while ago",
    ),
    "192.0.2.0/24": (SafeReason("settings"), "in the safe set of gw1 (NETLIMIT_SAFE)"),
}
NEEDED = [sentence for why, sentence in WHY.values() if "host" in why.text or "gateway" in why.text]
BLOCK: dict[str, Any] = {"target": "198.51.100.7", "action": "block"}
LIMIT: dict[str, Any] = {"target": "198.51.100.7", "rate": "5 packets/s"}


@pytest.fixture
def gateway(store: Store) -> None:
    store.report(
        HostStatus(
            host="gw1",
            backend="iptables",
            safe=tuple(WHY),
            safe_reasons={network: why for network, (why, _) in WHY.items()},
        )
    )


@pytest.mark.usefixtures("gateway")
def test_the_reason_is_said(client: httpx.Client) -> None:
    for target, (_, sentence) in WHY.items():
        answer = client.post("/rules", json={"target": target, "action": "block"})
        assert answer.status_code == 409
        problem = answer.json()
        assert problem["field"] == "target"
        assert f"would hit {target}, which is {sentence}. " in problem["detail"]
        spared = "what it exchanges with gw1 itself" if sentence in NEEDED else "it"
        assert f"A rule for a network around it leaves {spared} alone, and" in problem["detail"]
        assert "force=true" in problem["detail"]
    assert client.get("/rules").json()["total"] == 0


@pytest.mark.usefixtures("gateway")
def test_what_would_hit_somebody_who_is_safe_is_refused_and_nothing_else(client: httpx.Client) -> None:
    for rule in (
        LIMIT,
        {**LIMIT, "direction": "to", "action": "reject"},
        {**LIMIT, "action": "shape", "rate": "1 Mbit/s"},
        {**LIMIT, "hosts": ["gw1", "gw2"]},
        {"target": "192.0.2.0/25", "action": "block"},
    ):
        assert client.post("/rules", json=rule).status_code == 409
    assert client.post("/rules?dry_run=true", json=LIMIT).status_code == 409
    for rule in (
        {"target": "198.51.100.7", "action": "allow"},
        {**LIMIT, "action": "observe"},
        {**LIMIT, "enabled": False},
        {**BLOCK, "target": "198.51.100.8", "hosts": ["gw2"]},
        {"target": "198.51.100.9", "action": "block"},
        {"target": "198.51.100.0/24", "action": "block"},
    ):
        assert client.post("/rules", json=rule).status_code == 201


@pytest.mark.usefixtures("gateway")
def test_a_rule_around_them_says_whom_it_spares(client: httpx.Client) -> None:
    kept = client.post("/rules", json={"target": "198.51.100.0/24", "action": "block"}).json()
    assert kept["warnings"] == [
        "It leaves alone who is safe: 198.51.100.7 (where an SSH session to gw1 comes from), "
        "198.51.100.8 (where somebody speaks to the API of gw1 from)."
    ]
    assert client.put("/rules/1", json={**kept, "target": "198.51.101.0/24"}).json()["warnings"] == []
    router = client.post("/rules", json={"target": "10.2.0.0/24", "action": "block"}).json()
    assert router["warnings"] == [
        "It leaves alone who is safe: 10.2.0.1 (a default gateway of gw1; only what it exchanges with gw1 itself)."
    ]
    everything = client.post("/rules?force=true", json={"target": "0.0.0.0/0", "action": "block"}).json()
    assert everything["warnings"][0].endswith(" and 3 more.")


@pytest.mark.usefixtures("gateway")
def test_a_cap_says_that_it_spares_nobody_but_the_gateway_itself(client: httpx.Client) -> None:
    cap = {"target": "0.0.0.0/0", "direction": "to", "action": "shape", "rate": "8 kbit/s", "per": "target"}
    kept = client.post("/rules", json={**cap, "interface": "lan"}).json()
    assert any(
        "What the gateway's management ports (SSH, the API) answer them has a class" in each
        for each in kept["warnings"]
    )
    assert not any("leaves alone" in each for each in kept["warnings"])


@pytest.mark.usefixtures("gateway")
def test_the_first_rule_that_shapes_what_ends_on_a_gateway_says_what_it_costs(client: httpx.Client) -> None:
    rule = {"target": "203.0.113.9", "action": "shape", "rate": "1 Mbit/s"}
    for name, more, told in (
        ("leaves", {"interface": "lan"}, False),
        ("others", {"direction": "to"}, False),
        ("off", {"enabled": False}, False),
        ("first", {}, True),
        ("second", {"target": "203.0.113.10"}, False),
    ):
        kept = client.post("/rules", json={**rule, **more, "name": name}).json()
        assert any("empty the queues of its devices, once" in each for each in kept["warnings"]) is told, name


@pytest.mark.usefixtures("gateway")
def test_an_admin_can_force_it_and_nobody_else(client: httpx.Client, url: str) -> None:
    with connect(url, "operator") as operator:
        refused = operator.post("/rules?force=true", json=BLOCK)
    assert refused.status_code == 403
    assert "may not force a rule that would hit the safe set" in refused.json()["detail"]
    assert client.post("/rules?force=true", json=BLOCK).status_code == 201


@pytest.mark.usefixtures("gateway")
def test_changes_are_looked_at_too_but_not_what_stays(client: httpx.Client) -> None:
    client.post("/rules", json={**LIMIT, "target": "198.51.100.9"})
    assert client.patch("/rules/1", json={"target": "198.51.100.7"}).status_code == 409
    assert client.put("/rules/1", json=LIMIT).status_code == 409
    assert client.get("/rules/1").json()["target"] == "198.51.100.9"
    assert client.patch("/rules/1?force=true", json={"target": "198.51.100.7"}).status_code == 200
    assert client.patch("/rules/1", json={"comment": "It was forced."}).status_code == 200
    assert client.patch("/rules/1", json={"rate": "1 packets/s"}).status_code == 409
    assert client.patch("/rules/1", json={"enabled": False}).status_code == 200
    assert client.patch("/rules/1", json={"enabled": True}).status_code == 409
    assert client.put("/rules/1?force=true", json=LIMIT).status_code == 200
    assert client.patch("/rules/1", json={"ttl": "1h"}).status_code == 200, "it ends sooner"
    assert client.patch("/rules/1", json={"ttl": "2h"}).status_code == 409


@pytest.mark.usefixtures("gateway")
def test_a_rule_that_was_forced_does_not_come_back_by_itself(client: httpx.Client, url: str) -> None:
    client.post("/rules?force=true", json=BLOCK)
    client.patch("/rules/1", json={"comment": "It was forced."})
    client.delete("/rules/1")
    client.post("/rules", json={**LIMIT, "target": "198.51.100.9"})
    with connect(url, "operator") as operator:
        refused = operator.post("/revisions/2/rollback")
        assert refused.status_code == 409
        assert "where an SSH session to gw1 comes from" in refused.json()["detail"]
        assert operator.post("/revisions/2/rollback?force=true").status_code == 403
        assert operator.post("/revisions/3/rollback").json() == {"returned_to": 3, "revision": 5, "warnings": []}
    assert client.post("/revisions/2/rollback?force=true").json()["revision"] == 6
    assert client.post("/revisions/1/rollback").json()["revision"] == 7  # it stays


def test_a_rule_that_came_to_close_a_gateway_is_forced_as_its_note_says(client: httpx.Client, store: Store) -> None:
    """`netlimit rule edit ID --enable --force`, of a rule that nobody had to force when it was made."""
    store.report(HostStatus(host="gw1", backend="iptables", own=("10.2.0.1",)))
    assert client.post("/rules", json={"target": "10.2.0.50", "direction": "to", "action": "block"}).status_code == 201
    store.report(HostStatus(host="gw1", backend="iptables", own=("10.2.0.1", "10.2.0.50")))
    assert client.patch("/rules/1", json={"enabled": True}).json()["forced_by"] is None
    assert client.patch("/rules/1?force=true", json={"enabled": True}).json()["forced_by"] == "admin"


@pytest.mark.usefixtures("gateway")
def test_a_rule_keeps_who_has_forced_it_and_only_an_admin_brings_it_in(client: httpx.Client, url: str) -> None:
    forced = client.post("/rules?force=true", json=BLOCK).json()
    assert forced["forced_by"] == "admin"
    assert forced["warnings"] == []
    with connect(url, "operator") as operator:
        assert operator.patch("/rules/1", json={"comment": "It stays."}).json()["forced_by"] == "admin"
        sent = operator.get("/rules/1").json()
        assert operator.put("/rules/1", json={**sent, "labels": {"a": "b"}}).json()["forced_by"] == "admin"
        del sent["forced_by"]
        assert operator.put("/rules/1", json=sent).json()["forced_by"] == "admin", "what is left out stays"
        refused = operator.patch("/rules/1", json={"protocol": "tcp"})
        assert refused.status_code == 409
        assert operator.patch("/rules/1", json={"enabled": False}).json()["forced_by"] == "admin"
        assert operator.patch("/rules/1", json={"enabled": True}).status_code == 409
        assert operator.patch("/rules/1?force=true", json={"enabled": True}).status_code == 403
        other = {"target": "198.51.100.9", "action": "block", "forced_by": "admin"}
        assert operator.post("/rules", json=other).json()["field"] == "forced_by"
        assert operator.post("/rules/bulk", json=[other]).status_code == 409
        assert operator.post("/rules", json={**other, "enabled": False}).status_code == 409
    added = client.post(
        "/rules/bulk?force=true", json=[{**other, "forced_by": "alice"}, LIMIT, {**LIMIT, "target": "10.9.9.9"}]
    )
    assert [client.get(f"/rules/{number}").json()["forced_by"] for number in added.json()["ids"]] == [
        "alice",
        "admin",
        None,
    ]
    assert '"forced_by":"alice"' in client.get("/audit").text.replace(" ", ""), "the audit tells, too"


@pytest.mark.usefixtures("gateway")
def test_a_forced_rule_can_be_made_an_ordinary_one_that_hits_nobody(client: httpx.Client, url: str) -> None:
    own = {"target": "10.1.0.1", "direction": "to", "rate": "1 packets/day"}
    client.post("/rules?force=true", json=own)
    with connect(url, "operator") as operator:
        assert operator.patch("/rules/1", json={"rate": "2 packets/day"}).status_code == 409
        assert operator.patch("/rules/1", json={"forced_by": None}).json()["forced_by"] is None
        assert operator.patch("/rules/1", json={"rate": "2 packets/day"}).status_code == 200


@pytest.mark.usefixtures("gateway")
def test_what_was_forced_comes_back_by_an_admin_alone(client: httpx.Client, url: str) -> None:
    client.post("/rules?force=true", json={"target": "203.0.113.77", "action": "block"})
    client.delete("/rules/1")
    with connect(url, "operator") as operator:
        refused = operator.post("/revisions/1/rollback")
        assert refused.status_code == 409
        assert "was forced by admin" in refused.json()["detail"]
    assert client.post("/revisions/1/rollback").status_code == 409, "who may force must say so"
    assert client.post("/revisions/1/rollback?force=true").status_code == 200
    assert client.get("/rules/1").json()["forced_by"] == "admin"


@pytest.mark.usefixtures("gateway")
def test_an_allow_that_keeps_a_forced_rule_from_who_is_safe_stays(client: httpx.Client, url: str) -> None:
    client.post("/rules?force=true", json={**LIMIT, "direction": "to"})
    allow = {"target": "198.51.100.0/24", "action": "allow", "direction": "to"}
    client.post("/rules", json=allow)
    with connect(url, "operator") as operator:
        refused = operator.delete("/rules/2")
        assert refused.status_code == 409
        assert "which admin has forced, would hit 198.51.100.7" in refused.json()["detail"]
        changes = ({"enabled": False}, {"target": "198.51.100.128/25"}, {"ttl": "1h"}, {"protocol": "tcp"})
        for change in (*changes, {"on_failure": "open"}):
            assert operator.patch("/rules/2", json=change).status_code == 409
        assert operator.patch("/rules/2", json={"target": "198.51.0.0/16"}).status_code == 200
        assert operator.delete("/rules/2?force=true").status_code == 403
        assert operator.post("/revisions/1/rollback").status_code == 409
    assert client.delete("/rules/2?force=true").status_code == 204


@pytest.mark.parametrize(
    "rules",
    [
        [{"target": "0.0.0.0/0", "action": "block"}],
        [{"target": "::/0", "action": "block", "direction": "to"}],
        [{"target": "0.0.0.0/0", "action": "block", "interface": "eth0"}],
        [{"target": "0.0.0.0/1", "action": "block"}, {"target": "128.0.0.0/1", "direction": "to", "action": "block"}],
        [{"target": f"{16 * n}.0.0.0/4", "action": "block", "protocol": "tcp"} for n in range(11)],
        [{"target": "0.0.0.0/0", "rate": "1 packets/day", "per": "target"}],
        [{"target": "0.0.0.0/0", "rate": "12 kbit/s", "per": "target", "action": "reject"}],
        [{"target": "::/0", "rate": "1 connections/h", "per": "/16", "protocol": "tcp", "ports": 22}],
    ],
    ids=["all", "to all", "by one device", "two halves", "eleven parts", "one packet", "a trickle", "no new SSH"],
)  # fmt: skip
def test_what_closes_a_whole_gateway_needs_force(
    client: httpx.Client, url: str, gateway: None, rules: list[dict[str, Any]]
) -> None:
    *others, last = rules
    with connect(url, "operator") as operator:
        refused = operator.post("/rules/bulk", json=rules)
        assert refused.status_code == 409
        assert "would close gw1 to nearly every IPv" in str(refused.json()["errors"])
        for rule in others:
            assert operator.post("/rules", json=rule).status_code == 201 or rule == others[-1]
        assert operator.post("/rules", json=last).status_code == 409
        assert operator.post("/rules", json={**last, "enabled": False}).status_code == 201
        assert operator.get("/rules").json()["total"] >= 1
    (kept,) = (each for each in client.get("/rules").json()["items"] if not each["enabled"])
    with connect(url, "operator") as operator:
        assert operator.patch(f"/rules/{kept['id']}", json={"enabled": True}).status_code == 409
    assert client.patch(f"/rules/{kept['id']}?force=true", json={"enabled": True}).json()["forced_by"] == "admin"
    with connect(url, "operator") as operator:
        assert operator.patch(f"/rules/{kept['id']}", json={"comment": "It is closed."}).status_code == 200
        assert operator.delete(f"/rules/{kept['id']}").status_code == 204


@pytest.mark.usefixtures("gateway")
def test_what_leaves_the_gateway_open_needs_no_force(client: httpx.Client, url: str) -> None:
    with connect(url, "operator") as operator:
        for rule in (
            {"target": "0.0.0.0/1", "action": "block"},
            {"target": "0.0.0.0/0", "action": "block", "protocol": "tcp", "ports": 25},
            {"target": "0.0.0.0/0", "action": "block", "protocol": "udp", "ports": 53},
            {"target": "0.0.0.0/0", "action": "block", "protocol": "icmp"},
            {"target": "0.0.0.0/0", "rate": "10 Mbit/s", "per": "target"},
            {"target": "0.0.0.0/0", "rate": "6 connections/min", "per": "/20", "protocol": "tcp", "ports": 22},
            {"target": "0.0.0.0/0", "action": "observe", "rate": "1 packets/day", "per": "target"},
            {"target": "10.1.0.1", "direction": "to", "rate": "1 packets/day"},
        ):
            answer = operator.post("/rules", json=rule)
            assert answer.status_code == 201, answer.text


@pytest.mark.usefixtures("gateway")
def test_the_last_opening_of_a_closed_gateway_goes_by_force_alone(client: httpx.Client) -> None:
    door = client.post("/rules", json={"target": "10.2.0.0/16", "action": "allow"}).json()["id"]
    assert client.post("/rules?force=true", json={"target": "0.0.0.0/0", "action": "block"}).status_code == 201
    answer = client.delete(f"/rules/{door}")
    assert answer.status_code == 409
    assert "'allow from 10.2.0.0/16 any' leaves it open" in answer.json()["detail"]
    for change in ({"enabled": False}, {"ttl": "1m"}, {"target": "10.2.0.0/24"}, {"on_failure": "open"}):
        assert client.patch(f"/rules/{door}", json=change).status_code == 409
    halves = [{"target": target, "action": "block"} for target in ("10.2.0.0/17", "10.2.128.0/17")]
    assert client.post("/rules/bulk", json=halves).status_code == 409
    assert client.post("/rules", json=halves[0]).status_code == 201
    assert client.post("/rules", json=halves[1]).status_code == 409
    assert client.delete(f"/rules/{door}?force=true").status_code == 204


@pytest.mark.usefixtures("gateway")
def test_of_many_rules_each_line_is_told(client: httpx.Client) -> None:
    batch = [{**LIMIT, "target": "198.51.100.9"}, LIMIT, {"target": "10.1.2.3"}, {**BLOCK, "target": "10.2.0.1"}]
    problem = client.post("/rules/bulk", json=batch).json()
    assert [each["line"] for each in problem["errors"]] == [2, 3, 4]
    assert client.get("/rules").json()["total"] == 0
    del batch[2]
    problem = client.post("/rules/bulk", json=batch)
    assert problem.status_code == 409
    assert client.post("/rules/bulk?force=true", json=batch).json()["added"] == 3


def test_who_asks_is_safe_before_any_controller_knows() -> None:
    rule = parse_rule({"target": "198.51.100.9", "action": "block"}, NOW)
    assert "which is where this request comes from" in str(Havens([], NOW, ("198.51.100.9", "gw1")).refuse(rule))
    assert Havens([], NOW, ("198.51.100.10", "gw1")).refuse(rule) is None


def test_a_gateway_s_own_address_is_not_closed_to_those_who_manage_it() -> None:
    gateway = HostStatus("gw1", "iptables", own=("10.1.0.1",), management=(22,), silence=timedelta(0))
    own: dict[str, Any] = {"target": "10.1.0.1", "direction": "to", "action": "block"}
    for rule in (own, {**own, "protocol": "tcp", "ports": "1-1023"}, {**own, "direction": "from"}):
        sentence = Havens([gateway], NOW).refuse(parse_rule(rule, NOW))
        assert sentence is not None
        assert "would let nobody connect to port 22 of gw1 at 10.1.0.1 any more" in sentence
    for rule in (
        {**own, "protocol": "udp"},
        {**own, "protocol": "tcp", "ports": 80},
        {**own, "target": "10.1.0.0/24"},
        {**own, "target": "10.1.0.2"},
        {**own, "hosts": ["gw2"]},
        {"target": "10.1.0.1", "direction": "to", "rate": "10 connections/min", "per": "peer"},
    ):
        assert Havens([gateway], NOW).refuse(parse_rule(rule, NOW)) is None


def test_of_a_gateway_that_is_long_gone_nothing_is_known() -> None:
    rule = parse_rule(BLOCK, NOW)
    status = HostStatus("gw1", "iptables", safe=("198.51.100.7",), silence=timedelta(hours=1))
    assert Havens([status], NOW).refuse(rule) is None


def test_of_a_gateway_that_is_heard_of_in_times_to_come_nothing_is_known() -> None:
    rule = parse_rule(BLOCK, NOW)
    status = HostStatus("gw1", "iptables", safe=("198.51.100.7",), silence=timedelta(minutes=-10))
    assert Havens([status], NOW).refuse(rule) is None


@pytest.mark.usefixtures("gateway")
def test_explain_says_why_an_address_is_safe(client: httpx.Client) -> None:
    client.post("/rules", json={"target": "198.51.100.0/24", "action": "block"})
    found = client.get("/explain", params={"src": "198.51.100.7", "dst": "10.1.0.1", "protocol": "tcp"}).json()
    assert found["verdict"] == "passes"
    assert "198.51.100.7 is in the safe set (SSH session), and the rule does not name it" in found["text"]


def test_the_status_tells_who_is_safe_and_why(client: httpx.Client, gateway: None) -> None:
    (host,) = client.get("/status").json()["hosts"]
    assert host["safe_reasons"]["198.51.100.7"] == "SSH session"


def name_strangers(client: httpx.Client, start: int, stop: int) -> httpx.Response:
    """Add rules that name gateways which have never reported."""
    rules = [
        {
            "target": f"10.{9 + start % 7}.{place // 250 % 250}.{place % 250}",
            "rate": "9 packets/s",
            "hosts": [f"h{place}"],
        }
        for place in range(start, stop)
    ]
    return client.post("/rules/bulk", json=rules)


@pytest.mark.usefixtures("gateway")
def test_rules_name_so_many_gateways_that_have_never_reported_and_no_more(client: httpx.Client, url: str) -> None:
    with connect(url, "operator") as operator:
        refused = name_strangers(operator, 0, 1001)
        assert refused.status_code == 422
        assert "would name 1,001 gateways that have never reported, such as 'h0'; there can be 1,000" in refused.text
        assert name_strangers(operator, 0, 1000).status_code == 201
        one = operator.post("/rules", json={"target": "10.8.0.1", "rate": "9 packets/s", "hosts": ["h1000"]})
        assert (one.status_code, one.json()["field"]) == (422, "hosts")
        kept = operator.post("/rules", json={"target": "10.8.0.1", "rate": "9 packets/s", "hosts": ["gw1", "h7"]})
        assert kept.status_code == 201, "that are named already, or known"
        path = f"/rules/{kept.json()['id']}"
        changed = [
            operator.patch(path, json={"hosts": ["gw1", "h1000"]}),
            operator.put(path, json={"target": "10.8.0.1", "rate": "9 packets/s", "hosts": ["h1000"]}),
            operator.patch(f"{path}?dry_run=true", json={"hosts": ["h1000"]}),
            client.patch(f"{path}?force=true", json={"hosts": ["h1000"]}),
        ]
        assert [(each.status_code, each.json()["field"]) for each in changed] == [(422, "hosts")] * 4
        assert operator.patch(path, json={"hosts": ["h999"], "comment": "moved"}).status_code == 200
    first = client.get("/rules?limit=1").json()["items"][0]
    assert first["hosts"] == ["h0"]
    assert client.patch(f"/rules/{first['id']}", json={"hosts": ["h1000"]}).status_code == 200, "in place of h0"


@pytest.mark.usefixtures("gateway")
def test_many_blocks_for_gateways_that_nobody_knows_keep_nobody_waiting(client: httpx.Client, store: Store) -> None:
    """Also where there are more than may be named by now: an earlier version has kept them."""
    rules = [
        parse_rule({
            "target": f"{20 + place // 4096}.{place // 16 % 256}.{place % 16 * 16}.0/20", "action": "block",
            "hosts": [f"h{place}-{name}" for name in range(8)],
        }, NOW)
        for place in range(6000)
    ]  # fmt: skip
    store.add(rules, "former", NOW)
    began = time.monotonic()
    assert client.post("/rules", json={"target": "9.0.0.0/16", "action": "block"}).status_code == 201
    assert time.monotonic() - began < 10, "it took minutes"
    closing = client.post("/rules", json={"target": "0.0.0.0/0", "action": "block", "hosts": ["h17-3"]})
    assert closing.status_code == 409
    assert "would close h17-3 to nearly every IPv4 address" in closing.json()["detail"]


@pytest.mark.usefixtures("gateway")
def test_what_takes_too_long_to_judge_is_for_admins_alone(client: httpx.Client, url: str) -> None:
    """Each of these leaves most ports open, but there are as many ways to put them together as ports."""
    rules = [
        {"target": "0.0.0.0/1", "action": "block", "protocol": "tcp", "ports": f"1024-{1024 + 8 * n}",
         "source_ports": f"32768-{32768 + 8 * n}"}
        for n in range(1, 300)
    ]  # fmt: skip
    with connect(url, "operator") as operator:
        began = time.monotonic()
        refused = operator.post("/rules/bulk", json=rules)
        assert refused.status_code == 409
        assert "would take too long to find out whether these rules close a gateway" in refused.text
        assert time.monotonic() - began < 30, "it took a minute"
    assert client.get("/rules").json()["total"] == 0
    assert client.post("/rules/bulk?force=true", json=rules).status_code == 201
