"""What ends on the gateway is for nobody else, whatever address it is sent to: that one is safe spares nobody there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, Lab
from tests.e2e import frames
from tests.e2e.gateway import Gateway

ANYCAST, OWN6 = "fd00:1::", "fd00:1::1"
NAMED = "10.2.0.254"
SAFE = ("fd00:1::/65", NAMED)
"""A network around the gateway's own address and its anycast address; and somebody else's address."""
SENT, PORT, PROXY = 30, 9000, 3128
FEW: dict[str, object] = {"rate": "1 packets/h", "burst": 10}
RULES: dict[str, tuple[dict[str, object], int]] = {
    "limited": (FEW, 10),
    "limited by a port": ({"protocol": "udp", "ports": PORT, **FEW}, 10),
    "connections": ({"rate": "1 connections/h", "burst": 10}, 10),
    "connections at once": ({"rate": "10 connections"}, 10),
    "blocked": ({"action": "block"}, 0),
    "blocked by a port": ({"protocol": "udp", "ports": PORT, "action": "block"}, 0),
}
STRANGER6 = "fd00:1:0:0:8000::2"
LISTEN = """
import socket, sys
IP_TRANSPARENT = 19
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_IP, IP_TRANSPARENT, 1)
sock.bind(("0.0.0.0", int(sys.argv[1])))
print(flush=True)
sys.stdin.readline()
sock.setblocking(False)
found = 0
try:
    while sock.recv(100):
        found += 1
except BlockingIOError:
    print(found)
"""
SOURCE_PORTS = count(20000)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("destination", [OWN6, ANYCAST])
def test_addresses_of_the_gateway_in_a_safe_network_exempt_nobody(
    gateway: Gateway, lab: Lab, destination: str, kind: str
) -> None:
    fields, passing = RULES[kind]
    flows = [frames.udp(STRANGER6, destination, PORT, next(SOURCE_PORTS), b"x") for _ in range(SENT)]
    packets = [frames.frame(frames.ip(STRANGER6, destination, frames.UDP, each)) for each in flows]
    gateway.put({"target": STRANGER6, **fields})
    with streams.receive(lab.gateway, PORT) as receiver:
        frames.send(lab.client, packets)
    assert receiver.report().packets == passing


@pytest.mark.parametrize("kind", RULES)
def test_what_a_transparent_proxy_takes_is_held(gateway: Gateway, lab: Lab, kind: str) -> None:
    fields, passing = RULES[kind]
    gateway.put({"target": CLIENT, **fields})
    flows = [frames.udp(CLIENT, NAMED, PORT, next(SOURCE_PORTS), b"x") for _ in range(SENT)]
    with taking(lab), proxy(lab) as listening:
        frames.send(lab.client, [frames.frame(frames.ip(CLIENT, NAMED, frames.UDP, each)) for each in flows])
        found, _ = listening.communicate("\n", timeout=30)
    assert int(found) == passing


@contextmanager
def proxy(lab: Lab) -> Iterator[subprocess.Popen[str]]:
    """A socket of the gateway that takes what TPROXY leads to it, and counts."""
    listening = lab.gateway.popen(
        sys.executable, "-c", LISTEN, str(PROXY), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with listening:
        assert listening.stdout is not None
        listening.stdout.readline()
        yield listening


@contextmanager
def taking(lab: Lab) -> Iterator[None]:
    """The gateway hands what is for the port to its proxy, wherever it is sent."""
    rule = ("PREROUTING", "-i", "lan", "-p", "udp", "--dport", str(PORT), "-j", "TPROXY")
    lead = (*rule, "--on-port", str(PROXY), "--tproxy-mark", "1/1")
    lab.gateway.run("iptables-legacy", "-w", "-t", "mangle", "-A", *lead)
    lab.gateway.ip("rule add fwmark 1/1 lookup 77", "route add local default dev lo table 77")
    try:
        yield
    finally:
        lab.gateway.ip("rule del fwmark 1/1 lookup 77", "route flush table 77")
        lab.gateway.run("iptables-legacy", "-w", "-t", "mangle", "-D", *lead)
