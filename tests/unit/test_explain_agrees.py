"""What `explain` says of a packet is what the chains do with it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from netlimit.compile import Compilation
from netlimit.explain import Explanation, explain
from netlimit.kernel.base import Addresses
from netlimit.kernel.fake import FakeKernel
from netlimit.packet import Packet
from netlimit.plan import diff
from netlimit.rates import Kind
from netlimit.rules import Action, Rule, parse_rule
from netlimit.state import ChainId, State, Structure
from tests.unit.strategies import EXHAUSTING, MARKS, NOW, cases, facts, keep, show_connection


@dataclass
class Recorder(FakeKernel):
    """It remembers which entries packets meet, in their order."""

    met: list[int] = field(default_factory=list)

    def _count(self, packet: Packet, element: Any) -> None:
        self.met.append(id(element))
        super()._count(packet, element)


def make_kernel(compilation: Compilation, packet: Packet) -> Recorder:
    """A kernel that holds it, whose clock stands still: buckets do not fill. It knows the packet's connection."""
    kernel = Recorder(now=lambda: 0.0, where=Addresses(tuple(facts.own), ()))
    compilation.hold_open({packet.src.version: [show_connection(packet)]} if packet.established else {})
    for step in diff(compilation.state, State(), compilation.transition(Structure())).steps:
        kernel.apply(step)
    return kernel


def compile_all(rules: list[Rule]) -> Compilation:
    compilation = Compilation(facts)
    for rule in rules:
        assert compilation.put(rule) is None
    return compilation


def counted(compilation: Compilation, kernel: FakeKernel, which: int) -> set[int]:
    """The rules whose matched (0) or dropped (-1) packets were counted."""
    found = set()
    for rule_id, fragment in compilation.fragments.items():
        name = compilation.sets_of(rule_id)[which]
        readings = kernel.readings([name])[name]
        if any(readings[key].packets for key in fragment.keys):
            found.add(rule_id)
    return found


def ask(rules: list[Rule], packet: Packet) -> Explanation:
    safe = dict.fromkeys(map(str, facts.safe), "settings")
    return explain(rules, packet, facts.own, safe, facts.management, needed=map(str, facts.needed))


def counts_now(rule: Rule, packet: Packet) -> bool:
    """Connections are counted by the packet that opens one."""
    return rule.rate is None or rule.rate.kind in (Kind.PACKETS, Kind.BYTES) or packet.opens


EXEMPT = Packet(ip_address("10.1.0.2"), ip_address("10.2.0.2"), in_interface="lan", out_interface="wan", length=1500)
"""From a limited address to one that is allowed where it leaves, which only routing tells."""
TO_SERVER_NETWORK = {"target": "10.2.0.0/16", "direction": "to"}
EXEMPTION = keep(
    [
        parse_rule({"target": "10.1.0.2", "rate": "1 packets/min"}, NOW),
        parse_rule({"target": "10.2.0.2", "direction": "to", "interface": "wan", "action": "allow"}, NOW),
    ]
)

OPEN = Packet(ip_address("10.1.0.2"), ip_address("10.1.0.1"), "tcp", 22, 1024, "lan", None, 1500, established=True)
"""Of an open connection by which the host is managed."""
ALLOWED_BESIDE = keep(
    [
        parse_rule({"target": "10.1.0.0/24", "rate": "1 connections", "per": "host"}, NOW),
        parse_rule({"target": "10.1.0.0/24", "action": "allow"}, NOW),
    ]
)


BLOCK_FROM, BLOCK_TO = {"target": "10.0.0.0/9", "action": "block"}, {**TO_SERVER_NETWORK, "action": "block"}
BLOCKED_TWICE = keep([parse_rule(fields, NOW) for fields in (BLOCK_FROM, BLOCK_TO)])
BLOCKED_LATER = keep(
    [
        *BLOCKED_TWICE,
        parse_rule({"target": "192.0.2.0/24", "direction": "to", "action": "allow"}, NOW),
    ]
)
"""Who is blocked waits for what nobody knows before routing: whether the packet is for somebody who is allowed."""
SENT_HERE = replace(EXEMPT, src=ip_address("10.2.0.1"), in_interface=None)
BLOCKED_BY_FORCE = [
    replace(rule, forced_by="root")
    for rule in keep([parse_rule({"target": "10.2.0.1", "action": "block"}, NOW), BLOCKED_TWICE[1]])
]


