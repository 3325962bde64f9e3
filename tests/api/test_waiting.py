from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from netlimit.records import Exceptional, State
from netlimit.settings import Settings
from netlimit.store import Store, room
from tests.api.server import Controller, connect, until
from tests.awake import Awake
from tests.databases import DATABASES

OVER = DATABASES

RULE = {"target": "10.1.2.3", "rate": "200 packets/s"}
WAIT = {"Prefer": "wait=60"}


@pytest.fixture
def second(settings: Settings) -> Iterator[Controller]:
    store = Store(settings.database_url)
    controller = Controller(store, "gw2", delay=0.4)
    yield controller
    controller.stop()
    store.close()


def test_a_change_is_answered_once_the_kernel_holds_it(client: httpx.Client, controller: Controller) -> None:
    controller.start()
    answer = client.post("/rules", json=RULE, headers=WAIT)
    assert answer.status_code == 201
    assert answer.headers["Preference-Applied"] == "wait=60"
    assert answer.json()["status"] == {
        "state": "applied",
        "enforced_by": "iptables",
        "message": None,
        "hosts": {"gw1": {"state": "applied", "enforced_by": "iptables", "message": None}},
    }
    for method, body in (("PUT", {**RULE, "burst": 50}), ("PATCH", {"burst": 60})):
        answer = client.request(method, "/rules/1", json=body, headers=WAIT)
        assert answer.json()["status"]["state"] == "applied"
        assert answer.headers["Preference-Applied"] == "wait=60"
    gone = client.delete("/rules/1", headers=WAIT)
    assert (gone.status_code, gone.headers["Preference-Applied"]) == (204, "wait=60")
    assert controller.status.applied_revision == 4


def test_waiting_costs_little_more_than_the_kernel(client: httpx.Client, controller: Controller) -> None:
    controller.start()
    client.post("/rules", json=RULE, headers=WAIT)
    took = []
    for number in range(15):
        with Awake() as awake:
            client.post("/rules", json={**RULE, "target": f"10.2.0.{number}"}, headers=WAIT)
        took.append(awake.seconds)
    assert sorted(took)[7] < 0.15, took


def test_the_slowest_gateway_is_waited_for(client: httpx.Client, controller: Controller, second: Controller) -> None:
    controller.start()
    second.start()
    status = client.post("/rules", json=RULE, headers=WAIT).json()["status"]
    assert (status["state"], set(status["hosts"])) == ("applied", {"gw1", "gw2"})
    assert controller.status.applied_revision == second.status.applied_revision == 1


@pytest.mark.parametrize("prefer", ["wait=1", "respond-async, WAIT=1", 'foo; wait=3, wait="1"', "wait = 1 ;x=y"])
def test_nobody_is_waited_for_longer_than_asked(client: httpx.Client, prefer: str) -> None:
    begin = time.monotonic()
    with Awake() as awake:
        answer = client.post("/rules", json=RULE, headers={"Prefer": prefer})
    assert time.monotonic() - begin > 0.9
    assert awake.seconds < 3
    assert answer.headers["Preference-Applied"] == "wait=1"
    assert (answer.status_code, answer.json()["status"]["state"]) == (201, "pending")
    assert "No controller has reported yet" in answer.json()["status"]["message"]


@pytest.mark.parametrize("prefer", ["", "wait=", "wait=soon", "wait=-1", "waiting=5", "return=minimal", "wait=1.5"])
def test_a_preference_that_means_nothing_is_ignored(client: httpx.Client, prefer: str) -> None:
    answer = client.post("/rules", json=RULE, headers={"Prefer": prefer})
    assert answer.status_code == 201
    assert "Preference-Applied" not in answer.headers


@pytest.mark.parametrize(("prefer", "applied"), [("wait", "wait=5"), ("wait=999999", "wait=60"), ("wait=0", "wait=0")])
def test_a_wait_has_bounds(client: httpx.Client, controller: Controller, prefer: str, applied: str) -> None:
    controller.start()
    answer = client.post("/rules", json=RULE, headers=[("Prefer", "x=1"), ("Prefer", prefer)])
    assert answer.headers["Preference-Applied"] == applied


def test_a_paused_gateway_is_not_waited_for(client: httpx.Client, controller: Controller) -> None:
    controller.start()
    controller.store.pause("gw1", True)
    begin = time.monotonic()
    status = client.post("/rules", json=RULE, headers=WAIT).json()["status"]
    assert time.monotonic() - begin < 30
    assert status["state"] == "pending"
    assert "teardown" in status["message"]
    controller.store.pause("gw1", False)
    assert client.patch("/rules/1", json={"comment": "x"}, headers=WAIT).json()["status"]["state"] == "applied"


