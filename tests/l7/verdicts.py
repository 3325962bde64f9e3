"""A limiter in memory whose clock a test sets."""

from __future__ import annotations

import asyncio
from math import ceil

from netlimit.l7.limit import Limit
from netlimit.l7.limiter import Limiter, Verdict
from netlimit.l7.memory.counter import Clock
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import Descriptor, Entry, Node, Rule, RuleSet

SECOND = 10**9


def make_rule(name: str, limit: Limit | None = None, concurrency: Limit | None = None, **others: object) -> Rule:
    return Rule("test", name, limit, concurrency, **others)  # type: ignore[arg-type]


def describe(*names: str, who: str = "alice") -> list[Descriptor]:
    """A descriptor for each name, of which a rule of that name counts each `who` for himself."""
    return [Descriptor((Entry(name, who),)) for name in names]


def make_rules(*rules: Rule) -> RuleSet:
    """Rules that descriptors with their names as keys find, whatever the value."""
    return RuleSet({"test": Node(default={rule.name: Node(rule) for rule in rules})})


class Sandbox:
    """Rules, their limiter and its clock."""

    def __init__(self, *rules: Rule) -> None:
        self.now = 1_800_000_000 * SECOND
        self.rules = make_rules(*rules)
        self.limiter = Limiter(lambda: self.rules, MemoryStore(Clock(lambda: self.now, 0)))
        self.names = [rule.name for rule in rules]

    def after(self, seconds: float) -> Sandbox:
        self.now += ceil(seconds * SECOND)
        return self

    def ask(self, hits: int = 1, who: str = "alice") -> Verdict:
        return asyncio.run(self.limiter.decide("test", describe(*self.names, who=who), hits))
