"""Somebody saves our chains, and loads them through iptables-nft: a copy that nobody manages."""

from __future__ import annotations

import json

from netlimit.records import State
from scripts.testbed.namespaces import CLIENT, Lab
from tests.e2e.gateway import Gateway

LOAD = "iptables-legacy-save -t mangle | iptables-nft-restore"


def test_a_copy_is_told_until_it_is_removed_and_by_a_teardown(gateway: Gateway, lab: Lab) -> None:
    """What it takes from a rule is told at the rule; which it outlives."""
    (limited,) = gateway.put({"target": CLIENT, "rate": "50 packets/s"})
    lab.gateway.run("sh", "-c", LOAD)
    try:
        gateway.stop()
        gateway.launch()
        assert "A copy of netlimit's chains" in gateway.wait_for_state(limited, State.DEGRADED)
        told = gateway.attempt("doctor")
        assert told.returncode == 1
        assert "A copy of netlimit's chains is in tables of iptables-nft: ip mangle" in told.stdout
        (warning,) = json.loads(gateway.do("teardown", "--json"))["warnings"]
        assert "Then run `netlimit teardown` again" in warning
        assert "nl-" in lab.gateway.run("ipset", "list", "-n").stdout, "the copy uses them"
        removal = warning.partition("To remove it: ")[2].partition(". Save")[0]
        assert removal == "iptables-nft-save -t mangle | grep -v NL- | iptables-nft-restore"
        lab.gateway.run("sh", "-c", removal)
        assert json.loads(gateway.do("teardown", "--json"))["warnings"] == []
        assert lab.gateway.run("ipset", "list", "-n").stdout == ""
    finally:
        lab.gateway.run("nft", "flush", "ruleset")
    gateway.do("apply")
    gateway.wait_for_state(limited, State.APPLIED)
