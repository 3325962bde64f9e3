"""Who else uses our sets: rules of others, in the legacy tables and in those of iptables-nft, and copies of our chains
that somebody has loaded there."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from netlimit.duplicates import HOOKS, make_removal
from netlimit.errors import KernelError
from netlimit.kernel.iptables import foreign_rules
from netlimit.kernel.legacy import find_tool
from netlimit.kernel.tools import ask
from netlimit.several import name_some
from netlimit.state import CHAIN_PREFIX, SET_PREFIX, ChainId

_PATIENCE = 10.0
"""Seconds that a tool may take."""
_SHOWN, _NAMED = 3, 5
"""So many rules that use a set, and sets that a copy uses, are told by name."""
_TABLE = re.compile(r"^\*(\S+)\n(.*?)^COMMIT$", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(rf"^:{CHAIN_PREFIX}(?:{'|'.join(HOOKS)}) ", re.MULTILINE)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_USE = re.compile(rf"(! )?--(?:match|map|add|del)-set ({SET_PREFIX}\S+) ")
_LETS_PASS = re.compile(r" -[jg] (?:RETURN|ACCEPT)\b")
_LIMITING = re.compile(rf"{SET_PREFIX}[bdlq][46]-")
"""Sets of those who are blocked, limited or queued. In the others stand exceptions, and what is remembered."""


class Use(NamedTuple):
    """A rule of somebody else's that uses a set: the tool that shows it, its table, and what this prints. It is
    `copied` where it stands in a copy of our chains, and `limits` if it does nothing to packets once the set is
    empty."""

    name: str
    tool: str
    table: str
    rule: str
    copied: bool = False
    limits: bool = False

    @property
    def removal(self) -> str:
        """The command that removes it; the whole copy, where it is of one."""
        if self.copied:
            return make_removal(self.tool, self.table)
        return f"{self.tool} -t {self.table} -D {self.rule.removeprefix('-A ')}"


def find_uses(names: Collection[str]) -> list[Use]:
    """The rules of others that use these sets. It only advises: what cannot be read is left out."""
    uses: list[Use] = []
    for family in (4, 6):
        for find in (_find_legacy, _find_twins):
            with suppress(KernelError, OSError):
                uses += (use for use in find(family) if use.name in names)
    return uses


def find_spent(users: dict[str, int], uses: Iterable[Use]) -> list[str]:
    """Which of these sets, used by so many rules and sets, may be emptied: those that hold limits, and that nothing
    uses but rules of copies of our chains which do nothing then. Where anything else does, a rule that drops what is
    not in the set would drop everything."""
    told = [use.name for use in uses if use.copied and use.limits]
    return [name for name, number in users.items() if _LIMITING.match(name) and told.count(name) >= number]


def say_held(users: dict[str, int], uses: Iterable[Use]) -> Iterator[str]:
    """What keeps these sets, and how to remove it: a sentence for each copy, and for each set besides."""
    uses = list(uses)
    copies = dict.fromkeys(use.removal for use in uses if use.copied)
    for removal in copies:
        names = sorted({use.name for use in uses if use.copied and use.removal == removal})
        sets = f"The set {names[0]} is" if len(names) == 1 else f"The sets {name_some(names, _NAMED)} are"
        yield f"{sets} used by a copy of netlimit's chains in iptables-nft. `{removal}` removes that."
    for name, number in sorted(users.items()):
        own = list(dict.fromkeys(use.removal for use in uses if use.name == name and not use.copied))
        if own:
            commands = " and ".join(f"`{each}`" for each in own[:_SHOWN])
            yield f"The set {name} is used by {_count(own)} of somebody else. {commands} {_remove(own)}."
        elif not any(use.name == name for use in uses):
            yield (
                f"The set {name} is used by something of somebody else ({number}) that is not found among the rules "
                "of iptables: a set of sets (`ipset list`) or a filter of tc, say. Remove that."
            )


def say_held_chain(chain: ChainId) -> str:
    """That a chain of ours, which is empty, has to stay."""
    tool = find_tool(chain.family, "save").removesuffix("-save")
    return (
        f"The chain {chain.name} is used by a rule of somebody else. `{tool} -t {chain.table} -S | grep "
        f"'[jg] {chain.name}$'` shows it; remove it."
    )


def _count(rules: list[str]) -> str:
    return "a rule" if len(rules) == 1 else f"{len(rules)} rules"


def _remove(rules: list[str]) -> str:
    if len(rules) > _SHOWN:
        return "remove the first of them"
    return "removes it" if len(rules) == 1 else "remove them"


def _find_legacy(family: int) -> Iterator[Use]:
    tool = find_tool(family, "save").removesuffix("-save")
    for table, rules in foreign_rules(family).items():
        for rule in rules:
            yield from (Use(name, tool, table, rule) for _, name in _find_sets(rule))


def _find_twins(family: int) -> Iterator[Use]:
    tool = "iptables-nft" if family == 4 else "ip6tables-nft"
    for table, body in _TABLE.findall(ask(f"{tool}-save", patience=_PATIENCE)):
        is_copy = _ENTRY.search(body) is not None
        for rule in (line for line in body.splitlines() if line.startswith("-A ")):
            copied = is_copy and rule.startswith(f"-A {CHAIN_PREFIX}")
            passes = _LETS_PASS.search(rule) is not None
            yield from (
                Use(name, tool, table, rule, copied, not inverted and not passes) for inverted, name in _find_sets(rule)
            )


def _find_sets(rule: str) -> list[tuple[str, str]]:
    """The sets of which a rule speaks, each behind "! " where it asks who is not in it."""
    return _USE.findall(_QUOTED.sub('""', rule))
