"""A table of hashlimit keeps the buckets of targets that have gone: where they could fill it, a limit takes another."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlimit.compile import Compilation
from netlimit.limits import Facts
from netlimit.rules import Rule, parse_rule
from tests.unit.histories import Change, bring, changes
from tests.unit.strategies import NOW, facts

TABLE = re.compile(r"--hashlimit-above (\S+) .*--hashlimit-name (\S+)")
HOSTS = {"target": "10.16.0.0/16", "rate": "10 packets/min", "per": "host"}
PEERS = {"target": "10.1.0.2", "direction": "to", "rate": "100 packets/h", "per": "peer"}
OTHERS = [
    {"id": 90, "target": "10.48.0.0/16", "rate": "20 packets/min", "per": "host"},
    {"id": 91, "target": "10.48.0.0/16", "rate": "10 packets/min", "per": "host", "direction": "to"},
    {"id": 92, "target": "10.48.0.0/16", "rate": "10 packets/min", "per": "host", "action": "observe"},
    {"id": 93, "target": "10.48.0.0/16", "rate": "10 packets/min", "per": "peer"},
]


def make(*several: dict[str, object]) -> list[Rule]:
    return [replace(parse_rule({k: v for k, v in each.items() if k != "id"}, NOW), id=each["id"]) for each in several]


def tables(rules: Iterable[Rule], here: Facts = facts) -> set[tuple[str, str]]:
    """The rates and names of all tables."""
    compilation = Compilation(here)
    for rule in rules:
        assert compilation.put(rule) is None
    return read_tables(compilation)


def read_tables(compilation: Compilation) -> set[tuple[str, str]]:
    texts = (rule.text for rules in compilation.structure.chains.values() for rule in rules)
    return {(found[1], found[2]) for text in texts if (found := TABLE.search(text))}


def several(kind: dict[str, object], *targets: str) -> list[Rule]:
    return make(*({**kind, "id": n, "target": target} for n, target in enumerate(targets, 1)))


@pytest.mark.parametrize(
    ("kind", "one", "other", "narrow"),
    [
        (HOSTS, "10.16.0.0/16", "10.32.0.0/13", "10.64.0.0/17"),
        ({**HOSTS, "action": "observe"}, "10.16.0.0/16", "10.32.0.0/16", "10.64.0.7"),
        ({**HOSTS, "direction": "to", "protocol": "udp", "ports": 53}, "10.16.0.0/15", "10.32.0.0/16", "10.64.0.0/24"),
        (HOSTS, "2001:db8::/112", "2001:db8:1::/110", "2001:db8:2::/113"),
        ({**HOSTS, "rate": "1 Mbit/s"}, "10.16.0.0/13", "10.32.0.0/13", "10.64.0.0/18"),
    ],
)
def test_a_wide_target_that_comes_goes_or_changes_has_the_limit_take_another_table(
    kind: dict[str, object], one: str, other: str, narrow: str
) -> None:
    found = [tables(several(kind, *targets)) for targets in [(narrow,), (one, narrow), (other, narrow)]]
    assert [len(each) for each in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3


def test_limits_of_another_kind_or_rate_keep_theirs() -> None:
    others = tables(make(*OTHERS))
    assert len(others) == len(OTHERS)
    for targets in [("10.16.0.0/16",), ("10.32.0.0/16", "10.64.0.0/17")]:
        assert others < tables([*several(HOSTS, *targets), *make(*OTHERS)])


def test_narrow_targets_rename_nothing_however_many() -> None:
    """So that rules for single hosts may come and go, and an upgrade begins nobody's bucket anew."""
    here = replace(facts, set_size=65_536)
    names = [
        tables(several(HOSTS, *targets), here) for targets in (["10.16.0.0/17"], [f"10.16.0.{n}" for n in range(99)])
    ]
    assert names[0] == names[1] == {("10/min", "nl-c746cbd34c")}
    wide = several(HOSTS, "10.32.0.0/16", *(f"10.16.0.{n}" for n in range(99)))
    assert tables(wide, here) == tables(wide[:1], here)


def test_a_target_is_as_wide_as_the_blocks_in_it_are_many() -> None:
    kind = {**HOSTS, "per": "/64"}
    wide = [tables(several(kind, target)) for target in ("2001:db8::/48", "2001:db8:1::/48")]
    narrow = [tables(several(kind, target)) for target in ("2001:db8::/49", "2001:db8:1::/49")]
    assert wide[0] != wide[1]
    assert narrow[0] == narrow[1]


def test_budgets_are_never_wide() -> None:
    first, second = (tables(several({**HOSTS, "per": "target"}, target)) for target in ("10.0.0.0/8", "11.0.0.0/8"))
    assert first == second


def test_what_changes_no_target_costs_no_look_at_all_chains() -> None:
    compilation = Compilation(facts)
    (rule,) = several(HOSTS, "10.16.0.0/13")
    assert compilation.put(rule) is None
    compilation.settle()
    before = compilation.structure
    for again in (replace(rule, comment="why"), replace(rule, expires_at=NOW + timedelta(days=9)), replace(rule, id=7)):
        assert compilation.put(again) is None
    compilation.drop(rule.id)
    assert compilation.structure is before


@pytest.mark.parametrize("action", ["drop", "observe"])
def test_peers_of_another_target_have_another_table_while_each_target_can_have_many(action: str) -> None:
    here = Facts()
    few = [f"10.1.0.{n}" for n in range(1, 5)]
    named = [
        tables(several({**PEERS, "action": action}, *targets), here)
        for targets in (few, few[1:], [*few[1:], "10.1.1.1"])
    ]
    assert [len(each) for each in named] == [1, 1, 1]
    assert len(set.union(*named)) == 3
    many = [f"10.1.{n}.2" for n in range(30)]
    named = [
        tables(several({**PEERS, "action": action}, *targets), here)
        for targets in (many, many[1:], [*many, "10.9.9.9"])
    ]
    assert named[0] == named[1] == named[2], "sets of so many targets are so small that one leaves little behind"


def test_where_the_set_of_peers_is_another_one_the_table_is_too() -> None:
    """Peers whom a fresh set does not know yet would come beside those who have a bucket."""
    small = Facts(set_size=1024)
    many = [f"10.1.{n}.2" for n in range(42)]
    sizes = [several(PEERS, *many[:number]) for number in (20, 21, 42)]
    assert len(set.union(*(tables(each, Facts()) for each in sizes))) == 3
    alone, beside = several(PEERS, "10.1.0.2"), several({**PEERS, "rate": "10 packets/h"}, "10.1.0.3", "10.1.0.4")
    (before,) = tables(alone, small)
    after = dict(tables([*alone, *(replace(rule, id=rule.id + 1) for rule in beside)], small))
    assert after[before[0]] != before[1], "a slower rate has peers remembered for longer, in another set"


@settings(max_examples=100)
@given(changes(), st.randoms(use_true_random=False))
def test_names_tell_the_rules_in_force_and_not_what_came_before(change: Change, chance: Random) -> None:
    """A restart, a plan and the guard come to the same ones."""
    compilation = Compilation(facts)
    bring(compilation, change.before)
    chance.choice([lambda: None, compilation.settle, lambda: compilation.structure])()
    bring(compilation, change.after)
    if chance.random() < 0.5:
        compilation.settle()
    fresh = Compilation(facts)
    bring(fresh, chance.sample(change.after, len(change.after)))
    assert read_tables(compilation) == read_tables(fresh)
