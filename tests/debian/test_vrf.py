"""Addresses of the gateway's own on a port of a VRF, which the kernel's word for such addresses leaves out."""

from __future__ import annotations

import sys

import pytest

from scripts.testbed import streams
from tests.debian.links import LINKS, NEAR
from tests.e2e import frames
from tests.e2e.gateway import Gateway

OWN, OWN6, NEAR6 = "10.5.0.1", "fd05::1", "fd05::2"
SENT, BFD = 30, 3784
FEW: dict[str, object] = {"rate": "1 packets/h", "burst": 10}
SEND = """
import socket, sys, time
sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"vrf0")
for _ in range(10):
    time.sleep(0.3)
    try:
        sock.sendto(b"x", (sys.argv[1], 9000))
    except OSError:
        pass
"""


@pytest.fixture
def vrf(gateway: Gateway) -> Gateway:
    LINKS["vrf"](gateway.lab)
    gateway.lab.gateway.ip(f"addr add {OWN6}/64 dev lan nodad")
    gateway.lab.client.ip(f"addr add {NEAR6}/64 dev eth0 nodad")
    gateway.start()
    return gateway


@pytest.mark.parametrize("target", [NEAR6, "fd05::/64"])
def test_neighbours_are_found_whatever_is_blocked(vrf: Gateway, target: str) -> None:
    vrf.add({"target": target, "protocol": "icmp", "action": "block"})
    with streams.receive(vrf.lab.client) as receiver:
        vrf.lab.gateway.run(sys.executable, "-c", SEND, NEAR6)
    assert receiver.report().packets >= 8  # the first may go while the neighbour is looked for


@pytest.mark.parametrize("fields", [{"action": "block"}, {"per": "target", **FEW}])
def test_what_keeps_gateways_alive_is_spared_and_nothing_else_is(vrf: Gateway, fields: dict[str, object]) -> None:
    vrf.add({"target": "10.5.0.0/16", **fields})
    adverts, others = count_arriving(vrf, BFD), count_arriving(vrf, 9000)
    assert (adverts, others) == (SENT, 10 if "rate" in fields else 0)


def count_arriving(gateway: Gateway, port: int) -> int:
    """Of packets that no router has passed on, for the address on the port of the VRF."""
    gateway.lab.gateway.run("sysctl", "-qw", "net.ipv4.udp_l3mdev_accept=1")
    sent = [frames.udp(NEAR, OWN, port, 49152 + n, b"x") for n in range(SENT)]
    with streams.receive(gateway.lab.gateway, port) as receiver:
        packets = [frames.ip(NEAR, OWN, frames.UDP, each, hops=255) for each in sent]
        frames.send(gateway.lab.client, [frames.frame(packet) for packet in packets])
    return receiver.report().packets