OF_ROUTER = replace(
    EXEMPT, src=ip_address("10.2.0.4"), dst=ip_address("10.1.0.2"), in_interface="wan", out_interface="lan"
)
"""From a host that the gateway needs to one behind it."""
TOLD_BY_ROUTER = replace(OF_ROUTER, protocol="icmp")
TO_ROUTER = replace(EXEMPT, dst=OF_ROUTER.src)
FOR_THE_GATEWAY = replace(OF_ROUTER, dst=ip_address("10.2.0.1"), out_interface=None)
ROUTER_BLOCKED = keep(
    [
        parse_rule({"target": "10.2.0.0/16", "action": "block"}, NOW),
        parse_rule({"target": "10.1.0.2", "direction": "to", "rate": "1 packets/min"}, NOW),
        parse_rule({"target": "10.2.0.0/16", "direction": "to", "rate": "2 packets/min", "per": "target"}, NOW),
        parse_rule({"target": "10.2.0.0/16", "rate": "1 packets/min", "per": "peer"}, NOW),
    ]
)


@settings(max_examples=250)
@given(cases())
@example((EXEMPT, EXEMPTION))
@example((OPEN, ALLOWED_BESIDE))
@example((OF_ROUTER, ROUTER_BLOCKED))
@example((TOLD_BY_ROUTER, ROUTER_BLOCKED))
@example((TO_ROUTER, ROUTER_BLOCKED))
@example((FOR_THE_GATEWAY, ROUTER_BLOCKED))
@example((EXEMPT, BLOCKED_TWICE))
@example((EXEMPT, BLOCKED_LATER))
@example((SENT_HERE, BLOCKED_BY_FORCE))
def test_the_rules_that_hit_are_those_that_count(case: tuple[Packet, list[Rule]]) -> None:
    packet, rules = case
    compilation = compile_all(rules)
    kernel = make_kernel(compilation, packet)
    explanation = ask(rules, packet)
    hits = {s.rule.id for s in explanation.steps if s.hits and s.rule is not None and counts_now(s.rule, packet)}
    by_id = {rule.id: rule for rule in rules}

    verdict = kernel.trace(packet)
    moved = counted(compilation, kernel, 0)

    if explanation.verdict == "blocked":
        assert verdict == "drop"
        # Of two blocks the one that the packet meets first counts it: `from` dies before `to` is asked.
        assert {rule_id for rule_id in moved if by_id[rule_id].action is Action.BLOCK} == hits
        return
    assert verdict == "accept", "no bucket is empty at first"
    assert not counted(compilation, kernel, -1) - {i for i in moved if by_id[i].action is Action.ALLOW}
    if explanation.verdict == "allowed":
        assert all(by_id[rule_id].action is Action.ALLOW for rule_id in moved)
    else:
        assert moved == hits


@settings(max_examples=250)
@given(cases())
@example((EXEMPT, EXEMPTION))
@example((OPEN, ALLOWED_BESIDE))
def test_a_packet_is_dropped_sooner_or_later_if_it_is_limited(case: tuple[Packet, list[Rule]]) -> None:
    packet, rules = case
    compilation = compile_all(rules)
    kernel = make_kernel(compilation, packet)
    explanation = ask(rules, packet)

    verdicts = [kernel.trace(packet) for _ in range(EXHAUSTING + 1)]

    limits = [s.rule for s in explanation.steps if s.hits and s.rule is not None and s.rule.action is not Action.ALLOW]
    limiting = [rule for rule in limits if rule.action is not Action.OBSERVE and counts_now(rule, packet)]
    assert (verdicts[-1] != "accept") == bool(limiting)
    dropped = counted(compilation, kernel, -1)
    if explanation.verdict == "limited" and limiting:
        assert dropped & {rule.id for rule in limiting}, "a drop is counted by rule"
        if all(rule.action is Action.REJECT for rule in limiting):
            assert verdicts[-1] == "reject"
        if all(rule.action is Action.DROP for rule in limiting):
            assert verdicts[-1] == "drop"
    if explanation.verdict == "passes":
        watched = {r.id for r in limits if r.action is Action.OBSERVE and counts_now(r, packet)}
        assert dropped == watched, "what would be dropped is counted"


def list_met(compilation: Compilation, kernel: Recorder) -> list[int]:
    """The rules whose matched packets were counted, in the order in which the packet met them."""
    entries = {
        id(kernel.elements[compilation.sets_of(rule_id)[0]][key]): rule_id
        for rule_id, fragment in compilation.fragments.items()
        for key in fragment.keys
    }
    return list(dict.fromkeys(entries[each] for each in kernel.met if each in entries))


