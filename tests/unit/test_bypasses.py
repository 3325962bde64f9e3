"""Where what a target sends leaves past the queues of its rule, and what the operator hears."""

from __future__ import annotations

from dataclasses import replace

import pytest

from netlimit.bypasses import Bypass, find_bypasses, say_bypasses
from netlimit.limits import Facts, own_addresses
from netlimit.shaping import Note
from netlimit.tree import Device, Route, Topology
from tests.unit.shapes import Gateway, gateway_facts, shape

OWN = own_addresses(("10.1.0.1", "fd00:1::1"))
UPLINK = Route("0.0.0.0/0", ("net",), gateways=("192.0.2.1",)), Route("::/0", ("net",), gateways=("fe80::1",))


def near(prefix: str, device: str = "lan") -> Route:
    """A network in which the host has an address."""
    return Route(prefix, (device,), connected=True, attached=True)


def via(prefix: str, *gateways: str, device: str = "lan") -> Route:
    return Route(prefix, (device,), connected=not gateways, gateways=gateways)


def home(*routes: Route, kind: str = "") -> Topology:
    """A gateway with a device `lan` of a kind, others, and an uplink."""
    devices = {device: Device(1, True) for route in (*routes, *UPLINK) for device in route.devices}
    return Topology(devices | {"lan": Device(2, True, kind)}, (*UPLINK, *routes))


def missed(target: str, topology: Topology, **fields: object) -> dict[str, tuple[str, ...]]:
    rule = shape(1, target, per="target", **{"direction": "from", **fields})
    return {each.device: each.networks for each in find_bypasses(rule, Facts(own=OWN, topology=topology))}


LAN, SECOND = near("10.1.0.0/16"), near("10.3.0.0/16")
LAN6 = near("fd00:1::/64")


@pytest.mark.parametrize(
    ("target", "routes"),
    [
        ("10.1.0.2", (LAN,)),
        ("10.1.0.0/16", (LAN,)),
        ("10.1.0.0/24", (LAN, via("10.1.5.0/24", "10.1.0.9"), via("10.1.0.7/32"))),
        ("10.1.0.7", (LAN, via("10.1.0.7/32"))),
        ("10.1.0.2", (LAN, near("10.3.0.0/16", "dmz"))),
        ("10.1.0.2", (LAN, near("169.254.0.0/16"), via("224.0.0.0/4"))),
        ("10.1.0.0/16", (LAN, near("10.1.0.0/16", "vrrp"))),
        ("10.4.0.2", (LAN, via("10.4.0.0/16", "10.1.0.9"))),
        ("10.4.0.2", (LAN, via("10.4.0.0/16", "10.1.0.8", "10.1.0.9"), via("10.5.0.0/16", "10.1.0.9"))),
        ("fd00:1::2", (LAN6, near("2001:db8::/64"), Route("2001:db8:1::/64", ("lan",), True))),
        ("fd00:4::2", (LAN6, near("2001:db8::/64"), via("fd00:4::/64", "fe80::9"), via("fd00:5::/64", "fe80::9"))),
        ("192.0.2.7", (LAN,)),
        ("10.1.0.1", (LAN, SECOND)),
    ],
)
def test_what_does_not_come_by_the_host_is_not_missed(target: str, routes: tuple[Route, ...]) -> None:
    assert missed(target, home(*routes)) == {}


@pytest.mark.parametrize(
    ("target", "routes", "networks"),
    [
        ("10.1.0.2", (LAN, SECOND), ("10.3.0.0/16",)),
        ("10.3.0.0/16", (LAN, SECOND), ("10.1.0.0/16",)),
        ("10.1.0.2", (LAN, SECOND, via("10.4.0.0/16", "10.3.0.9")), ("10.3.0.0/16", "10.4.0.0/16")),
        ("10.1.0.2", (LAN, via("10.4.0.0/16", "10.1.0.9")), ("10.4.0.0/16",)),
        ("10.1.0.2", (LAN, via("10.0.0.0/8", "10.1.0.9")), ("10.0.0.0/8",)),
        ("10.4.0.2", (LAN, via("10.4.0.0/16", "10.1.0.9"), via("10.5.0.0/16", "10.1.0.8")), ("10.5.0.0/16",)),
        ("10.4.0.2", (LAN, SECOND, via("10.4.0.0/16", "10.1.0.9")), ("10.3.0.0/16",)),
        ("10.9.0.2", (via("10.9.0.2/32"), via("10.9.0.3/32"), via("10.9.0.4/32")), ("10.9.0.4",)),
        ("fd00:1::2", (LAN6, via("fd00:4::/64", "fe80::9")), ("fd00:4::/64",)),
    ],
)
def test_what_it_sends_to_other_networks_behind_its_device_is_missed(
    target: str, routes: tuple[Route, ...], networks: tuple[str, ...]
) -> None:
    assert missed(target, home(*routes)) == {"lan": networks}


def test_of_a_target_around_several_devices_each_misses_something() -> None:
    topology = home(LAN, near("10.2.0.0/16", "dmz"))
    assert missed("10.0.0.0/8", topology) == {"dmz": ("10.2.0.0/16",), "lan": ("10.1.0.0/16",)}
    assert missed("0.0.0.0/0", topology) == {"dmz": ("10.2.0.0/16",), "lan": ("10.1.0.0/16",)}
    assert missed("10.0.0.0/8", home(LAN)) == {}
    assert missed("10.0.0.0/8", home(LAN, SECOND)) == {"lan": ("10.1.0.0/16", "10.3.0.0/16")}
    assert missed("10.0.0.0/8", home(LAN, near("10.2.0.0/16", "net"))) == {"lan": ("10.1.0.0/16",)}


