"""What a bridge floods to its ports is charged as it comes in, if the bridge hands it to iptables: once, whatever rules
there are."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_network
from typing import get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from netlimit.addresses import reaches_many
from netlimit.adverts import BFD, BFD_FAR, HELLO_PORTS
from netlimit.compile import Compilation
from netlimit.kernel.base import Addresses, observe
from netlimit.kernel.fake import FakeKernel, _Walk
from netlimit.limits import Facts, parse_safe
from netlimit.packet import Packet, Receivers
from netlimit.plan import diff
from netlimit.rules import Action, Direction, Rule
from netlimit.state import ChainId, State, Structure, Table
from netlimit.tree import Device, Topology
from tests.unit.histories import bring, settled
from tests.unit.strategies import EXHAUSTING, cases, facts
from tests.unit.test_explain_agrees import make_kernel
from tests.unit.test_make_before_break import follow, journeys, rules

PEER = "10.1.0.3"
ROUTED = replace(facts, peers=frozenset({PEER}))
WAN, BRIDGE = Device(6, True), Device(5, True, "bridge", filtered=(4, 6))
BRIDGED = replace(ROUTED, topology=Topology({"lan": BRIDGE, "wan": WAN}))
MANY = st.sampled_from(get_args(Receivers))
UDP_PORTS = st.sampled_from([53, 53, 9000, 5353, BFD, BFD_FAR, HELLO_PORTS[4][0], HELLO_PORTS[6][0]])
HELLOS = (*HELLO_PORTS[4], *HELLO_PORTS[6])
ENDS = {
    4: [ip_address(text) for text in ("10.1.0.3", "10.2.0.9", "10.2.0.2", "224.0.0.9", "224.0.0.251", "239.1.2.3")],
    6: [ip_address(text) for text in ("fd00:1::3", "fd00:1::9", "fd00:2::2", "ff02::9", "ff02::fb", "ff05::1")],
}
"""Where somebody is safe, limited, or many."""
SUBNET: dict[str, object] = {"id": 1, "target": "10.1.0.0/16", "per": "host", "rate": "5 packets/min"}
MULTICAST = Packet(ip_address("10.1.0.2"), ip_address("224.0.0.251"), "udp", 5353, 5353, "lan", "lan")


def compile_for(here: Facts, wanted: list[Rule]) -> Compilation:
    compilation = Compilation(here)
    for rule in wanted:
        assert compilation.put(rule) is None
    return compilation


def is_spared(packet: Packet, wanted: list[Rule]) -> bool:
    """Whether its destination may spare the packet, were it not for many."""
    allowed = [r.target for r in wanted if (r.action, r.direction) == (Action.ALLOW, Direction.TO)]
    return any(packet.dst in network for network in (*allowed, *facts.safe))


def count_charges(compilation: Compilation, kernel: FakeKernel, wanted: list[Rule]) -> dict[int, int]:
    """How often each limit `from` was charged."""
    limits = [r for r in wanted if r.direction is Direction.FROM and r.rate is not None]
    names = {rule.id: compilation.sets_of(rule.id)[0] for rule in limits}
    readings = {rule_id: kernel.readings([name])[name] for rule_id, name in names.items()}
    return {i: sum(readings[i][key].packets for key in compilation.fragments[i].keys) for i in readings}


@settings(max_examples=250)
@given(cases(), UDP_PORTS, st.data(), MANY)
def test_it_meets_the_same_limits_once(
    case: tuple[Packet, list[Rule]], port: int, data: st.DataObject, sent_to: Receivers
) -> None:
    """Who chooses both destinations, that of the frame and that of the packet, passes no limit by it."""
    packet, wanted = case
    assume(packet.in_interface == "lan")
    goal = data.draw(st.sampled_from([packet.dst, *ENDS[packet.dst.version]]))
    packet = replace(packet, protocol="udp", dst=goal, port=port, sent_to=sent_to, established=False)
    fates, charges = [], []
    for here in (ROUTED, BRIDGED):
        compilation = compile_for(here, wanted)
        kernel = make_kernel(compilation, packet)
        first = kernel.trace(packet)
        charges.append(count_charges(compilation, kernel, wanted) if first == "accept" else {})
        fates.append("accept" not in [kernel.trace(packet) for _ in range(EXHAUSTING)][-1:])
    assert fates[1] >= fates[0], "what is over the rate is dropped"
    honest = goal.is_multicast is (sent_to == "multicast")
    if honest and not is_spared(packet, wanted):
        assert fates[1] == fates[0]
        assert charges[1] == charges[0]


@settings(max_examples=100)
@given(journeys(), st.sampled_from([(ROUTED, BRIDGED), (BRIDGED, ROUTED)]), MANY)
def test_nobody_is_unlimited_or_cut_off_while_a_bridge_comes_or_goes(
    journey: tuple[object, list[Packet]], here: tuple[Facts, Facts], sent_to: Receivers
) -> None:
    change, seen = journey
    compilation, kernel = settled(change.before, here[0])  # type: ignore[attr-defined]
    compilation.protect(here[1])
    bring(compilation, change.before)  # type: ignore[attr-defined]
    follow(compilation, kernel, [replace(packet, sent_to=many) for packet in seen for many in (None, sent_to)])
    assert observe(kernel) == compilation.state


class Translating(FakeKernel):
    """A kernel in which somebody's DNAT leads every packet elsewhere."""

    goal: Packet

    def _enter(self, walk: _Walk, table: Table, hook: str) -> str:
        verdict = super()._enter(walk, table, hook)
        if (table, hook) == ("mangle", "PREROUTING"):
            walk.packet = replace(walk.packet, dst=self.goal.dst, port=self.goal.port)
        return verdict


