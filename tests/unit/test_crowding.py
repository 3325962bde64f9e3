"""Kinds of limits are counted, told of, and refused beyond what a kernel should be asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from netlimit import crowding
from netlimit.compile import Compilation, compile_rules
from netlimit.crowding import find_crowd
from netlimit.limits import Facts
from netlimit.rules import Rule, parse_rule
from netlimit.state import Above
from tests.unit.strategies import NOW

PORT = {"target": "10.9.0.1", "rate": "100 packets/s", "protocol": "udp"}


def number(make: Callable[[int], dict[str, object]], count: int) -> list[Rule]:
    return [replace(parse_rule(make(n), NOW), id=n + 1) for n in range(count)]


def a_port(n: int) -> dict[str, object]:
    return {**PORT, "ports": 1000 + n}


CROWDS: dict[str, Callable[[int], dict[str, object]]] = {
    "a port each": a_port,
    "blocked ports": lambda n: {"target": "10.9.0.1", "action": "block", "protocol": "tcp", "ports": 1000 + n},
    "a device each": lambda n: {"target": "10.9.0.1", "rate": "9 packets/s", "interface": f"ppp{n}"},
    "connections at once": lambda n: {"target": "10.9.0.0/16", "per": "host", "rate": f"{n + 5} connections"},
    "observed at a rate each": lambda n: {"target": f"10.9.0.{n}", "rate": f"{n + 5} packets/s", "action": "observe"},
    "wide ranges": lambda n: {**PORT, "ports": f"{1000 + n}-{60_000 + n}"},
}


@pytest.mark.parametrize("what", CROWDS)
def test_what_is_too_much_is_refused_and_there_is_room_again(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowding, "MOST_KINDS", 20)
    monkeypatch.setattr(crowding, "MOST_MET", 20)
    rules = number(CROWDS[what], 22)
    compilation = Compilation(Facts())
    problems = [compilation.put(rule) for rule in rules]
    assert problems[:20] == [None] * 20
    for problem in problems[20:]:
        assert problem is not None
        assert "kinds of limits" in problem
    compilation.drop(1)
    assert compilation.put(rules[20]) is None
    assert compilation.put(rules[21]) is not None


SCATTERED: dict[str, tuple[Callable[[int], dict[str, object]], int]] = {
    "ports in a list": (lambda n: {**PORT, "ports": [1000 + n, 3000 + n, 5000 + n, 7000 + n]}, 5),
    "a range that fits no block": (lambda n: {**PORT, "ports": f"{1001 + 64 * n}-{1014 + 64 * n}"}, 3),
    "ports on both sides": (
        lambda n: {**PORT, "ports": [53, 1000 + n], "source_ports": [53, 1000 + n]},
        5,
    ),
}
"""What takes several places in the trees of ports, and how many of such there may be in 20."""


@pytest.mark.parametrize("what", SCATTERED)
def test_many_ports_are_too_much_with_few_kinds_too(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """3,900 kinds of 15 ports each took 137,000 rules, and each change a quarter of a minute."""
    monkeypatch.setattr(crowding, "MOST_PLACES", 20)
    make, room = SCATTERED[what]
    rules = number(make, room + 2)
    compilation = Compilation(Facts())
    problems = [compilation.put(rule) for rule in rules]
    assert problems[:room] == [None] * room
    for problem in (*problems[room:], find_crowd(rules)):
        assert problem is not None
        assert "ports that can be told apart" in problem
    assert find_crowd(rules[:room]) is None
    assert "20 places of ports" in (compilation.kinds.warning or "")
    compilation.drop(1)
    assert compilation.put(rules[room]) is None
    assert compilation.put(rules[room + 1]) is not None


def test_a_block_of_ports_takes_one_place() -> None:
    """Such as each customer's behind a shared address."""
    rules = number(lambda n: {**PORT, "ports": f"{1024 + 64 * (n % 1000)}-{1024 + 64 * (n % 1000) + 63}"}, 1000)
    assert find_crowd(rules) is None
    assert sum(crowding.count_places(rule.selector) for rule in rules) == 1000


