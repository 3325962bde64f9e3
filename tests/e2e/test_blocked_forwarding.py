"""A block `from` is asked where packets come in, and again of what is forwarded and may have been spared there."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from netlimit.explain import explain
from netlimit.packet import Packet
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, SERVER, WAN, WAN_MAC, Lab
from tests.e2e import frames
from tests.e2e.gateway import Gateway

PORT, BFD, SENT = 9000, 3784, 30
BLOCKED: dict[str, object] = {"target": CLIENT, "action": "block"}
UNPACKED = ("parent", "ffff:", "protocol", "ip", "prio", "1", "u32", "match", "ip", "dst", SERVER)
UNPACKED += ("action", "mirred", "ingress", "redirect", "dev", "lo")


@pytest.fixture
def by_loopback(lab: Lab) -> Iterator[None]:
    """What comes for the server is handed on by loopback, as MPLS hands on what it has unpacked."""
    lab.gateway.run("tc", "qdisc", "add", "dev", "lan", "ingress")
    lab.gateway.run("tc", "filter", "add", "dev", "lan", *UNPACKED)
    yield
    lab.gateway.run("tc", "qdisc", "del", "dev", "lan", "ingress")


def count_arriving(lab: Lab) -> int:
    flows = [frames.udp(CLIENT, SERVER, PORT, 20000 + number, b"x") for number in range(SENT)]
    with streams.receive(lab.server) as receiver:
        frames.send(lab.client, [frames.frame(frames.ip(CLIENT, SERVER, frames.UDP, each)) for each in flows])
    return receiver.report().packets


def test_multicast_that_is_spared_where_it_comes_in_is_asked_for_where_it_is_forwarded(
    gateway: Gateway, lab: Lab
) -> None:
    """Bridges pass on what routers tell each other on a link, and multicast routing what other gateways say."""
    gateway.put(BLOCKED)
    saved = lab.gateway.run("iptables-legacy-save", "-t", "mangle").stdout
    assert "-A NL-FORWARD -d 224.0.0.0/4 -m set --match-set nl-blocked4-from src -g NL-FORWARD-BLOCKED" in saved


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "behind an allow"])
def test_of_two_blocks_the_one_that_is_explained_counts(gateway: Gateway, lab: Lab, waits: bool) -> None:
    allowed = [{"target": "192.0.2.0/24", "direction": "to", "action": "allow"}] if waits else []
    rules = gateway.put(
        {"target": "10.1.0.0/18", "action": "block"},
        {"target": "10.2.0.0/16", "direction": "to", "action": "block"},
        *allowed,
    )
    assert count_arriving(lab) == 0
    packet = Packet(ip_address(CLIENT), ip_address(SERVER), "udp", PORT, 20000, "lan", "wan")
    (hit,) = [step.rule for step in explain(rules, packet, own=[WAN]).steps if step.hits]
    assert hit is not None
    gateway.wait(lambda: gateway.count(hit).matched_packets >= SENT, "the counters")
    assert [gateway.count(rule).matched_packets for rule in rules if rule.id != hit.id] == [0] * len(rules[1:])


def test_nothing_passes_while_a_block_moves_and_back(gateway: Gateway, lab: Lab) -> None:
    """An exception `to` somebody makes a block wait until it is known for whom a packet is."""
    gateway.put(BLOCKED)
    with (
        streams.receive(lab.server, limit=120) as receiver,
        streams.sending(lab.client, SERVER, rate=3000, seconds=120) as sender,
    ):
        for _ in range(5):
            gateway.remove(gateway.add({"target": "10.2.0.9", "action": "allow", "direction": "to"})[0])
            gateway.wait_until_applied()
        assert sender.running
    assert receiver.report().packets == 0


@pytest.mark.parametrize(("port", "hops"), [(PORT, 64), (BFD, 255)])
def test_what_is_answered_to_a_host_behind_a_masquerade_is_blocked(
    gateway: Gateway, lab: Lab, port: int, hops: int
) -> None:
    """It is for an address of the gateway's own where it comes in, and there what keeps gateways alive is spared."""
    rule = ("POSTROUTING", "-o", "wan", "-j", "MASQUERADE")
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-A", *rule)
    asking = frames.udp(CLIENT, SERVER, PORT, port, b"x")
    answer = frames.ip(SERVER, WAN, frames.UDP, frames.udp(SERVER, WAN, port, PORT, b"x"), hops)
    try:
        for blocked in (False, True):
            if blocked:
                gateway.put({"target": SERVER, "action": "block"})
            with streams.receive(lab.client, port) as receiver:
                frames.send(lab.client, [frames.frame(frames.ip(CLIENT, SERVER, frames.UDP, asking))])
                frames.send(lab.server, [frames.frame(answer, WAN_MAC)] * SENT)
            assert receiver.report().packets == (0 if blocked else SENT)
    finally:
        lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-D", *rule)


@pytest.mark.usefixtures("by_loopback")
def test_what_is_handed_on_by_loopback_is_blocked(gateway: Gateway, lab: Lab) -> None:
    """But not what is for the gateway itself, which is told."""
    assert count_arriving(lab) == SENT
    gateway.add(BLOCKED)
    assert count_arriving(lab) == 0
