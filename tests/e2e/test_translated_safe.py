"""What is sent to somebody safe is spared; but not where the gateway leads it to somebody else (a hijack of DNS)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, SERVER, Lab
from tests.e2e import frames
from tests.e2e.gateway import Gateway

NAMED = "10.2.0.254"
"""Nobody has that address: what is sent there goes to the server, or to the gateway."""
SAFE = (NAMED,)
PORT, SENT = 9000, 30
FEW: dict[str, object] = {"rate": "1 packets/h", "burst": 10}
RULES: dict[str, dict[str, object]] = {
    "packets": {"target": CLIENT, **FEW},
    "connections": {"target": CLIENT, "rate": "1 connections/h", "burst": 10},
    "by a device": {"target": CLIENT, "interface": "lan", **FEW},
    "hosts": {"target": "10.1.0.0/16", "per": "host", **FEW},
    "refused": {"target": CLIENT, "action": "reject", **FEW},
    "blocked": {"target": CLIENT, "action": "block"},
    "blocked by a device": {"target": CLIENT, "action": "block", "interface": "lan"},
}
LEADS = {
    "to the server": ("DNAT", "--to-destination", SERVER),
    "to the gateway": ("REDIRECT", "--to-ports", str(PORT)),
}
SOURCE_PORTS = count(20000)


@pytest.fixture(params=LEADS)
def led(request: pytest.FixtureRequest, lab: Lab) -> Iterator[str]:
    rule = ("PREROUTING", "-i", "lan", "-p", "udp", "--dport", str(PORT), "-j", *LEADS[request.param])
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-A", *rule)
    yield request.param
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-D", *rule)


def count_arriving(lab: Lab, led: str) -> int:
    """Of packets for the safe address, each a flow of its own."""
    flows = [frames.udp(CLIENT, NAMED, PORT, next(SOURCE_PORTS), b"x") for _ in range(SENT)]
    with streams.receive(lab.server if led == "to the server" else lab.gateway) as receiver:
        frames.send(lab.client, [frames.frame(frames.ip(CLIENT, NAMED, frames.UDP, each)) for each in flows])
    return receiver.report().packets


@pytest.mark.parametrize("kind", RULES)
def test_it_is_held_where_it_comes_to_somebody_else(gateway: Gateway, lab: Lab, led: str, kind: str) -> None:
    assert count_arriving(lab, led) == SENT
    gateway.put(RULES[kind])
    assert count_arriving(lab, led) == (0 if "blocked" in kind else 10)


@pytest.mark.parametrize("kind", RULES)
def test_it_is_spared_where_it_goes_to_who_is_safe(gateway: Gateway, lab: Lab, kind: str) -> None:
    lab.server.ip(f"addr add {NAMED}/16 dev eth0")
    try:
        gateway.put(RULES[kind])
        assert count_arriving(lab, "to the server") == SENT
    finally:
        lab.server.ip(f"addr del {NAMED}/16 dev eth0")
