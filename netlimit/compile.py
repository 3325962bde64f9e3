"""From rules to the state that the kernel shall be in.

Each rule compiles on its own (`limits.compile_rule`); a `Compilation` adds the fragments up, so that a change costs
what changed. `compile_rules` does it from nothing, and comes to the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from netlimit.chains import asked_keys, assemble
from netlimit.ingress import Ingress, IngressLane
from netlimit.lanes import OpenLane
from netlimit.limits import (
    Facts,
    Fragment,
    Group,
    Limit,
    Profile,
    Purpose,
    VerdictGroup,
    blocked_set,
    compile_rule,
    exempt_set,
    find_problem,
    matched_set,
    parse_purpose,
    purpose_key,
    purpose_sets,
    safe_set,
    set_keys,
)
from netlimit.numbers import Numbering, Numbers, PurposeKey
from netlimit.rules import Action, Direction, Rule
from netlimit.shaping import Shaping
from netlimit.state import Entry, IpSet, State, Structure
from netlimit.tree import Tree

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

    `numbers` holds what may be in the kernel; what no rule needs any more stays in it until `settle`.
    `touched` names what changed since `settle`: keys by set; `touched_classes`: classids by device. `owners` are the
    rules by the sets in which their keys are, and by key; `problems` says of rules why they cannot be enforced. Not
    thread-safe.
    """

    def __init__(self, facts: Facts, numbering: Mapping[PurposeKey, int] | None = None) -> None:
        self.facts = facts
        self.numbers = Numbers(numbering)
        self.shaping = Shaping(facts, self.numbers)
        self.fragments: dict[int, Fragment] = {}
        self._problems: dict[int, str] = {}
        self.entries: dict[str, dict[str, Entry]] = {}
        self.touched: dict[str, set[str]] = {}
        self.touched_classes: dict[str, set[int]] = {}
        self.owners: dict[tuple[str, ...], dict[str, int]] = {}
        self._slots: dict[Purpose, _Slot] = {}
        self._special: dict[str, Counter[str]] = {}
        self._lanes: list[OpenLane] = []
        self._settled_lanes: list[OpenLane] = []
        self._settled_trees: dict[str, Tree] = {}
        self._settled_ingress: Ingress | None = None
        self._structure: Structure | None = None
        self._settled: Structure | None = None
        self.protect(facts)

    def put(self, rule: Rule) -> str | None:
        """Add a rule in force, or put it in the place of the one with its id. Returns why it cannot be enforced."""
        if rule.action is Action.SHAPE:
            return self._shape(rule)
        self.shaping.drop(rule.id)
        fragment = compile_rule(rule, self.facts)
        slot = self._slots.get(fragment.purpose) or self._prepare(fragment.purpose)
        problem = slot.problem or self._find_lack(slot, fragment)
        before = self._enforced(rule.id)
        self.fragments[rule.id] = fragment
        if problem is None:
            self._problems.pop(rule.id, None)
            self._add(slot, fragment)
        else:
            self._problems[rule.id] = problem
        if before is not None:
            self._remove(before, fragment if problem is None else None)
        return problem

    def _shape(self, rule: Rule) -> str | None:
        before = self._enforced(rule.id)
        if before is not None:
            self._remove(before, None)
        self._problems.pop(rule.id, None)
        self.fragments.pop(rule.id, None)
        return self.shaping.put(rule)

    def drop(self, rule_id: int) -> None:
        """Take a rule out; one that is not there is no error."""
        self.shaping.drop(rule_id)
        before = self._enforced(rule_id)
        self._problems.pop(rule_id, None)
        self.fragments.pop(rule_id, None)
        if before is not None:
            self._remove(before, None)

    def _enforced(self, rule_id: int) -> Fragment | None:
        """What a rule adds to sets now."""
        fragment = self.fragments.get(rule_id)
        return None if rule_id in self._problems else fragment

    def __contains__(self, rule_id: int) -> bool:
        return rule_id in self.fragments or rule_id in self.shaping

    def __len__(self) -> int:
        return len(self.fragments) + len(self.shaping)

    @property
    def problems(self) -> dict[int, str]:
        """Why rules cannot be enforced, by their ids."""
        return {**self._problems, **self.shaping.problems}

    def sets_of(self, rule_id: int) -> tuple[str, ...]:
        """The sets in which a rule has its keys: first the one that counts what matched, then, for limits, the one that
        counts what was dropped. None for a rule that is not enforced."""
        fragment = self._enforced(rule_id)
        return () if fragment is None else self._slots[fragment.purpose].names

    @property
    def changed(self) -> bool:
        """Whether anything has changed since `settle`."""
        return self._settled is not self.structure or bool(self.touched or self.touched_classes)

    @property
    def structure(self) -> Structure:
        """Sets, chains and hooks for the limits in use."""
        self._work_out()
        if self._structure is None:
            self._structure = assemble(self._limits(), self._verdicts(), self.facts, self._few(), self._lanes)
            for name in self._structure.sets:
                self.entries.setdefault(name, {})
        return self._structure

    @property
    def state(self) -> State:
        """The desired state."""
        structure, ingress = self.structure, self._ingress
        entries = {name: self.entries[name] for name in structure.sets}
        for lane in ingress.lanes if ingress else ():
            entries[lane.name] = self.entries.setdefault(lane.copies or lane.name, {})
        return State(structure, entries, self.shaping.trees, ingress)

    @property
    def _ingress(self) -> Ingress | None:
        """What the ingress must do: first let pass who is safe or allowed, unless a rule names the very address."""
        ingress = self.shaping.ingress
        if ingress is None:
            return None
        families = {lane.family for lane in ingress.lanes}
        exact = len(self.shaping.exact_lanes)
        exempt = [IngressLane.copy(safe_set(family, self.facts).name, family, "src") for family in sorted(families)]
        for verdict in sorted(self._verdicts(), key=lambda each: each.key):
            if verdict.action is Action.ALLOW and verdict.family in families:
                name, where = matched_set(verdict, self.facts).name, verdict.selector
                ports = where.protocol.value, where.ports, where.source_ports
                exempt.append(IngressLane.copy(name, verdict.family, verdict.side, *ports))
        return replace(ingress, lanes=(*ingress.lanes[:exact], *exempt, *ingress.lanes[exact:]))

    @property
    def settled(self) -> State:
        """What the kernel held at the last `settle`, as far as it takes to know what is new: no entries, no classes."""
        return State(self._settled or Structure(), {}, self._settled_trees, self._settled_ingress)

    def _work_out(self) -> None:
        """Take in what shaping rules have come to."""
        for name, key, entry in self.shaping.settle():
            held = self.entries.setdefault(name, {})
            if entry is None:
                held.pop(key, None)
            else:
                held[key] = entry
            self.touched.setdefault(name, set()).add(key)
        for device, numbers in self.shaping.take_touched().items():
            if numbers:
                self.touched_classes.setdefault(device, set()).update(numbers)
        lanes = self.shaping.open_lanes
        if lanes != self._lanes:
            self._lanes, self._structure = lanes, None

    def transition(self, known: Structure) -> Structure:
        """The desired structure and all that is to go with it, of what the kernel is `known` to hold.

        While entries move from one limit to another both are there, so that nobody is unlimited for a moment.
        """
        keys = (parse_purpose(key) for key in sorted(self.numbers.retired))
        retired = [purpose for purpose in keys if purpose is not None]
        few = self._few_still(known)
        current = {each.lane for each in self._lanes}
        leaving = [each for each in self._settled_lanes if each.lane not in current]
        if not (retired or leaving) and few == self._few():
            return self.structure
        return assemble(self._limits(retired), self._verdicts(retired), self.facts, few, [*self._lanes, *leaving])

    def settle(self) -> set[PurposeKey]:
        """Forget what changed, and the numbers of what no rule needs; returns their keys."""
        live = self.structure.sets
        retired = self.numbers.settle()
        self.touched, self.touched_classes = {}, {}
        self.shaping.recycle()
        for name in [name for name, held in self.entries.items() if not held and name not in live]:
            del self.entries[name]
        self._settled_lanes, self._settled_ingress = self._lanes, self._ingress
        self._settled_trees = {
            name: Tree(tree.handle, tree.cap, {}, dict(tree.children)) for name, tree in self.shaping.trees.items()
        }
        self._slots = {purpose: slot for purpose, slot in self._slots.items() if slot.users}
        self._settled = self.structure
        return retired

    def protect(self, facts: Facts) -> None:
        """Take new facts; limits whose target is protected now, or no longer, must be put again by the caller."""
        if facts.management != self.facts.management:
            self._structure = None
        self.facts = facts
        self.shaping.relocate(facts)
        for family in (4, 6):
            self._protect(family)

    # -- entries

    def _add(self, slot: _Slot, fragment: Fragment) -> None:
        if slot.users == 0:
            self._structure = None
            self.numbers.used.add(purpose_key(fragment.purpose))
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
            self.numbers.release(*purpose_key(fragment.purpose))

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
        """The purpose's number, a new one if it has none; 0 when it needs none, None when all are taken. It is not in
        use before a rule is in it."""
        key = purpose_key(purpose)
        number: int | None = 0
        if isinstance(purpose, Limit) and purpose.group.marked:
            number = self.numbers.take(*key, range(1, self.facts.most_limits + 1))
        else:
            self.numbers.note(key)
        self.numbers.release(*key)
        return number

    def _purposes(self, retired: Iterable[Purpose]) -> Iterator[Purpose]:
        yield from (purpose for purpose, slot in self._slots.items() if slot.users)
        yield from retired

    def _verdicts(self, retired: Iterable[Purpose] = ()) -> list[VerdictGroup]:
        return [purpose for purpose in self._purposes(retired) if isinstance(purpose, VerdictGroup)]

    def _limits(self, retired: Iterable[Purpose] = ()) -> dict[Group, dict[Profile, int]]:
        limits: dict[Group, dict[Profile, int]] = {}
        for purpose in self._purposes(retired):
            if isinstance(purpose, Limit):
                limits.setdefault(purpose.group, {})[purpose.profile] = self.numbers.kept[purpose.key]
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
    return state, compilation.numbers.kept, compilation.problems


_PLAIN = Entry()
