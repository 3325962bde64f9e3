"""The gateway's own addresses, and what is never touched."""

from __future__ import annotations

import pytest

from netlimit.records import State
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, CLIENT6, LAN, LAN6, SERVER, SERVER6, WAN, Lab
from tests.e2e.gateway import Gateway
from tests.e2e.loads import megabits, offer, shape

BROAD = (
    {"target": "10.0.0.0/8", "direction": "to", "rate": "1 packets/h", "per": "target"},
    {"target": "10.1.0.0/16", "direction": "to", "action": "block", "interface": "lan", "protocol": "udp"},
    {"target": "fd00::/16", "direction": "to", "rate": "1 packets/h", "per": "target"},
)


def test_it_can_be_reached_whatever_the_rules_for_the_net_around_it(gateway: Gateway, lab: Lab) -> None:
    gateway.put(*BROAD[:2])
    assert streams.ping(lab.client, LAN, count=10) == 1, "answers go to the client, which is not the gateway's own"
    gateway.clear()
    (rule,) = gateway.put({"target": "10.1.0.0/24", "direction": "to", "rate": "1 packets/h", "per": "host"})
    with streams.receive(lab.gateway) as receiver:
        streams.send(lab.client, LAN, rate=500, count=100)
    assert receiver.report().packets == 100
    assert gateway.count(rule).matched_packets == 0


def test_what_it_sends_is_limited_only_when_it_is_named(gateway: Gateway, lab: Lab) -> None:
    gateway.put({"target": "10.2.0.0/16", "rate": "1 packets/h", "per": "host"})
    with streams.receive(lab.server) as receiver:
        streams.send(lab.gateway, SERVER, rate=500, count=100)
    assert receiver.report().packets == 100
    (rule,) = gateway.put({"target": WAN, "rate": "5 packets/h", "burst": 5})
    with streams.receive(lab.server) as receiver:
        report = streams.send(lab.gateway, SERVER, rate=500, count=100)
    assert receiver.report().packets == 5
    assert report.refused == 95
    assert 95 <= gateway.count(rule).dropped_packets <= 97  # it may say something of its own meanwhile


@pytest.mark.parametrize(("client", "own"), [(CLIENT, LAN), (CLIENT6, LAN6)])
def test_a_rule_that_names_it_limits_it(gateway: Gateway, lab: Lab, client: str, own: str) -> None:
    (rule,) = gateway.put({"target": own, "direction": "to", "protocol": "icmp", "rate": "3 packets/h", "burst": 3})
    assert streams.ping(lab.client, own, count=10) == 3
    counts = gateway.count(rule)
    assert (counts.matched_packets, counts.dropped_packets) == (10, 7)


@pytest.mark.parametrize("own", [LAN, LAN6])
def test_a_rule_that_names_it_can_block_it(gateway: Gateway, lab: Lab, own: str) -> None:
    gateway.put({"target": own, "direction": "to", "action": "block"})
    assert streams.ping(lab.client, own, count=3) == 0
    gateway.clear()
    assert streams.ping(lab.client, own, count=3) == 3


def test_neighbour_discovery_is_never_touched(gateway: Gateway, lab: Lab) -> None:
    gateway.put(
        {"target": "::/0", "action": "block"},
        {"target": "fe80::/64", "direction": "to", "action": "block"},
        {"target": LAN6, "direction": "to", "action": "block"},
        {"target": LAN6, "action": "block"},
    )
    lab.client.ip(f"neigh flush dev eth0 to {LAN6}")
    streams.ping(lab.client, LAN6, count=1)
    shown = lab.client.run("ip", "neigh", "show", LAN6).stdout
    assert "lladdr" in shown, "the gateway has told its link address"
    gateway.clear()
    assert streams.ping(lab.client, SERVER6, count=3) == 3


def test_loopback_is_never_touched(gateway: Gateway, lab: Lab) -> None:
    gateway.put({"target": WAN, "action": "block"})
    (rule,) = gateway.add({"target": "127.0.0.1", "action": "block"})
    assert "never touched" in gateway.wait_for_state(rule, State.DEGRADED)
    assert streams.ping(lab.gateway, "127.0.0.1", count=3) == 3
    assert streams.ping(lab.gateway, WAN, count=3) == 3


@pytest.mark.parametrize(("client", "own"), [("10.1.95.1", LAN), ("fd00:1::9501", LAN6)])
@pytest.mark.parametrize("named", ["the sender", "the gateway"])
def test_what_ends_on_it_is_shaped(gateway: Gateway, lab: Lab, client: str, own: str, named: str) -> None:
    """And what others send through it is not touched."""
    other = "fd00:1::9502" if ":" in client else "10.1.95.2"
    lab.add_client_addresses(client, other)
    gateway.put(shape(client) if named == "the sender" else shape(own, direction="to"))
    with (
        streams.receive(lab.gateway) as inside,
        streams.receive(lab.server) as outside,
        offer(lab.client, own, client, megabits=3, seconds=2.7) as sender,
        offer(lab.client, "", other, megabits=3, seconds=2.7) as passing,
    ):
        sender.report()
        sent = passing.report().packets
    assert megabits(inside.report(), client, after=0.6, during=2).is_about(1)
    assert outside.report().packets == sent


def test_one_rate_holds_for_each_of_the_ways_that_a_host_s_traffic_can_take(gateway: Gateway, lab: Lab) -> None:
    client = "10.1.95.1"
    lab.add_client_addresses(client)
    gateway.put(shape(client))
    with (
        streams.receive(lab.gateway) as inside,
        streams.receive(lab.server) as outside,
        offer(lab.client, LAN, client, megabits=3, seconds=2.7) as sender,
        offer(lab.client, "", client, megabits=3, seconds=2.7) as passing,
    ):
        sender.report()
        passing.report()
    for receiver in (inside, outside):
        assert megabits(receiver.report(), client, after=0.6, during=2).is_about(1)


def test_what_it_sends_is_shaped_when_it_is_named(gateway: Gateway, lab: Lab) -> None:
    gateway.put(shape(WAN, interface="wan"))
    with streams.receive(lab.server) as receiver, offer(lab.gateway, "", WAN, megabits=3, seconds=2.7) as sender:
        sender.report()
    assert megabits(receiver.report(), WAN, after=0.6, during=2).is_about(1)


def test_shaping_a_subnet_leaves_what_it_sends_itself_alone(gateway: Gateway, lab: Lab) -> None:
    gateway.put(shape("10.2.0.0/16", per="target"))
    with (
        streams.receive(lab.client) as receiver,
        offer(lab.gateway, CLIENT, WAN, megabits=3, seconds=2.7) as own,
        offer(lab.server, CLIENT, SERVER, megabits=3, seconds=2.7) as other,
    ):
        sent = own.report().packets
        other.report()
    report = receiver.report()
    assert report.by_source[WAN] == sent
    assert megabits(report, SERVER, after=0.6, during=2).is_about(1)
