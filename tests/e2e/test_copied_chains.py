"""Somebody saves our chains, and loads them through iptables-nft: a copy that nobody manages."""

from __future__ import annotations

import json
import subprocess

from netlimit.records import State
from scripts.testbed.namespaces import CLIENT, SERVER, Lab
from tests.e2e.gateway import Gateway

LOAD = "iptables-legacy-save -t mangle | iptables-nft-restore"
SENT = 200


def echoes(lab: Lab) -> int:
    """How many of the client's pings, 200 a second, are answered."""
    command = lab.client.argv("ping", "-q", "-i", "0.005", "-c", str(SENT), "-W", "1", SERVER)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return int(done.stdout.partition(" received")[0].split()[-1])


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
        assert echoes(lab) < SENT, "both charge"
        done = gateway.attempt("teardown", "--json")
        assert done.returncode == 3, "not all is gone"
        (warning,) = json.loads(done.stdout)["warnings"]
        (held,) = json.loads(done.stdout)["left"]
        assert "Then run `netlimit teardown` again" in warning
        assert "nl-" in lab.gateway.run("ipset", "list", "-n").stdout, "the copy uses them"
        assert echoes(lab) == SENT, "but nobody is in them any more"
        removal = warning.partition("To remove it: ")[2].partition(". Save")[0]
        assert f"`{removal}`" in held
        assert removal == "iptables-nft-save -t mangle | grep -v NL- | iptables-nft-restore"
        lab.gateway.run("sh", "-c", removal)
        assert json.loads(gateway.do("teardown", "--json"))["warnings"] == []
        assert lab.gateway.run("ipset", "list", "-n").stdout == ""
    finally:
        lab.gateway.run("nft", "flush", "ruleset")
    gateway.do("apply")
    gateway.wait_for_state(limited, State.APPLIED)
