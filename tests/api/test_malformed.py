"""A rule of which the database holds garbage is listed as it is, and can be replaced or deleted."""

import httpx
import pytest
from sqlalchemy import create_engine, text

from netlimit.records import Counts, HostStatus, RuleCounters
from netlimit.store import Store

HALF = r"""'{"a": "\ud800"}'"""
SPOILT = [
    "target = 'garbage'",
    "rate = 'x'",
    "labels = '{'",
    f"labels = {HALF}",
    "action = 'x'",
    "expires_at = 1e300",
    "revision = 'x'",
]
WATCHED = ("/rules/2", "/status", "/rules?state=error", "/revisions", "/audit", "/explain?src=10.0.0.1&dst=10.0.0.2")


@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_cannot_be_read_is_listed_and_can_go(client: httpx.Client, store: Store, spoilt: str) -> None:
    for target in ("10.0.0.1", "10.0.0.2", "10.0.0.3"):
        assert client.post("/rules", json={"target": target, "rate": "5 packets/s"}).status_code == 201
    engine = create_engine(store._database.url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE rules SET {spoilt} WHERE id IN (2, 3)"))  # noqa: S608
    engine.dispose()
    listed = client.get("/rules").json()["items"]
    assert [each["status"]["state"] == "error" for each in listed] == [False, True, True]
    assert "Replace rule 2" in listed[1]["status"]["message"]
    for path in WATCHED:
        assert client.get(path).status_code < 500, path
    assert client.get(str(client.base_url.join("/metrics"))).status_code == 200
    assert client.put("/rules/2", json={"target": "10.0.0.2", "rate": "5 packets/s"}).status_code == 200
    assert client.delete("/rules/3").status_code == 204
    assert [each["status"]["state"] == "error" for each in client.get("/rules").json()["items"]] == [False, False]


@pytest.mark.parametrize("column", ["revision", "last_rule", "pruned", "oldest", "audit_pruned", "limits", "stamp"])
def test_nor_does_a_clock_that_cannot_be_read_blind_anybody(client: httpx.Client, store: Store, column: str) -> None:
    assert client.post("/rules", json={"target": "10.0.0.1", "rate": "5 packets/s"}).status_code == 201
    engine = create_engine(store._database.url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE clock SET {column} = 'x'"))  # noqa: S608
    engine.dispose()
    for path in ("/rules", "/rules/1", *WATCHED[1:], "/limits", str(client.base_url.join("/metrics"))):
        assert client.get(path).status_code == 200, path
    changed = client.post("/rules", json={"target": "10.0.0.2", "rate": "5 packets/s"})
    assert changed.status_code in (201, 503), changed.text  # an id that was given already is not given again


@pytest.mark.parametrize("column", ["capabilities", "own", "safe", "notes", "repairs", "safe_reasons", "local"])
@pytest.mark.parametrize("document", [HALF, r"""'["\ud800"]'"""])
def test_half_a_surrogate_pair_blinds_nobody(client: httpx.Client, store: Store, column: str, document: str) -> None:
    assert client.post("/rules", json={"target": "10.0.0.1", "rate": "5 packets/s"}).status_code == 201
    store.report(HostStatus("gw1", "iptables", applied_revision=1))
    engine = create_engine(store._database.url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE hosts SET {column} = {document}"))  # noqa: S608
    engine.dispose()
    for path in ("/rules", "/rules/1", *WATCHED[1:], str(client.base_url.join("/metrics"))):
        assert client.get(path).status_code == 200, (path, client.get(path).text)


@pytest.mark.parametrize("ended", ["NULL", "9223372036854775807", "'x'"])
@pytest.mark.parametrize("outcome", ["expired", "abandoned", "garbage"])
def test_a_window_that_has_ended_at_no_time_is_told_as_ended(
    client: httpx.Client, store: Store, outcome: str, ended: str
) -> None:
    store.guarded("gw1")
    assert client.post("/confirmation", json={"seconds": 60}).status_code == 201
    engine = create_engine(store._database.url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE windows SET outcome = '{outcome}', ended_at = {ended}"))  # noqa: S608
    engine.dispose()
    assert client.get("/confirmation").json()["open"] is False
    for ask in (client.put, client.delete):
        answer = ask("/confirmation")
        assert answer.status_code == 409, answer.text
        assert answer.json()["detail"].startswith("No window of confirmation is open. The last one ")
    assert client.post("/confirmation", json={"seconds": 60}).status_code == 201


HOSTILE = [
    ("hosts", "applying", '{"garbage": 1}'),
    ("hosts", "applying", '{"": 1, "0x1": 2, "nan": 3, "0.1": -5, "sum": -1}'),
    ("counters", "matched_packets", 2**63 - 1),
    ("counters", "matched_bytes", -(2**63)),
    ("request_counters", "dropped_bytes", 2**63 - 1),
    ("rules", "hosts", b"\xff\x00"),
    ("rules", "name", b"\xff\x00"),
]


@pytest.mark.parametrize(("table", "column", "value"), HOSTILE)
def test_one_odd_value_blinds_nobody(
    client: httpx.Client, store: Store, table: str, column: str, value: object
) -> None:
    assert client.post("/rules", json={"target": "10.0.0.1", "rate": "5 packets/s", "name": "one"}).status_code == 201
    now = store.now()
    store.report(HostStatus("gw1", "iptables", applied_revision=1, applying={"0.1": 1, "+Inf": 2, "sum": 0.2}))
    store.count("gw1", [RuleCounters(1, Counts(1, -2, 3, 4), Counts(), now, now)])
    store.count_requests("gw1", {1: Counts(1, -2, 3, 4)}, now)
    engine = create_engine(store._database.url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {table} SET {column} = :value"), {"value": value})  # noqa: S608
    engine.dispose()
    for path in ("/rules", "/rules/1/counters", "/counters?rule=1", "/status", "/gateways", "/rules?state=applied"):
        assert client.get(path).status_code == 200, (path, client.get(path).text)
    told = client.get(str(client.base_url.join("/metrics")))
    assert told.status_code == 200
    assert "netlimit_database_up 1.0" in told.text
    assert 'netlimit_host_live{host="gw1"} 1.0' in told.text
