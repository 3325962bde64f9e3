"""Whether python-iptables can say what we say is tried with specimens: there is one of every form that is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from hypothesis import given, settings

from netlimit.compile import Compilation, compile_rules
from netlimit.kernel.specimens import list_specimens
from netlimit.rules import Rule
from netlimit.state import ChainRule, Effect, Enters, Leaves, Match, Structure
from tests.forcing import make_rule
from tests.unit.strategies import NOW, facts, rule_sets
from tests.unit.test_golden_states import STATES

Form = tuple[str, str]


def list_forms(rule: ChainRule) -> Iterator[Form]:
    """The matches and the target of a rule without what is particular to it: their kinds, each with each option."""
    assert rule.effect is not None
    for part in (*rule.matches, rule.effect):
        words = part.args()
        for index, word in enumerate(words):
            if word.startswith("-"):
                inverted = index > 0 and words[index - 1] == "!"
                begins = isinstance(part, Enters | Leaves) and part.interface.endswith("+")
                yield type(part).__name__, "! " * inverted + word + " +" * begins


KNOWN = {family: {form for _, rule in list_specimens(family) for form in list_forms(rule)} for family in (4, 6)}


def list_unknown(structure: Structure) -> set[tuple[int, Form]]:
    return {
        (where.family, form)
        for where, rules in (*structure.chains.items(), *structure.hooks.items())
        for rule in rules
        for form in list_forms(rule)
        if form not in KNOWN[where.family]
    }


def test_every_kind_of_match_and_target_has_a_specimen() -> None:
    kinds = {kind.__name__ for kind in (*get_args(Match), *get_args(Effect))}
    assert {form[0] for form in KNOWN[6]} == kinds
    assert {form[0] for form in KNOWN[4]} == kinds - {"Icmp6"}


def test_every_form_of_the_golden_states_has_a_specimen() -> None:
    for known, wanted in STATES.values():
        rules = [replace(make_rule(fields, NOW), id=number) for number, fields in enumerate(wanted, start=1)]
        assert list_unknown(compile_rules(rules, known)[0].structure) == set()


@settings(max_examples=100)
@given(rule_sets())
def test_every_form_of_random_rules_has_a_specimen(rules: list[Rule]) -> None:
    compilation = Compilation(facts)
    for rule in rules:
        compilation.put(rule)
    assert list_unknown(compilation.structure) == set()
