"""What /metrics and the log tell of the API: the right numbers, bounded, with and without a database; no secrets."""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import IPv4Network, ip_network
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from netlimit.records import Counts, HostStatus, RuleCounters
from netlimit.settings import Settings
from netlimit.store import Store
from scripts.testbed.streams import ROOT
from tests.api.server import HANDLES, HASHES, TOKENS, connect, get, serve, until
from tests.databases import Postgres

RULE = {"target": "10.1.2.3", "rate": "200 packets/s", "name": "down"}
STATUS = HostStatus(
    host="gw1",
    backend="iptables",
    applied_revision=1,
    capabilities={"ipset": None, "fq_codel": "It is missing.", "tc": "It is missing."},
    last_error="The kernel refused it.",
    drift=7,
    repairs={"chains": 5, "sets": 2},
    applying={"0.005": 1, "0.1": 3, "+Inf": 4, "sum": 2.5},
    desired=5,
    enforced=4,
    degraded=3,
    drifted=2,
    lifted=1,
)
Samples = dict[str, float]


@pytest.fixture
def full(client: httpx.Client, store: Store) -> None:
    """A database that has something of everything to tell."""
    client.post("/rules", json=RULE)
    client.post("/rules", json={**RULE, "target": "10.1.2.4", "name": None})
    now = datetime.now(UTC)
    store.report(STATUS, now)
    store.count("gw1", [RuleCounters(n, Counts(10 * n, 100 * n, n, 5 * n, 3), Counts(), now, now) for n in (1, 2)])
    store.guarded("gw1")
    store.open_window(60, "test", now)


def scrape(url: str) -> str:
    answer = get(f"{url}/metrics")
    assert answer.status_code == 200
    return answer.text