def rows(*wanted: dict[str, object]) -> list[Rule]:
    """Rules whose buckets hold a packet."""
    return keep([parse_rule({"rate": "1 packets/min", **fields}, NOW) for fields in wanted])


FORWARDED = replace(EXEMPT, protocol="tcp", port=80, source_port=1024, opens=True)
TO_SERVER, BUDGET = {"target": "10.2.0.2", "direction": "to"}, {"target": "10.1.0.0/24", "per": "target"}
PEERS = {"target": "10.1.0.0/24", "per": "peer"}
CONNECTIONS = {"target": "10.1.0.2", "rate": "1 connections"}
WATCHED = rows({"target": "10.1.0.2"}, {**TO_SERVER, "action": "observe"})
SHARED = rows(BUDGET, TO_SERVER)
BOTH_WAYS = rows(BUDGET, {"target": "10.2.0.0/16", "direction": "to", "per": "target"}, {**TO_SERVER, "per": "target"})
OF_PEERS = rows({"target": "10.1.0.2", "action": "observe"}, TO_SERVER, PEERS)
OF_PEERS_LATER = rows({"target": "10.1.0.2", "action": "observe"}, TO_SERVER, {**PEERS, "action": "reject"})
OF_PEERS_WAITING = [
    *OF_PEERS,
    replace(parse_rule({"target": "192.0.2.0/24", "direction": "to", "action": "allow"}, NOW), id=9),
]
AT_ONCE = rows({**CONNECTIONS, "protocol": "tcp"}, {**CONNECTIONS, "action": "reject"}, BUDGET)
AT_ONCE_WATCHED = rows({**CONNECTIONS, "action": "reject"}, {**CONNECTIONS, "action": "observe"}, TO_SERVER)
FORCED = [
    *rows({**BUDGET, "target": "10.1.0.0/16"}),
    replace(rows({"target": "10.2.0.1", "direction": "to", "per": "peer"})[0], id=7, forced_by="root"),
]
HERE = replace(FORWARDED, dst=ip_address("10.2.0.1"), out_interface=None)


@settings(max_examples=400)
@given(cases())
@example((FORWARDED, WATCHED))
@example((FORWARDED, SHARED))
@example((FORWARDED, BOTH_WAYS))
@example((FORWARDED, OF_PEERS))
@example((FORWARDED, OF_PEERS_LATER))
@example((FORWARDED, OF_PEERS_WAITING))
@example((FORWARDED, AT_ONCE))
@example((FORWARDED, AT_ONCE_WATCHED))
@example((HERE, FORCED))
def test_rules_are_told_in_the_order_in_which_they_are_asked(case: tuple[Packet, list[Rule]]) -> None:
    packet, rules = case
    compilation = compile_all(rules)
    kernel = make_kernel(compilation, packet)
    explanation = ask(rules, packet)
    told = [s.rule for s in explanation.steps if s.hits and s.rule is not None and counts_now(s.rule, packet)]

    verdict = kernel.trace(packet)

    if verdict == "accept" and explanation.verdict != "allowed":
        assert list_met(compilation, kernel) == [rule.id for rule in told]


PLACES = [
    ChainId(family, table, hook)
    for family in (4, 6)
    for table, hook in (
        ("raw", "PREROUTING"),
        *(("mangle", name) for name in ("PREROUTING", "INPUT", "FORWARD", "OUTPUT")),
    )
]


@settings(max_examples=150)
@given(cases(), st.dictionaries(st.sampled_from(PLACES), st.sampled_from(MARKS)))
def test_what_others_write_on_packets_changes_nothing(
    case: tuple[Packet, list[Rule]], marking: dict[ChainId, int]
) -> None:
    """Before our chains, and behind them; they may also wipe out what was there."""
    packet, rules = case
    for where in [where for where in marking if where.name != "PREROUTING"]:
        marking[where] &= 0x7FFFFFFF  # between mangle and filter, that would be how ours tells whom to reject
    fates = []
    for marked in (False, True):
        compilation = compile_all(rules)
        kernel = make_kernel(compilation, packet)
        if marked:
            kernel.marking = {where: (value, 0xFFFFFFFF) for where, value in marking.items()}
        verdicts = [kernel.trace(packet if marked else replace(packet, mark=0)) for _ in range(EXHAUSTING + 1)]
        fates.append((verdicts, counted(compilation, kernel, 0), counted(compilation, kernel, -1)))
    assert fates[0] == fates[1]
