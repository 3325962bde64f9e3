"""From rules to the state that the kernel shall be in.

Each rule compiles on its own (`limits.compile_rule`); a `Compilation` adds the fragments up, so that a change costs
what changed. `compile_rules` does it from nothing, and comes to the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from netlimit.chains import asked_keys, assemble
from netlimit.limits import (
    Facts,
    Fragment,
    Group,
    Limit,
    Profile,
    Purpose,
    PurposeKey,
    VerdictGroup,
    blocked_set,
    compile_rule,
    exempt_set,
    find_problem,
    parse_purpose,
    purpose_key,
    purpose_sets,
    safe_set,
    set_keys,
)
from netlimit.rules import Action, Direction, Rule
from netlimit.state import Entry, IpSet, State, Structure

Numbering = dict[PurposeKey, int]
"""What may be in the kernel, with the number that it has under the mark mask (0: needs none). A number must stay put,
for entries in the kernel carry it."""


MOST_FEW = 16
"""Up to so many exempt or blocked targets are asked for one by one: at about 5 ns each against 170 for a look into a
set (measured)."""


@dataclass(slots=True)
class _Slot:
    """What a purpose comes to on this host: the sets that must have room for its rules, the names of those that are
    its own, the entry that its rules have there (without an end), or the reason why it cannot be enforced. `special` is
    the set that its rules have their keys in beside others'; `users` counts its rules."""

    sets: tuple[IpSet, ...]
    names: tuple[str, ...]
    entry: Entry
    problem: str | None
    special: str | None = None
    users: int = 0