def read(url: str) -> Samples:
    """Every sample, as Prometheus writes it."""
    lines = [line.rpartition(" ") for line in scrape(url).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


@pytest.mark.parametrize("trusted", [(), (ip_network("127.0.0.1"),)])
def test_who_comes_by_a_proxy_shows_a_token(settings: Settings, store: Store, trusted: tuple[IPv4Network, ...]) -> None:
    with serve(settings.model_copy(update={"trusted_proxies": trusted}), store) as url:
        for field in ("X-Forwarded-For", "X-Real-IP", "Forwarded", "Via"):
            answer = get(f"{url}/metrics", headers={field: "198.51.100.7"})
            assert (answer.status_code, "netlimit" in answer.text) == (401, False), field
            known = {field: "198.51.100.7", "Authorization": f"Bearer {TOKENS['viewer']}"}
            assert get(f"{url}/metrics", headers=known).status_code == 200, field
        assert get(f"{url}/metrics").status_code == 200


def test_promtool_finds_nothing_to_complain_of(url: str, full: None) -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=scrape(url), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_page_names_every_metric_with_its_labels(url: str, full: None) -> None:
    page = (ROOT / "docs/monitoring.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)(?:\{([\w, ]+)\})?` \| (counter|gauge|histogram) \|", page, re.MULTILINE)
    described = {name: (kind, frozenset(labels.split(", ")) - {""}) for name, labels, kind in rows}
    found = {}
    for family in text_string_to_metric_families(scrape(url)):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        if name.startswith("netlimit_"):
            found[name] = (family.type, frozenset(labels))
    assert described == found


def test_what_gateways_say_is_told(url: str, full: None) -> None:
    found = read(url)
    for name, value in {
        "netlimit_database_up": 1,
        "netlimit_wanted_revision": 2,
        'netlimit_applied_revision{host="gw1"}': 1,
        'netlimit_rules{state="applied"}': 1,
        'netlimit_rules{state="pending"}': 1,
        'netlimit_host_rules{host="gw1",kind="desired"}': 5,
        'netlimit_host_rules{host="gw1",kind="lifted"}': 1,
        'netlimit_host_live{host="gw1"}': 1,
        'netlimit_host_paused{host="gw1"}': 0,
        'netlimit_host_error{host="gw1"}': 1,
        'netlimit_host_missing_capabilities{host="gw1"}': 1,
        'netlimit_drift_repairs_total{host="gw1",kind="chains"}': 5,
        'netlimit_apply_seconds_bucket{host="gw1",le="0.1"}': 3,
        'netlimit_apply_seconds_count{host="gw1"}': 4,
        'netlimit_apply_seconds_sum{host="gw1"}': 2.5,
        'netlimit_guard_live{host="gw1"}': 1,
        "netlimit_window_open": 1,
    }.items():
        assert found[name] == value, name
    assert 0 < found["netlimit_window_remaining_seconds"] <= 60
    age = datetime.now(UTC).timestamp() - found['netlimit_host_seen_timestamp_seconds{host="gw1"}']
    assert 0 <= age < 60


def test_status_tells_the_same_and_what_was_repaired(client: httpx.Client, store: Store, full: None) -> None:
    for number in range(6):
        store.repaired("gw1", "chains", f"repair {number}", 0.02345, datetime.now(UTC))
    found = client.get("/status").json()
    (host,) = found["hosts"]
    assert [host[kind] for kind in ("desired", "enforced", "degraded", "drifted", "lifted")] == [5, 4, 3, 2, 1]
    assert (host["repairs"], host["guarded"]) == ({"chains": 5, "sets": 2}, True)
    assert [(each["found"], each["seconds"]) for each in host["last_repairs"]] == [
        (f"repair {number}", 0.023) for number in (5, 4, 3, 2, 1)
    ]
    assert (found["window"]["open"], found["window"]["guards"]) == (True, ["gw1"])
    store.confirm("test", datetime.now(UTC))
    assert client.get("/status").json()["window"] is None


def test_rules_without_a_name_are_in_the_totals_alone(url: str, full: None, client: httpx.Client) -> None:
    named = 'netlimit_rule_packets_total{host="gw1",name="down",rule="1",what="matched"}'
    total = 'netlimit_packets_total{host="gw1",what="matched"}'
    found = read(url)
    assert (found[named], found[total]) == (10, 30)
    assert not any('rule="2"' in name for name in found)
    client.delete("/rules/1")
    found = read(url)
    assert named not in found
    assert found[total] == 30


def test_requests_are_counted_by_template_and_nobody_makes_up_series(url: str, client: httpx.Client) -> None:
    client.post("/rules", json=RULE)
    for number in range(20):
        client.get(f"/rules/{number}")
        client.get(f"/nothing/{number}")
        client.request(f"METHOD{number}", "/rules")
    get(f"{url}/api/v1/rules")
    name = "netlimit_api_request_duration_seconds_count"
    found = {each: value for each, value in read(url).items() if each.startswith(name)}
    assert found == {
        name + '{method="POST",route="/api/v1/rules",status="2xx"}': 1,
        name + '{method="GET",route="/api/v1/rules/{key}",status="2xx"}': 1,
        name + '{method="GET",route="/api/v1/rules/{key}",status="4xx"}': 19,
        name + '{method="GET",route="other",status="4xx"}': 20,
        name + '{method="other",route="/api/v1/rules",status="4xx"}': 20,
        name + '{method="GET",route="/api/v1/rules",status="4xx"}': 1,
    }
    assert read(url)["netlimit_api_login_failures_total"] == 1
    assert read(url)["netlimit_api_requests_in_flight"] == 1  # this one


def test_each_request_has_a_line_that_tells_no_secret(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    answer = client.post("/rules?token=hush-query", json={**RULE, "comment": "hush-body"})
    assert answer.status_code == 422
    until(lambda: any(record.name == "api.access" for record in caplog.records))  # it comes after the answer
    (line,) = (record for record in caplog.records if record.name == "api.access")
    assert line.getMessage() == "POST /api/v1/rules: 422"
    assert line.__dict__["request"] == answer.headers["X-Request-ID"]
    assert line.__dict__["actor"] == "admin"
    assert line.__dict__["milliseconds"] > 0
    # pytest listens to uvicorn's own lines for each request, which nobody else does; httpx is the client's.
    others = ("httpx", "httpcore", "uvicorn.access")
    said = " ".join(str(record.__dict__) for record in caplog.records if not record.name.startswith(others))
    for secret in ("hush-query", "hush-body", TOKENS["admin"]):
        assert secret not in said


@dataclass
class Losable:
    """A database that knows the tokens, and what takes it away and brings it back."""

    url: str
    lose: Callable[[], object]
    find: Callable[[], object]


@pytest.fixture(params=["sqlite", "postgres"])
def losable(request: pytest.FixtureRequest, settings: Settings) -> Losable:
    if request.param == "sqlite":
        path = Path(settings.database_url.removeprefix("sqlite:///"))
        away = path.with_suffix(".away")
        return Losable(settings.database_url, lambda: path.rename(away), lambda: away.rename(path))
    server: Postgres = request.getfixturevalue("postgres")
    store = Store(request.getfixturevalue("postgres_url"))
    for role, kept in HASHES.items():
        store.add_token(role, kept, role, datetime.now(UTC), handle=HANDLES[role])
    store.close()
    return Losable(request.getfixturevalue("postgres_url"), server.stop, server.start)


def test_without_its_database_it_says_so_and_goes_on_when_it_is_back(
    losable: Losable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens where others can ask, too: then even /metrics takes a token, which it remembers."""
    monkeypatch.setattr("api.doorkeeper._FRESH_SECONDS", 0)
    settings = Settings(database_url=losable.url, host="gw1", listen="0.0.0.0:0")  # type: ignore[arg-type]
    store = Store(losable.url)
    with serve(settings, store) as url, connect(url, "operator") as client:
        metrics, ready, healthy = f"{url}/metrics", f"{url}/readyz", f"{url}/healthz"
        assert client.post("/rules", json=RULE).status_code == 201
        assert "netlimit_database_up 1.0" in client.get(metrics).text
        losable.lose()
        try:
            lost = {path: client.get(path) for path in ("/status", "/rules", ready)}
            lost["add"] = client.post("/rules", json={**RULE, "target": "10.1.2.9"})
            told = client.get(metrics)
            alive = client.get(healthy).status_code
            stranger = get(metrics, headers={"Authorization": f"Bearer {TOKENS['viewer']}"})
        finally:
            losable.find()
        for path, answer in lost.items():
            assert answer.status_code == 503, path
            assert answer.headers["Content-Type"] == "application/problem+json"
            assert answer.headers["Retry-After"] == "5"
            assert "The kernels of the gateways keep what they hold" in answer.json()["detail"]
        assert (told.status_code, alive, stranger.status_code) == (200, 200, 503)
        assert "netlimit_database_up 0.0" in told.text
        assert "netlimit_rules" not in told.text
        assert "netlimit_api_requests_in_flight" in told.text
        assert client.get(ready).json() == {"status": "ok"}
        assert client.get("/rules").json()["total"] == 1
        assert client.post("/rules", json={**RULE, "target": "10.1.2.9", "name": "next"}).status_code == 201
        assert "netlimit_database_up 1.0" in client.get(metrics).text
    store.close()
