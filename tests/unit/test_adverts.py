"""What `explain` says of what routers say to each other is what the chains do."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address

import pytest

from netlimit.explain import explain
from netlimit.limits import Facts
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
LINK, GROUPS = ("224.0.0.18", "224.0.0.251", "ff02::12"), ("239.1.2.3", "ff05::1")
DESTINATIONS = (OWN, OWN6, *LINK, *GROUPS, "10.2.0.2", "10.1.255.255")
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


def bridged_packets() -> list[Packet]:
    """What a bridge passes on between its ports, or multicast routing to another device."""
    sent = [packet for packet in packets() if packet.in_interface and packet.dst.is_multicast]
    found = [replace(packet, in_interface="br0", out_interface="br0") for packet in sent]
    return [*found, *(replace(each, icmp_type=135) for each in found if each.protocol == "icmp")]


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
    for packet in (*packets(), *bridged_packets()):
        said = explain(BLOCKS, packet, FACTS.own, peers=FACTS.peers).verdict
        done = gateway.kernel.trace(packet)
        assert (said == "blocked") == (done == "drop"), f"{packet}: {said}, {done}"
        passed[done == "accept"] += 1
    assert min(passed.values()) > 100


def test_what_is_spared_before_its_destination_is_translated_is_asked_again() -> None:
    """Of whatever is spared as it comes in, the same is charged where it is forwarded: but for what has no hop left
    then, and for what other gateways of the database send by multicast."""
    limited, clock = _limit_by_peer(replace(FACTS, translated=frozenset({4, 6})))
    asked = set()
    for packet in packets():
        by_peer = str(packet.src) == PEER and packet.dst.is_multicast
        comes_in = packet.in_interface is not None and packet.out_interface is None
        spared = explain(BLOCKS, packet, FACTS.own, peers=FACTS.peers).verdict != "blocked"
        if comes_in and spared and packet.hop_limit > 1 and not by_peer:
            clock[0] += 10
            behind = ip_address("10.2.0.2" if packet.dst.version == 4 else "fd00:2::2")
            led_on = replace(packet, out_interface="wan", hop_limit=packet.hop_limit - 1)
            assert [limited.kernel.trace(led_on, behind) for _ in range(2)] == ["accept", "drop"], packet
            asked.add((packet.protocol, packet.port))
    assert asked == {
        *((protocol, None) for protocol in ("vrrp", "ospf", "pim", "eigrp", "ah", "esp")),
        *(("udp", port) for port in (520, 3784, 3785, 4784, 6696)),
        ("tcp", 179),
    }


@pytest.mark.parametrize("translated", [frozenset[int](), frozenset({4})], ids=["nobody translates", "NAT"])
def test_what_is_forwarded_to_where_it_was_sent_is_charged_once(translated: frozenset[int]) -> None:
    """Over IPv4."""
    limited, clock = _limit_by_peer(replace(FACTS, translated=translated))
    several = {packet.protocol: packet for packet in packets() if packet.in_interface and packet.dst.version == 4}
    assert {"vrrp", "ospf", "pim", "eigrp", "ah", "esp", "udp"} <= set(several)
    for packet in several.values():
        clock[0] += 10
        forwarded = replace(packet, dst=ip_address("10.2.0.2"), out_interface="wan", hop_limit=64)
        assert [limited.kernel.trace(forwarded) for _ in range(2)] == ["accept", "drop"], packet


def _limit_by_peer(facts: Facts) -> tuple[Gateway, list[float]]:
    """One packet a second for who sends to one end; and the clock that this goes by."""
    limited, clock = Gateway(facts), [NOW.timestamp()]
    limited.kernel.now = lambda: clock[0]
    for number, target in enumerate(("10.1.0.0/16", "fd00:1::/112"), 1):
        fields = {"target": target, "per": "peer", "rate": "1 packets/s", "burst": 1}
        limited.put(replace(parse_rule(fields, NOW), id=number))
    limited.sync()
    return limited, clock


def test_what_is_routed_is_never_spared(gateway: Gateway) -> None:
    for packet in (*packets(), *bridged_packets()):
        if packet.in_interface and packet.out_interface and str(packet.dst) not in LINK:
            assert gateway.kernel.trace(packet) == "drop", packet


RATE = {"rate": "1 packets/h", "burst": 1, "per": "target"}
HELD: dict[str, list[dict[str, object]]] = {
    "by a limit": [RATE],
    "by one of each host": [{**RATE, "per": "host"}],
    "by one of the groups": [{**RATE, "direction": "to"}],
    "by peer": [{**RATE, "per": "peer"}],
    "by peer, beside a limit": [{**RATE, "per": "peer"}, RATE],
    "by a limit that rejects": [{**RATE, "action": "reject"}],
    "by new connections": [{"rate": "1 connections/h", "per": "host"}],
    "by connections at once": [{"rate": "1 connections", "per": "host"}],
    "by connections at once that are rejected": [{"rate": "1 connections", "per": "host", "action": "reject"}],
    "by a block": [{"action": "block"}],
    "by a block of the group": [{"action": "block", "direction": "to"}],
    "by a block, beside a limit by peer": [{"action": "block"}, {**RATE, "per": "peer"}],
    "by a block that waits": [{"action": "block"}, {"action": "allow", "direction": "to", "target": "192.0.2.0/24"}],
}


def _make(held: list[dict[str, object]], family: int, facts: Facts = FACTS) -> Gateway:
    made = Gateway(facts)
    ends = {"from": "10.1.0.0/16", "to": "224.0.0.0/4"} if family == 4 else {"from": "fd00:1::/112", "to": "ff00::/8"}
    for number, fields in enumerate(held, 1):
        target = ends[str(fields.get("direction", "from"))]
        made.put(replace(parse_rule({"target": target, **fields}, NOW), id=number))
    made.sync()
    return made


def _is_spared(packet: Packet) -> bool:
    """As the page has it, of what a bridge passes on."""
    hops = {"vrrp": 255, "igmp": 1, "icmp": 1}.get(packet.protocol, packet.hop_limit)
    sealed = ("ah", "esp") if packet.dst.version == 4 else ("esp",)
    listeners = packet.protocol == "icmp" and packet.dst.version == 6 and packet.icmp_type in (130, 143)
    said = packet.protocol in ("vrrp", "ospf", "pim", "eigrp", *sealed) or (packet.port == 6696 or listeners)
    told = (packet.port == 520 or packet.protocol == "igmp") and packet.dst.version == 4
    return str(packet.dst) in LINK and packet.hop_limit == hops and (said or told)


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("name", HELD)
def test_what_routers_tell_each_other_over_a_bridge_is_spared_and_nothing_else(name: str, family: int) -> None:
    made, passed = _make(HELD[name], family), {True: 0, False: 0}
    for packet in bridged_packets():
        if packet.dst.version != family or str(packet.src) == PEER:
            continue
        packet = replace(packet, opens=True)
        explained = explain(made.rules.values(), packet, FACTS.own, peers=FACTS.peers)
        assert (explained.verdict == "passes") == _is_spared(packet), packet
        made.kernel._buckets.clear()
        made.kernel._flows.clear()
        done = [made.kernel.trace(packet) for _ in range(3)]
        assert (done == ["accept"] * 3) == _is_spared(packet), f"{packet}: {done}"
        passed[done[2] == "accept"] += 1
    assert min(passed.values()) > 10


def test_nothing_is_spared_where_tunnels_hand_it_to_a_next_hop_whomever_it_is_for() -> None:
    """What comes out of one with a multicast address of the link is routed."""
    made = _make(HELD["by a block"], 6, replace(FACTS, topology=replace(FACTS.topology, segments=("fd00:9::1/128",))))
    done = {made.kernel.trace(packet) for packet in bridged_packets() if packet.dst.version == 6}
    assert done == {"drop"}
