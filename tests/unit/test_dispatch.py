"""Many selectors: packets are led to those that speak of them, in few steps and in the same order as without trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from cProfile import Profile
from dataclasses import replace
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from netlimit import dispatch
from netlimit.compile import Compilation
from netlimit.kernel.fake import FakeKernel
from netlimit.limits import Facts
from netlimit.packet import Packet
from netlimit.plan import SwitchTable, diff
from netlimit.rules import Rule, parse_rule
from netlimit.state import ChainRule, State, Structure, Table
from tests.unit.strategies import EXHAUSTING, NOW, facts, keep

MANY = 400
A_DAY = 86_400.0
PORTS = 61, 63, 64, 65, 66, 127, 128, 32_767, 32_768
MOST_STEPS = 90
"""Rules that a packet may be compared with where many selectors are."""


@contextmanager
def in_a_row(most: int) -> Iterator[None]:
    """Meanwhile trees are made of more selectors than that."""
    before = dispatch.MOST_IN_A_ROW
    dispatch.MOST_IN_A_ROW = most
    try:
        yield
    finally:
        dispatch.MOST_IN_A_ROW = before


def number(*wanted: dict[str, object]) -> list[Rule]:
    return [replace(parse_rule(fields, NOW), id=at) for at, fields in enumerate(wanted, start=1)]


class Pacer(FakeKernel):
    """Counts the rules that packets are compared with."""

    steps = 0

    def _run(self, walk: object, table: Table, rules: tuple[ChainRule, ...]) -> str | None:
        def counted() -> Iterator[ChainRule]:
            for rule in rules:
                self.steps += 1
                yield rule

        return super()._run(walk, table, counted())  # type: ignore[arg-type]


def hold(rules: list[Rule], kernel: FakeKernel, host: Facts = facts) -> Compilation:
    compilation = Compilation(host)
    for rule in rules:
        assert compilation.put(rule) is None
    for step in diff(compilation.state, State(), compilation.transition(Structure())).steps:
        kernel.apply(step)
    compilation.settle()
    return compilation


# -- trees change nothing but the cost


@st.composite
def selecting(draw: Callable[..., object]) -> dict[str, object]:
    """A rule of few ports, on both sides of where trees part, and four interfaces: ranges overlap in every way."""

    def mostly(usual: str | None, *others: str | None) -> str | None:
        return draw(st.sampled_from([*[usual] * (2 * len(others)), *others]))  # type: ignore[return-value]

    fields: dict[str, object] = {
        "target": mostly("10.1.0.2", "10.1.0.0/24", "10.2.0.2", "10.1.0.1"),
        "direction": mostly("from", "to"),
        "protocol": mostly("udp", "tcp", "any", "icmp"),
        "interface": mostly(None, "lan", "lan2", "wan", "w"),
        "action": mostly("drop", "reject", "observe", "block", "allow"),
    }
    for side in ("ports", "source_ports"):
        if fields["protocol"] in ("udp", "tcp") and draw(st.integers(0, 4)) > (side == "source_ports") * 2:
            low = draw(st.lists(st.sampled_from(PORTS), min_size=1, max_size=3))
            fields[side] = [f"{port}-{port + draw(st.sampled_from([0, 0, 1, 5, 1000]))}" for port in low]
    if fields["action"] not in ("block", "allow"):
        fields["rate"] = mostly("1 packets/min", "2 packets/min", "12 kbit/s", "1 connections/min")
        fields["per"] = mostly("host", "target", "peer")
        if fields["protocol"] == "icmp":
            fields["rate"] = "1 packets/min"
    return {name: value for name, value in fields.items() if value is not None}


@st.composite
def passing(draw: Callable[..., object]) -> Packet:
    there = draw(st.sampled_from([("10.1.0.2", "10.2.0.2", "lan", "wan"), ("10.1.0.3", "10.1.0.1", "lan2", None)]))
    src, dst, enters, leaves = there
    protocol = draw(st.sampled_from(["udp", "udp", "tcp", "icmp", "gre"]))
    ported = protocol in ("udp", "tcp") and draw(st.integers(0, 9)) > 0  # a later fragment has none
    return Packet(
        ip_address(src),
        ip_address(dst),
        protocol,
        port=draw(st.sampled_from(PORTS)) if ported else None,
        source_port=draw(st.sampled_from(PORTS)) if ported else None,
        in_interface=enters,
        out_interface=leaves,
        length=1500,
        opens=bool(ported and draw(st.booleans())),
        icmp_type=128,
    )


@settings(max_examples=120, deadline=None)
@given(st.lists(selecting(), min_size=6, max_size=16), st.lists(passing(), min_size=1, max_size=4))
def test_trees_lead_a_packet_to_the_same_end_and_count_the_same(wanted: list, packets: list[Packet]) -> None:
    """Of one rank the order is free: of two limits that are exhausted either may be the one that drops, and counts."""
    rules = keep([parse_rule(fields, NOW) for fields in wanted])
    found: list[list[object]] = []
    for most in (1, 10**9):
        with in_a_row(most):
            clock = [0.0]
            kernel = FakeKernel(now=lambda clock=clock: clock[0])
            hold(rules, kernel)
            seen: list[object] = []
            for packet in packets:
                clock[0] += A_DAY  # every bucket is full again
                before = _count(kernel)
                first = kernel.trace(packet)
                seen.append((first, _count(kernel) - before) if first == "accept" else first)
                seen += [kernel.trace(packet) == "accept" for _ in range(EXHAUSTING)]
        found.append(seen)
    assert found[0] == found[1]


PLAIN = {"direction": "from", "protocol": "udp", "action": "drop", "rate": "1 packets/min", "per": "target"}
NARROW_FIRST = [{**PLAIN, "ports": 65}, {**PLAIN, "ports": 66}, {**PLAIN, "ports": "64-71"}]
TO_66 = Packet(ip_address("10.1.0.2"), ip_address("10.2.0.2"), "udp", 66, 40_000, "lan", "wan")


@settings(max_examples=120, deadline=None)
@example(NARROW_FIRST, TO_66)
@given(st.lists(selecting(), min_size=6, max_size=16), passing())
def test_trees_keep_the_order_of_ranks(wanted: list, packet: Packet) -> None:
    """Each rule of a rank of its own: which of those that are exhausted drops, and so which are not asked, is fixed."""
    lengths = (str(ip_network(f"10.1.0.2/{32 - at}", strict=False)) for at in range(len(wanted)))
    limits = [{**fields, "target": target} for fields, target in zip(wanted, lengths, strict=True)]
    rules = keep([parse_rule({**fields, "per": "target"} if "per" in fields else fields, NOW) for fields in limits])
    found = []
    for most in (1, 10**9):
        with in_a_row(most):
            kernel = FakeKernel(now=lambda: 0.0)
            hold(rules, kernel)
            fates = [kernel.trace(packet) for _ in range(EXHAUSTING)]
            found.append((fates, _count(kernel)))
    assert found[0] == found[1]


def _count(kernel: FakeKernel) -> Counter[tuple[str, str]]:
    return Counter(
        {
            (name, key): reading.packets
            for name, held in kernel.readings(sorted(kernel.sets)).items()
            for key, reading in held.items()
            if not name.startswith(("nl-exempt", "nl-blocked", "nl-safe"))
        }
    )


# -- and few steps lead there

UDP = {"target": "10.9.0.1", "rate": "100 packets/s", "protocol": "udp"}
KINDS: dict[str, Callable[[int], dict[str, object]]] = {
    "a port each": lambda n: {**UDP, "ports": 1000 + 7 * n},
    "a port each, to": lambda n: {**UDP, "direction": "to", "ports": 1000 + n},
    "a source port each": lambda n: {**UDP, "protocol": "tcp", "source_ports": 20_000 + 7 * n},
    "both protocols": lambda n: {**UDP, "protocol": ("tcp", "udp")[n % 2], "ports": 1000 + n},
    "both sides": lambda n: {**UDP, ("ports", "source_ports")[n % 2]: 1000 + n},
    "both families": lambda n: {**UDP, "target": ("10.9.0.1", "2001:db8::9")[n % 2], "ports": 1000 + n},
    "lists of fifteen": lambda n: {**UDP, "ports": [(n * 15 + k) * 4357 % 65_536 for k in range(15)]},
    "one port, a source port each": lambda n: {**UDP, "ports": 53, "source_ports": 1000 + n},
    "an interface each": lambda n: {"target": "10.9.0.1", "rate": "9 packets/s", "interface": f"ppp{n}"},
    "an interface each, on one port": lambda n: {**UDP, "ports": 53, "interface": f"ppp{n}"},
    "budgets of every size": lambda n: {**UDP, "target": f"10.0.0.0/{8 + n % 8}", "per": "target", "ports": 1000 + n},
    "peers": lambda n: {**UDP, "per": "peer", "ports": 1000 + n},
    "the gateway's own address": lambda n: {**UDP, "target": "10.1.0.1", "direction": "to", "ports": 1000 + n},
    "rejected": lambda n: {**UDP, "action": "reject", "ports": 1000 + n},
    "observed": lambda n: {**UDP, "action": "observe", "ports": 1000 + n},
    "narrow ranges": lambda n: {**UDP, "ports": f"{1000 + 10 * n}-{1009 + 10 * n}"},
    "connections": lambda n: {**UDP, "protocol": "tcp", "rate": "5 connections/s", "ports": 1000 + n},
    "connections at once": lambda n: {**UDP, "protocol": "tcp", "rate": "5 connections", "ports": 1000 + n},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_packet_of_somebody_else_is_asked_little_beside_many_selectors(kind: str) -> None:
    rules = keep([parse_rule(KINDS[kind](n), NOW) for n in range(MANY)])
    kernel = Pacer(now=lambda: 0.0)
    hold(rules, kernel, replace(facts, safe=()))
    for protocol, port, source in (
        *(("udp", port, 40_000) for port in (53, 1000, 2234, 3999, 65_535)),
        ("tcp", 2235, 20_007),
        ("udp", 53, 2234),
        ("udp", None, None),
        ("gre", None, None),
    ):
        for family in (4, 6) if kind == "both families" else (4,):
            src, dst = ("10.9.7.7", "10.1.0.1") if family == 4 else ("2001:db8::77", "fd00:1::2")
            before = kernel.steps
            packet = Packet(
                ip_address(src), ip_address(dst), protocol, port, source, "ppp2234", "ppp17", opens=port is not None
            )
            assert kernel.trace(packet) == "accept"
            assert kernel.steps - before <= MOST_STEPS, packet


@pytest.mark.parametrize("kind", ["a port each", "lists of fifteen", "an interface each", "budgets of every size"])
def test_one_rule_more_rewrites_little(kind: str) -> None:
    make = KINDS[kind]
    kernel = FakeKernel(now=lambda: 0.0)
    compilation = hold(keep([parse_rule(make(n), NOW) for n in range(MANY)]), kernel)
    known = compilation.settled
    compilation.put(replace(parse_rule(make(MANY + 5), NOW), id=MANY + 99))
    plan = diff(compilation.state, known, compilation.transition(known.structure), compilation.touched)
    chains = [name for step in plan.steps if isinstance(step, SwitchTable) for name in step.chains]
    assert len(chains) <= 20 * (15 if kind == "lists of fifteen" else 1)


def test_compiling_takes_as_much_longer_as_there_are_more_kinds() -> None:
    def steps(count: int, first: int) -> int:
        compilation = Compilation(Facts())
        for rule in keep([parse_rule({**UDP, "ports": first + n}, NOW) for n in range(count)]):
            compilation.put(rule)
        calls = Profile(builtins=False, subcalls=False)
        calls.runcall(lambda: compilation.structure)
        return sum(entry.callcount for entry in calls.getstats())

    assert steps(800, 20_480) < 6 * steps(200, 40_960), "other ports, for some of the chains are remembered"


def test_wide_ranges_that_overlap_do_not_stand_in_every_leaf() -> None:
    rules = keep([parse_rule({**UDP, "ports": f"{1000 + n}-{60_000 + n}"}, NOW) for n in range(250)])
    compilation = hold(rules, FakeKernel(now=lambda: 0.0))
    assert sum(map(len, compilation.structure.chains.values())) < 100 * len(rules)
