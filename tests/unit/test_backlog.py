"""How much may wait for the hosts of a device together, and when that changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from netlimit.backlog import FEW, MOST_SHARED, Backlog, round_up
from netlimit.htb import MTU
from netlimit.limits import Facts
from netlimit.numbers import Numbers
from netlimit.plan import WriteTree, diff
from netlimit.rules import Rule
from netlimit.tree import Leaf
from tests.unit.shapes import Gateway, gateway_facts, is_host, shape

CAP = shape(1, "0.0.0.0/0", "19 Mbit/s", interface="lan", per="target")
EACH = shape(2, "10.1.0.0/16", "1 Mbit/s", ceil="19 Mbit/s", per="host")
TOTAL = 2 * 19_000_000 // 8
"""Bytes: two seconds of the cap."""
WITHOUT = replace(gateway_facts, capabilities={"fq_codel": "there is none."})


def gateway(*rules: Rule, facts: Facts = WITHOUT) -> Gateway:
    made = Gateway(facts)
    for rule in rules:
        made.put(rule)
    made.sync()
    return made


def see(made: Gateway, addresses: Iterable[str]) -> list[WriteTree]:
    """Let hosts appear; the changes of trees that this takes."""
    made.see(addresses)
    plan = made.plan()
    made.sync()
    made.check()
    return [step for step in plan.steps if isinstance(step, WriteTree)]


def flood(first: int, last: int) -> list[str]:
    return [f"10.1.{32 + number // 250}.{number % 250}" for number in range(first, last)]


def leaves(made: Gateway, device: str = "lan") -> list[Leaf]:
    classes = made.kernel.trees[device].classes
    return [each.leaf for number, each in classes.items() if is_host(number) and each.leaf]


def held(found: list[Leaf]) -> int:
    """Bytes of full packets."""
    return sum(each.limit if each.kind == "bfifo" else each.limit * MTU for each in found)


def test_a_few_have_each_what_one_has_alone() -> None:
    made = gateway(CAP, EACH)
    see(made, flood(0, FEW))
    assert leaves(made) == [Leaf("bfifo", 475_000)] * FEW


def test_many_share_what_two_seconds_send() -> None:
    made = gateway(CAP, EACH)
    for before, count in ((0, FEW + 1), (FEW + 1, 30), (30, 254), (254, 1000)):
        see(made, flood(before, count))
        assert len(leaves(made)) == count
        assert len(set(leaves(made))) == 1
        assert TOTAL / 4 < held(leaves(made)) <= TOTAL


def test_thousands_have_two_packets_each() -> None:
    made = gateway(CAP, EACH)
    for count in range(0, 4000, 1000):
        see(made, flood(count, count + 1000))
    assert set(leaves(made)) == {Leaf("pfifo", 2)}


def test_without_a_cap_there_is_an_end_too() -> None:
    made = gateway(shape(2, "10.1.0.0/16", "1 Mbit/s", ceil="10 Gbit/s", per="host"))
    see(made, flood(0, 900))
    assert MOST_SHARED / 4 < held(leaves(made)) <= MOST_SHARED


def test_hosts_of_many_budgets_share_what_the_device_has() -> None:
    budgets = [shape(10 + n, f"10.1.{32 + n}.0/24", "19 Mbit/s", per="target") for n in range(4)]
    made = gateway(CAP, EACH, *budgets)
    see(made, flood(0, 900))
    assert held(leaves(made)) <= TOTAL


def test_hosts_of_a_slow_budget_share_what_that_sends_and_others_do_not() -> None:
    made = gateway(EACH, shape(3, "10.1.32.0/24", "4 Mbit/s", per="target"))
    see(made, [*flood(0, 200), "10.1.0.2"])
    assert sorted(map(str, set(leaves(made)))) == ["bfifo limit 125000", "pfifo limit 2"]


@pytest.mark.parametrize("count", [12, 100, 300])
def test_an_fq_codel_shares_as_well(count: int) -> None:
    made = gateway(CAP, EACH, facts=gateway_facts)
    see(made, flood(0, count))
    (leaf,) = set(leaves(made))
    assert leaf.kind == "fq_codel"
    assert leaf.limit == min(TOTAL // round_up(count) // MTU, 1024)


def test_a_newcomer_costs_his_own_class_alone_but_where_the_number_has_doubled() -> None:
    made = gateway(CAP, EACH)
    see(made, flood(0, 100))
    (step,) = see(made, flood(100, 101))
    assert sum(map(is_host, step.classes)) == 1
    (step,) = see(made, flood(101, 129))
    assert sum(map(is_host, step.classes)) == 129


def test_who_comes_and_goes_at_the_edge_has_nobody_resized() -> None:
    made = gateway(CAP, EACH)
    see(made, flood(0, 129))
    numbers = sorted(filter(is_host, made.kernel.trees["lan"].classes))
    before = set(leaves(made))
    made.compilation.shaping.dismiss("lan", set(numbers[:60]))
    made.sync()
    assert len(leaves(made)) == 69
    assert set(leaves(made)) == before
    made.compilation.shaping.dismiss("lan", set(numbers[60:120]))
    made.sync()
    assert before != set(leaves(made)), "a few have more again"
    made.check()


def test_a_restart_finds_all_queues_as_they_shall_be() -> None:
    made = gateway(CAP, EACH)
    see(made, flood(0, 129))
    numbers = sorted(filter(is_host, made.kernel.trees["lan"].classes))
    made.compilation.shaping.dismiss("lan", set(numbers[:60]))
    made.sync()
    made.restart()
    assert str(made.plan_all()) == "Nothing to do."


def test_no_number_is_kept_once_all_have_gone() -> None:
    made = gateway(CAP, EACH)
    see(made, flood(0, 129))
    assert any(group.startswith("tc backlog") for group, _ in made.compilation.numbers.kept)
    made.drop(2)
    made.sync()
    assert not any(group.startswith("tc backlog") for group, _ in made.compilation.numbers.kept)


def test_a_number_that_nobody_could_have_kept_counts_for_nothing() -> None:
    """The database is anybody's to write who may."""
    numbers = Numbers({("tc backlog lan 5", ""): -3, ("tc backlog lan 6", ""): 2**60})
    shares = Backlog(numbers, "lan").share({5: (100, 10**6), 6: (100, 10**6)}, 10**7)
    assert shares == dict.fromkeys((5, 6), 2 * 10**6 // 128)


def test_a_tree_that_holds_queues_of_other_sizes_is_mended() -> None:
    made = gateway(CAP, EACH)
    see(made, flood(0, 254))
    tree = made.kernel.trees["lan"]
    number = next(filter(is_host, tree.classes))
    strange = {number: tree.classes[number]._replace(leaf=Leaf("bfifo", 475_000))}
    made.kernel.trees["lan"] = replace(tree, classes={**tree.classes, **strange})
    (step,) = diff(made.compilation.state, made.observed).steps
    assert isinstance(step, WriteTree)
    assert list(step.classes) == [number]
