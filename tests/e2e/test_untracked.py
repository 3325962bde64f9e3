"""Where nobody tracks connections, rules with ports do not have the kernel do so: what its table has no room for it
drops. Once somebody translates addresses, they speak of the ports that were sent."""

from __future__ import annotations

from itertools import count

from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, CLIENT6, SERVER, Lab
from tests.e2e import frames
from tests.e2e.gateway import Gateway

TAKEN = "10.2.0.253"
PORT, REAL, SENT = 9000, 3128, 30
SOURCE_PORTS = count(20000)


def count_arriving(lab: Lab, destination: str, real: int) -> int:
    """Of packets to a port that arrive at the server's, each a flow of its own."""
    flows = [frames.udp(CLIENT, destination, PORT, next(SOURCE_PORTS), b"x") for _ in range(SENT)]
    with streams.receive(lab.server, real) as receiver:
        frames.send(lab.client, [frames.frame(frames.ip(CLIENT, destination, frames.UDP, each)) for each in flows])
    return receiver.report().packets


def list_rules(lab: Lab, tool: str) -> str:
    return lab.gateway.run(tool, "-w", "-t", "mangle", "-S").stdout


def test_connections_are_asked_for_once_somebody_tracks_them(gateway: Gateway, lab: Lab) -> None:
    limit = {"target": CLIENT, "protocol": "udp", "ports": PORT, "rate": "1 packets/h", "burst": 10}
    gateway.add(limit, limit | {"target": CLIENT6}, {"target": "203.0.113.9", "direction": "to", "action": "allow"})
    assert count_arriving(lab, SERVER, PORT) == 10
    assert lab.gateway.run("cat", "/proc/sys/net/netfilter/nf_conntrack_count").stdout.strip() == "0"
    assert "conntrack" not in list_rules(lab, "iptables-legacy")
    lead = ("PREROUTING", "-p", "udp", "-d", TAKEN, "-j", "DNAT", "--to-destination", f"{SERVER}:{REAL}")
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-A", *lead)
    count_arriving(lab, TAKEN, REAL)
    gateway.wait(lambda: "--ctorigdstport" in list_rules(lab, "iptables-legacy"), "connections to be asked for")
    assert "conntrack" not in list_rules(lab, "ip6tables-legacy"), "IPv6 is translated by nobody"
    gateway.clear()
    gateway.add(limit | {"burst": 20}, {"target": "203.0.113.9", "direction": "to", "action": "allow"})
    assert count_arriving(lab, TAKEN, REAL) == 20
