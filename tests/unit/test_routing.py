"""By which devices a shaping rule's traffic leaves, read from routes."""

from __future__ import annotations

import time
from dataclasses import replace
from ipaddress import IPv4Network, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlimit.compile import Compilation
from netlimit.conflicts import Finding, Severity, Spoiled
from netlimit.limits import MOST_ENDING, Facts, own_addresses
from netlimit.routing import Way, find_entrances, find_home, find_stacked, find_towards, find_way, leads_towards
from netlimit.rules import parse_rule
from netlimit.tree import INGRESS_DEVICE, Device, Lookup, Route, Topology
from netlimit.untouched import spare
from tests.unit.shapes import HOME, UPLINKS, WITHOUT_WAN, shape
from tests.unit.strategies import NOW

OWN = own_addresses(("10.1.0.1", "10.2.0.1", "fd00:1::1"))
CARD = Device(1, True)


def way(target: str, topology: Topology = HOME, **fields: object) -> Way:
    return find_way(shape(1, target, per="target", **fields), Facts(own=OWN, topology=topology))


def routed(*routes: Route) -> Topology:
    return Topology({device: CARD for route in routes for device in route.devices}, routes)


@pytest.mark.parametrize(
    ("target", "devices"),
    [
        ("10.1.0.2", ("lan",)),
        ("10.1.0.0/16", ("lan",)),
        ("10.2.0.2", ("wan",)),
        ("192.0.2.7", ("wan",)),
        ("0.0.0.0/0", ("lan", "wan")),
        ("10.0.0.0/8", ("lan", "wan")),
        ("10.0.0.0/15", ("lan", "wan")),
        ("fd00:1::2", ("lan",)),
        ("fd00:1::/64", ("lan",)),
        ("2001:db8::/32", ("wan",)),
        ("fd00::/16", ("lan", "wan")),
    ],
)
def test_towards_a_target_it_leaves_where_routes_lead_there(target: str, devices: tuple[str, ...]) -> None:
    assert way(target).devices == devices


@pytest.mark.parametrize(
    ("target", "devices"),
    [
        ("10.1.0.2", ("wan", INGRESS_DEVICE)),
        ("10.1.0.0/24", ("wan", INGRESS_DEVICE)),
        ("fd00:1::2", ("wan", INGRESS_DEVICE)),
        ("10.2.0.2", ("lan", "wan", INGRESS_DEVICE)),
        ("192.0.2.7", ("lan", "wan", INGRESS_DEVICE)),
        ("0.0.0.0/0", ("wan", INGRESS_DEVICE)),
        ("10.1.0.1", ("lan", "wan")),
        ("fd00:1::1", ("lan", "wan")),
    ],
)
def test_from_a_target_it_leaves_elsewhere_or_ends_here(target: str, devices: tuple[str, ...]) -> None:
    """By the default route even back to where it came from; the host's own traffic by any device."""
    assert way(target, direction="from").devices == devices


def test_the_longest_prefix_decides() -> None:
    topology = routed(Route("10.0.0.0/8", ("a",)), Route("10.1.0.0/16", ("b",)), Route("10.1.2.0/24", ("c",)))
    assert way("10.1.3.4", topology).devices == ("b",)
    assert way("10.1.0.0/16", topology).devices == ("b", "c")
    assert way("10.1.2.0/25", topology).devices == ("c",)


def test_all_next_hops_of_a_route_and_all_tables_count() -> None:
    topology = routed(Route("0.0.0.0/0", ("a", "b")), Route("0.0.0.0/0", ("c",)), Route("10.1.0.0/16", ("lan",), True))
    assert way("192.0.2.7", topology).devices == ("a", "b", "c")
    assert way("10.1.0.2", topology, direction="from").devices == ("a", "b", "c", INGRESS_DEVICE)


MAIN, GUESTS = 254, 100
SITES = (
    Route("10.1.0.0/16", ("lan",), True, attached=True),
    Route("10.4.0.0/16", ("lan",)),
    Route("203.0.113.0/24", ("net",)),
    Route("0.0.0.0/0", ("net",)),
    Route("0.0.0.0/0", ("wan",), table=GUESTS),
)


