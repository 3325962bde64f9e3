"""Who manages a gateway by a reverse proxy on another host is not cut off with that."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.testbed.namespaces import CLIENT, LAN, Lab
from scripts.testbed.service import Service

ADMIN = "203.0.113.9"
PATIENCE = 120.0
API = f"http://{LAN}:8750/api/v1"


@pytest.fixture
def service(lab: Lab) -> Iterator[Service]:
    settings = {
        "NETLIMIT_LISTEN": "0.0.0.0:8750",
        "NETLIMIT_TRUSTED_PROXIES": CLIENT,
        "NETLIMIT_BOOTSTRAP_TOKEN": "a-token-of-the-tests-1",
    }
    with Service(lab.gateway, settings=settings, url="http://127.0.0.1:8750") as running:
        yield running


def ask(lab: Lab, service: Service, *more: str) -> tuple[int, Any]:
    """By the proxy, in the name of an administrator behind it."""
    headers = ("-H", f"Authorization: Bearer {service.token}", "-H", f"X-Forwarded-For: {ADMIN}")
    said = lab.client.run("curl", "-s", "-m", "60", "-w", "\n%{http_code}", *headers, *more).stdout
    body, _, status = said.rpartition("\n")
    return int(status), json.loads(body)


def test_the_proxy_is_safe_as_those_are_who_come_by_it(lab: Lab, service: Service) -> None:
    assert ask(lab, service, f"{API}/rules")[0] == 200
    end = time.monotonic() + PATIENCE
    while not {CLIENT, ADMIN} <= {each.split("/")[0] for each in read_safe(lab, service)}:
        assert time.monotonic() < end, read_safe(lab, service)
        time.sleep(0.2)
    for address in (CLIENT, ADMIN):
        rule = json.dumps({"target": address, "action": "block"})
        status, said = ask(lab, service, f"{API}/rules", "--json", rule)
        assert status == 409, said
        assert "force" in json.dumps(said)


def read_safe(lab: Lab, service: Service) -> list[str]:
    status, said = ask(lab, service, f"{API}/status")
    assert status == 200
    return [network for host in said["hosts"] for network in host["safe"]]
