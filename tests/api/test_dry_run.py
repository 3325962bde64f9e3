"""A rule that is only tried, over HTTP, with the real controller behind it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest

from netlimit.controller import Controller, Setup
from netlimit.kernel.fake import FakeKernel
from netlimit.settings import Settings
from netlimit.store import Store
from tests.api.server import PATIENCE
from tests.api.server import Controller as Silent

OFFICE = {"name": "office", "target": "10.1.0.0/16", "rate": "100 packets/s", "per": "host"}
LAPTOP = {"target": "10.1.0.5", "rate": "5 packets/s"}


@pytest.fixture
def gateway(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKernel]:
    monkeypatch.setattr("api.preview.ANSWER_SECONDS", PATIENCE)
    store, kernel = Store(settings.database_url), FakeKernel()
    controller, end = Controller(store, kernel, Setup("gw1", "iptables")), threading.Event()
    controller.tick()
    thread = threading.Thread(target=controller.run, args=(end.is_set,))
    thread.start()
    yield kernel
    end.set()
    thread.join()
    store.close()


def test_a_rule_is_explained_by_every_gateway_and_not_kept(
    client: httpx.Client, gateway: FakeKernel, store: Store
) -> None:
    assert client.post("/rules", json=OFFICE, headers={"Prefer": "wait=60"}).status_code == 201
    audit, applied = store.audit(), len(gateway.applied)
    answer = client.post("/rules?dry_run=true", json=LAPTOP)
    assert answer.status_code == 200
    found = answer.json()["preview"]
    assert found["words"][0].startswith("The new rule comes into force: at most 5 packets/s from 10.1.0.5;")
    assert any(step.startswith("ipset add nl-") for step in found["steps"])
    here = found["hosts"]["gw1"]
    assert (here["state"], here["enforced_by"], here["message"]) == ("applied", "iptables", None)
    assert "takes the place of rule 1 (office)" in here["relations"][0]
    assert (found["message"], found["silent"]) == (None, [])
    assert (store.audit(), len(gateway.applied)) == (audit, applied)
    assert client.get("/rules").json()["total"] == 1


def test_the_same_traffic_twice_is_refused_as_for_real(client: httpx.Client, store: Store) -> None:
    client.post("/rules", json=OFFICE)
    for draft in ({**OFFICE, "name": "other", "rate": "7 packets/s"}, {**LAPTOP, "name": "office"}):
        tried = client.post("/rules?dry_run=true", json=draft)
        assert tried.status_code == 409
        kept = client.post("/rules", json=draft)
        assert (tried.json()["detail"], tried.json()["rule"]) == (kept.json()["detail"], kept.json()["rule"])
    assert store.revision() == 1


def test_a_change_is_tried_too(client: httpx.Client, gateway: FakeKernel, store: Store) -> None:
    client.post("/rules", json=OFFICE, headers={"Prefer": "wait=60"})
    changed = "Rule 1 (office) changes from 100 packets/s to 200 packets/s: "
    tried = client.patch("/rules/office?dry_run=true", json={"rate": "200 packets/s"})
    assert tried.json()["preview"]["words"][0].startswith(changed)
    assert tried.json()["id"] == 1
    tried = client.put("/rules/1?dry_run=true", json={**OFFICE, "rate": "200 packets/s"}, headers={"If-Match": '"1"'})
    assert tried.json()["preview"]["words"][0].startswith(changed)
    stale = client.patch("/rules/office?dry_run=true", json={"rate": "2 packets/s"}, headers={"If-Match": '"7"'})
    assert stale.status_code == 412
    assert client.put("/rules/7?dry_run=true", json=OFFICE).status_code == 404
    assert client.get("/rules/1").json()["rate"]["text"] == "100 packets/s"
    assert store.revision() == 1


def test_a_gateway_that_cannot_tell_says_so(client: httpx.Client, gateway: FakeKernel, store: Store) -> None:
    store.pause("gw1", True)
    found = client.post("/rules?dry_run=true", json=LAPTOP).json()["preview"]
    assert found["hosts"]["gw1"]["state"] == "pending"
    assert "netlimit apply" in found["hosts"]["gw1"]["message"]
    elsewhere = client.post("/rules?dry_run=true", json={**LAPTOP, "hosts": ["gw9"]}).json()["preview"]
    assert "gw9" in elsewhere["message"]


def test_a_gateway_that_says_nothing_is_named(
    client: httpx.Client, controller: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.preview.ANSWER_SECONDS", 0.2)
    controller.start()
    found = client.post("/rules?dry_run=true", json=LAPTOP).json()["preview"]
    assert (found["silent"], found["hosts"]) == (["gw1"], {})
    assert "no controller could compile it; asked were gw1" in found["message"]
