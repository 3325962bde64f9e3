"""What `explain` says of a packet is what the chains do with it."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address

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


def make_kernel(compilation: Compilation, packet: Packet) -> FakeKernel:
    """A kernel that holds it, whose clock stands still: buckets do not fill. It knows the packet's connection."""
    kernel = FakeKernel(now=lambda: 0.0, where=Addresses(tuple(facts.own), ()))
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
    return explain(rules, packet, facts.own, dict.fromkeys(map(str, facts.safe), "settings"), facts.management)


def counts_now(rule: Rule, packet: Packet) -> bool:
    """Connections are counted by the packet that opens one."""
    return rule.rate is None or rule.rate.kind in (Kind.PACKETS, Kind.BYTES) or packet.opens


EXEMPT = Packet(ip_address("10.1.0.2"), ip_address("10.2.0.2"), in_interface="lan", out_interface="wan", length=1500)
"""From a limited address to one that is allowed where it leaves, which only routing tells."""
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


@settings(max_examples=250)
@given(cases())
@example((EXEMPT, EXEMPTION))
@example((OPEN, ALLOWED_BESIDE))
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
        assert any(by_id[rule_id].action is Action.BLOCK for rule_id in moved)
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
