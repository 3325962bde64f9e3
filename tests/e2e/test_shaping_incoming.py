"""What ends on the gateway is shaped by whatever device it comes in, but where that device is allowed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from netlimit.records import State
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, CLIENT6, LAN, LAN6, LAN_MAC, SERVER, Lab
from tests.e2e import frames
from tests.e2e.gateway import Gateway
from tests.e2e.loads import shape

SENT, PORT = 30, 9000
ENDS = {4: (CLIENT, LAN), 6: (CLIENT6, LAN6)}
ROUTED, AROUND = "198.51.100.7", "198.51.100.64/26"
NOBODY = "0.0.0.0"  # noqa: S104  who has no address yet sends from it
EVERYBODY = "ff:ff:ff:ff:ff:ff"
OTHERS = (
    ("10.1.255.255", EVERYBODY),
    ("10.1.255.255", LAN_MAC),
    ("10.2.255.255", LAN_MAC),
    ("255.255.255.255", EVERYBODY),
    (ROUTED, LAN_MAC),
    ("fd00:1::", LAN_MAC),
    ("fd00:2::", LAN_MAC),
)
"""What ends on the gateway and is no address of its own, and to whom frames with it go."""


@pytest.fixture
def bare(lab: Lab) -> Iterator[str]:
    """A device `bare` of the gateway without addresses and routes, `far` at the client: its hardware address."""
    lab.gateway.ip(f"link add bare type veth peer name far netns {lab.client.name}", "link set bare up")
    lab.client.ip("link set far up")
    yield lab.gateway.run("cat", "/sys/class/net/bare/address").stdout.strip()
    lab.gateway.ip("link del bare")


@pytest.fixture
def routed(lab: Lab) -> Iterator[None]:
    """One address, and a network, that are local by a route."""
    for change in ("add", "del"):
        lab.gateway.ip(*(f"route {change} local {each} dev lo" for each in (ROUTED, AROUND)))
        if change == "add":
            yield


def find_addresses(gateway: Gateway) -> set[str]:
    """The addresses whose packets the program on the ingress looks for, as the database has them reported."""
    (status,) = gateway.store.hosts()
    return {each.partition("/")[0] for each in status.local}


def deliver(lab: Lab, family: int, device: str = "eth0", mac: str = LAN_MAC, to: str = "") -> None:
    """Send to a socket of the gateway until all of it has arrived."""
    source, own = ENDS[family]
    target = to or own
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


def test_what_a_macvlan_takes_from_the_device_below_is_shaped_once(gateway: Gateway, lab: Lab, bare: str) -> None:
    """Of mode passthru it has the MAC address of the device below, and all that comes in by that is for it."""
    lab.gateway.ip("link add upper link bare type macvlan mode passthru", "link set upper up")
    rules = gateway.add(*(shape(source) for source, _ in ENDS.values()))
    gateway.wait(lambda: "upper" in gateway.kernel.ingress(), "the program on the device")
    for family in ENDS:
        deliver(lab, family, "far", bare)
    assert [gateway.count(rule).matched_packets for rule in rules] == [SENT, SENT]
    assert "bare" not in gateway.kernel.ingress()


def test_rules_that_come_and_go_take_nothing_from_what_waits_by_other_devices(gateway: Gateway, lab: Lab) -> None:
    """The first one may, for the kernel takes a device down for a moment when it gets a clsact, or loses it."""
    own = shape(LAN, direction="to")
    gateway.erase(*gateway.put(own))
    gateway.wait(lambda: gateway.kernel.ingress() == {}, "the programs to go")
    slow = ("root", "handle", "1:", "tbf", "rate", "8kbit", "burst", "2000", "limit", "1000000")
    lab.gateway.run("tc", "qdisc", "replace", "dev", "wan", *slow)
    try:
        datagram = frames.ip(CLIENT, SERVER, frames.UDP, frames.udp(CLIENT, SERVER, PORT, 4000, bytes(1000)))
        frames.send(lab.client, [frames.frame(datagram)] * (2 * SENT))
        gateway.wait(lambda: count_sent(lab)[0] >= 2 * SENT, "the datagrams to come to the queue")
        before, waiting = count_sent(lab)
        assert waiting > SENT
        for _ in range(2):
            (kept,) = gateway.put(own)
            gateway.wait(lambda: "wan" in gateway.kernel.ingress(), "the program on the device")
            gateway.erase(kept)
            gateway.wait(lambda: gateway.kernel.ingress() == {}, "the programs to go")
        assert count_sent(lab)[0] >= before
    finally:
        lab.gateway.run("tc", "qdisc", "del", "dev", "wan", "root")
    gateway.do("teardown")
    assert "clsact" not in lab.gateway.run("tc", "qdisc", "show").stdout
    gateway.do("apply")


def count_sent(lab: Lab) -> tuple[int, int]:
    """The packets that have left the root qdisc of `wan` or wait there, and those that wait."""
    (root,) = json.loads(lab.gateway.run("tc", "-s", "-j", "qdisc", "show", "dev", "wan", "root").stdout)
    return root["packets"] + root["qlen"], root["qlen"]


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


@pytest.mark.parametrize(("address", "mac"), OTHERS)
def test_what_ends_here_without_being_for_an_own_address_is_shaped(
    gateway: Gateway, lab: Lab, routed: None, address: str, mac: str
) -> None:
    family = 6 if ":" in address else 4
    gateway.wait(lambda: address in {*find_addresses(gateway), "255.255.255.255"}, "the route to be known")
    for wanted in (shape(ENDS[family][0]), shape(address, direction="to")):
        (rule,) = gateway.add(wanted)
        before = gateway.count(rule).matched_packets
        deliver(lab, family, mac=mac, to=address)
        assert gateway.count(rule).matched_packets - before == SENT
        gateway.remove(rule)


def test_an_address_that_is_known_later_is_shaped_from_then_on(gateway: Gateway, lab: Lab) -> None:
    held, named = gateway.add(shape(CLIENT), shape(ROUTED, direction="to", protocol="tcp"))
    before = gateway.kernel.ingress()
    lab.gateway.ip(f"route add local {ROUTED} dev lo")
    try:
        gateway.wait(lambda: gateway.kernel.ingress() != before, "another program")
        gateway.wait_for_state(named, State.APPLIED)
        before = gateway.count(held).matched_packets
        deliver(lab, 4, to=ROUTED)
        assert gateway.count(held).matched_packets - before == SENT
    finally:
        lab.gateway.ip(f"route del local {ROUTED} dev lo")


def test_an_address_in_a_network_that_ends_here_is_not_and_its_rule_says_so(
    gateway: Gateway, lab: Lab, routed: None
) -> None:
    gateway.wait(lambda: AROUND.partition("/")[0] in find_addresses(gateway), "the route to be known")
    (rule,) = gateway.add(shape("198.51.100.65", direction="to"))
    said = gateway.wait_for_state(rule, State.ERROR)
    assert "198.51.100.65 ends on this host by a route" in said
    assert "ip route add local 198.51.100.65 dev lo" in said


def test_who_asks_for_an_address_by_dhcp_waits_for_nobody(gateway: Gateway, lab: Lab) -> None:
    """All who have none yet send from 0.0.0.0: in a queue of that address one of them could keep the others waiting."""
    (rule,) = gateway.add(shape("0.0.0.0/0", "8 kbit/s", per="host"))
    before = gateway.count(rule).matched_packets
    ends = NOBODY, "255.255.255.255"
    packet = frames.ip(*ends, frames.UDP, frames.udp(*ends, 67, 68, b"x" * 300))
    with streams.receive(lab.gateway, 67) as receiver:
        frames.send(lab.client, [frames.frame(packet, to=EVERYBODY)] * 200)
    assert receiver.report().packets == 200
    assert gateway.count(rule).matched_packets == before
    (other,) = gateway.add(shape(SERVER, direction="to", interface="wan"))
    assert gateway.state(other)[0] is State.APPLIED, "passes go on"


STRANGERS = {4: "10.1.0.66", 6: "fd00:1::66"}
TAKEN_AWAY = 5.0
"""Seconds; a second or so where the machine has nothing else to do."""


@contextmanager
def dropped_early(lab: Lab, kind: str) -> Iterator[None]:
    """A chain of nftables on the ingress of `lan` drops what comes from strangers."""
    rules = f"ip saddr {STRANGERS[4]} drop; ip6 saddr {STRANGERS[6]} drop;"
    chain = f'chain drops {{ type filter hook ingress device "lan" priority -500; {rules} }};'
    lab.gateway.run("nft", f"table {kind} early {{ {chain} }};")
    try:
        yield
    finally:
        lab.gateway.run("nft", "delete", "table", kind, "early")


def count_arriving(lab: Lab, family: int, source: str) -> int:
    """How many of thirty datagrams from a source reach a socket of the gateway; all of the client's do."""
    own, target = ENDS[family]
    with streams.receive(lab.gateway, PORT) as receiver:
        for each in (source, own):
            packet = frames.ip(each, target, frames.UDP, frames.udp(each, target, PORT, 4000, b"x"))
            frames.send(lab.client, [frames.frame(packet)] * SENT)
    arrived = receiver.report().by_source
    assert arrived[own] == SENT
    return arrived.get(source, 0)