@settings(max_examples=400)
@given(cases(), UDP_PORTS, UDP_PORTS, st.data(), MANY)
def test_nobody_passes_a_limit_by_what_others_translate(
    case: tuple[Packet, list[Rule]], port: int, other: int, data: st.DataObject, sent_to: Receivers
) -> None:
    """Whatever comes through behind a limit at last would do so if it were not charged before."""
    packet, wanted = case
    assume(packet.in_interface == "lan")
    sent, led = (data.draw(st.sampled_from([packet.dst, *ENDS[packet.dst.version]])) for _ in range(2))
    assume(not (sent.is_multicast and led.is_multicast and port in HELLOS and other != port))
    packet = replace(packet, protocol="udp", dst=sent, port=port, sent_to=sent_to, established=False, opens=True)
    fates = []
    for here in (ROUTED, BRIDGED):
        compilation = compile_for(here, wanted)
        kernel = Translating(now=lambda: 0.0, where=Addresses(tuple(facts.own), ()))
        kernel.goal = replace(packet, dst=led, port=other)
        for step in diff(compilation.state, State(), compilation.transition(Structure())).steps:
            kernel.apply(step)
        fates.append([kernel.trace(packet) for _ in range(EXHAUSTING + 1)][-1] == "accept")
    assert fates[1] <= fates[0]


def is_charged_early(here: Facts, *wanted: dict[str, object]) -> bool:
    compilation = compile_for(here, rules(*wanted))
    found = {rule.text for rule in compilation.state.structure.chains.get(ChainId(4, "mangle", "NL-PREROUTING"), ())}
    return any("pkttype" in text for text in found)


def test_only_where_a_bridge_hands_it_over() -> None:
    """Not in a VRF, whose packets come in once more by another name; nor where all is charged early anyway."""
    red = replace(BRIDGE, master="red")
    others = {
        "no bridge": Topology({"lan": WAN}),
        "a bridge that hands nothing over": Topology({"lan": replace(BRIDGE, filtered=())}),
        "another family": Topology({"lan": replace(BRIDGE, filtered=(6,))}),
        "a VRF": Topology({"lan": red, "red": Device(9, True, "vrf")}),
    }
    assert is_charged_early(BRIDGED, SUBNET)
    for name, topology in others.items():
        assert not is_charged_early(replace(facts, topology=topology), SUBNET), name
    assert not is_charged_early(replace(BRIDGED, capabilities={"pkttype": "No such match."}), SUBNET)
    assert not is_charged_early(BRIDGED, {**SUBNET, "protocol": "udp", "ports": [53]})
    assert not is_charged_early(BRIDGED, {**SUBNET, "protocol": "tcp"})
    assert not is_charged_early(BRIDGED, {**SUBNET, "direction": "to"})


ALLOWED = {"id": 2, "action": "allow", "direction": "to"}


@pytest.mark.parametrize("spared", ["224.0.0.251", "239.0.0.0/8", "255.255.255.255", "0.0.0.0/0", "192.0.0.0/2"])
def test_not_where_a_group_is_spared(spared: str) -> None:
    """Then it is told behind the translation of addresses who is spared, and each copy counts."""
    assert not is_charged_early(BRIDGED, SUBNET, {**ALLOWED, "target": spared})
    assert not is_charged_early(replace(BRIDGED, safe=parse_safe((spared,))), SUBNET)
    assert is_charged_early(BRIDGED, SUBNET, {**ALLOWED, "target": "10.2.0.0/16"})


def test_not_where_an_allowance_depends_on_the_port_behind_the_translation() -> None:
    allowed = {**ALLOWED, "direction": "from", "target": "10.1.0.2", "protocol": "udp"}
    assert is_charged_early(BRIDGED, SUBNET, allowed)
    assert is_charged_early(BRIDGED, SUBNET, {**allowed, "protocol": "tcp", "ports": [53]})
    assert not is_charged_early(BRIDGED, SUBNET, {**allowed, "ports": [53]})


def test_a_group_is_spared_while_a_rule_allows_it() -> None:
    limit, allow = rules({**SUBNET, "rate": "1 packets/min", "burst": 1}, {**ALLOWED, "target": "224.0.0.251"})
    compilation, kernel = settled([limit], BRIDGED)
    for now in ([limit, allow], [limit]):
        bring(compilation, now)
        follow(compilation, kernel, [MULTICAST, replace(MULTICAST, sent_to="multicast")])
        verdicts = [kernel.trace(replace(MULTICAST, sent_to="multicast")) for _ in range(EXHAUSTING)]
        assert verdicts[-1] == ("accept" if allow in now else "drop")
        assert observe(kernel) == compilation.state


@pytest.mark.parametrize("text", ["224.0.0.0/4", "ff00::/8", "255.255.255.255"])
@given(st.data())
def test_what_reaches_many(text: str, data: st.DataObject) -> None:
    """A key of a set does if it shares an address with what is for many."""
    many = ip_network(text)
    bits = data.draw(st.integers(0, 2**many.max_prefixlen - 1))
    length = data.draw(st.integers(1, many.max_prefixlen))
    key = ip_network((bits >> (many.max_prefixlen - length) << (many.max_prefixlen - length), length))
    short = str(key).removesuffix(f"/{many.max_prefixlen}")
    reserved = ip_network("240.0.0.0/4")
    shares = key.overlaps(ip_network("ff00::/8") if many.version == 6 else ip_network("224.0.0.0/4"))
    assert reaches_many(short) == (shares or (many.version == 4 and key.overlaps(reserved)))
