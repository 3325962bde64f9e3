"""Shaping rules that come, change and go, with hosts and routes: what must be true after every pass, and within it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlimit.branches import _LEAST
from netlimit.compile import Compilation
from netlimit.errors import KernelError
from netlimit.marks import USUAL
from netlimit.numbers import MARK_BITS
from netlimit.plan import Plan
from netlimit.tree import FIRST_BUDGET, LAST_CHILD, TOP, major
from tests.forcing import make_rule
from tests.unit.shapes import TRAFFIC, Gateway, Step, find_classes, histories, is_host, packets
from tests.unit.strategies import NOW


@settings(max_examples=60)
@given(histories())
def test_one_change_at_a_time_comes_to_the_same_as_all_from_nothing(history: list[list[Step]]) -> None:
    gateway = Gateway()
    for steps in history:
        gateway.take(steps)
        gateway.sync()
    anew = Gateway(gateway.compilation.facts)
    for _, rule in sorted(gateway.rules.items()):
        anew.put(rule)
    assert anew.compilation.state
    for traffic in gateway.traffics:
        twin = next(each for each in anew.traffics if each.lane == traffic.lane)
        for block in traffic.present:
            twin.welcome([str(block.network_address)], block.prefixlen, 10**6)
    assert gateway.describe() == anew.describe()


@settings(max_examples=60)
@given(histories(changes=TRAFFIC))
def test_what_changed_is_enough_to_know(history: list[list[Step]]) -> None:
    gateway = Gateway()
    for steps in history:
        gateway.take(steps)
        gateway.sync()
        gateway.check()
        assert not gateway.plan_all()


@settings(max_examples=40)
@given(histories(4, changes=TRAFFIC))
def test_looking_in_between_changes_nothing(history: list[list[Step]]) -> None:
    """A plan may be asked for at any time."""
    gateway = Gateway()
    for steps in history:
        for step in steps:
            gateway.take([step])
            assert gateway.plan() is not None
        gateway.sync()
        gateway.check()


@settings(max_examples=40)
@given(st.data(), histories(3, changes=TRAFFIC))
def test_a_controller_that_dies_at_any_step_converges_when_it_starts_again(
    data: st.DataObject, history: list[list[Step]]
) -> None:
    gateway = Gateway()
    for steps in history:
        gateway.take(steps)
        plan = gateway.plan()
        gateway.apply(Plan(plan.steps[: data.draw(st.integers(0, len(plan.steps)))]))
        gateway.restart()
        gateway.apply(gateway.plan_all())
        gateway.compilation.settle()
        gateway.check()


@settings(max_examples=40)
@given(st.data(), histories(3, changes=TRAFFIC))
def test_after_a_failure_at_any_step_one_more_pass_converges(data: st.DataObject, history: list[list[Step]]) -> None:
    gateway = Gateway()
    for steps in history:
        gateway.take(steps)
        plan = gateway.plan()
        gateway.kernel.fail_at(data.draw(st.integers(0, len(plan.steps))))
        try:
            gateway.apply(plan)
        except KernelError:
            gateway.apply(gateway.plan_all())
        gateway.kernel._failing = None
        gateway.compilation.settle()
        gateway.check()


@settings(max_examples=40)
@given(histories(4, changes=TRAFFIC))
def test_a_host_keeps_its_class_over_a_restart(history: list[list[Step]]) -> None:
    gateway = Gateway()
    for steps in history:
        gateway.take(steps)
    gateway.sync()
    gateway.restart()
    assert not gateway.plan_all()


@settings(max_examples=60)
@given(histories(3))
def test_on_the_way_every_packet_waits_in_a_class_of_its_rule(history: list[list[Step]]) -> None:
    gateway, owners = Gateway(), dict[int, int]()
    probes = list(packets(gateway.kernel.routes))
    for steps in history:
        gateway.take([step for step in steps if step.what != "route"])
        assert gateway.compilation.state
        whose = {**owners, **gateway.owners()}
        seen = [find_classes(gateway.kernel, probes)]
        for step in gateway.plan().steps:
            gateway.kernel.apply(step)
            seen.append(find_classes(gateway.kernel, probes))
        gateway.compilation.settle()
        owners = gateway.owners()
        for packet in probes:
            first, *way, last = (whose.get(found[packet] or 0) for found in (*seen, seen[-1]))
            if first and last:
                assert set(way) <= {first, last}, f"{packet}: {first}, {way}"


@settings(max_examples=60)
@given(histories(6, changes=TRAFFIC))
def test_what_is_guaranteed_below_a_branch_never_exceeds_it(history: list[list[Step]]) -> None:
    gateway = Gateway()
    for steps in history:
        gateway.take(steps)
    for tree in gateway.compilation.state.trees.values():
        for number, branch in tree.classes.items():
            below = [each.rate for each in tree.classes.values() if each.parent == number]
            if major(number) == tree.handle and below and min(below) > _LEAST:
                assert sum(below) <= branch.rate


@settings(max_examples=60)
@given(histories(6))
def test_nobody_shares_the_class_of_a_host(history: list[list[Step]]) -> None:
    gateway = Gateway()
    for steps in history:
        gateway.take(steps)
        trees = gateway.compilation.state.trees
        gateway.sync()
        places = [place.number for traffic in gateway.traffics for place in traffic.places.values()]
        assert len(places) == len(set(places))
        classes = [number for tree in trees.values() for number in tree.classes]
        assert len(classes) == len(set(classes)), "the priority of a packet stays with it from device to device"
        assert {number for number in classes if is_host(number)} <= set(places)
        for number in classes:
            assert major(number) <= LAST_CHILD
            assert not is_host(number) or 1 <= number & 0xFFFF < TOP
            assert is_host(number) or number & 0xFFFF < 0x1000 or number & 0xFFFF >= FIRST_BUDGET


@settings(max_examples=40)
@given(histories(5))
def test_nothing_remains_when_no_rule_is_left(history: list[list[Step]]) -> None:
    gateway = Gateway()
    for steps in history:
        gateway.take(steps)
        gateway.sync()
    for number in list(gateway.rules):
        gateway.drop(number)
    gateway.sync()
    gateway.check()
    kernel, empty = gateway.kernel, Compilation(gateway.compilation.facts)
    assert (kernel.sets, kernel.chains, kernel.hooks) == ({}, {}, {})
    assert (kernel.trees, kernel.program, kernel.lanes) == ({}, None, {})
    assert gateway.compilation.numbers.kept == empty.numbers.kept == {MARK_BITS: USUAL}, "the bits of the mark stay"


@pytest.fixture(autouse=True)
def _small_children(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few hosts fill a child HTB; but how they are dealt out depends on the order in which they come."""
    if "from_nothing" not in request.node.name:
        monkeypatch.setattr("netlimit.traffic.SHARD_HOSTS", 2)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_who_is_refused_does_not_depend_on_who_came_first(order: tuple[int, int]) -> None:
    """Also where one of the two names somebody safe, whom it does not touch."""
    wide = {"target": "10.1.0.0/16", "direction": "from", "interface": "lan", "per": "host"}
    fields = {1: wide, 2: {"target": "10.1.9.9", "direction": "to"}}
    gateway = Gateway()
    for number in order:
        gateway.put(replace(make_rule({"action": "shape", "rate": "1 Mbit/s", **fields[number]}, NOW), id=number))
    assert gateway.compilation.problems == {}
