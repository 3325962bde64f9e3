"""What gateways report, and what only they can answer."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from netlimit.records import Counts, Exceptional, HostStatus, LimiterReport, RuleCounters, SafeReason, State
from netlimit.settings import Settings
from netlimit.store import Store
from tests.api.server import HANDLES, HASHES, PATIENCE, Controller, connect, get, serve

RULE = {"target": "10.1.2.3", "rate": "200 packets/s"}
SINCE = datetime(2030, 1, 1, tzinfo=UTC)
WORDS = ["Rule 1 comes into force."]
STEPS = [{"kind": "add", "text": "add 10.1.2.3 to nl-1"}]


@pytest.fixture
def second(settings: Settings) -> Iterator[Controller]:
    store = Store(settings.database_url)
    controller = Controller(store, "gw2")
    yield controller
    controller.stop()
    store.close()


def reading(rule_id: int, number: int, as_of: datetime) -> RuleCounters:
    counts = Counts(number, number * 100, number // 2, number * 50)
    return RuleCounters(rule_id, counts, counts, SINCE, as_of)


def test_the_plan_is_the_controllers(
    client: httpx.Client, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.plan.ANSWER_SECONDS", PATIENCE)
    controller.answers["plan"] = lambda argument: {"words": WORDS, "text": "add 10.1.2.3 to nl-1", "steps": STEPS}
    controller.start()
    begin = time.monotonic()
    answer = client.get("/plan")
    assert time.monotonic() - begin < PATIENCE / 2, "nothing is waited for once it is there"
    assert answer.json() == {
        "words": WORDS,
        "text": "add 10.1.2.3 to nl-1",
        "steps": STEPS,
        "hosts": {"gw1": {"words": WORDS, "text": "add 10.1.2.3 to nl-1", "steps": STEPS}},
        "silent": [],
    }


def test_the_plans_of_several_are_told_apart(
    client: httpx.Client, controller: Controller, second: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.plan.ANSWER_SECONDS", PATIENCE)
    answer = {"words": [], "text": "nothing to do", "steps": []}
    controller.answers["plan"] = lambda argument: time.sleep(0.3) or answer  # the order is not that of the answers
    second.answers["plan"] = lambda argument: answer
    for each in (controller, second):
        each.start()
    assert client.get("/plan").json()["text"] == "# gw1\nnothing to do\n# gw2\nnothing to do"
    assert set(client.get("/plan", params={"host": "gw2"}).json()["hosts"]) == {"gw2"}
    second.answers.clear()
    for seconds in (1.0, 8.0, 30.0):  # who answers may stand still, too: then nobody does in time
        monkeypatch.setattr("api.plan.ANSWER_SECONDS", seconds)
        found = client.get("/plan")
        if found.status_code != 503:
            break
    assert found.json()["silent"] == ["gw2"]


def test_gateways_that_have_been_silent_for_a_while_are_named_unless_they_are_gone(
    client: httpx.Client, store: Store, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks them: the plan, and the preview of a rule, are not those of all gateways."""
    monkeypatch.setattr("api.plan.ANSWER_SECONDS", PATIENCE)
    monkeypatch.setattr("api.preview.ANSWER_SECONDS", PATIENCE)
    nothing = {"words": [], "text": "", "steps": []}
    controller.answers |= {
        "plan": lambda argument: nothing,
        "preview": lambda argument: {"state": "applied", **nothing},
    }
    controller.start()
    store.report(HostStatus(host="quiet", backend="iptables"), ago(minutes=1))
    store.report(HostStatus(host="gone", backend="iptables"), ago(minutes=61))
    assert client.get("/plan").json()["silent"] == ["quiet"]
    assert client.post("/rules?dry_run=true", json=RULE).json()["preview"]["silent"] == ["quiet"]
    here = {**RULE, "hosts": ["gw1"]}
    assert client.post("/rules?dry_run=true", json=here).json()["preview"]["silent"] == []


