"""From rules to the state that the kernel shall be in.

Each rule compiles on its own (`limits.compile_rule`); a `Compilation` adds the fragments up, so that a change costs
what changed. `compile_rules` does it from nothing, and comes to the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from netlimit.chains import assemble
from netlimit.limits import (
    Facts,
    Fragment,
    Group,
    Limit,
    Profile,
    Purpose,
    PurposeKey,
    VerdictGroup,
    compile_rule,
    parse_purpose,
    purpose_key,
    purpose_sets,
    safe_set,
    set_keys,
)
from netlimit.rules import Rule
from netlimit.state import Entry, State, Structure

Numbering = dict[PurposeKey, int]
"""What may be in the kernel, with the number that it has under the mark mask (0: needs none). A number must stay put,
for entries in the kernel carry it."""


class Compilation:
    """The desired state, kept up to date rule by rule.

    `numbering` holds what may be in the kernel; what no rule needs any more stays in it until `settle`.
    `touched` names what changed since `settle`: keys by set. `owners` are the rules by the sets in which their keys
    are. Not thread-safe.
    """

    def __init__(self, facts: Facts, numbering: Mapping[PurposeKey, int] | None = None) -> None:
        self.facts = facts
        self.numbering: Numbering = dict(numbering or {})
        self.fragments: dict[int, Fragment] = {}
        self.entries: dict[str, dict[str, Entry]] = {}
        self.touched: dict[str, set[str]] = {}
        self.owners: dict[tuple[str, ...], set[int]] = {}
        self._used: Counter[Purpose] = Counter()
        self._names: dict[Purpose, tuple[str, ...]] = {}
        self._keys: set[PurposeKey] = set()
        self._taken: dict[str, set[int]] = {}
        for (group, _), number in self.numbering.items():
            self._taken.setdefault(group, set()).add(number)
        self._structure: Structure | None = None
        self._settled: Structure | None = None
        self._problems: dict[int, Fragment] = {}

    def put(self, rule: Rule) -> Fragment:
        """Add a rule in force, or put it in the place of the one with its id."""
        fragment = compile_rule(rule, self.facts)
        if fragment.problem is None:
            fragment = self._check_room(fragment)
        previous = self.fragments.pop(rule.id, None)
        self.fragments[rule.id] = fragment
        if fragment.problem is None:
            self._problems.pop(rule.id, None)
            self._add(fragment)
        else:
            self._problems[rule.id] = fragment
        if previous is not None and previous.problem is None:
            self._remove(previous, fragment if fragment.problem is None else None)
        return fragment

    def drop(self, rule_id: int) -> None:
        """Take a rule out; one that is not there is no error."""
        fragment = self.fragments.pop(rule_id, None)
        self._problems.pop(rule_id, None)
        if fragment is not None and fragment.problem is None:
            self._remove(fragment, None)

    @property
    def problems(self) -> Mapping[int, Fragment]:
        """The rules that cannot be enforced, each with its reason."""
        return self._problems

    @property
    def dirty(self) -> bool:
        """Whether the structure has changed since `settle`."""
        return self._settled is not self.structure

    @property
    def structure(self) -> Structure:
        """Sets, chains and hooks for the limits in use."""
        if self._structure is None:
            self._structure = assemble(self._limits(), self._verdicts(), self.facts)
            for name in self._structure.sets:
                self.entries.setdefault(name, {})
            for family in (4, 6):
                self._protect(family)
        return self._structure

    @property
    def state(self) -> State:
        """The desired state."""
        structure = self.structure
        return State(structure, {name: self.entries[name] for name in structure.sets})

    @property
    def transition(self) -> Structure:
        """The desired structure and all that is to go with it.

        While entries move from one limit to another both are there, so that nobody is unlimited for a moment.
        """
        retired = [parse_purpose(key) for key in self.numbering if key not in self._keys]
        if not retired:
            return self.structure
        return assemble(self._limits(retired), self._verdicts(retired), self.facts)

    def settle(self) -> set[PurposeKey]:
        """Forget what changed, and the numbers of what no rule needs; returns their keys."""
        retired = {key for key in self.numbering if key not in self._keys}
        for key in retired:
            self._taken[key[0]].discard(self.numbering.pop(key))
        self.touched = {}
        live = self.structure.sets
        for name in [name for name in self.entries if name not in live]:
            del self.entries[name]
        self._settled = self.structure
        return retired

    def protect(self, facts: Facts) -> None:
        """Take new facts; rules whose target is protected now, or no longer, must be put again by the caller."""
        self.facts = facts
        for family in (4, 6):
            self._protect(family)

    def sets_of(self, fragment: Fragment) -> tuple[str, ...]:
        """The sets in which a rule has its keys: first the one that counts what matched, then, for limits, the one that
        counts what was dropped."""
        return self._names.get(fragment.purpose, ()) if fragment.purpose else ()

    # -- entries

    def _add(self, fragment: Fragment) -> None:
        purpose = fragment.purpose
        assert purpose is not None
        if self._used[purpose] == 0:
            self._structure = None
            self._names[purpose] = tuple(ipset.name for ipset in purpose_sets(purpose, self.facts))
            self._keys.add(purpose_key(purpose))
            self._number(purpose)
        self._used[purpose] += 1
        self.owners.setdefault(self._names[purpose], set()).add(fragment.rule_id)
        main, *twins = self._names[purpose]
        entry = self._entry(purpose, fragment.expires)
        plain = _interned(0, 0, fragment.expires)
        for key in fragment.keys:
            self._set(main, key, entry)
            for twin in twins:
                self._set(twin, key, plain)

    def _remove(self, fragment: Fragment, successor: Fragment | None) -> None:
        purpose = fragment.purpose
        assert purpose is not None
        names = self._names[purpose]
        kept = self._names.get(successor.purpose, ()) if successor and successor.purpose else ()
        for name in names:
            for key in fragment.keys:
                if successor is None or name not in kept or key not in successor.keys:
                    self.entries[name].pop(key, None)
                    self.touched.setdefault(name, set()).add(key)
        if kept != names:
            self.owners[names].discard(fragment.rule_id)
            if not self.owners[names]:
                del self.owners[names]
        self._used[purpose] -= 1
        if self._used[purpose] == 0:
            del self._used[purpose], self._names[purpose]
            self._keys.discard(purpose_key(purpose))
            self._structure = None

    def _set(self, name: str, key: str, entry: Entry) -> None:
        held = self.entries.setdefault(name, {})
        # Writing an entry resets its counters: one that stays as it is must not be touched.
        if held.get(key) != entry:
            held[key] = entry
            self.touched.setdefault(name, set()).add(key)

    def _entry(self, purpose: Purpose, expires: int) -> Entry:
        if not (isinstance(purpose, Limit) and purpose.group.marked):
            return _interned(0, 0, expires)
        return _interned(self._number(purpose) << self.facts.shift, self.facts.mark_mask, expires)

    def _protect(self, family: int) -> None:
        name = safe_set(family, self.facts).name
        wanted = {key: Entry() for net in self.facts.safe if net.version == family for key in set_keys(net)}
        held = self.entries.get(name)
        if held is not None and held != wanted:
            self.touched.setdefault(name, set()).update(held.keys() ^ wanted.keys())
            self.entries[name] = wanted

    # -- numbers

    def _check_room(self, fragment: Fragment) -> Fragment:
        """Refuse what no set and no mark has room for."""
        purpose = fragment.purpose
        assert purpose is not None
        for ipset in purpose_sets(purpose, self.facts):
            held = self.entries.get(ipset.name, {})
            if len(held) + sum(key not in held for key in fragment.keys) > ipset.size:
                return replace(
                    fragment,
                    problem=f"The set for this kind of limit is full: it holds {ipset.size} addresses. Name larger "
                    "subnets, or raise NETLIMIT_SET_SIZE.",
                )
        if isinstance(purpose, Limit) and purpose.group.marked and self._number(purpose) == 0:
            return replace(
                fragment,
                problem=f"All {self.facts.most_limits} numbers under the mark mask {self.facts.mark_mask:#x} are taken "
                "by other rates of this kind of limit. Use a rate that is in use already, or widen NETLIMIT_MARK_MASK.",
            )
        return fragment

    def _number(self, purpose: Purpose) -> int:
        """The purpose's number, a new one if it has none; 0 when it needs none, or when all are taken."""
        key = purpose_key(purpose)
        number = self.numbering.get(key)
        if number is not None:
            return number
        taken = self._taken.setdefault(key[0], set())
        number = 0
        if isinstance(purpose, Limit) and purpose.group.marked:
            number = next((n for n in range(1, self.facts.most_limits + 1) if n not in taken), 0)
            if number == 0:
                return 0
            taken.add(number)
        self.numbering[key] = number
        return number

    def _verdicts(self, retired: Iterable[Purpose] = ()) -> list[VerdictGroup]:
        return [purpose for purpose in (*self._used, *retired) if isinstance(purpose, VerdictGroup)]

    def _limits(self, retired: Iterable[Purpose] = ()) -> dict[Group, dict[Profile, int]]:
        limits: dict[Group, dict[Profile, int]] = {}
        for purpose in (*self._used, *retired):
            if isinstance(purpose, Limit):
                limits.setdefault(purpose.group, {})[purpose.profile] = self.numbering[purpose_key(purpose)]
        return limits


def compile_rules(
    rules: Iterable[Rule], facts: Facts, numbering: Mapping[PurposeKey, int] | None = None
) -> tuple[State, Numbering, dict[int, str]]:
    """Compile rules in force from nothing: the desired state, the numbers it uses, and a sentence for every rule that
    cannot be enforced."""
    compilation = Compilation(facts, numbering)
    problems = {rule.id: fragment.problem for rule in rules if (fragment := compilation.put(rule)).problem}
    state = compilation.state
    compilation.settle()
    return state, compilation.numbering, problems


_INTERNED: dict[tuple[int, int, int], Entry] = {}


def _interned(mark: int, mask: int, expires: int) -> Entry:
    """One object for all entries alike: of 100,000 few differ. Those that end are not kept for reuse."""
    if expires:
        return Entry(mark, mask, expires)
    return _INTERNED.setdefault((mark, mask, expires), Entry(mark, mask, expires))
