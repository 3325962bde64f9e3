"""An API whose clock is not the database's: what is in force, and must be forced, does not depend on it."""

from __future__ import annotations

import signal
import sys
from contextlib import closing
from datetime import timedelta

import httpx
import pytest

from netlimit.records import HostStatus
from netlimit.store import Store
from tests.cli.running import Netlimit, until

SAFE = "198.51.100.7"


@pytest.mark.parametrize("ahead", [3600, -3600])
def test_a_rule_is_in_force_by_the_clock_of_the_database(netlimit: Netlimit, ahead: int) -> None:
    netlimit.do("db", "upgrade")
    token = netlimit.ask("token", "create", "operator", "--role", "operator")["token"]
    with closing(Store(netlimit.environment["NETLIMIT_DATABASE_URL"])) as store:
        store.report(HostStatus("gw1", "fake", applied_revision=100, safe=(SAFE,)))
        end = (store.now() + timedelta(minutes=30)).isoformat()
    api = netlimit.start(str(ahead), "api", program=(sys.executable, "-m", "tests.cli.ahead"))
    until(lambda: api.ended or not netlimit.run("status", NETLIMIT_TOKEN=token).returncode, api.said)
    try:
        with httpx.Client(
            base_url=netlimit.environment["NETLIMIT_URL"] + "/api/v1",
            headers={"Authorization": f"Bearer {token}"},
            timeout=60,
        ) as client:
            answer = client.post("/rules", json={"target": SAFE, "action": "block", "expires_at": end})
            assert (answer.status_code, answer.json().get("field")) == (409, "target"), answer.json()
            for harm in ({"target": SAFE, "action": "block"}, {"target": "0.0.0.0/0", "action": "block"}):
                answer = client.post("/rules", json=harm | {"ttl": "10m"})
                assert (answer.status_code, answer.json().get("field")) == (409, "target"), answer.json()
            rule = client.post("/rules", json={"target": "10.1.0.2", "action": "block", "expires_at": end}).json()
            assert rule["status"]["state"] != "expired"
            assert client.get(f"/rules/{rule['id']}").json()["status"]["state"] != "expired"
            assert client.get("/rules", params={"state": "expired"}).json()["total"] == 0
            status = client.get("/status").json()
            assert status["rules"]["expired"] == 0
            where = "ahead of" if ahead > 0 else "behind"
            (note,) = (each for each in status["notes"] if each.startswith("The clock of this API is"))
            assert f" {where} the database's" in note
            assert api.said().count("The clock of this API is") == 1
    finally:
        api.end(signal.SIGKILL)


@pytest.mark.parametrize("ahead", [3600, -3600])
def test_a_client_of_an_api_whose_clock_is_wrong_is_safe_on_every_gateway(netlimit: Netlimit, ahead: int) -> None:
    netlimit.do("db", "upgrade")
    token = netlimit.ask("token", "create", "boss", "--role", "admin")["token"]
    netlimit.environment["NETLIMIT_TRUSTED_PROXIES"] = "127.0.0.0/8"
    api = netlimit.start(str(ahead), "api", program=(sys.executable, "-m", "tests.cli.ahead"))
    until(lambda: api.ended or not netlimit.run("status", NETLIMIT_TOKEN=token).returncode, api.said)
    try:
        headers = {"Authorization": f"Bearer {token}", "X-Forwarded-For": SAFE}
        url = netlimit.environment["NETLIMIT_URL"] + "/api/v1/status"
        assert httpx.get(url, headers=headers, timeout=60).status_code == 200
        with closing(Store(netlimit.environment["NETLIMIT_DATABASE_URL"])) as store:
            until(lambda: SAFE in store.clients("another"), api.said)
    finally:
        api.end(signal.SIGKILL)
