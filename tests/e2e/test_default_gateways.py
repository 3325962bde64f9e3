"""A default gateway is safe for the gateway's own sake: what the two exchange is spared. What is forwarded is not: who
writes its address as his source would pass every rule `to` somebody, and who is blocked would reach it."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import count
from typing import NamedTuple

import pytest

from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, CLIENT6, SERVER_MAC, WAN, WAN6, WAN_MAC, Lab
from tests.e2e import frames
from tests.e2e.gateway import Gateway


class Side(NamedTuple):
    """What one address family has: the default gateway, and who else there is."""

    router: str
    link: str
    own: str
    client: str
    clients: str
    everybody: str


SIDES = {
    "IPv4": Side("10.2.0.254", "10.2.0.0/16", WAN, CLIENT, "10.1.0.0/16", "0.0.0.0/0"),
    "IPv6": Side("fd00:2::fe", "fd00:2::/112", WAN6, CLIENT6, "fd00:1::/64", "::/0"),
}
"""The routers' addresses are the server's, beside its own."""
PORT, SENT = 9000, 30
FEW: dict[str, object] = {"rate": "1 packets/h", "burst": 10}
BLOCK: dict[str, object] = {"action": "block"}
TO: dict[str, object] = {"direction": "to"}
RULES: dict[str, tuple[str, dict[str, object], int]] = {
    "limited by a budget": ("clients", {**TO, "protocol": "udp", "per": "target", **FEW}, 10),
    "limited": ("client", {**TO, **FEW}, 10),
    "new connections": ("client", {**TO, "rate": "1 connections/h", "burst": 10}, 10),
    "connections at once": ("client", {**TO, "rate": "10 connections"}, 10),
    "limited by the source": ("link", {"per": "host", **FEW}, 10),
    "limited by peers": ("link", {"per": "peer", **FEW}, 10),
    "blocked": ("client", {**TO, **BLOCK}, 0),
    "blocked by the source": ("link", BLOCK, 0),
    "blocked by a device": ("link", {**BLOCK, "interface": "wan"}, 0),
}
"""Each with what it names, and how many datagrams from the default gateway to the client pass."""
SOURCE_PORTS = count(20000)
TRANSLATES = {"iptables-legacy": "192.0.2.0/24", "ip6tables-legacy": "2001:db8::/32"}
"""Whom masquerades are for, who are not here: it matters that somebody may translate."""


@pytest.fixture(scope="module", params=[False, True], ids=["routed", "translating"])
def surroundings(request: pytest.FixtureRequest, lab: Lab) -> Iterator[None]:
    """Before the controller begins."""
    for side, length in zip(SIDES.values(), (16, 64), strict=True):
        lab.server.ip(f"addr replace {side.router}/{length} dev eth0{' nodad' if ':' in side.router else ''}")
        lab.gateway.ip(f"neigh replace {side.router} lladdr {SERVER_MAC} nud permanent dev wan")
        lab.gateway.ip(f"route replace default via {side.router}")
    for tool, network in TRANSLATES.items() if request.param else ():
        lab.gateway.run(tool, "-w", "-t", "nat", "-A", "POSTROUTING", "-s", network, "-j", "MASQUERADE")
    yield
    for tool, network in TRANSLATES.items() if request.param else ():
        lab.gateway.run(tool, "-w", "-t", "nat", "-D", "POSTROUTING", "-s", network, "-j", "MASQUERADE")


@pytest.fixture(params=SIDES)
def side(request: pytest.FixtureRequest, surroundings: None, gateway: Gateway) -> Side:
    chosen = SIDES[request.param]

    def is_safe() -> bool:
        (status,) = gateway.store.hosts()
        why = status.safe_reasons.get(chosen.router)
        return why is not None and why.text == "default gateway"

    gateway.wait(is_safe, f"{chosen.router} to be safe")
    return chosen


def send(lab: Lab, src: str, dst: str) -> int:
    """How many datagrams arrive, each a flow of its own: from the wan to the client, or the other way round."""
    begins_at_client = src in (CLIENT, CLIENT6)
    flows = [frames.udp(src, dst, PORT, next(SOURCE_PORTS), b"x") for _ in range(SENT)]
    packets = [frames.ip(src, dst, frames.UDP, each) for each in flows]
    sender, receiver = (lab.client, lab.server) if begins_at_client else (lab.server, lab.client)
    with streams.receive(receiver, PORT) as receiving:
        frames.send(sender, [frames.frame(each, **({} if begins_at_client else {"to": WAN_MAC})) for each in packets])
    return receiving.report().packets


@pytest.mark.parametrize("kind", RULES)
def test_who_feigns_its_address_is_held(gateway: Gateway, lab: Lab, side: Side, kind: str) -> None:
    named, fields, passing = RULES[kind]
    gateway.put({"target": getattr(side, named), **fields})
    assert send(lab, side.router, side.client) == passing
    assert streams.ping(lab.gateway, side.router, count=12) == 12


@pytest.mark.parametrize(
    ("fields", "passing"), [(BLOCK, 0), ({"per": "target", **FEW}, 10)], ids=["blocked", "limited"]
)
def test_who_is_held_does_not_reach_it(
    gateway: Gateway, lab: Lab, side: Side, fields: dict[str, object], passing: int
) -> None:
    gateway.put({"target": side.client, **fields})
    assert send(lab, side.client, side.router) == passing
    gateway.clear()
    gateway.put({"target": side.link, "direction": "to", **fields})
    assert send(lab, side.client, side.router) == passing


def test_the_gateway_and_it_reach_each_other_whatever_is_blocked(gateway: Gateway, lab: Lab, side: Side) -> None:
    gateway.put(*({"target": each, "direction": way, **BLOCK}
                  for each in (side.everybody, side.link) for way in ("from", "to")))  # fmt: skip
    assert streams.ping(lab.gateway, side.router, count=3) == 3
    assert streams.ping(lab.server, side.own, count=3, source=side.router) == 3
    assert streams.ping(lab.gateway, side.client, count=2) == 0
    assert send(lab, side.router, side.client) == 0


def test_what_it_tells_of_packets_that_are_too_big_arrives_though_its_network_is_blocked(
    gateway: Gateway, lab: Lab, side: Side
) -> None:
    gateway.put({"target": side.link, **BLOCK})
    assert tell_size(lab, side, side.router) == SENT
    other = str(ip_address(side.router) - 1)
    assert tell_size(lab, side, other) == 0, "that of others does not"
    gateway.put({"target": side.client, "direction": "to", **BLOCK})
    assert tell_size(lab, side, side.router) == 0, "nor to who is blocked"


def tell_size(lab: Lab, side: Side, router: str) -> int:
    """How many messages of a router reach the client, of packets that were too big."""
    sent = frames.ip(side.client, "192.0.2.1" if ":" not in router else "2001:db8::1", frames.UDP, bytes(64))
    if ":" in router:
        message, protocol = frames.icmp6(router, side.client, 2, struct.pack("!I", 1280) + sent), frames.ICMP6
    else:
        quoted = struct.pack("!BBHI", 3, 4, 0, 1300) + sent[:28]
        message, protocol = quoted[:2] + struct.pack("!H", frames.checksum(quoted)) + quoted[4:], 1
    packet = frames.frame(frames.ip(router, side.client, protocol, message), to=WAN_MAC)
    before = count_told(lab, router)
    frames.send(lab.server, [packet] * SENT)
    time.sleep(0.1)
    return count_told(lab, router) - before


def count_told(lab: Lab, router: str) -> int:
    if ":" in router:
        found = lab.client.run("cat", "/proc/net/snmp6").stdout.split()
        return int(found[found.index("Icmp6InPktTooBigs") + 1])
    names, values = (line.split() for line in lab.client.run("grep", "^Icmp:", "/proc/net/snmp").stdout.splitlines())
    return int(values[names.index("InDestUnreachs")])