def test_no_plan_without_a_controller(
    client: httpx.Client, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.plan.ANSWER_SECONDS", 0.3)
    answer = client.get("/plan")
    assert (answer.status_code, answer.headers["Content-Type"]) == (503, "application/problem+json")
    assert "netlimit serve" in answer.json()["detail"]
    controller.start()
    answer = client.get("/plan")
    assert answer.status_code == 503
    assert "gw1" in answer.json()["detail"]
    for address in ("/plan", "/offenders", "/explain?src=10.1.2.3&dst=10.1.2.4"):
        answer = client.get(address, params={**httpx.URL(address).params, "host": "gw9"})
        assert answer.status_code == 404
        assert "'gw9'; known are gw1" in answer.json()["detail"]


def test_counters_are_read_afresh(
    client: httpx.Client, store: Store, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.counters.READING_SECONDS", PATIENCE)

    def read(argument: dict[str, Any]) -> dict[str, Any]:
        controller.store.count("gw1", [reading(argument["rules"][0], 42, datetime.now(UTC))])
        return {"ok": True}

    client.post("/rules", json=RULE)
    controller.answers["counters"] = read
    controller.start()
    began = datetime.now(UTC)
    counters = client.get("/rules/1/counters").json()
    assert began <= datetime.fromisoformat(counters.pop("as_of")) <= datetime.now(UTC)
    assert counters == {
        "matched_packets": 42,
        "matched_bytes": 4200,
        "dropped_packets": 21,
        "dropped_bytes": 2100,
        "delayed": 0,
        "queued_packets": 0,
        "queued_bytes": 0,
        "since": client.get("/rules/1").json()["created_at"],
    }


def test_counters_of_all_gateways_are_summed(
    client: httpx.Client, store: Store, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.counters.READING_SECONDS", 0.1)
    client.post("/rules", json={**RULE, "name": "guests"})
    nothing = client.get("/rules/guests/counters").json()
    assert nothing == {
        "matched_packets": 0, "matched_bytes": 0, "dropped_packets": 0, "dropped_bytes": 0,
        "delayed": 0, "queued_packets": 0, "queued_bytes": 0, "since": None, "as_of": None,
    }  # fmt: skip
    controller.start()
    store.count("gw1", [reading(1, 10, SINCE + timedelta(hours=2))])
    store.count("gw2", [reading(1, 30, SINCE + timedelta(hours=1))])
    counters = client.get("/rules/guests/counters").json()
    assert (counters["matched_packets"], counters["dropped_packets"]) == (40, 20)
    assert counters["as_of"] == "2030-01-01T01:00:00Z"
    assert client.get("/rules/2/counters").status_code == 404


def test_offenders_are_merged_and_the_worst_is_first(
    client: httpx.Client, controller: Controller, second: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.offenders.ANSWER_SECONDS", PATIENCE)

    def see(*items: tuple[str, int, int]) -> dict[str, Any]:
        return {"items": [{"address": a, "packets": p, "bytes": b} for a, p, b in items]}

    controller.answers["offenders"] = lambda argument: see(("10.1.2.3", 5, 500), ("10.1.2.4", 7, 700))
    second.answers["offenders"] = lambda argument: see(("10.1.2.3", 5, 500), ("10.1.2.5", 1, 9))
    controller.start()
    second.start()
    answer = client.get("/offenders").json()
    assert [(each["address"], each["packets"], each["bytes"]) for each in answer["items"]] == [
        ("10.1.2.3", 10, 1000), ("10.1.2.4", 7, 700), ("10.1.2.5", 1, 9),
    ]  # fmt: skip
    assert len(client.get("/offenders", params={"limit": 1}).json()["items"]) == 1


def test_no_offenders_without_a_controller(client: httpx.Client) -> None:
    assert client.get("/offenders").status_code == 503


def test_the_status_of_one_gateway_is_the_status(client: httpx.Client, store: Store) -> None:
    client.post("/rules", json=RULE)
    store.report(
        HostStatus(
            host="gw1",
            backend="iptables",
            applied_revision=1,
            capabilities={"ipset": None, "fq_codel": "Load it.", "reject": "xt_REJECT is missing; load it."},
            own=("192.0.2.1",),
            safe=("198.51.100.0/24",),
            notes=("A note.",),
            drift=3,
            last_error="It failed.",
        )
    )
    status = client.get("/status").json()
    (host,) = status.pop("hosts")
    assert status == {
        "backend": "iptables",
        "capabilities": {
            "fq_codel": {"available": False, "reason": "Load it.", "needed": False},
            "ipset": {"available": True, "reason": None, "needed": True},
            "reject": {"available": False, "reason": "xt_REJECT is missing; load it.", "needed": True},
        },
        "wanted_revision": 1,
        "applied_revision": 1,
        "drift": 3,
        "window": None,
        "last_error": "It failed.",
        "rules": {"applied": 1, "expired": 0, "disabled": 0, "pending": 0, "degraded": 0, "error": 0, "total": 1},
        "notes": ["A note."],
    }
    assert (host["own"], host["safe"], host["live"], host["paused"]) == (
        ["192.0.2.1"],
        ["198.51.100.0/24"],
        True,
        False,
    )


def test_the_status_of_several_is_that_of_the_worst(client: httpx.Client, store: Store) -> None:
    status = client.get("/status").json()
    assert (status["backend"], status["applied_revision"], status["hosts"]) == (None, 0, [])
    assert "netlimit serve" in status["notes"][0]
    client.post("/rules", json=RULE)
    one = HostStatus(host="gw1", backend="iptables", applied_revision=1, capabilities={"ipset": None}, drift=1)
    store.report(one)
    missing = {"ipset": "It is not installed."}
    store.report(replace(one, host="gw2", applied_revision=0, capabilities=missing), ago(minutes=10))
    store.pause("gw1", True)
    status = client.get("/status").json()
    assert (status["applied_revision"], status["drift"], status["rules"]["pending"]) == (0, 2, 1)
    assert status["capabilities"]["ipset"] == {
        "available": False,
        "reason": "gw2: It is not installed.",
        "needed": True,
    }
    assert len(status["notes"]) == 2
    assert [host["live"] for host in status["hosts"]] == [True, False]


def test_what_a_teardown_has_taken_out_is_not_told_as_applied(client: httpx.Client, store: Store) -> None:
    """Nor once the pause is over: not before its controller says so."""
    client.post("/rules", json=RULE)
    one = HostStatus(host="gw1", backend="iptables", applied_revision=1, desired=1, enforced=1)
    for host in ("gw1", "gw2"):
        store.report(replace(one, host=host))

    def tell() -> tuple[int, str, list[tuple[int, int]]]:
        status = client.get("/status").json()
        state = client.get("/rules/1").json()["status"]["state"]
        assert status["rules"][state] == client.get(f"/rules?state={state}").json()["total"] == 1
        hosts = [(host["applied_revision"], host["enforced"]) for host in status["hosts"]]
        assert [each["applied_revision"] for each in client.get("/gateways").json()["items"]] == [at for at, _ in hosts]
        return status["applied_revision"], state, hosts

    store.pause("gw1", True)
    assert tell() == (1, "pending", [(0, 0), (1, 1)])
    store.pause("gw1", False)
    assert tell() == (0, "pending", [(0, 0), (1, 1)])
    store.report(one)
    assert tell() == (1, "applied", [(1, 1), (1, 1)])


def ago(**span: float) -> datetime:
    return datetime.now(UTC) - timedelta(**span)


def test_nothing_waits_for_a_gateway_that_is_gone(url: str, client: httpx.Client, store: Store) -> None:
    """One that was renamed: `old` became `new`, and nobody reports by `old` any more."""
    rules = {
        name: {**RULE, "name": name, "target": f"10.1.2.{number}"} for number, name in enumerate(("all", "both"), 3)
    }
    one = HostStatus(host="old", backend="iptables", applied_revision=0, capabilities={"ipset": "It is missing."})
    store.report(one, ago(minutes=59))
    client.post("/rules", json=rules["all"])
    store.report(HostStatus(host="new", backend="iptables", applied_revision=9, capabilities={"ipset": None}))
    assert client.get("/rules/all").json()["status"]["state"] == "pending"
    assert client.get("/gateways").json()["items"][1]["state"] == "silent"

    store.report(one, ago(minutes=61))
    client.post("/rules", json={**rules["both"], "hosts": ["new", "old"]})
    standing = client.get("/rules/all").json()["status"]
    assert (standing["state"], standing["message"]) == ("applied", None)
    assert (standing["hosts"]["old"]["state"], standing["hosts"]["new"]["state"]) == ("error", "applied")
    named = client.get("/rules/both").json()["status"]
    assert named["state"] == "error"
    assert "old: The gateway old is gone: its controller was last heard of at" in named["message"]
    status = client.get("/status").json()
    assert (status["applied_revision"], status["rules"]["pending"], status["rules"]["applied"]) == (9, 0, 1)
    assert status["capabilities"]["ipset"]["available"]
    assert any("`netlimit gateway forget old`" in note for note in status["notes"])
    assert {host["host"]: host["gone"] for host in status["hosts"]} == {"old": True, "new": False}
    assert client.get("/rules?state=pending").json()["items"] == []
    items = client.get("/gateways").json()["items"]
    assert [(each["name"], each["state"], each["rules"]) for each in items] == [("new", "live", 1), ("old", "gone", 1)]


def test_where_all_are_gone_it_is_told_of_them(client: httpx.Client, store: Store) -> None:
    client.post("/rules", json=RULE)
    store.report(HostStatus(host="gw1", backend="iptables", applied_revision=0), ago(hours=2))
    assert client.get("/status").json()["backend"] == "iptables"
    standing = client.get("/rules/1").json()["status"]
    assert (standing["state"], "gw1 is gone" in standing["message"]) == ("error", True)
    store.report(HostStatus(host="gw1", backend="iptables", applied_revision=1), ago(hours=2))
    assert client.get("/rules/1").json()["status"]["state"] == "applied", "its kernel may hold it yet"


def test_a_gateway_that_is_gone_is_forgotten(client: httpx.Client, store: Store) -> None:
    client.post("/rules", json={**RULE, "name": "theirs", "hosts": ["a/old"]})
    store.report(HostStatus(host="a/old", backend="iptables", own=("192.0.2.1",)), ago(hours=2))
    store.report(HostStatus(host="new", backend="iptables", applied_revision=1))
    store.mark("a/old", [Exceptional(1, State.ERROR, "No.")], ())
    store.count("a/old", [reading(1, 40, SINCE)])
    store.pause("a/old", True)
    store.number("a/old", {("group", "profile"): 7}, ())
    answer = client.delete("/gateways/a%2Fold")
    assert (answer.status_code, answer.content) == (204, b"")
    assert "Rules still name a/old, and wait for a gateway of that name: 1." in answer.headers["Warning"]
    assert [each["name"] for each in client.get("/gateways").json()["items"]] == ["new"]
    assert store.exceptional_counts() == {}
    assert store.counters(1) == {}
    kept = client.get("/rules/theirs").json()
    assert (kept["hosts"], kept["status"]["state"]) == (["a/old"], "pending"), "it holds nowhere else"
    assert (store.paused("a/old"), store.numbering("a/old")) == (True, {("group", "profile"): 7})
    entry = client.get("/audit").json()["items"][0]
    assert (entry["action"], entry["actor"], entry["old"]["host"]) == ("forget-gateway", "admin", "a/old")
    gone = client.delete("/gateways/a%2Fold")
    assert (gone.status_code, "known are new" in gone.json()["detail"]) == (404, True)


def test_a_gateway_that_is_alive_is_not_forgotten(client: httpx.Client, store: Store) -> None:
    status = HostStatus(host="gw1", backend="iptables")
    store.report(status)
    assert "its controller has reported" in client.delete("/gateways/gw1").json()["detail"]
    store.report(status, ago(hours=2))
    store.guarded("gw1")
    assert "its guard has reported" in client.delete("/gateways/gw1").json()["detail"]
    store.unguarded("gw1")
    store.limiter_runs(LimiterReport("gw1", "gw1/1", 0, datetime.now(UTC), datetime.now(UTC)), True)
    answer = client.delete("/gateways/gw1")
    assert (answer.status_code, "a limiter there has reported" in answer.json()["detail"]) == (409, True)
    store.limiter_ended("gw1", "gw1/1")
    assert client.delete("/gateways/gw1").status_code == 204


def test_a_window_that_is_open_goes_on_without_a_gateway(client: httpx.Client, store: Store) -> None:
    store.report(HostStatus(host="gw1", backend="iptables"), ago(hours=2))
    window = store.open_window(60, "ann", datetime.now(UTC), paused=["gw1"])
    assert client.delete("/gateways/gw1").status_code == 204
    assert store.expire(window, "netlimit", datetime.now(UTC)) is not None
    assert store.hosts() == []
    assert store.paused("gw1"), "as it was before the window, should it come back"


def test_a_gateway_that_reported_by_a_clock_that_was_ahead_is_not_live(
    url: str, client: httpx.Client, store: Store
) -> None:
    client.post("/rules", json=RULE)
    store.report(HostStatus("gw1", "iptables", applied_revision=1), datetime.now(UTC) + timedelta(hours=1, minutes=5))
    status = client.get("/status").json()
    assert not status["hosts"][0]["live"]
    said = ", which is yet to come: it was written by a clock that was 1 h "
    assert said in status["notes"][0]
    assert said in client.get("/rules/1").json()["status"]["message"]
    assert 'netlimit_host_live{host="gw1"} 0.0' in get(f"{url}/metrics").text.splitlines()
    assert client.post("/rules?dry_run=true", json=RULE | {"target": "10.1.2.4"}).json()["preview"]["silent"] == ["gw1"]
    store.report(HostStatus("gw1", "iptables", applied_revision=1))
    status = client.get("/status").json()
    assert status["hosts"][0]["live"]
    assert status["notes"] == []


def test_metrics_say_how_rules_stand(url: str, client: httpx.Client, controller: Controller) -> None:
    controller.start()
    client.post("/rules", json=RULE, headers={"Prefer": "wait=60"})
    answer = get(f"{url}/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    for line in (
        'netlimit_rules{state="applied"} 1.0',
        "netlimit_wanted_revision 1.0",
        'netlimit_applied_revision{host="gw1"} 1.0',
        'netlimit_host_live{host="gw1"} 1.0',
    ):
        assert line in answer.text.splitlines()


def test_where_the_disk_is_full_what_is_said_of_rules_is_true(root: None, tmp_path: Path) -> None:
    """Those with `on_failure: open` stay, for the database can be read (tests/controller/test_outage.py)."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "netlimit-test", disk], check=True)
    settings = Settings(database_url=f"sqlite:///{disk}/netlimit.db")
    store = Store(settings.database_url)
    many = [RULE | {"target": f"10.9.{number // 250}.{number % 250}"} for number in range(5000)]
    try:
        store.upgrade()
        store.add_token("admin", HASHES["admin"], "admin", SINCE, None, HANDLES["admin"])
        with serve(settings, store) as url, connect(url, "admin") as client:
            assert client.post("/rules", json=RULE).status_code == 201
            with suppress(OSError), (disk / "rest").open("wb", buffering=0) as rest:
                while rest.write(bytes(4096)):
                    pass
            refused = client.post("/rules/bulk", json=many)
            assert refused.status_code == 503
            told = refused.json()["detail"]
            assert "Make room on it" in told
            assert "The kernels of the gateways keep what they hold" in told
            assert "could read nothing of the database for too long" in refused.json()["detail"]
            assert client.get("/rules").json()["total"] == 1
            (disk / "rest").unlink()
            assert client.post("/rules", json=RULE | {"target": "10.8.0.1"}).status_code == 201
    finally:
        store.close()
        subprocess.run(["umount", disk], check=True)


def test_where_gateways_differ_an_explanation_says_so(client: httpx.Client, store: Store) -> None:
    """Who is safe on one of them, or has an address of its own, passes there alone."""
    client.post("/rules", json={"target": "10.1.0.64/26", "action": "block"})
    for host, own, safe in (("gw1", "10.1.0.1", ()), ("gw2", "10.1.0.70", ("10.1.0.77/32",))):
        store.report(HostStatus(host=host, backend="iptables", own=(own,), safe=safe, applied_revision=1))
    for source in ("10.1.0.77", "10.1.0.70"):
        query = {"src": source, "dst": "10.2.0.2", "protocol": "icmp", "in": "lan", "out": "wan"}
        told = client.get("/explain", params=query).json()
        assert told["verdict"] == "blocked"
        assert told["steps"][0]["reason"].startswith("Gateways differ: blocked on gw1; passes on gw2. This is what gw1")
        found = [client.get("/explain", params={**query, "host": host}).json()["verdict"] for host in ("gw1", "gw2")]
        assert found == ["blocked", "passes"]
    alike = client.get("/explain", params={"src": "10.1.0.78", "dst": "10.2.0.2", "protocol": "icmp"}).json()
    assert alike["verdict"] == "blocked"
    assert "differ" not in alike["text"]


def test_a_default_gateway_is_safe_where_it_talks_with_the_gateway_and_not_beyond(
    client: httpx.Client, store: Store
) -> None:
    router, own, inside = "10.2.0.254", "10.2.0.1", "10.1.0.2"
    client.post("/rules", json={"target": "10.2.0.0/24", "action": "block"})
    client.post("/rules", json={"target": "10.0.0.0/8", "direction": "to", "rate": "9 packets/s", "per": "target"})
    reasons = {router: SafeReason("default gateway", datetime.now(UTC).timestamp())}
    store.report(HostStatus("gw1", "iptables", own=(own,), safe=(router,), safe_reasons=reasons, applied_revision=2))
    for src, dst, way, protocol, verdict in (
        (router, inside, {"in": "wan", "out": "lan"}, "udp", "blocked"),
        (router, inside, {"in": "wan", "out": "lan"}, "icmp", "limited"),
        (inside, router, {"in": "lan", "out": "wan"}, "udp", "limited"),
        (inside, router, {}, "udp", "limited"),
        (router, own, {"in": "wan"}, "udp", "passes"),
        (own, router, {"out": "wan"}, "udp", "passes"),
    ):
        told = client.get("/explain", params={"src": src, "dst": dst, "protocol": protocol, **way}).json()
        assert told["verdict"] == verdict, (src, dst, protocol)


def test_without_a_database_it_lives_but_is_not_ready(tmp_path: Path) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path}/missing.db")
    with serve(settings, Store(settings.database_url)) as url, connect(url, "admin") as client:
        assert client.get(f"{url}/healthz").json() == {"status": "ok"}
        for address in (f"{url}/readyz", "/rules", "/status"):
            answer = client.get(address)
            assert (answer.status_code, answer.headers["Content-Type"]) == (503, "application/problem+json")
            assert "netlimit db upgrade" in answer.json()["detail"]
            assert "The kernels of the gateways keep what they hold" in answer.json()["detail"]
            assert answer.headers["Retry-After"] == "5"
        assert "netlimit_database_up 0.0" in client.get(f"{url}/metrics").text.splitlines()


def test_a_packet_is_explained(client: httpx.Client, store: Store) -> None:
    client.post("/rules", json={"target": "10.1.0.0/16", "rate": "200 packets/s", "per": "host", "name": "office"})
    client.post("/rules", json={**RULE, "protocol": "tcp"})
    client.post("/rules", json={"target": "10.9.0.0/16", "action": "block"})
    client.post("/rules", json={**RULE, "enabled": False})
    client.post("/rules", json={**RULE, "protocol": "udp", "ports": [53], "hosts": ["gw2"]})
    store.report(HostStatus(host="gw1", backend="iptables"))
    query: dict[str, str | int] = {"src": "10.1.2.3", "dst": "198.51.100.7", "protocol": "udp", "port": 53}
    answer = client.get("/explain", params=query).json()
    assert answer["verdict"] == "limited"
    assert {step["rule"]: step["hits"] for step in answer["steps"]} == {1: True, 2: False, 5: True}
    assert {step["name"] for step in answer["steps"]} == {"office", None}
    assert all(
        step["reason"].endswith("(pending: no gateway holds it yet)") for step in answer["steps"] if step["hits"]
    )
    store.report(HostStatus(host="gw1", backend="iptables", applied_revision=store.revision()))
    held = client.get("/explain", params=query).json()
    assert [step["reason"].endswith("holds it yet)") for step in held["steps"] if step["hits"]] == [False, True]
    here = client.get("/explain", params={**query, "host": "gw1"}).json()
    assert [step["rule"] for step in here["steps"]] == [1, 2]
    store.report(HostStatus(host="gw1", backend="iptables", own=("198.51.100.7",), safe=("10.1.0.0/16",)))
    safe = client.get("/explain", params={**query, "host": "gw1"}).json()
    assert (safe["verdict"], any(step["hits"] for step in safe["steps"])) == ("passes", False)


def test_an_explanation_says_of_what_hits_that_it_is_degraded(client: httpx.Client, store: Store) -> None:
    client.post("/rules", json={"target": "10.2.0.1", "direction": "to", "action": "block", "protocol": "tcp"})
    client.post("/rules", json={"target": "10.2.0.1", "direction": "to", "action": "block", "protocol": "udp"})
    for host in ("gw1", "gw2"):
        store.report(HostStatus(host=host, backend="iptables", applied_revision=store.revision()))
    store.mark("gw2", [Exceptional(number, State.DEGRADED, "It is led away.") for number in (1, 2)], [])
    query = {"src": "10.1.2.3", "dst": "10.2.0.1", "protocol": "tcp", "in": "lan"}
    answer = client.get("/explain", params=query).json()
    assert answer["verdict"] == "blocked"
    assert answer["text"].startswith("The packet is blocked, unless it gets past a rule that hits it and is degraded.")
    told = {step["rule"]: step["reason"].endswith(" (degraded: It is led away.)") for step in answer["steps"]}
    assert told == {1: True, 2: False}, "the other one does not hit it"
    held = client.get("/explain", params={**query, "host": "gw1"}).json()
    assert held["text"].startswith("The packet is blocked.")
    assert "degraded" not in held["text"]
    store.mark("gw1", [Exceptional(1, State.APPLIED, "Nobody knows.")], [])
    held = client.get("/explain", params={**query, "host": "gw1"}).json()
    assert held["text"].startswith("The packet is blocked.")
    assert "(note: Nobody knows.)" in held["text"]
    assert "(degraded: It is led away.)" in client.get("/explain", params=query).json()["text"]


def test_limits_are_told_in_the_order_in_which_they_are_asked(client: httpx.Client, store: Store) -> None:
    client.post("/rules", json={"target": "10.1.0.0/16", "rate": "200 packets/s", "per": "target", "name": "budget"})
    client.post("/rules", json={"target": "10.2.0.0/16", "rate": "200 packets/s", "per": "host", "direction": "to"})
    client.post("/rules", json={"target": "10.1.0.0/16", "rate": "9 packets/s", "per": "peer"})
    store.report(HostStatus(host="gw1", backend="iptables"))

    def ask() -> list[int]:
        steps = client.get("/explain?src=10.1.2.3&dst=10.2.0.1&in=lan&out=wan").json()["steps"]
        return [step["rule"] for step in steps]

    assert ask() == [3, 2, 1], "peers are asked for as packets come in"
    client.post("/rules", json={"target": "2001:db8::1", "direction": "to", "action": "allow"})
    assert ask() == [3, 2, 1], "of the other family"
    client.post("/rules", json={"target": "192.0.2.1", "direction": "to", "action": "allow"})
    assert ask() == [2, 3, 1], "an `allow to` has all wait until it is known who a packet is for"


def test_of_a_packet_that_ends_on_a_gateway_by_its_routes_only_who_names_it_is_told(
    client: httpx.Client, store: Store
) -> None:
    client.post("/rules", json={"target": "10.3.0.0/24", "direction": "to", "action": "block"})
    query = {"src": "10.1.2.3", "dst": "10.3.0.5", "in": "lan"}
    store.report(HostStatus(host="gw1", backend="iptables", applied_revision=1))
    assert client.get("/explain", params=query).json()["verdict"] == "blocked"
    store.report(HostStatus(host="gw1", backend="iptables", applied_revision=1, local=("10.3.0.0/24",)))
    answer = client.get("/explain", params=query).json()
    assert answer["verdict"] == "passes"
    assert answer["steps"][0]["reason"] == "10.3.0.5 ends on this host, and the rule does not name it"
    assert client.get("/explain", params={**query, "out": "wan"}).json()["verdict"] == "blocked"


def test_a_paused_gateway_does_nothing_to_a_packet(client: httpx.Client, store: Store) -> None:
    client.post("/rules", json={"target": "10.1.0.0/16", "rate": "200 packets/s", "per": "host", "name": "office"})
    for host in ("gw1", "gw2"):
        store.report(HostStatus(host=host, backend="iptables"))
    store.pause("gw1", True)
    query = {"src": "10.1.2.3", "dst": "198.51.100.7"}
    assert client.get("/explain", params=query).json()["verdict"] == "limited"
    answer = client.get("/explain", params={**query, "host": "gw1"}).json()
    assert answer["verdict"] == "passes"
    assert answer["steps"][0]["reason"] == "not enforced: gw1 is paused by a teardown, until `netlimit apply`."


@pytest.mark.parametrize(
    ("field", "query"),
    [
        ("src", "dst=10.1.2.3"),
        ("src", "src=here&dst=10.1.2.3"),
        ("dst", "src=10.1.2.3&dst=10.1.0.0/16"),
        ("dst", "src=10.1.2.3&dst=2001:db8::1"),
        ("port", "src=10.1.2.3&dst=10.1.2.4&port=65536"),
        ("protocol", "src=10.1.2.3&dst=10.1.2.4&protocol=gre"),
        ("inn", "src=10.1.2.3&dst=10.1.2.4&inn=eth0"),
    ],
)
def test_no_packet_is_like_that(client: httpx.Client, field: str, query: str) -> None:
    answer = client.get(f"/explain?{query}")
    assert (answer.status_code, answer.json()["field"]) == (422, field)