def led(*lookups: Lookup, routes: tuple[Route, ...] = SITES) -> Topology:
    return replace(routed(*routes), lookups=lookups)


@pytest.mark.parametrize(
    ("lookups", "devices"),
    [
        ((), ("net", "wan")),
        ((Lookup(4, MAIN, always=True),), ("net", "wan")),
        ((Lookup(4, GUESTS), Lookup(4, MAIN, always=True)), ("net", "wan")),
        ((Lookup(4, MAIN, always=True), Lookup(4, GUESTS)), ("net",)),
        ((Lookup(4, GUESTS, always=True), Lookup(4, MAIN, always=True)), ("wan",)),
        ((Lookup(6, GUESTS, always=True), Lookup(4, GUESTS), Lookup(4, MAIN, always=True)), ("net", "wan")),
        ((Lookup(4, MAIN, True, 0), Lookup(4, GUESTS), Lookup(4, MAIN, True)), ("net",)),
        ((Lookup(4, MAIN, True, 24), Lookup(4, GUESTS), Lookup(4, MAIN, True)), ("net", "wan")),
        ((Lookup(4, MAIN, True, 24), Lookup(4, GUESTS, True, 0), Lookup(4, MAIN, True)), ("net",)),
    ],
)
def test_the_best_of_each_table_counts_that_routing_rules_may_lead_to(
    lookups: tuple[Lookup, ...], devices: tuple[str, ...]
) -> None:
    """A table that no rule names may be that of a VRF, or be led to by segment routing."""
    assert way("203.0.113.5", led(*lookups)).devices == devices
    assert way("203.0.113.0/24", led(*lookups)).devices == devices
    topology = led(*lookups)
    assert leads_towards(ip_network("203.0.113.5"), ("wan",), topology) == ("wan" in devices)


def test_a_route_for_some_packets_alone_leaves_the_others_to_the_next() -> None:
    """By their TOS, or by where they come from."""
    partial = Route("203.0.113.0/24", ("site",), partial=True)
    topology = led(*(Lookup(4, GUESTS), Lookup(4, MAIN, always=True)), routes=(*SITES, partial))
    assert way("203.0.113.5", topology).devices == ("net", "site", "wan")
    nearer = Route("203.0.113.5/32", ("vpn",), partial=True)
    topology = led(Lookup(4, MAIN, always=True), Lookup(4, GUESTS), routes=(*SITES, nearer))
    assert way("203.0.113.5", topology).devices == ("net", "vpn")
    assert leads_towards(ip_network("203.0.113.5"), ("net",), topology)
    wider = Route("203.0.0.0/16", ("vpn",), partial=True)
    assert way("203.0.113.5", routed(*SITES[:4], wider)).devices == ("net",)


@pytest.mark.parametrize(
    ("thrown", "target", "devices"),
    [
        ("203.0.113.0/24", "203.0.113.5", ("net",)),
        ("203.0.113.0/24", "203.0.113.0/24", ("net",)),
        ("203.0.113.5/32", "203.0.113.0/24", ("net", "wan")),  # the rest is led away by the table that is asked first
        ("203.0.0.0/16", "203.0.113.5", ("net",)),
        ("0.0.0.0/0", "203.0.113.5", ("net", "wan")),  # beside the route of the same length: one of both
        ("198.51.100.0/24", "203.0.113.5", ("wan",)),
        ("203.0.112.0/24", "203.0.113.5", ("wan",)),
    ],
)
def test_a_table_may_leave_networks_to_the_next(thrown: str, target: str, devices: tuple[str, ...]) -> None:
    """`ip route add throw …`, as VPNs do in a table of their own."""
    tables = led(Lookup(4, GUESTS, always=True), Lookup(4, MAIN, always=True))
    topology = replace(tables, throws=(Route(thrown, (), table=GUESTS),))
    assert way(target, tables).devices == ("wan",)
    assert way(target, topology).devices == devices
    assert leads_towards(ip_network(target), ("net",), topology) == ("net" in devices)