@pytest.mark.parametrize("low", [0, 1, 7, 1024, 65_535])
@pytest.mark.parametrize("high", [0, 1, 6, 7, 1087, 32_767, 65_535])
def test_places_are_those_of_the_tree(low: int, high: int) -> None:
    if low <= high:
        selector = parse_rule({**PORT, "ports": f"{max(low, 1)}-{max(high, 1)}"}, NOW).selector
        assert crowding.count_places(selector) == len(split(max(low, 1), max(high, 1)))


def split(low: int, high: int, first: int = 0, last: int = 65_535) -> list[tuple[int, int]]:
    """The halves of halves that a range is made of."""
    if low <= first and last <= high:
        return [(first, last)]
    if last < low or high < first:
        return []
    middle = (first + last) // 2
    return split(low, high, first, middle) + split(low, high, middle + 1, last)


def test_targets_and_rates_of_one_kind_are_no_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowding, "MOST_KINDS", 2)
    many = number(lambda n: {**PORT, "target": f"10.9.0.{n}", "rate": f"{n + 5} packets/s", "ports": 53}, 100)
    _, _, problems = compile_rules(many, Facts())
    assert not problems
    assert find_crowd(many) is None


def test_tables_of_peers_are_large_and_their_memory_is_bounded() -> None:
    rules = number(lambda n: {**PORT, "ports": n, "per": "peer"}, 4000)
    compilation = Compilation(Facts())
    problems = [problem for rule in rules if (problem := compilation.put(rule))]
    assert "kernel memory" in problems[0]
    assert 1200 < len(rules) - len(problems) < 2000
    assert compilation.kinds.memory <= crowding.MOST_MEMORY


def test_it_is_told_of_before_it_hurts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowding, "MANY_KINDS", 10)
    compilation = Compilation(Facts())
    for rule in number(a_port, 9):
        compilation.put(rule)
    assert compilation.kinds.warning is None
    compilation.put(replace(parse_rule(a_port(99), NOW), id=99))
    assert "10 of the 4096" in str(compilation.kinds.warning)


def test_a_call_that_can_never_be_held_is_refused_whole() -> None:
    assert find_crowd(number(a_port, 4096)) is None
    assert "4097 kinds of IPv4" in str(find_crowd(number(a_port, 4097)))
    apart = [replace(rule, hosts=(f"gw{rule.id % 2}",)) for rule in number(a_port, 8000)]
    assert find_crowd(apart) is None, "each gateway holds half of them"


def slots(*wanted: dict[str, object]) -> set[int]:
    rules = [replace(parse_rule(fields, NOW), id=n) for n, fields in enumerate(wanted, 1)]
    state, _, problems = compile_rules(rules, Facts())
    assert not problems
    chains = state.structure.chains.values()
    return {m.slots for rules in chains for rule in rules for m in rule.matches if isinstance(m, Above)}


def test_a_table_is_as_large_as_its_targets_need() -> None:
    wide = {"target": "10.9.0.0/16", "rate": "9 packets/s", "protocol": "udp", "ports": 53}
    assert slots(a_port(1)) == {64}
    assert slots({**wide, "per": "host"}) == {8192}
    assert slots({**wide, "per": "target"}) == {64}
    assert slots({**wide, "per": "/26"}) == {1024}
    assert slots({**wide, "target": "10.9.0.1", "per": "peer"}) == {8192}, "nobody knows how many there are"
    assert slots({"target": "10.9.0.1", "rate": "9 packets/s"}) == {8192}, "as it always was"


def test_a_table_changes_its_size_only_where_it_must() -> None:
    compilation = Compilation(Facts())
    rules = number(lambda n: {**PORT, "target": f"10.9.{n >> 8}.{n & 255}", "ports": 53}, 300)
    names = []
    for rule in rules:
        compilation.put(rule)
        chains = compilation.structure.chains.values()
        names += [m.name for held in chains for each in held for m in each.matches if isinstance(m, Above)]
        compilation.settle()
    assert len(set(names)) == 2
    for rule in rules[:100]:
        compilation.drop(rule.id)
    state, _, _ = compile_rules(rules[100:], Facts(), compilation.numbers.kept)
    assert compilation.state == state
