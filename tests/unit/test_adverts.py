"""What `explain` says of what routers say to each other is what the chains do."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address

import pytest

from netlimit.explain import explain
from netlimit.packet import Packet
from netlimit.rules import parse_rule
from tests.unit.shapes import Gateway, gateway_facts
from tests.unit.strategies import NOW

PEER, STRANGER, OWN, OWN6 = "10.1.0.77", "10.1.0.99", "10.1.0.1", "fd00:1::1"
FACTS = replace(gateway_facts, peers=frozenset({PEER}))
BLOCKS = [
    replace(parse_rule({"target": target, "action": "block", "direction": direction}, NOW), id=number)
    for number, (target, direction) in enumerate(
        [("10.0.0.0/8", "from"), ("fd00::/16", "from"), ("224.0.0.0/4", "to"), ("fe80::/10", "from")], 1
    )
]
DESTINATIONS = (OWN, OWN6, "224.0.0.18", "224.0.0.251", "239.1.2.3", "ff02::12", "ff05::1", "10.2.0.2", "10.1.255.255")
KINDS: list[dict[str, object]] = [
    *({"protocol": protocol} for protocol in ("vrrp", "ospf", "pim", "eigrp", "igmp", "ah", "esp", "gre")),
    *({"protocol": "udp", "port": port} for port in (53, 520, 3784, 3785, 4784, 6696)),
    *({"protocol": "tcp", "port": port, "opens": True} for port in (179, 80)),
    *({"protocol": "icmp", "icmp_type": number} for number in (8, 128, 130, 143)),
]


def packets() -> list[Packet]:
    found = []
    for destination in map(ip_address, DESTINATIONS):
        sources = (PEER, STRANGER, OWN) if destination.version == 4 else ("fd00:1::9", OWN6)
        for source in sources:
            ends_here = destination.is_multicast or str(destination) in (OWN, OWN6)
            came, leaves = (None, "lan") if source in (OWN, OWN6) else ("lan", None if ends_here else "wan")
            if came is None and str(destination) in (OWN, OWN6):
                continue
            for kind in KINDS:
                for hops in (1, 64, 254, 255):
                    packet = Packet(ip_address(source), destination, in_interface=came, out_interface=leaves)
                    found.append(replace(packet, hop_limit=hops, **kind))  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def gateway() -> Gateway:
    made = Gateway(FACTS)
    made.kernel.where = made.kernel.where._replace(own=tuple(FACTS.own))
    for rule in BLOCKS:
        made.put(rule)
    made.sync()
    return made


def test_every_kind_of_packet(gateway: Gateway) -> None:
    passed = {True: 0, False: 0}
    for packet in packets():
        said = explain(BLOCKS, packet, FACTS.own, peers=FACTS.peers).verdict
        done = gateway.kernel.trace(packet)
        assert (said == "blocked") == (done == "drop"), f"{packet}: {said}, {done}"
        passed[done == "accept"] += 1
    assert min(passed.values()) > 100


def test_what_is_spared_before_its_destination_is_translated_is_asked_again() -> None:
    """Of whatever is spared as it comes in, the same is charged once more where it is forwarded: but for what has no
    hop left then, and for what other gateways of the database send by multicast."""
    limited, clock = Gateway(FACTS), [NOW.timestamp()]
    limited.kernel.now = lambda: clock[0]
    for number, target in enumerate(("10.1.0.0/16", "fd00:1::/112"), 1):
        fields = {"target": target, "per": "peer", "rate": "1 packets/s", "burst": 1}
        limited.put(replace(parse_rule(fields, NOW), id=number))
    limited.sync()
    asked = set()
    for packet in packets():
        by_peer = str(packet.src) == PEER and packet.dst.is_multicast
        comes_in = packet.in_interface is not None and packet.out_interface is None
        spared = explain(BLOCKS, packet, FACTS.own, peers=FACTS.peers).verdict != "blocked"
        if comes_in and spared and packet.hop_limit > 1 and not by_peer:
            clock[0] += 10
            behind = ip_address("10.2.0.2" if packet.dst.version == 4 else "fd00:2::2")
            led_on = replace(packet, dst=behind, out_interface="wan", hop_limit=packet.hop_limit - 1)
            assert limited.kernel.trace(led_on) == "drop", packet
            asked.add((packet.protocol, packet.port))
    assert asked == {
        *((protocol, None) for protocol in ("vrrp", "ospf", "pim", "eigrp", "ah", "esp")),
        *(("udp", port) for port in (520, 3784, 3785, 4784, 6696)),
        ("tcp", 179),
    }


def test_a_forwarded_packet_is_never_spared(gateway: Gateway) -> None:
    for packet in packets():
        if packet.in_interface and packet.out_interface and packet.src.version == 4:
            assert gateway.kernel.trace(packet) == "drop", packet
