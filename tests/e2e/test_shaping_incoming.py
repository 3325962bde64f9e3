"""What ends on the gateway is shaped by whatever device it comes in, but where that device is allowed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, CLIENT6, LAN, LAN6, LAN_MAC, Lab
from tests.e2e import frames
from tests.e2e.gateway import Gateway
from tests.e2e.loads import shape

SENT, PORT = 30, 9000
ENDS = {4: (CLIENT, LAN), 6: (CLIENT6, LAN6)}


@pytest.fixture
def bare(lab: Lab) -> Iterator[str]:
    """A device `bare` of the gateway without addresses and routes, `far` at the client: its hardware address."""
    lab.gateway.ip(f"link add bare type veth peer name far netns {lab.client.name}", "link set bare up")
    lab.client.ip("link set far up")
    yield lab.gateway.run("cat", "/sys/class/net/bare/address").stdout.strip()
    lab.gateway.ip("link del bare")


def deliver(lab: Lab, family: int, device: str = "eth0", mac: str = LAN_MAC) -> None:
    """Send to a socket of the gateway until all of it has arrived."""
    source, target = ENDS[family]
    payload = frames.udp(source, target, PORT, 4000, b"x")
    with streams.receive(lab.gateway, PORT) as receiver:
        packet = frames.ip(source, target, frames.UDP, payload)
        frames.send(lab.client, [frames.frame(packet, to=mac)] * SENT, device=device)
    assert receiver.report().packets == SENT


def test_what_comes_in_by_a_device_without_routes_is_shaped(gateway: Gateway, lab: Lab, bare: str) -> None:
    rules = gateway.add(*(shape(source) for source, _ in ENDS.values()))
    gateway.wait(lambda: "bare" in gateway.kernel.ingress(), "the program on the device")
    for family in ENDS:
        deliver(lab, family, "far", bare)
    assert [gateway.count(rule).matched_packets for rule in rules] == [SENT, SENT]


def test_who_is_allowed_by_one_device_is_shaped_by_others(gateway: Gateway, lab: Lab, bare: str) -> None:
    rules = gateway.add(*(shape(source) for source, _ in ENDS.values()))
    gateway.add(*({"target": source, "action": "allow", "interface": "bare"} for source, _ in ENDS.values()))
    gateway.wait(lambda: "bare" in gateway.kernel.ingress(), "the program on the device")
    for family in ENDS:
        deliver(lab, family, "far", bare)
    assert [gateway.count(rule).matched_packets for rule in rules] == [0, 0]
    for family in ENDS:
        deliver(lab, family)
    assert [gateway.count(rule).matched_packets for rule in rules] == [SENT, SENT]