def wait_for_programs(gateway: Gateway, *devices: str) -> float:
    """Until these devices have one; how many seconds that took."""
    began = time.monotonic()
    gateway.wait(lambda: gateway.kernel.ingress().keys() == {*devices}, f"programs on {devices}")
    return time.monotonic() - began


@pytest.mark.parametrize("kind", ["netdev", "inet"])
def test_what_a_chain_of_nftables_drops_on_an_ingress_stays_dropped(gateway: Gateway, lab: Lab, kind: str) -> None:
    """What is led over an IFB device comes back behind such chains: where one stands, nothing is led there."""
    with dropped_early(lab, kind):
        rules = gateway.add(*(shape(own, "50 Mbit/s", direction="to") for _, own in ENDS.values()))
        for rule in rules:
            told = gateway.wait_for_state(rule, State.DEGRADED)
            assert told.startswith("What comes in by lan and ends on this host is not shaped: a chain of nftables ")
            assert f"({kind} early drops)" in told
        assert gateway.kernel.ingress().keys() == {"wan"}
        assert [count_arriving(lab, family, each) for family, each in STRANGERS.items()] == [0, 0]
        said = gateway.attempt("doctor").stdout
        assert "WARNING: no program on an ingress. What comes in by lan and ends on this gateway is not shaped" in said
        assert "NOTE: clsact. netlimit uses a clsact qdisc on" in said
    wait_for_programs(gateway, "lan", "wan")
    for rule in rules:
        gateway.wait_for_state(rule, State.APPLIED)
    assert [count_arriving(lab, family, each) for family, each in STRANGERS.items()] == [SENT, SENT]


