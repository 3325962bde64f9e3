"""What a bridge floods to its ports, and hands to iptables (br_netfilter), is charged to its sender once, not once for
each port; and there is no way to have it charged never."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from netlimit.rules import Rule
from scripts.testbed.namespaces import CLIENT, CLIENT6, LAN, LAN6, SERVER, SERVER6, Lab
from tests.e2e.frames import UDP, frame, ip, send, udp
from tests.e2e.gateway import Gateway
from tests.e2e.test_told_of_neighbours import HANDED

PORTS = ("p1", "p2", "p3", "p4")
"""Devices of the bridge besides that of the client: of each frame that is for many, each gets one."""
SENT, ROOM = 20, 30
SOURCE_PORTS = count(20000)
RATE: dict[str, object] = {"rate": f"{ROOM} packets/day", "burst": ROOM}
FEW: dict[str, object] = {"rate": "1 packets/h", "burst": 5}
NEIGHBOUR, HIDDEN = "10.1.0.70", "10.1.0.71"
SAFE = (HIDDEN,)
EVERYBODY = "ff:ff:ff:ff:ff:ff"
KINDS = {
    "mDNS": ("01:00:5e:00:00:fb", "224.0.0.251"),
    "a group": ("01:00:5e:01:02:03", "239.1.2.3"),
    "all here": (EVERYBODY, "255.255.255.255"),
    "all of the network": (EVERYBODY, "10.1.255.255"),
    "mDNS, IPv6": ("33:33:00:00:00:fb", "ff02::fb"),
}


@pytest.fixture
def bridge(lab: Lab) -> Iterator[None]:
    """The client's device is a port of a bridge that has the gateway's address there, and four ports more."""
    gateway, client = lab.gateway, lab.client
    mac = gateway.run("cat", "/sys/class/net/lan/address").stdout.strip()
    gateway.run("sysctl", "-qw", *HANDED["on"])  # which by itself would be seen half a minute later
    gateway.ip("link add br0 type bridge mcast_snooping 0")
    gateway.ip(*(f"link add {port} type veth peer name {port}-end netns {client.name}" for port in PORTS))
    client.ip(*(f"link set {port}-end up" for port in PORTS))
    gateway.ip(*(f"link set {port} master br0" for port in ("lan", *PORTS)))
    gateway.ip("link set lan address 02:00:00:01:00:99", f"link set br0 address {mac}", f"addr del {LAN}/16 dev lan")
    gateway.ip(f"addr del {LAN6}/64 dev lan")
    gateway.ip(*(f"link set {device} up" for device in ("br0", *PORTS)), f"addr add {LAN}/16 dev br0")
    gateway.ip(f"addr add {LAN6}/64 dev br0 nodad")
    yield
    gateway.run("sysctl", "-qw", *HANDED["off"])
    gateway.ip("link del br0", *(f"link del {port}" for port in PORTS))
    gateway.ip(f"link set lan address {mac}", f"addr add {LAN}/16 dev lan")
    gateway.ip(f"addr add {LAN6}/64 dev lan nodad")


def put(gateway: Gateway, lab: Lab, *wanted: dict[str, object]) -> list[Rule]:
    """Put rules, and wait until the controller knows of the bridge."""
    made = gateway.put(*wanted)
    told = ("sh", "-c", "iptables-legacy-save -t mangle; ip6tables-legacy-save -t mangle")
    gateway.wait(lambda: "-g NL-PREROUTING-FLOOD" in lab.gateway.run(*told).stdout, "the bridge is seen")
    return made


def flood(lab: Lab, to: str, destination: str, port: int = 5353, source: str = CLIENT) -> None:
    """Frames for many, each a datagram of one flow that nobody has translated yet."""
    datagram = ip(source, destination, UDP, udp(source, destination, port, next(SOURCE_PORTS), b"x"), hops=255)
    send(lab.client, [frame(datagram, to)] * SENT)


def finish(gateway: Gateway, lab: Lab, rule: Rule, source: str = CLIENT) -> int:
    """How many packets the rule has counted, when all that were sent before have come through."""
    other = gateway.count(rule).matched_packets
    to = SERVER if source == CLIENT else SERVER6
    send(lab.client, [frame(ip(source, to, UDP, udp(source, to, 9, 1000, b"x")))])
    gateway.wait(lambda: gateway.count(rule).matched_packets > other, "the last packet comes through")
    return gateway.count(rule).matched_packets - 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_for_many_is_charged_once(bridge: None, gateway: Gateway, lab: Lab, kind: str) -> None:
    to, destination = KINDS[kind]
    source = CLIENT if "." in destination else CLIENT6
    (rule,) = put(gateway, lab, {"target": source, **RATE})
    before = lab.client.received_packets("p4-end")
    flood(lab, to, destination, source=source)
    assert finish(gateway, lab, rule, source) == SENT
    assert gateway.count(rule).dropped_packets == 0
    assert lab.client.received_packets("p4-end") - before >= SENT


@pytest.mark.parametrize("action", ["drop", "reject"])
def test_what_is_over_the_rate_goes_nowhere(bridge: None, gateway: Gateway, lab: Lab, action: str) -> None:
    """Neither to the ports nor to the gateway; nor where it would be rejected, which the kernel does to nobody who
    sends to many."""
    to, destination = KINDS["a group"]
    (rule,) = put(gateway, lab, {"target": CLIENT, "action": action, **FEW})
    before = lab.client.received_packets("p4-end")
    flood(lab, to, destination)
    assert finish(gateway, lab, rule) == SENT
    assert gateway.count(rule).dropped_packets == SENT - 5 + 1
    assert 5 <= lab.client.received_packets("p4-end") - before < SENT


LEADS = {
    "to a host on the bridge": ("DNAT", "--to-destination", NEIGHBOUR),
    "to the gateway": ("REDIRECT", "--to-ports", "9000"),
}


@pytest.fixture(params=LEADS)
def led(request: pytest.FixtureRequest, bridge: None, lab: Lab) -> Iterator[None]:
    """What is sent to the hidden address is led elsewhere."""
    mac = lab.client.run("cat", "/sys/class/net/p1-end/address").stdout.strip()
    lab.gateway.ip(f"neigh replace {NEIGHBOUR} lladdr {mac} dev br0 nud permanent")
    rule = ("PREROUTING", "-i", "br0", "-d", HIDDEN, "-p", "udp", "-j", *LEADS[request.param])
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-A", *rule)
    yield
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-D", *rule)


@pytest.mark.parametrize("to", [EVERYBODY, "01:00:5e:00:00:fb"])
@pytest.mark.parametrize("allowed", [False, True])
def test_frames_for_many_to_who_is_spared_are_charged_where_they_are_led_elsewhere(
    led: None, gateway: Gateway, lab: Lab, allowed: bool, to: str
) -> None:
    """A sender chooses both destinations, that of the frame and that of the packet."""
    spared: list[dict[str, object]] = [{"target": HIDDEN, "action": "allow", "direction": "to"}] if allowed else []
    rule, *_ = put(gateway, lab, {"target": CLIENT, **RATE}, *spared)
    flood(lab, to, HIDDEN, port=9000)
    assert finish(gateway, lab, rule) >= SENT


@pytest.mark.parametrize(("to", "destination", "port"), [("01:00:5e:00:00:09", "224.0.0.9", 520)])
def test_what_may_be_spared_as_it_comes_in_is_charged_where_it_goes(
    bridge: None, gateway: Gateway, lab: Lab, to: str, destination: str, port: int
) -> None:
    """RIP keeps routers alive, so that nothing of it is charged before it is known that it goes on."""
    (rule,) = put(gateway, lab, {"target": CLIENT, **RATE})
    flood(lab, to, destination, port)
    assert finish(gateway, lab, rule) >= SENT


def test_a_group_that_is_allowed_is_charged_to_nobody(bridge: None, gateway: Gateway, lab: Lab) -> None:
    to, destination = KINDS["mDNS"]
    rule, _ = gateway.put(
        {"target": CLIENT, **FEW},
        {"target": destination, "action": "allow", "direction": "to"},
    )
    before = lab.client.received_packets("p4-end")
    flood(lab, to, destination)
    assert finish(gateway, lab, rule) == 0
    assert lab.client.received_packets("p4-end") - before >= SENT
    flood(lab, *KINDS["a group"])
    assert finish(gateway, lab, rule) >= SENT


def test_limits_that_are_asked_where_packets_go_and_blocks_hold_what_is_flooded(
    bridge: None, gateway: Gateway, lab: Lab
) -> None:
    to, destination = KINDS["a group"]
    came, went = put(gateway, lab, {"target": CLIENT, **RATE}, {"target": destination, "direction": "to", **FEW})
    flood(lab, to, destination)
    assert finish(gateway, lab, came) == SENT
    assert gateway.count(went).matched_packets == SENT * len(PORTS)
    gateway.put({"target": destination, "action": "block", "direction": "to"})
    before = lab.client.received_packets("p4-end")
    flood(lab, to, destination)
    finish(gateway, lab, came)
    assert lab.client.received_packets("p4-end") - before < SENT