PEERS = near("10.8.0.0/24")


@pytest.mark.parametrize(
    ("kind", "target", "routes", "networks"),
    [
        ("wireguard", "10.8.0.2", (PEERS,), ("10.8.0.0/24",)),
        ("wireguard", "10.8.0.2", (near("10.8.0.0/30"),), ()),
        ("wireguard", "10.8.0.2", (via("10.8.0.2/32"),), ()),
        ("wireguard", "10.8.0.2", (via("10.8.0.2/32"), via("10.8.0.3/32")), ("10.8.0.3",)),
        ("wireguard", "10.50.0.2", (near("10.8.0.0/30"), via("10.50.0.0/16")), ()),
        ("wireguard", "10.50.0.2", (via("10.50.0.0/16"), via("10.51.0.0/16")), ("10.51.0.0/16",)),
        ("wireguard", "203.0.113.5", (via("0.0.0.0/1"), via("128.0.0.0/1"), near("10.8.0.0/30")), ()),
        ("tun", "10.8.0.2", (PEERS,), ("10.8.0.0/24",)),
        ("gre", "10.8.0.2", (PEERS,), ("10.8.0.0/24",)),
        ("gre", "10.50.0.2", (near("10.8.0.0/30"), via("10.50.0.0/16"), via("10.51.0.0/16")), ()),
        ("ppp", "10.8.0.2", (via("10.8.0.2/32"), via("10.50.0.0/16")), ()),
        ("bridge", "10.8.0.2", (PEERS,), ()),
    ],
)
def test_peers_of_a_tunnel_reach_each_other_by_the_host(
    kind: str, target: str, routes: tuple[Route, ...], networks: tuple[str, ...]
) -> None:
    assert missed(target, home(*routes, kind=kind)) == ({"lan": networks} if networks else {})


def test_other_rules_miss_nothing_or_are_told_elsewhere() -> None:
    topology = home(LAN, SECOND)
    assert missed("10.1.0.2", topology, direction="to") == {}
    assert missed("10.1.0.2", topology, interface="net") == {}
    assert missed("10.1.0.2", replace(topology, routes=(*topology.routes, via("0.0.0.0/0", "10.1.0.9")))) == {}


def test_it_is_said_with_what_would_help() -> None:
    assert say_bypasses((Bypass("lan", ("10.3.0.0/16",)),)) == TOLD.text
    many = tuple(Bypass(f"lan{n}", ("10.3.0.0/16", "10.4.0.0/16", "10.5.0.0/16"), more=True) for n in range(5))
    assert say_bypasses(many[:2]) == (
        "What it sends to 10.3.0.0/16, 10.4.0.0/16, 10.5.0.0/16 and others by lan0, and to 10.3.0.0/16, 10.4.0.0/16, "
        "10.5.0.0/16 and others by lan1 is not shaped. Rules with `interface: lan0` and `interface: lan1` shape it."
    )
    assert ", and by 2 more devices is not shaped." in say_bypasses(many)


# -- what becomes of the rule ---------------------------------------------------------------------------------------


TOLD = Note("What it sends to 10.3.0.0/16 by lan is not shaped. A rule with `interface: lan` shapes it.", degraded=True)


def gateway(topology: Topology) -> Gateway:
    made = Gateway(replace(gateway_facts, topology=topology))
    made.put(shape(1, "10.1.0.2", direction="from"))
    return made


def test_a_rule_that_misses_something_is_degraded_until_another_shapes_it() -> None:
    made = gateway(home(LAN, SECOND))
    shaping = made.compilation.shaping
    assert shaping.notes == {1: TOLD}
    made.put(shape(2, "10.1.0.2", direction="from", interface="net"))
    made.put(shape(3, "10.1.0.2", direction="from", interface="lan", protocol="tcp"))
    made.put(shape(4, "10.1.0.2", interface="lan"))
    assert shaping.notes == {1: TOLD}
    for number in (2, 3, 4):
        made.drop(number)
    made.put(shape(5, "10.1.0.2", direction="from", interface="lan"))
    assert made.compilation.problems == {}
    assert shaping.notes == {}
    made.drop(5)
    assert shaping.notes == {1: TOLD}
    made.drop(1)
    assert shaping.notes == {}


def test_it_is_said_beside_what_else_there_is_to_say() -> None:
    uplinks = home(LAN, SECOND, Route("0.0.0.0/0", ("dsl",), gateways=("192.0.2.1",)))
    note = gateway(uplinks).compilation.shaping.notes[1]
    assert note.degraded
    assert note.text.startswith("Its traffic can leave by dsl and net:")
    assert note.text.endswith(TOLD.text)


def test_it_follows_the_routes() -> None:
    made = gateway(home(LAN))
    shaping = made.compilation.shaping
    assert shaping.notes == {}
    made.route(home(LAN, SECOND))
    assert shaping.notes == {1: TOLD}
    made.route(home(LAN))
    assert shaping.notes == {}