def test_a_chain_of_nftables_that_comes_takes_the_program_away_at_once(gateway: Gateway, lab: Lab) -> None:
    (rule,) = gateway.add(shape(LAN, "50 Mbit/s", direction="to"))
    wait_for_programs(gateway, "lan", "wan")
    before = gateway.store.hosts()[0].drift
    with dropped_early(lab, "netdev"):
        assert wait_for_programs(gateway, "wan") < TAKEN_AWAY
        assert count_arriving(lab, 4, STRANGERS[4]) == 0
        gateway.wait_for_state(rule, State.DEGRADED)
    gateway.wait_for_state(rule, State.APPLIED)
    wait_for_programs(gateway, "lan", "wan")
    assert gateway.store.hosts()[0].drift == before, "nobody has undone anything"


def test_a_program_that_passes_a_chain_by_is_told_where_no_controller_runs(gateway: Gateway, lab: Lab) -> None:
    gateway.add(shape(LAN, "50 Mbit/s", direction="to"))
    wait_for_programs(gateway, "lan", "wan")
    gateway.stop()
    try:
        with dropped_early(lab, "netdev"):
            assert "SERIOUS: chains passed by. A program of netlimit is still on" in gateway.attempt("doctor").stdout
            gateway.do("apply")
            assert gateway.kernel.ingress().keys() == {"wan"}
            assert "chains passed by" not in gateway.attempt("doctor").stdout
    finally:
        gateway.start()
