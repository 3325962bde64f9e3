"""The steps from what the kernel holds to what it shall hold.

Make before break: new sets are filled before a chain names them, chains lead to the new limits before entries move
there, and what is old goes last. There is no moment without a limit, and none that drops what is allowed.
A plan is data that prints; the text is the dry run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from netlimit.state import (
    TABLES,
    ChainRule,
    Chains,
    Entries,
    Entry,
    IpSet,
    State,
    Structure,
    Table,
    show_entry,
)

TIMEOUT_SLACK = 3
"""Seconds by which an entry's end may differ: the kernel tells it as whole seconds from now."""
_LINES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class WriteSets:
    """Write sets, in this order: create, add (an entry that exists takes the new value), remove, destroy.

    `create` with a name that exists takes the place of a set of another kind in one go.
    """

    create: tuple[IpSet, ...] = ()
    add: Entries = field(default_factory=dict)
    remove: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    destroy: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.create or self.add or self.remove or self.destroy)

    def lines(self) -> Iterator[str]:
        """One line a change."""
        for ipset in self.create:
            yield f"ipset create {ipset}"
        for name, entries in self.add.items():
            for key, entry in entries.items():
                yield f"ipset add {name} {show_entry(key, entry)}"
        for name, keys in self.remove.items():
            for key in keys:
                yield f"ipset del {name} {key}"
        for name in self.destroy:
            yield f"ipset destroy {name}"

    def __str__(self) -> str:
        return _shorten(self.lines())


@dataclass(frozen=True, slots=True)
class SwitchTable:
    """Give one table new contents for some chains of ours, in one commit.

    `chains` are new or changed, `gone` are to be removed, `hooks` are the rules that shall stand first in the kernel's
    own chains (none: our jumps are removed). `before` is what stood there, for the text only.
    """

    family: int
    table: Table
    chains: Mapping[str, tuple[ChainRule, ...]]
    gone: tuple[str, ...]
    hooks: Mapping[str, tuple[ChainRule, ...]]
    before: Mapping[str, tuple[ChainRule, ...]] = field(default_factory=dict, compare=False)

    def lines(self) -> Iterator[str]:
        """One line for each rule that comes or goes."""
        tool = f"{'iptables' if self.family == 4 else 'ip6tables'} -t {self.table}"
        for name, rules in (*self.chains.items(), *self.hooks.items()):
            before = self.before.get(name)
            if before is None and name in self.chains:
                yield f"{tool} -N {name}"
            yield from (f"{tool} -D {name} {rule.text}" for rule in before or () if rule not in rules)
            verb = "-I" if name in self.hooks else "-A"
            yield from (f"{tool} {verb} {name} {rule.text}" for rule in rules if rule not in (before or ()))
            if before is not None and before != rules and set(before) == set(rules):
                yield f"{tool} (reorder) {name}"
        yield from (f"{tool} -X {name}" for name in self.gone)

    def __str__(self) -> str:
        return _shorten(self.lines())


Step = WriteSets | SwitchTable


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in the order in which they must be taken. Empty when there is nothing to do."""

    steps: tuple[Step, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    def lines(self) -> Iterator[str]:
        """Every change, a line each."""
        for step in self.steps:
            yield from step.lines()

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) if self.steps else "Nothing to do."


def diff(
    desired: State,
    observed: State,
    transition: Structure | None = None,
    touched: Mapping[str, Collection[str]] | None = None,
) -> Plan:
    """Plan the way from `observed` to `desired`.

    `transition` is the structure to pass through, in which what comes and what goes are both there (default: the
    desired one). With `touched` (keys by set), only those entries of sets that exist already are looked at, and
    written whether they are there or not.
    """
    between = transition or desired.structure
    have = observed.structure.sets
    create = tuple(ipset for name, ipset in between.sets.items() if have.get(name) != ipset)
    fresh = {ipset.name for ipset in create}
    fill = {name: desired.entries[name] for name in fresh if desired.entries.get(name)}
    add, remove = _diff_entries(desired, observed, fresh, touched)
    # A set that is nearly full has no room for old and new at once.
    crowded = {name: keys for name, keys in remove.items() if len(desired.entries[name]) + len(keys) > have[name].size}
    remove = {name: keys for name, keys in remove.items() if name not in crowded}
    destroy = tuple(sorted(name for name in {*have, *between.sets} if name not in desired.structure.sets))
    steps: list[Step] = [
        WriteSets(create=create, add=fill),
        *_switch(between, observed.structure),
        WriteSets(remove=crowded),
        WriteSets(add=add, remove=remove),
        *_switch(desired.structure, between),
        WriteSets(destroy=destroy),
    ]
    return Plan(tuple(step for step in steps if isinstance(step, SwitchTable) or step))


def _diff_entries(
    desired: State, observed: State, fresh: set[str], touched: Mapping[str, Collection[str]] | None
) -> tuple[dict[str, dict[str, Entry]], dict[str, tuple[str, ...]]]:
    add: dict[str, dict[str, Entry]] = {}
    remove: dict[str, tuple[str, ...]] = {}
    for name, ipset in desired.structure.sets.items():
        if name in fresh or ipset.rolling or (touched is not None and name not in touched):
            continue
        want, have = desired.entries.get(name, {}), observed.entries.get(name, {})
        keys = touched[name] if touched is not None else want.keys() | have.keys()
        changed = {key: want[key] for key in keys if key in want and not alike(want[key], have.get(key))}
        gone = tuple(key for key in keys if key not in want and (touched is not None or key in have))
        if changed:
            add[name] = changed
        if gone:
            remove[name] = gone
    return add, remove


def alike(wanted: Entry, found: Entry | None) -> bool:
    """Whether an entry is as it should be; ends may differ by what rounding makes of them."""
    if found is None:
        return False
    if wanted == found:
        return True
    same = wanted.mark == found.mark and wanted.mask == found.mask and bool(wanted.expires) == bool(found.expires)
    return same and abs(wanted.expires - found.expires) <= TIMEOUT_SLACK


def _switch(wanted: Structure, found: Structure) -> Iterator[SwitchTable]:
    for family in (4, 6):
        for table in TABLES:
            chains = {
                chain.name: rules
                for chain, rules in wanted.chains.items()
                if (chain.family, chain.table) == (family, table) and found.chains.get(chain) != rules
            }
            gone = _names(family, table, found.chains, wanted.chains)
            hooks = {
                hook.name: rules
                for hook, rules in wanted.hooks.items()
                if (hook.family, hook.table) == (family, table) and found.hooks.get(hook) != rules
            }
            hooks |= dict.fromkeys(_names(family, table, found.hooks, wanted.hooks), ())
            if chains or gone or hooks:
                before = _contents(family, table, found.chains) | _contents(family, table, found.hooks)
                yield SwitchTable(family, table, chains, gone, hooks, before)


def _names(family: int, table: Table, found: Chains, wanted: Chains) -> tuple[str, ...]:
    """What is there and shall not be."""
    here = (chain for chain in found if (chain.family, chain.table) == (family, table))
    return tuple(sorted(chain.name for chain in here if chain not in wanted))


def _contents(family: int, table: Table, chains: Chains) -> dict[str, tuple[ChainRule, ...]]:
    return {c.name: rules for c, rules in chains.items() if (c.family, c.table) == (family, table)}


def _shorten(lines: Iterator[str]) -> str:
    every = list(lines)
    if len(every) <= _LINES_SHOWN:
        return "\n".join(every)
    return "\n".join([*every[: _LINES_SHOWN - 1], f"… and {len(every) - _LINES_SHOWN + 1} lines like these"])
