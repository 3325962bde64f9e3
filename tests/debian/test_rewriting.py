"""What writes other addresses into packets as they come in, by actions of tc, is told."""

from __future__ import annotations

import pytest

from netlimit.records import State
from scripts.testbed.namespaces import CLIENT
from tests.e2e.gateway import Gateway

FILTER = ("filter", "add", "dev", "lan", "ingress", "protocol", "ip", "pref", "10", "matchall", "action")
ACTIONS = {
    "pedit": ("pedit", "munge", "ip", "src", "set", "10.1.9.9"),
    "nat": ("nat", "ingress", "10.1.0.1", "10.1.9.9"),
    "ct": ("ct", "commit", "nat", "src", "addr", "10.1.9.9", "pipe"),
    "ct that only tracks": ("ct", "commit", "pipe"),
    "none": ("gact", "pass"),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_who_writes_into_what_comes_in_is_told(gateway: Gateway, name: str) -> None:
    gateway.lab.gateway.run("tc", "qdisc", "add", "dev", "lan", "clsact")
    gateway.lab.gateway.run("tc", *FILTER, *ACTIONS[name])
    gateway.start()
    (rule,) = gateway.add({"target": CLIENT, "rate": "200 packets/s"})
    if name in ("nat", "ct"):
        assert "the filter of lan, matchall, pref 10" in gateway.wait_for_state(rule, State.DEGRADED)
    else:
        assert gateway.state(rule) == (State.APPLIED, "")
        told = "WARNING: edited packets" in gateway.attempt("doctor").stdout
        assert told is (name == "pedit")