def test_one_that_is_left_to_the_next_for_some_packets_alone_is_led_by_both() -> None:
    tables = led(Lookup(4, GUESTS, always=True), Lookup(4, MAIN, always=True))
    topology = replace(tables, throws=(Route("203.0.113.0/24", (), table=GUESTS, partial=True),))
    assert way("203.0.113.5", topology).devices == ("net", "wan")


def test_what_another_table_leaves_to_the_next_is_not_left_by_this() -> None:
    tables = led(Lookup(4, GUESTS, always=True), Lookup(4, MAIN, always=True))
    topology = replace(tables, throws=(Route("203.0.113.0/24", (), table=7),))
    assert way("203.0.113.5", topology).devices == ("wan",)


def test_parts_of_a_network_behind_another_device_have_no_home_there() -> None:
    """What one part sends another leaves by that device."""
    topology = routed(Route("10.0.0.0/8", ("lan",)), Route("10.9.0.0/16", ("wan",)), Route("10.8.0.0/16", ("dmz",)))
    whole = ip_network("10.0.0.0/8")
    assert find_home(whole, "wan", topology) is None
    assert find_home(whole, "vpn", topology) == whole


def test_who_is_attached_is_not_looked_for_by_a_default_route() -> None:
    rules = Lookup(4, GUESTS), Lookup(4, MAIN, always=True)
    assert way("10.1.0.2", led(*rules)).devices == ("lan",)
    assert way("10.1.0.0/16", led(*rules)).devices == ("lan",)
    assert way("10.4.0.2", led(*rules)).devices == ("lan", "wan")
    nearer = (*SITES, Route("10.1.0.0/24", ("vpn",), True, table=GUESTS))
    assert way("10.1.0.2", led(*rules, routes=nearer)).devices == ("lan", "vpn")


def test_with_one_arm_it_leaves_where_it_came_from() -> None:
    topology = routed(Route("10.1.0.0/16", ("one",), True), Route("0.0.0.0/0", ("one",)))
    assert way("10.1.0.2", topology).devices == ("one",)
    assert way("10.1.0.2", topology, direction="from").devices == ("one", INGRESS_DEVICE)


def test_where_no_other_network_is_its_traffic_can_only_end_here() -> None:
    topology = routed(Route("10.1.0.0/16", ("lan",), True))
    assert way("10.1.0.2", topology, direction="from").devices == (INGRESS_DEVICE,)


def test_to_the_host_itself_it_ends_here() -> None:
    assert way("10.1.0.1").devices == (INGRESS_DEVICE,)
    assert way("10.1.0.1", Topology()).devices == (INGRESS_DEVICE,)


ENDING = replace(HOME, ending=("10.1.255.255/32", "198.51.100.7/32", "10.5.0.0/16", "fd00:1::/128", "fd05::/64"))


@pytest.mark.parametrize(
    ("target", "devices"), [("10.1.255.255", ("lan",)), ("198.51.100.7", ("wan",)), ("fd00:1::", ("lan",))]
)
def test_to_an_address_that_ends_here_by_a_route_it_ends_here_and_may_be_sent_from_here(
    target: str, devices: tuple[str, ...]
) -> None:
    assert way(target, ENDING).devices == (*devices, INGRESS_DEVICE)
    assert way(target, ENDING, direction="from").devices == ("lan", "wan")
    assert way("198.51.100.7", replace(WITHOUT_WAN, ending=ENDING.ending)).devices == (INGRESS_DEVICE,)


def test_to_an_address_in_a_network_that_ends_here_nothing_is_shaped() -> None:
    for target in ("10.5.0.9", "fd05::9"):
        assert f"{target} ends on this host by a route" in str(way(target, ENDING).problem)
    assert way("10.6.0.9", ENDING).devices == ("wan",)
    many = replace(HOME, ending=tuple(f"192.{n >> 8}.{n & 255}.1/32" for n in range(MOST_ENDING + 100)))
    assert sum(way(each, many).problem is not None for each in many.ending) == 100


