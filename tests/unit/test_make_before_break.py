"""On the way from one rule set to another nobody is without a limit, and nothing is dropped that is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from ipaddress import ip_address, ip_network
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlimit.compile import Compilation
from netlimit.kernel.base import observe
from netlimit.kernel.fake import FakeKernel
from netlimit.limits import parse_safe
from netlimit.packet import Packet
from netlimit.plan import Plan, Step, WriteSets
from netlimit.rules import Rule, parse_rule
from netlimit.state import TABLES
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


@settings(max_examples=80)
@given(journeys(), st.sets(st.sampled_from(("10.1.0.2/32", "10.1.0.0/24", "10.2.0.9/32", "fd00:1::2/128"))))
def test_nor_when_others_become_safe(journey: tuple[Change, list[Packet]], safe: set[str]) -> None:
    change, seen = journey
    compilation, kernel = settled(change.before)
    compilation.protect(replace(facts, safe=parse_safe(tuple(safe))))
    bring(compilation, change.before)
    follow(compilation, kernel, seen)
    assert observe(kernel) == compilation.state


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
    follow(compilation, kernel, seen)


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
