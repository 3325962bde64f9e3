"""On the way from one rule set to another nobody is without a limit, and nothing is dropped that is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from ipaddress import ip_address, ip_network
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlimit.chains import find_former_bits
from netlimit.compile import Compilation, compile_rules
from netlimit.kernel.base import observe
from netlimit.kernel.fake import FakeKernel
from netlimit.limits import own_addresses, parse_safe
from netlimit.marks import EVERY
from netlimit.packet import Packet
from netlimit.plan import Plan, Step, WriteSets
from netlimit.rules import Rule, parse_rule
from netlimit.state import TABLES
from netlimit.tree import Device, Topology
from tests.unit.histories import Change, bring, changes, plan_for, settled
from tests.unit.strategies import EXHAUSTING, NOW, TARGETS, facts, packets


def single_lines(plan: Plan) -> Iterator[Step]:
    """Every change for itself: the kernel takes a table at once, but sets entry by entry."""
    for step in plan.steps:
        if not isinstance(step, WriteSets):
            yield step
            continue
        yield from (WriteSets(create=(ipset,)) for ipset in step.create)
        yield from (WriteSets(add={n: {k: e}}) for n, entries in step.add.items() for k, e in entries.items())
        yield from (WriteSets(remove={n: (k,)}) for n, keys in step.remove.items() for k in keys)
        yield from (WriteSets(destroy=(name,)) for name in step.destroy)


def fate(kernel: FakeKernel, packet: Packet) -> str:
    """What becomes of the packet if it comes again and again, and all buckets were full."""
    kernel._buckets.clear()
    kernel._flows.clear()
    verdicts = [kernel.trace(packet) for _ in range(EXHAUSTING + 1)]
    return "passes" if verdicts[-1] == "accept" else "is dropped"


def check(change: Change, seen: list[Packet]) -> None:
    compilation, kernel = settled(change.before)
    bring(compilation, change.after)
    follow(compilation, kernel, seen)


def follow(compilation: Compilation, kernel: FakeKernel, seen: list[Packet]) -> None:
    history = [[fate(kernel, packet) for packet in seen]]
    steps = ["before"]
    for step in single_lines(plan_for(compilation, kernel)):
        kernel.apply(step)
        steps.append(str(step))
        history.append([fate(kernel, packet) for packet in seen])
    for packet, fates in zip(seen, zip(*history, strict=True), strict=True):
        if fates[0] == fates[-1]:
            broken = [step for step, what in zip(steps, fates, strict=True) if what != fates[0]]
            assert not broken, f"{packet} always {fates[0]}, but not after {broken[0]}; all steps:\n" + "\n".join(steps)


@st.composite
def journeys(draw: Callable[..., object]) -> tuple[Change, list[Packet]]:
    seen = draw(st.lists(packets(), min_size=1, max_size=3))
    ends = [end for packet in seen for end in (packet.src, packet.dst)]
    near = tuple(t for t in TARGETS if any(end in ip_network(t) for end in ends))
    return draw(changes(near, most=6)), seen


@settings(max_examples=150)
@given(journeys())
def test_nobody_is_unlimited_or_cut_off_for_a_moment(journey: tuple[Change, list[Packet]]) -> None:
    check(*journey)


@pytest.mark.parametrize("known", [(), ({"id": 4, "target": "10.9.0.9", "rate": "1 packets/min", "action": "reject"},)])
def test_who_is_over_a_limit_does_not_pass_while_one_that_rejects_comes(known: tuple[dict[str, object], ...]) -> None:
    everybody = {"id": 1, "target": "0.0.0.0/0", "direction": "from", "rate": "1 packets/min", "per": "target"}
    spared = {"id": 2, "target": "0.0.0.0/0", "direction": "from", "action": "allow", "protocol": "tcp"}
    rejecting = {**everybody, "id": 3, "target": "10.0.0.0/8", "action": "reject"}
    packet = Packet(ip_address("10.1.0.2"), ip_address("10.2.0.2"), "udp", 53, 1024, "lan", "wan", 1500, opens=False)
    there = everybody, spared, *known
    check(Change(rules(*there), rules(*there, rejecting)), [packet])


@pytest.mark.parametrize("held", [(), ({"id": 3, "target": "10.9.0.8", "direction": "to", "action": "block"},)])
def test_a_mark_like_ours_is_not_refused_where_filter_looks_for_the_first_time(held: tuple[dict[str, object]]) -> None:
    """At a hook in which mangle has cleared nothing so far, while it rejects elsewhere already."""
    known = {"id": 1, "target": "10.9.0.9", "rate": "1 packets/min", "action": "reject"}
    wide = {"id": 2, "target": "10.7.7.7", "direction": "to", "rate": "1000 packets/s", "action": "reject"}
    first = Packet(ip_address(min(facts.own)), ip_address("10.7.7.7"), "udp", 53, 1024, None, "wan", 1500)
    check(Change(rules(known, *held), rules(known, *held, wide)), [replace(first, mark=facts.mark_mask)])


@settings(max_examples=80)
@given(journeys(), st.sets(st.sampled_from(("10.1.0.2/32", "10.1.0.0/24", "10.2.0.9/32", "fd00:1::2/128"))))
def test_nor_when_others_become_safe(journey: tuple[Change, list[Packet]], safe: set[str]) -> None:
    change, seen = journey
    compilation, kernel = settled(change.before)
    compilation.protect(replace(facts, safe=parse_safe(tuple(safe))))
    bring(compilation, change.before)
    follow(compilation, kernel, seen)
    assert observe(kernel) == compilation.state


CHANGED = {
    "safe": parse_safe(("10.1.0.2/32", "fd00:1::2/128")),
    "own": own_addresses(("10.1.0.2", "fd00:1::2")),
    "peers": frozenset({"10.1.0.9"}),
    "translated": frozenset({4, 6}),
    "topology": replace(facts.topology, segments=("fd07::1/128",)),
    "management": (22, 8080),
}


@pytest.mark.parametrize("changed", CHANGED)
@pytest.mark.parametrize("there", [True, False])
def test_facts_that_change_leave_what_they_would_have_made(changed: str, there: bool) -> None:
    """Of the chains, whose order no packet of a test has to show."""
    every = rules(
        {"id": 1, "target": "10.9.0.0/16", "action": "block"},
        {"id": 2, "target": "10.1.0.0/16", "rate": "1 packets/min", "per": "host"},
        {"id": 3, "target": "fd00:1::/64", "action": "block"},
        {"id": 4, "target": "10.1.0.2", "rate": "12 kbit/s", "direction": "to"},
    )
    later = replace(facts, **{changed: CHANGED[changed]})
    before, after = (facts, later) if there else (later, facts)
    compilation, _ = settled(list(every), before)
    compilation.protect(after)
    for rule in every:
        compilation.put(rule)
    fresh, _, _ = compile_rules(every, after)
    assert compilation.structure.chains == fresh.structure.chains
    assert later != facts


@pytest.mark.parametrize("safe", ["10.1.0.2/32", "10.1.0.0/24"])
@pytest.mark.parametrize("others", [(), ("10.3.0.0/24", "10.4.0.0/24", "10.5.0.0/24", "10.6.0.0/24", "10.7.0.0/24")])
@pytest.mark.parametrize(
    "fields",
    [
        {"action": "block"},
        {"action": "block", "direction": "to"},
        {"rate": "1 packets/min"},
        {"rate": "1 connections/min", "direction": "to"},
        {"rate": "12 kbit/s", "action": "reject"},
    ],
    ids=str,
)
def test_who_becomes_safe_is_hit_all_the_time_by_a_rule_that_was_forced(
    fields: dict[str, object], others: tuple[str, ...], safe: str
) -> None:
    """Also where so many are safe already that chains ask the set for them."""
    (forced,) = (replace(rule, forced_by="root") for rule in rules({"id": 1, "target": "10.1.0.2", **fields}))
    compilation, kernel = settled([forced], replace(facts, safe=parse_safe(others)))
    compilation.protect(replace(facts, safe=parse_safe((*others, safe))))
    bring(compilation, [forced])
    answer = replace(FORWARDED, src=FORWARDED.dst, dst=FORWARDED.src, in_interface="wan", out_interface="lan")
    follow(compilation, kernel, [replace(packet, opens=True) for packet in (FORWARDED, answer)])
    assert observe(kernel) == compilation.state


@settings(max_examples=100)
@given(journeys(), st.permutations([0xFF000000, 0x00FF0000, 0x0FF00000, 0xF]))
def test_nor_when_the_bits_of_the_mark_change(journey: tuple[Change, list[Packet]], masks: list[int]) -> None:
    change, seen = journey
    before, after = masks[:2]
    compilation, kernel = settled(change.before, replace(facts, mark_mask=before))
    moved = Compilation(replace(facts, mark_mask=after), compilation.numbers.kept)
    bring(moved, change.before)
    marks = (0, before & 0x77777777, after, 0x40)
    follow(moved, kernel, [replace(packet, mark=mark) for packet in seen for mark in marks])
    assert observe(kernel) == moved.state


def rules(*wanted: dict[str, object]) -> list[Rule]:
    return [
        replace(parse_rule({k: v for k, v in fields.items() if k != "id"}, NOW), id=int(str(fields["id"])))
        for fields in wanted
    ]


FORWARDED = Packet(ip_address("10.1.0.2"), ip_address("10.2.0.2"), in_interface="lan", out_interface="wan")
OTHER_ALLOW = {"id": 8, "target": "10.1.0.9", "action": "allow"}
BLOCK = {"id": 1, "target": "10.1.0.0/24", "action": "block"}
ALLOW_TO = {"id": 2, "target": "10.2.0.2", "direction": "to", "action": "allow"}
CROWD = {"id": 1, "target": "10.1.0.0/24", "rate": "1 connections", "per": "host"}
JOURNEYS: dict[str, tuple[list[dict[str, object]], list[dict[str, object]]]] = {
    "an exception comes with its block": ([OTHER_ALLOW], [OTHER_ALLOW, BLOCK, {**OTHER_ALLOW, "target": "10.1.0.2"}]),
    "an exception goes with its block": ([OTHER_ALLOW, BLOCK, {**OTHER_ALLOW, "target": "10.1.0.2"}], [OTHER_ALLOW]),
    "a block moves behind the routing": ([BLOCK], [BLOCK, {**ALLOW_TO, "target": "10.2.0.3"}]),
    "and back": ([BLOCK, {**ALLOW_TO, "target": "10.2.0.3"}], [BLOCK]),
    "a limit moves behind the routing": (
        [{"id": 1, "target": "10.1.0.2", "rate": "1 packets/min"}],
        [{"id": 1, "target": "10.1.0.2", "rate": "1 packets/min"}, {**ALLOW_TO, "target": "10.2.0.3"}],
    ),
    "a block becomes a limit": ([BLOCK], [{"id": 1, "target": "10.1.0.2", "rate": "1 packets/min"}]),
    "a limit becomes one for all": (
        [{"id": 1, "target": "10.1.0.0/24", "rate": "1 packets/min", "per": "host"}],
        [{"id": 1, "target": "10.1.0.0/24", "rate": "2 packets/min", "per": "target"}],
    ),
    "connections are counted elsewhere, since one is rejected": (
        [CROWD],
        [CROWD, {"id": 2, "target": "10.9.0.2", "rate": "1 connections", "action": "reject"}],
    ),
    "and again": ([CROWD, {"id": 2, "target": "10.9.0.2", "rate": "1 connections", "action": "reject"}], [CROWD]),
}


@pytest.mark.parametrize("target", ["10.0.0.0/8", "10.1.0.0/24"])
@pytest.mark.parametrize("allow", ["from", "to"])
@pytest.mark.parametrize("block", ["from", "to"])
@pytest.mark.parametrize(
    "limit", [{"rate": "1 packets/min"}, {"rate": "1 connections/min"}, {"rate": "1 packets/min", "action": "reject"}]
)
def test_a_limit_of_all_gives_way_to_a_block_within_what_is_allowed(
    limit: dict[str, object], block: str, allow: str, target: str
) -> None:
    """And back. The allow passes nobody before the block is there, whichever tables they are in."""
    before = [{"id": 1, "target": "0.0.0.0/0", "per": "target", **limit}]
    after = [
        {"id": 2, "target": "0.0.0.0/0", "direction": allow, "action": "allow"},
        {"id": 3, "target": target, "direction": block, "action": "block"},
    ]
    seen = [replace(FORWARDED, opens=True)]
    check(Change(rules(*before), rules(*after)), seen)
    check(Change(rules(*after), rules(*before)), seen)


@pytest.mark.parametrize("name", JOURNEYS)
def test_known_journeys(name: str) -> None:
    before, after = JOURNEYS[name]
    check(Change(rules(*before), rules(*after)), [replace(FORWARDED, opens=True)])


@settings(max_examples=150)
@given(journeys(), st.randoms(use_true_random=False))
def test_nor_while_what_others_took_away_is_put_back(journey: tuple[Change, list[Packet]], chance: Random) -> None:
    change, seen = journey
    compilation, kernel = settled(change.before)
    damage(kernel, chance)
    # Where mangle is gone and filter is not, a mark like ours is taken for ours until mangle is back.
    follow(compilation, kernel, [replace(packet, mark=0) for packet in seen])


def damage(kernel: FakeKernel, chance: Random) -> None:
    """Somebody resets tables, destroys sets that no chain names any more, and deletes entries."""
    if chance.random() < 0.7:
        for table in chance.sample(TABLES, chance.randrange(1, len(TABLES) + 1)):
            for held in (kernel.chains, kernel.hooks):
                for chain in [chain for chain in held if chain.table == table]:
                    del held[chain]
    named = {name for rules in kernel.chains.values() for rule in rules for name in kernel.sets if name in rule.text}
    for name in sorted(kernel.sets.keys() - named):
        if chance.random() < 0.5:
            del kernel.sets[name], kernel.elements[name]
    for held in kernel.elements.values():
        for key in [key for key in held if chance.random() < 0.2]:
            del held[key]


REJECT = {"action": "reject", "rate": "1 packets/min", "burst": 1}
FLOWED = replace(FORWARDED, protocol="udp", port=53)
MANY_PORTS = [
    {"id": n, "target": "10.1.0.0/24", "per": "host", "protocol": "udp", "ports": n, **REJECT} for n in range(45, 60)
]
MANY_DEVICES: list[dict[str, object]] = [
    {"id": n, "target": "10.1.0.2", "interface": f"lan{n or ''}", **REJECT} for n in range(12)
]
SHAPES: dict[str, list[dict[str, object]]] = {
    "one": [{"id": 1, "target": "10.1.0.2", **REJECT}],
    "many of a kind": [{"id": n, "target": f"10.1.0.{n}", **REJECT, "rate": f"{n} packets/min"} for n in range(1, 9)],
    "a tree of ports": MANY_PORTS,
    "a tree of ports that drops": [{**fields, "action": "drop"} for fields in MANY_PORTS],
    "a tree of interfaces": MANY_DEVICES,
    "a VRF": [{"id": 1, "target": "10.1.0.2", "interface": "red", **REJECT}],
    "a VRF that drops, with a tree": [
        *({**fields, "action": "drop"} for fields in MANY_PORTS),
        {"id": 1, "target": "10.1.0.2", "interface": "red", **REJECT, "action": "drop"},
    ],
}


@pytest.mark.parametrize("masks", [(0xFF000000, 0xFF0000), (0xF, 0xFF000000)])
@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_shape_chains_have_their_bits_change_without_a_gap(shape: str, masks: tuple[int, int]) -> None:
    """Whatever marks packets bring. In no shape a limit depends on what the bits are, nor are any left behind."""
    before, after = masks
    red = Topology({"lan": Device(1, True, master="red"), "red": Device(9, True, "vrf")})
    here = replace(facts, mark_mask=before, topology=red)
    compilation, kernel = settled(rules(*SHAPES[shape]), here)
    moved = Compilation(replace(here, mark_mask=after), compilation.numbers.kept)
    bring(moved, rules(*SHAPES[shape]))
    marks = (0, before & 0x11111111, after & 0x11111111, after, EVERY & ~(before | after), EVERY & ~after)
    named = [replace(FLOWED, mark=mark, in_interface=device) for mark in marks for device in ("lan", "red")]
    others = [replace(packet, src=ip_address("10.7.7.7")) for packet in named]
    follow(moved, kernel, named + others)
    assert observe(kernel) == moved.state
    assert {fate(kernel, packet) for packet in others} == {"passes"}
    limited = {fate(kernel, packet) for packet in named if packet.in_interface == ("red" if "VRF" in shape else "lan")}
    assert limited == {"is dropped"}
    assert find_former_bits(moved.state.structure, after) == ()


def test_limits_from_somewhere_stand_behind_the_routing_but_for_peers() -> None:
    """Those may be translated there; and what has come in by a port of a VRF has come in by the VRF there."""
    fields: dict[str, dict[str, object]] = {
        "four": {"target": "10.1.0.2"},
        "six": {"target": "fd00:1::2"},
        "device": {"target": "10.1.0.3", "interface": "lan"},
        "port": {"target": "10.1.0.4", "protocol": "udp", "ports": [53]},
        "peer": {"target": "10.1.0.5", "per": "peer"},
        "slave": {"target": "10.1.0.6", "interface": "slave"},
        "vrf": {"target": "10.1.0.7", "interface": "red"},
    }
    devices = {"red": Device(1, True, "vrf"), "slave": Device(2, True, master="red"), "lan": Device(3, True)}
    for name, each in fields.items():
        wanted = rules({"id": 1, "rate": "5 packets/s", **each})
        compilation, _ = settled(wanted, replace(facts, topology=Topology(devices)))
        hooks = {hook.name for hook in compilation.state.structure.hooks if hook.table == "mangle"}
        early = name in ("peer", "slave")
        assert ("PREROUTING" in hooks, {"FORWARD", "INPUT"} <= hooks) == (early, not early), name