def test_a_gateway_that_is_gone_is_not_waited_for(client: httpx.Client, store: Store, controller: Controller) -> None:
    controller.start()
    long_ago = datetime.now(UTC) - timedelta(minutes=5)
    store.report(replace(controller.status, host="gw0"), long_ago)
    status = client.post("/rules", json=RULE, headers=WAIT).json()["status"]
    assert status["state"] == "pending"
    assert status["hosts"]["gw1"]["state"] == "applied"
    assert status["hosts"]["gw0"]["state"] == "pending"
    assert f"{long_ago:%Y-%m-%dT%H:%M:%S}" in status["hosts"]["gw0"]["message"]


def test_those_who_wait_keep_nobody_out(url: str, client: httpx.Client, store: Store, controller: Controller) -> None:
    store.report(controller.status)
    done = []

    def wait(number: int) -> None:
        with connect(url, "admin") as other:
            rule = {**RULE, "target": f"10.3.0.{number}"}
            done.append(other.post("/rules", json=rule, headers=WAIT).json()["status"]["state"])

    waiters = [threading.Thread(target=wait, args=(number,)) for number in range(60)]
    for waiter in waiters:
        waiter.start()
    until(lambda: store.revision() == 60)
    begin = time.monotonic()
    assert client.get("/rules", params={"limit": 1}).json()["total"] == 60
    assert time.monotonic() - begin < 30
    assert done == []
    controller.start()
    for waiter in waiters:
        waiter.join()
    assert done == ["applied"] * 60


def test_a_rule_stands_as_its_gateways_say(client: httpx.Client, store: Store, controller: Controller) -> None:
    controller.start()
    client.post("/rules", json=RULE, headers=WAIT)
    store.mark("gw1", [Exceptional(1, State.DEGRADED, "The set is full.")], [])
    status = client.get("/rules/1").json()["status"]
    assert (status["state"], status["enforced_by"], status["message"]) == ("degraded", "iptables", "The set is full.")
    store.mark("gw1", [Exceptional(1, State.ERROR, "The kernel refused.")], [])
    status = client.get("/rules/1").json()["status"]
    assert (status["state"], status["enforced_by"], status["message"]) == ("error", None, "The kernel refused.")
    assert client.get("/rules", params={"state": "error"}).json()["total"] == 1
    assert client.get("/status").json()["rules"]["error"] == 1


def test_the_worst_gateway_counts(client: httpx.Client, store: Store, controller: Controller) -> None:
    for host, revision in (("gw1", 1), ("gw2", 0), ("gw3", 1)):
        store.report(replace(controller.status, host=host, applied_revision=revision))
    client.post("/rules", json=RULE)
    store.mark("gw3", [Exceptional(1, State.DEGRADED, "The set is full.")], [])
    status = client.get("/rules/1").json()["status"]
    assert {host: each["state"] for host, each in status["hosts"].items()} == {
        "gw1": "applied", "gw2": "pending", "gw3": "degraded",
    }  # fmt: skip
    assert (status["state"], status["message"]) == ("degraded", "gw3: The set is full.")
    only = client.patch("/rules/1", json={"hosts": ["gw9"]}).json()["status"]
    assert (set(only["hosts"]), only["state"]) == ({"gw9"}, "pending")


def test_disabled_and_expired_rules_say_so(client: httpx.Client, controller: Controller) -> None:
    controller.start()
    client.post("/rules", json={**RULE, "enabled": False})
    client.post("/rules", json={**RULE, "expires_at": "2020-01-01T00:00:00Z"})
    for number, state in ((1, "disabled"), (2, "expired")):
        status = client.get(f"/rules/{number}").json()["status"]
        assert (status["state"], status["enforced_by"], status["hosts"]) == (state, None, {})
    assert client.get("/status").json()["rules"] == {
        "applied": 0, "expired": 1, "disabled": 1, "pending": 0, "degraded": 0, "error": 0, "total": 2,
    }  # fmt: skip


def test_where_the_disk_has_little_room_admins_alone_ask_controllers(
    settings: Settings, url: str, client: httpx.Client, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions and answers take room, too; who looks at counters has to do with those that are kept."""
    asked: list[object] = []

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        asked.append(question["rules"])
        return {"counted": True}

    controller.answers["counters"] = answer
    controller.start()
    client.post("/rules", json=RULE, headers=WAIT)
    path = Store(settings.database_url).path
    if path:
        disk = os.statvfs(path)
        monkeypatch.setattr(room, "RESERVE", disk.f_bavail * disk.f_frsize * 3 // 2)
        monkeypatch.setattr(room, "_PART", 0.001)
    with connect(url, "viewer") as viewer:
        for path_of in ("/rules/1/counters", "/counters?rule=1"):
            assert viewer.get(path_of).status_code == 200
    assert asked == ([] if path else [[1], [1]])
    assert client.get("/rules/1/counters").status_code == 200
    assert len(asked) == (1 if path else 3)
