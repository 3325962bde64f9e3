"""Whatever link brings in what ends on the gateway: each packet is shaped once, and not where its device is allowed."""

from __future__ import annotations

import sys

import pytest

from scripts.testbed import streams
from tests import warm
from tests.debian.links import FAR, LINKS, NEAR, NETWORK
from tests.e2e.evasion import wire
from tests.e2e.evasion.headers import UDP, Ends, ip4, udp
from tests.e2e.gateway import Gateway

SENT, PORT = 30, 9000


def deliver(gateway: Gateway) -> None:
    """Send to a socket of the gateway until all of it has arrived."""
    packets = [ip4(ends, UDP, udp(ends, b"x", to=PORT)) for ends in (Ends(NEAR, FAR, n) for n in range(SENT))]
    program = (sys.executable, "-m", "tests.e2e.evasion.wire", "raw", "4")
    with streams.receive(gateway.lab.gateway, PORT) as receiver:
        gateway.lab.client.run(*program, input=wire.pack(packets), cwd=warm.ROOT, timeout=120)
    assert receiver.report().packets == SENT


@pytest.mark.parametrize("link", LINKS)
def test_who_is_allowed_by_the_device_of_a_link_is_not_shaped_there(gateway: Gateway, link: str) -> None:
    gateway.lab.gateway.run("sysctl", "-qw", "net.ipv4.udp_l3mdev_accept=1", check=False)
    LINKS[link](gateway.lab)
    gateway.start()
    fields: dict[str, object] = {"target": NETWORK, "action": "shape", "rate": "1 Mbit/s", "per": "target"}
    (shaped,) = gateway.add(fields)
    deliver(gateway)
    assert gateway.count(shaped).matched_packets == SENT
    gateway.add({"target": NEAR, "action": "allow", "interface": "wan"})
    deliver(gateway)
    assert gateway.count(shaped).matched_packets == 2 * SENT
    gateway.add({"target": NEAR, "action": "allow", "interface": {"vrf": "vrf0", "esp": "lan"}.get(link, "in0")})
    deliver(gateway)
    assert gateway.count(shaped).matched_packets == 2 * SENT