class Compilation:
    """The desired state, kept up to date rule by rule.

    `numbering` holds what may be in the kernel; what no rule needs any more stays in it until `settle`.
    `touched` names what changed since `settle`: keys by set. `owners` are the rules by the sets in which their keys
    are, and by key; `problems` says of rules why they cannot be enforced. Not thread-safe.
    """

    def __init__(self, facts: Facts, numbering: Mapping[PurposeKey, int] | None = None) -> None:
        self.facts = facts
        self.numbering: Numbering = dict(numbering or {})
        self.fragments: dict[int, Fragment] = {}
        self.problems: dict[int, str] = {}
        self.entries: dict[str, dict[str, Entry]] = {}
        self.touched: dict[str, set[str]] = {}
        self.owners: dict[tuple[str, ...], dict[str, int]] = {}
        self._slots: dict[Purpose, _Slot] = {}
        self._special: dict[str, Counter[str]] = {}
        self._taken: dict[str, set[int]] = {}
        for (group, _), number in self.numbering.items():
            self._taken.setdefault(group, set()).add(number)
        self._structure: Structure | None = None
        self._settled: Structure | None = None
        self.protect(facts)

    def put(self, rule: Rule) -> str | None:
        """Add a rule in force, or put it in the place of the one with its id. Returns why it cannot be enforced."""
        fragment = compile_rule(rule, self.facts)
        slot = self._slots.get(fragment.purpose) or self._prepare(fragment.purpose)
        problem = slot.problem or self._find_lack(slot, fragment)
        before = None if rule.id in self.problems else self.fragments.get(rule.id)
        self.fragments[rule.id] = fragment
        if problem is None:
            self.problems.pop(rule.id, None)
            self._add(slot, fragment)
        else:
            self.problems[rule.id] = problem
        if before is not None:
            self._remove(before, fragment if problem is None else None)
        return problem

    def drop(self, rule_id: int) -> None:
        """Take a rule out; one that is not there is no error."""
        fragment = self.fragments.pop(rule_id, None)
        if self.problems.pop(rule_id, None) is None and fragment is not None:
            self._remove(fragment, None)

    def sets_of(self, rule_id: int) -> tuple[str, ...]:
        """The sets in which a rule has its keys: first the one that counts what matched, then, for limits, the one that
        counts what was dropped. None for a rule that is not enforced."""
        if rule_id in self.problems or rule_id not in self.fragments:
            return ()
        return self._slots[self.fragments[rule_id].purpose].names

    @property
    def dirty(self) -> bool:
        """Whether the structure has changed since `settle`."""
        return self._settled is not self.structure

    @property
    def structure(self) -> Structure:
        """Sets, chains and hooks for the limits in use."""
        if self._structure is None:
            self._structure = assemble(self._limits(), self._verdicts(), self.facts, self._few())
            for name in self._structure.sets:
                self.entries.setdefault(name, {})
        return self._structure

    @property
    def state(self) -> State:
        """The desired state."""
        structure = self.structure
        return State(structure, {name: self.entries[name] for name in structure.sets})

    def transition(self, known: Structure) -> Structure:
        """The desired structure and all that is to go with it, of what the kernel is `known` to hold.

        While entries move from one limit to another both are there, so that nobody is unlimited for a moment.
        """
        keys = (parse_purpose(key) for key in sorted(self._retired()))
        retired = [purpose for purpose in keys if purpose is not None]
        few = self._few_still(known)
        if not retired and few == self._few():
            return self.structure
        return assemble(self._limits(retired), self._verdicts(retired), self.facts, few)

    def settle(self) -> set[PurposeKey]:
        """Forget what changed, and the numbers of what no rule needs; returns their keys."""
        retired = self._retired()
        for key in retired:
            self._taken.get(key[0], set()).discard(self.numbering.pop(key))
        self.touched = {}
        live = self.structure.sets
        for name in [name for name, held in self.entries.items() if not held and name not in live]:
            del self.entries[name]
        self._slots = {purpose: slot for purpose, slot in self._slots.items() if slot.users}
        self._settled = self.structure
        return retired

    def protect(self, facts: Facts) -> None:
        """Take new facts; rules whose target is protected now, or no longer, must be put again by the caller."""
        self.facts = facts
        for family in (4, 6):
            self._protect(family)

    # -- entries

    def _add(self, slot: _Slot, fragment: Fragment) -> None:
        if slot.users == 0:
            self._structure = None
        slot.users += 1
        owners = self.owners.setdefault(slot.names, {})
        main, *twins = slot.names
        entry, plain = slot.entry, _PLAIN
        if fragment.expires:
            entry = entry._replace(expires=fragment.expires)
            plain = Entry(expires=fragment.expires)
        values = {main: entry, **dict.fromkeys(twins, plain)}
        for key in fragment.keys:
            # Writing an entry begins its counters anew: one that stays as it is must not be touched, and what counts
            # for another rule, or at another rate, is written in all sets.
            if owners.get(key) == fragment.rule_id and self.entries[main].get(key) == entry:
                continue
            owners[key] = fragment.rule_id
            for name, value in values.items():
                self.entries.setdefault(name, {})[key] = value
                self.touched.setdefault(name, set()).add(key)
        if slot.special:
            self._share(slot.special, fragment.keys)

    def _remove(self, fragment: Fragment, successor: Fragment | None) -> None:
        slot = self._slots[fragment.purpose]
        stays = successor.keys if successor and self._slots[successor.purpose].names == slot.names else ()
        owners = self.owners.get(slot.names, {})
        for key in fragment.keys:
            # Of two rules that one pass brings, the newer may have the key already when the older leaves it.
            if key in stays or owners.get(key) != fragment.rule_id:
                continue
            del owners[key]
            for name in slot.names:
                self.entries[name].pop(key, None)
                self.touched.setdefault(name, set()).add(key)
        if not owners:
            self.owners.pop(slot.names, None)
        if slot.special:
            self._unshare(slot.special, fragment.keys)
        slot.users -= 1
        if slot.users == 0:
            self._structure = None

    def _share(self, name: str, keys: Iterable[str]) -> None:
        """Add to a set in which several may want the same key. Its entries do not end: one too many costs a packet a
        closer look, no more."""
        counts = self._special.setdefault(name, Counter())
        before = len(counts)
        for key in keys:
            counts[key] += 1
            self._set(name, key, _PLAIN)
        self._heed(before, len(counts))

    def _unshare(self, name: str, keys: Iterable[str]) -> None:
        counts = self._special[name]
        before = len(counts)
        for key in keys:
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
                self.entries[name].pop(key, None)
                self.touched.setdefault(name, set()).add(key)
        self._heed(before, len(counts))

    def _heed(self, before: int, after: int) -> None:
        """Few keys stand in the chains themselves."""
        if before != after and min(before, after) <= MOST_FEW:
            self._structure = None

    def _few(self) -> dict[str, tuple[str, ...]]:
        return {name: tuple(sorted(counts)) for name, counts in self._special.items() if len(counts) <= MOST_FEW}

    def _set(self, name: str, key: str, entry: Entry) -> None:
        held = self.entries.setdefault(name, {})
        if held.get(key) != entry:
            held[key] = entry
            self.touched.setdefault(name, set()).add(key)

    def _protect(self, family: int) -> None:
        name = safe_set(family, self.facts).name
        wanted = {key for net in self.facts.safe if net.version == family for key in set_keys(net)}
        held = self.entries.setdefault(name, {}).keys()
        gone, new = held - wanted, wanted - held
        for key in gone:
            del self.entries[name][key]
        self.touched.setdefault(name, set()).update(gone)
        for key in new:
            self._set(name, key, _PLAIN)
        for direction in Direction:
            exempt = exempt_set(family, direction, self.facts).name
            self._share(exempt, new)
            self._unshare(exempt, gone)
            self._special.setdefault(blocked_set(family, direction, self.facts).name, Counter())

    def _few_still(self, known: Structure) -> dict[str, tuple[str, ...]]:
        """The few, and those that chains still ask for: what goes is looked at closely until its entries are gone."""
        few = self._few()
        asked = asked_keys(known)
        for family in (4, 6):
            for direction in Direction:
                names = [kind(family, direction, self.facts).name for kind in (exempt_set, blocked_set)]
                going = asked[family, direction].difference(*(few.get(name, ()) for name in names))
                for name in names:
                    if going and name in few:
                        few[name] = tuple(sorted({*few[name], *going}))
        return few

    # -- purposes

    def _prepare(self, purpose: Purpose) -> _Slot:
        sets = purpose_sets(purpose, self.facts)
        problem = find_problem(purpose, self.facts)
        entry = _PLAIN
        if problem is None:
            number = self._number(purpose)
            if number is None:
                problem = (
                    f"All {self.facts.most_limits} numbers under the mark mask {self.facts.mark_mask:#x} are taken by "
                    "other rates of this kind of limit. Use a rate that is in use already, or widen NETLIMIT_MARK_MASK."
                )
            elif number:
                entry = Entry(number << self.facts.shift, self.facts.mark_mask)
        slot = _Slot(sets, tuple(ipset.name for ipset in sets), entry, problem)
        if isinstance(purpose, VerdictGroup):
            kind = exempt_set if purpose.action is Action.ALLOW else blocked_set
            special = kind(purpose.family, purpose.direction, self.facts)
            slot.sets, slot.special = (*sets, special), special.name
        if problem is None:
            self._slots[purpose] = slot
        return slot

    def _find_lack(self, slot: _Slot, fragment: Fragment) -> str | None:
        """Refuse what no set has room for."""
        for ipset in slot.sets:
            held = self.entries.get(ipset.name, {})
            if len(held) + len(fragment.keys) <= ipset.size:
                continue
            if len(held) + sum(key not in held for key in fragment.keys) > ipset.size:
                return (
                    f"The set for this kind of limit is full: it holds {ipset.size} addresses. Name larger subnets, or "
                    "raise NETLIMIT_SET_SIZE."
                )
        return None

    def _number(self, purpose: Purpose) -> int | None:
        """The purpose's number, a new one if it has none; 0 when it needs none, None when all are taken."""
        key = purpose_key(purpose)
        number = self.numbering.get(key)
        if number is not None:
            return number
        number = 0
        if isinstance(purpose, Limit) and purpose.group.marked:
            taken = self._taken.setdefault(key[0], set())
            free = next((n for n in range(1, self.facts.most_limits + 1) if n not in taken), None)
            if free is None:
                return None
            number = free
            taken.add(number)
        self.numbering[key] = number
        return number

    def _retired(self) -> set[PurposeKey]:
        used = {purpose_key(purpose) for purpose, slot in self._slots.items() if slot.users}
        return self.numbering.keys() - used

    def _purposes(self, retired: Iterable[Purpose]) -> Iterator[Purpose]:
        yield from (purpose for purpose, slot in self._slots.items() if slot.users)
        yield from retired

    def _verdicts(self, retired: Iterable[Purpose] = ()) -> list[VerdictGroup]:
        return [purpose for purpose in self._purposes(retired) if isinstance(purpose, VerdictGroup)]

    def _limits(self, retired: Iterable[Purpose] = ()) -> dict[Group, dict[Profile, int]]:
        limits: dict[Group, dict[Profile, int]] = {}
        for purpose in self._purposes(retired):
            if isinstance(purpose, Limit):
                limits.setdefault(purpose.group, {})[purpose.profile] = self.numbering[purpose.key]
        return limits


def compile_rules(
    rules: Iterable[Rule], facts: Facts, numbering: Mapping[PurposeKey, int] | None = None
) -> tuple[State, Numbering, dict[int, str]]:
    """Compile rules in force from nothing: the desired state, the numbers it uses, and a sentence for every rule that
    cannot be enforced."""
    compilation = Compilation(facts, numbering)
    for rule in rules:
        compilation.put(rule)
    state = compilation.state
    compilation.settle()
    return state, compilation.numbering, compilation.problems


_PLAIN = Entry()