def test_what_ends_here_leaves_by_no_device_that_is_named() -> None:
    assert "10.1.0.1 is this host's own" in str(way("10.1.0.1", interface="lan").problem)
    for interface in (None, "lan"):
        assert "All of 10.5.0.0/16 ends on this host" in str(way("10.5.0.0/16", ENDING, interface=interface).problem)
        assert "10.5.0.9 ends on this host by a route" in str(way("10.5.0.9", ENDING, interface=interface).problem)
    found = way("198.51.100.7", ENDING, interface="wan")
    assert found.devices == ("wan",)
    assert "hits only what this host itself sends there by wan" in str(found.note)


def test_a_named_device_needs_no_route() -> None:
    assert way("192.0.2.7", interface="lan").devices == ("lan",)
    assert way("10.1.0.1", direction="from", interface="lan").devices == ("lan",)
    assert way("10.1.0.2", direction="from", interface="lan").devices == ("lan",)


def test_a_device_that_is_not_there_is_named_with_those_that_are() -> None:
    assert way("10.1.0.2", interface="dmz") == Way(problem="There is no device dmz on this host; there are lan, wan.")
    assert "there are none but loopback" in str(way("10.1.0.2", Topology(), interface="dmz").problem)
    assert way("10.1.0.2", interface=INGRESS_DEVICE).problem, "what ends here is found without its name"


@pytest.mark.parametrize("target", ["10.1.0.2", "192.0.2.0/24"])
def test_where_no_route_leads_there_is_no_place(target: str) -> None:
    found = way(target, routed(Route("fd00:1::/64", ("lan",), True)))
    assert (found.devices, found.note) == ((), None)
    assert found.problem == f"No route leads to {target}; name the device in `interface`."


def test_nor_for_what_the_host_sends_itself() -> None:
    found = way("10.1.0.1", routed(Route("fd00:1::/64", ("lan",), True)), direction="from")
    assert found.problem == "No route leads away from 10.1.0.1; name the device in `interface`."


def test_of_two_uplinks_the_operator_hears() -> None:
    note = way("192.0.2.7", UPLINKS).note
    assert note == (
        "Its traffic can leave by other and wan: the rate holds on each of them by itself. `interface` names one."
    )
    assert "other and wan" in str(way("10.1.0.2", UPLINKS, direction="from").note)
    assert way("192.0.2.7").note is None
    assert way("10.1.0.2", direction="from").note is None
    three = routed(*(Route("0.0.0.0/0", (name,)) for name in "abc"))
    assert "a, b and c" in str(way("192.0.2.7", three).note)


def test_home_is_the_network_behind_a_device_that_a_target_lies_in() -> None:
    lan = ip_network("10.1.0.0/16")
    assert find_home(ip_network("10.1.2.0/24"), "lan", HOME) == lan
    assert find_home(lan, "lan", HOME) == lan
    assert find_home(ip_network("10.0.0.0/8"), "lan", HOME) is None
    assert find_home(ip_network("10.1.2.3"), "wan", HOME) == lan, "what they send each other does not leave there"
    assert find_home(ip_network("10.4.2.3"), "wan", led()) == ip_network("10.4.0.0/16")
    assert find_home(ip_network("10.4.2.3"), "lan", led()) is None, "it is behind a gateway there"
    assert find_home(ip_network("192.0.2.7"), "wan", HOME) is None, "it is behind a gateway there"
    assert find_home(ip_network("192.0.2.7"), "lan", HOME) is None, "a default route makes no network"
    assert find_home(ip_network("fd00:1::2"), "lan", HOME) == ip_network("fd00:1::/32")


NETWORKS = st.builds(
    lambda address, length: IPv4Network((address << 29, length), strict=False), st.integers(0, 7), st.integers(0, 4)
)
DEVICES = st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True).map(tuple)


