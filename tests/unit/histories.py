"""A rule set, and what may become of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from netlimit.compile import Compilation
from netlimit.errors import KernelError
from netlimit.kernel.base import Addresses, observe
from netlimit.kernel.fake import FakeKernel
from netlimit.limits import Facts
from netlimit.plan import Plan, diff
from netlimit.rules import Rule
from netlimit.state import ChainRule, Chains, Structure
from tests.unit.strategies import TARGETS, facts, rule_sets, rules


@dataclass(frozen=True)
class Change:
    """Rules before and after; those that stay, or get another rate, keep their id."""

    before: list[Rule]
    after: list[Rule]


@st.composite
def changes(draw: Callable[..., object], targets: tuple[str, ...] = TARGETS, most: int = 10) -> Change:
    """Some rules go, some come, some become others, the rest stays."""
    before: list[Rule] = []
    after: dict[str, Rule] = {}
    for rule in draw(rule_sets(most, targets)):
        fate = draw(st.sampled_from(["stays", "goes", "comes", "becomes"]))
        if fate != "comes":
            before.append(rule)
        if fate != "goes":
            wanted = replace(draw(rules(targets)), id=rule.id) if fate == "becomes" else rule
            after.setdefault(wanted.identity, wanted)
    return Change(before, list(after.values()))


def frozen_kernel() -> FakeKernel:
    """A kernel whose clock stands still: buckets do not fill."""
    return FakeKernel(now=lambda: 0.0, where=Addresses(tuple(facts.own), ()))


def bring(compilation: Compilation, rules: list[Rule]) -> None:
    """Change a compilation to hold these rules."""
    wanted = {rule.id for rule in rules}
    for rule_id in [rule_id for rule_id in compilation.fragments if rule_id not in wanted]:
        compilation.drop(rule_id)
    for rule in rules:
        assert compilation.put(rule) is None


def plan_for(compilation: Compilation, kernel: FakeKernel) -> Plan:
    """What a kernel tells of its chains is text."""
    found = observe(kernel)
    told = Structure(found.structure.sets, _tell(found.structure.chains), _tell(found.structure.hooks))
    return diff(compilation.state, replace(found, structure=told), compilation.transition(told))


def _tell(chains: Chains) -> Chains:
    return {where: tuple(ChainRule(rule.text) for rule in rules) for where, rules in chains.items()}


def apply(plan: Plan, kernel: FakeKernel) -> None:
    for step in plan.steps:
        kernel.apply(step)


def settled(rules: list[Rule], facts: Facts = facts) -> tuple[Compilation, FakeKernel]:
    """A compilation, and a kernel that holds it."""
    compilation, kernel = Compilation(facts), frozen_kernel()
    bring(compilation, rules)
    apply(plan_for(compilation, kernel), kernel)
    compilation.settle()
    return compilation, kernel


def converge(compilation: Compilation, kernel: FakeKernel) -> None:
    """Apply as the controller does, and again if the kernel refuses something."""
    try:
        apply(plan_for(compilation, kernel), kernel)
    except KernelError:
        apply(plan_for(compilation, kernel), kernel)
