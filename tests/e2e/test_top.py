"""`netlimit top` and `netlimit counters`, while somebody floods: what is dropped now comes first."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from scripts.testbed.namespaces import SERVER, Lab
from scripts.testbed.service import Service
from scripts.testbed.streams import ROOT, sending

FLOODER = "10.1.0.2"


@pytest.fixture(scope="module")
def service(root: None) -> Iterator[Service]:
    with Lab() as lab, Service(lab.gateway) as running, sending(lab.client, SERVER, rate=500, seconds=120):
        yield running


def run(service: Service, *command: str) -> str:
    env = {**service.env, "NETLIMIT_TOKEN": service.token}
    done = service.namespace.run(sys.executable, "-m", "netlimit.cli.main", *command, env=env, cwd=ROOT)
    return done.stdout


def test_the_busiest_rules_are_shown_whatever_their_numbers(service: Service) -> None:
    quiet = [{"target": f"10.1.7.{number}", "rate": "9 packets/s"} for number in range(1, 26)]
    service.request("POST", "/api/v1/rules/bulk", quiet)  # type: ignore[arg-type]  # an array is a body, too
    for name, fields in {
        "seen": {"target": "10.1.0.0/16", "rate": "100 packets/s", "per": "host", "action": "observe"},
        "held": {"target": FLOODER, "rate": "400 packets/s"},
    }.items():
        answer = service.request("POST", "/api/v1/rules", {"name": name, **fields}, "Prefer: wait=60")
        assert answer.body["status"]["state"] == "applied", answer

    frame = json.loads(run(service, "top", "--json"))
    assert [flow["name"] for flow in frame["rules"][:2]] == ["held", "seen"]
    assert len(frame["rules"]) == 20
    printed = run(service, "top", "--once")
    titles = [" ".join(line.split()) for line in printed.splitlines() if line.split()[:1] == ["ID"]]
    assert titles == [
        "ID NAME RULE MATCHED/s DROPPED/s DROPPED bit/s",
        "ID NAME RULE MATCHED/s WOULD DROP/s WOULD DROP bit/s",
    ]
    assert printed.index(" held ") < printed.index("WOULD DROP") < printed.index(" seen ")

    counted = run(service, "counters", "seen")
    assert ("would drop" in counted, "dropped" in counted) == (True, False)
    assert "dropped" in run(service, "counters", "held")
    rule = service.request("GET", "/api/v1/rules/seen").body
    counters = service.request("GET", "/api/v1/rules/seen/counters").body
    assert counters["since"] == rule["created_at"]
    many = service.request("GET", "/api/v1/counters?rule=seen&rule=held").body["items"]
    assert many[0]["since"] == rule["created_at"]