@given(st.lists(st.builds(Route, NETWORKS.map(str), DEVICES), max_size=12), NETWORKS, DEVICES)
def test_a_target_is_led_towards_the_devices_that_routes_name(
    routes: list[Route], target: IPv4Network, devices: tuple[str, ...]
) -> None:
    topology = routed(*routes)
    assert leads_towards(target, devices, topology) == bool({*devices} & {*find_towards(target, topology)})


def test_many_rules_are_looked_for_in_many_routes_at_once() -> None:
    blocks = [f"10.{block >> 8}.{block & 255}" for block in range(20_000)]
    topology = routed(
        Route("0.0.0.0/0", ("wan",)),
        *(Route(f"{each}.64/26", ("vpn" if i % 2 else "lan",)) for i, each in enumerate(blocks)),
    )
    compilation = Compilation(Facts(own=OWN, topology=topology))
    for number, block in enumerate(blocks[:3000], start=1):
        rule = parse_rule({"target": f"{block}.0/24", "rate": "100 packets/s", "per": "target"}, NOW)
        assert compilation.put(replace(rule, id=number)) is None
    finding = Finding("redirected", Severity.SERIOUS, "It is led away.", "", Spoiled.ENTERING, ("dmz", "lan"))
    began = time.process_time()
    assert compilation.find_spoiled({Spoiled.ENTERING: finding}).keys() == {*range(1, 3001, 2)}
    assert time.process_time() - began < 4


def test_what_no_tool_can_name_is_left_out_and_told() -> None:
    routes = Route("10.1.0.0/16", ("lan",)), Route("0.0.0.0/0", ("wan+", "wan"))
    ports = {"lan": CARD, "wan": CARD, "port": replace(CARD, master="br+")}
    odd = {"wan+": CARD, "br+": replace(CARD, kind="bridge"), "down+": replace(CARD, up=False)}
    topology = Topology(ports, routes, unspeakable=odd)
    sent = way("10.1.0.0/16", topology, direction="from")
    assert (sent.devices, sent.note) == (("wan", INGRESS_DEVICE), None)
    assert "What leaves by wan+ is not shaped. What comes in by br+, wan+ and ends on this host" in str(sent.missing)
    assert find_entrances(topology) == ("lan", "wan"), "the port's packets come in by the bridge"
    assert way("10.1.0.2", topology) == Way(("lan",))
    assert "wan+" in str(way("10.7.0.2", replace(topology, routes=(Route("0.0.0.0/0", ("wan+",)),))).problem)


def test_no_rule_spares_the_vrfs_whose_names_begin_like_that_of_one() -> None:
    vrf = replace(CARD, kind="vrf")
    facts = Facts(topology=Topology({"red": vrf}, unspeakable={"blue+": vrf}))
    told = [rule.text for hook in ("PREROUTING", "OUTPUT") for rule in spare(4, hook, facts)]
    assert any("red" in text for text in told)
    assert not any("blue" in text for text in told)
    assert facts.vrfs == {"red", "blue+"}


def test_what_comes_by_twice_is_known_by_its_device() -> None:
    kinds = {"lan": "", "veth": "veth", "br": "bridge", "vmac": "macvlan", "tag": "vlan", "ip": "ipvlan"}
    devices = {name: replace(CARD, kind=kind, index=number) for number, (name, kind) in enumerate(kinds.items(), 1)}
    assert find_stacked(Topology(devices, ())) == (6,)


def test_what_a_bridge_forwards_between_its_ports_is_told_not_to_be_shaped() -> None:
    one = replace(HOME, devices={"lan": Device(1, True, "bridge"), "p1": Device(3, True, master="lan"), "wan": CARD})
    two = replace(one, unspeakable={"p+": Device(4, True, master="lan")})
    assert way("10.1.0.2", one).note is None
    assert way("192.0.2.7", two).note is None
    for fields in ({}, {"interface": "lan"}):
        found = way("10.1.0.2", two, **fields)
        assert (found.devices, found.missing) == (("lan",), None)
        assert str(found.note).startswith("What lan forwards from one port to another leaves by the ports")
    assert "and is not shaped" in str(way("0.0.0.0/0", two, interface="lan").note)
