"""A plan in words: which rules come, change and go, what is repaired, and what becomes of the rest.

Told from what the kernel holds (`found`) to what it shall hold (a `Compilation`), by the steps of the plan alone: no
step goes unsaid. A rule that the kernel still holds and nobody knows any more is told by its limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network

from netlimit.compile import Compilation
from netlimit.limits import Limit, Purpose, VerdictGroup, compile_rule, parse_purpose, purpose_sets
from netlimit.plan import Plan, SwitchTable, WriteIngress, WriteSets, WriteTree, alike
from netlimit.rates import format_rate
from netlimit.rules import HOST, TARGET, Action, Rule, Target
from netlimit.several import say_more
from netlimit.state import CHAIN_PREFIX, ChainId, Entry, State, leads
from netlimit.tree import QueueClass
from netlimit.wording import say_changes, say_comes, say_goes, title

MOST_NAMED = 20
"""So many of a kind are told one by one."""
FindRules = Callable[[Collection[int]], Mapping[int, Rule]]
"""Gives the rules of some ids, as they are now."""
_Place = tuple[str, str]
"""A set and a key in it."""


def tell(
    plan: Plan,
    wanted: Compilation,
    found: State,
    find: FindRules,
    former: Iterable[Rule] = (),
    applied: int | None = None,
) -> list[str]:
    """Say in sentences what a plan does. `former` are rules as they were, of those that have changed or gone, as far as
    they are known; `applied` is the revision that the kernel held last."""
    account = _Account(plan, wanted, found, {rule.id: rule for rule in former})
    sentences = [*account.say_rules(find, applied), *account.say_strays(), *account.say_places(), *account.say_rest()]
    if plan and not sentences:
        sentences.append("What the kernel holds is put in order; the rules stay as they are.")
    return sentences


@dataclass(slots=True)
class _Account:
    """What a plan does, sorted by what it is about: rules that come, change (with how they were) and go, and entries of
    no rule that leave a set."""

    plan: Plan
    wanted: Compilation
    found: State
    former: dict[int, Rule]
    come: set[int] = field(default_factory=set)
    change: dict[int, Rule | None] = field(default_factory=dict)
    go: list[Rule] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    strays: Counter[str] = field(default_factory=Counter)
    mended: Counter[str] = field(default_factory=Counter)
    queues: dict[int, list[str]] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    ways: Counter[str] = field(default_factory=Counter)
    freed: list[str] = field(default_factory=list)
    _purposes: dict[str, list[Purpose]] | None = None

    def __post_init__(self) -> None:
        added = {place for step in self._writes for place in _list_added(step)}
        removed = {place for step in self._writes for place in _list_removed(step)}
        gone = {name for step in self._writes for name in step.destroy}
        removed |= {(name, key) for name in gone for key in self.found.entries.get(name, ())}
        self._sort_queues()
        self._sort_added(added)
        self._sort_removed(removed)
        self._sort_others(added, removed)
        self.come -= self.former.keys() & self.change.keys()

    @property
    def _writes(self) -> list[WriteSets]:
        return [step for step in self.plan.steps if isinstance(step, WriteSets)]

    # -- what limits

    def _sort_added(self, added: Collection[_Place]) -> None:
        """Entries that are written belong to rules that come, or change, or had lost them."""
        owned = {name: names for names in self.wanted.owners for name in names}
        for name, key in sorted(added):
            names = owned.get(name)
            rule_id = self.wanted.owners[names].get(key) if names else None
            if names is None or rule_id is None:
                continue
            before, after = self.found.entries.get(names[0], {}).get(key), self.wanted.entries[names[0]][key]
            if before is None:
                self.come.add(rule_id)
            elif not alike(after, before):
                was = self._read(names[0], key, before)
                self.change.setdefault(rule_id, was)
            else:
                self.mended[name] += 1
            self.told.add(key)
        for rule_id, rule in self.former.items():
            if rule_id in self.come and rule.action is not Action.SHAPE and self._held(rule):
                self.come.discard(rule_id)
                self.change[rule_id] = rule
            if rule_id in self.change:
                self.change[rule_id] = rule

    def _sort_removed(self, removed: Collection[_Place]) -> None:
        purposes = self._read_purposes()
        known = {
            (ipset.name, key): rule
            for rule in self.former.values()
            if rule.action is not Action.SHAPE
            for fragment in [compile_rule(rule, self.wanted.facts)]
            for ipset in purpose_sets(fragment.purpose, self.wanted.facts)
            for key in fragment.keys
        }
        gone: list[Rule] = []
        for name, key in sorted(removed):
            rule = known.get((name, key)) or self._read_removed(purposes, name, key)
            if rule is None:
                continue
            self.told.add(key)
            if rule.id and (rule.id in self.change or (rule.id in self.wanted and rule.id not in self.wanted.problems)):
                self.change.setdefault(rule.id, rule)
            else:
                gone.append(rule)
        self.go += _join_halves(gone)

    def _sort_others(self, added: Collection[_Place], removed: Collection[_Place]) -> None:
        """What no rule explains: entries that somebody took out or put in, and who is safe."""
        owned = {name for names in self.wanted.owners for name in names}
        for name, key in sorted(added):
            if leads(name):
                self.ways[name] += 1
            elif name not in owned and key not in self.told:
                self.mended[name] += 1
        for name, key in sorted(removed):
            if leads(name):
                self.freed += [key] if not self._shapes_anew else []
            elif key not in self.told:
                self.strays[name] += 1

    @property
    def _shapes_anew(self) -> bool:
        """Whether what is said of rules and queues tells why addresses have other queues."""
        rules = (*self.come, *self.change, *self.queues, *self.former)
        known = any(rule.action is Action.SHAPE for rule in self.former.values())
        return known or any(rule_id in self.wanted.shaping for rule_id in rules)

    def _held(self, rule: Rule) -> bool:
        """Whether the kernel holds a rule as it was."""
        fragment = compile_rule(rule, self.wanted.facts)
        name = purpose_sets(fragment.purpose, self.wanted.facts)[0].name
        return all(key in self.found.entries.get(name, {}) for key in fragment.keys)

    def _read_purposes(self) -> dict[str, list[Purpose]]:
        """What sets are for, by the numbers that were given out."""
        if self._purposes is not None:
            return self._purposes
        purposes = self._purposes = {}
        for key in self.wanted.numbers.kept:
            purpose = parse_purpose(key)
            if purpose is None:
                continue
            for ipset in purpose_sets(purpose, self.wanted.facts):
                purposes.setdefault(ipset.name, []).append(purpose)
        return purposes

    def _read(self, name: str, key: str, entry: Entry) -> Rule | None:
        return _read_rule(self._read_purposes().get(name, ()), self.wanted, key, entry)

    def _read_removed(self, purposes: Mapping[str, list[Purpose]], name: str, key: str) -> Rule | None:
        """The rule that an entry was for: a limit has it in two sets, and what is in the first alone is nobody's."""
        several = purposes.get(name, ())
        if not several:
            return None
        main, *twins = (ipset.name for ipset in purpose_sets(several[0], self.wanted.facts))
        entry = self.found.entries.get(main, {}).get(key)
        if entry is None or any(key not in self.found.entries.get(twin, {}) for twin in twins):
            return None
        return _read_rule(several, self.wanted, key, entry)

    # -- what shapes

    def _sort_queues(self) -> None:
        shaping = self.wanted.shaping
        classes = shaping.classes()
        owners = {place: rule_id for rule_id, places in classes.items() for place in places}
        held = {(device, number) for device, tree in self.found.trees.items() for number in tree.classes}
        for step in self.plan.steps:
            if isinstance(step, WriteTree):
                self._sort_tree(step, owners, held)
        for rule_id, places in classes.items():
            if rule_id not in shaping.problems and held.isdisjoint(places):
                self.come.add(rule_id)
                self.queues.pop(rule_id, None)
        for rule_id, rule in self.former.items():
            if rule.action is Action.SHAPE and rule_id not in self.wanted.problems and rule_id in self.wanted:
                self.come.discard(rule_id)
                self.queues.pop(rule_id, None)
                self.change[rule_id] = rule
            elif rule.action is Action.SHAPE:
                self.go.append(rule)

    def _sort_tree(self, step: WriteTree, owners: Mapping[_Class, int], held: Collection[_Class]) -> None:
        device, before = step.device, self.found.trees.get(step.device)
        if step.drop:
            back = ", and what others had there comes back" if step.put_back else ""
            self.devices.append(f"{device} loses its queue tree{back}.")
        elif step.root is not None and (before is None or before.handle != step.root.handle):
            instead = " in the place of somebody else's" if step.put_back else ""
            self.devices.append(f"{device} gets a queue tree{instead}.")
        count: Counter[str] = Counter()
        for number, each in step.classes.items():
            rule_id = owners.get((device, number))
            old = before.classes.get(number) if before else None
            if rule_id is None or (device, number) not in held:
                count["new" if old is None else "changed"] += rule_id is not None or old is not None
                if rule_id is not None:
                    self.queues.setdefault(rule_id, [])
            elif old is not None and (old.rate, old.ceil) != (each.rate, each.ceil):
                self.queues.setdefault(rule_id, []).append(_say_class(device, old, each))
            else:
                count["changed"] += 1
        count["gone"] = len(step.gone)
        if before is not None and not step.drop:
            self.devices += [f"On {device}, {text}." for text in _say_counts(count, "queue")]

    # -- in sentences

    def say_rules(self, find: FindRules, applied: int | None) -> Iterator[str]:
        """First what comes, then what changes, then what goes."""
        changed = [each for each in self.change if each not in self.come]
        queues = [each for each in self.queues if each not in self.come and each not in self.change]
        named = [sorted(each)[:MOST_NAMED] for each in (self.come, changed, queues)]
        rules = find({rule_id for some in named for rule_id in some})
        come, change, share = ([(each, rules[each]) for each in some if each in rules] for some in named)
        newest = -1 if applied is None else applied
        yield from (say_comes(rule, 0 < rule.revision <= newest) for _, rule in come)
        yield from _say_more(len(self.come) - len(named[0]), "comes into force", "come into force")
        yield from (self._say_change(self.change[rule_id], rule) for rule_id, rule in change)
        yield from _say_more(len(changed) - len(named[1]), "changes", "change")
        for rule_id, rule in share:
            yield from (f"What {title(rule)} is sure of {text}." for text in self.queues[rule_id])
        yield from _say_more(len(queues) - len(named[2]), "gets another share", "get another share")
        yield from (say_goes(rule) for rule in self.go[:MOST_NAMED])
        yield from _say_more(len(self.go) - MOST_NAMED, "is lifted", "are lifted")

    def _say_change(self, before: Rule | None, after: Rule) -> str:
        return say_changes(before, after) if before is not None else say_comes(after, again=True)

    def say_strays(self) -> Iterator[str]:
        """Entries that others took out or put in."""
        for name, number in sorted(self.mended.items()):
            yield f"{_count(number, 'entry', 'entries')} of the set {name} {'is' if number == 1 else 'are'} put right."
        for name, number in sorted(self.strays.items()):
            leave = "leaves" if number == 1 else "leave"
            yield f"{_count(number, 'entry', 'entries')} of no rule {leave} the set {name}."
        for name, number in sorted(self.ways.items()):
            if not self._shapes_anew:
                yield f"The way of {_count(number, 'address', 'addresses')} to their queues is put right (set {name})."
        if self.freed:
            more = say_more(self.freed)
            have = "have" if more else "has"
            yield f"{self.freed[0]}{more} {have} no queue of {'their' if more else 'its'} own any more."

    def say_places(self) -> Iterator[str]:
        """Where netlimit stands among the rules of others."""
        said: dict[tuple[str, str], list[str]] = {}
        desired = self.wanted.structure
        for where in {**self.found.structure.hooks, **desired.hooks, **dict.fromkeys(self._hooks())}:
            before, after = self.found.structure.hooks.get(where), desired.hooks.get(where)
            if before == after:
                continue
            base = ChainId(where.family, where.table, CHAIN_PREFIX + where.name)
            verb = "lost" if base in self.found.structure.chains else "new"
            verb = "left" if after is None else "changed" if before else verb
            said.setdefault((verb, f"IPv{where.family}"), []).append(f"{where.table} {where.name}")
        for (verb, family), places in sorted(said.items()):
            where_ = f"{', '.join(sorted(places))} ({family})"
            yield {
                "new": f"netlimit takes its place in {where_}.",
                "lost": f"The place of netlimit in {where_} is restored.",
                "changed": f"The place of netlimit in {where_} changes.",
                "left": f"netlimit leaves {where_}.",
            }[verb]

    def _hooks(self) -> Iterator[ChainId]:
        for step in self.plan.steps:
            if isinstance(step, SwitchTable):
                yield from (ChainId(step.family, step.table, name) for name in step.hooks)

    def say_rest(self) -> Iterator[str]:
        """Chains, sets, queues and the ingress, in numbers."""
        chains: dict[tuple[int, str], Counter[str]] = {}
        before, after = self.found.structure.chains, self.wanted.structure.chains
        for where in {**before, **after}:
            if before.get(where) != after.get(where):
                kind = "new" if where not in before else "gone" if where not in after else "changed"
                chains.setdefault((where.family, where.table), Counter())[kind] += 1
        for (family, table), count in sorted(chains.items()):
            yield from (f"In {table} (IPv{family}), {text}." for text in _say_counts(count, "chain"))
        have, want = self.found.structure.sets, self.wanted.structure.sets
        count = Counter(new=len(want.keys() - have.keys()), gone=len(have.keys() - want.keys()))
        count["changed"] = sum(have[name] != want[name] for name in want.keys() & have.keys())
        yield from (f"{text[:1].upper()}{text[1:]}." for text in _say_counts(count, "set"))
        yield from self.devices
        for step in self.plan.steps:
            if isinstance(step, WriteIngress):
                yield from _say_ingress(step)


_Class = tuple[str, int]
"""A device, and a class there."""


def _list_added(step: WriteSets) -> Iterator[_Place]:
    yield from ((name, key) for name, entries in step.add.items() for key in entries)


def _list_removed(step: WriteSets) -> Iterator[_Place]:
    yield from ((name, key) for name, keys in step.remove.items() for key in keys)


def _read_rule(purposes: Iterable[Purpose], wanted: Compilation, key: str, entry: Entry) -> Rule | None:
    """What rule an entry is of, without id and name; None for one that no rule can have made."""
    number = entry.mark >> wanted.facts.shift
    for purpose in purposes:
        if isinstance(purpose, VerdictGroup):
            return Rule(ip_network(key), purpose.action, purpose.direction, purpose.selector)
        if not purpose.group.marked or wanted.numbers.kept.get(purpose.key) == number:
            return _as_rule(purpose, ip_network(key))
    return None


def _as_rule(limit: Limit, target: Target) -> Rule:
    group, profile = limit.group, limit.profile
    per = group.scope
    if group.scope == TARGET and group.bucket_length != target.prefixlen:
        per = f"/{group.bucket_length}"
    return Rule(target, profile.action, group.direction, group.selector, profile.rate, profile.burst, per or HOST)


def _join_halves(rules: Iterable[Rule]) -> list[Rule]:
    """A set holds everything as two halves; a rule says it once, and one with an id is one."""
    kept: dict[object, Rule] = {}
    for rule in rules:
        whole = rule.target.supernet() if rule.target.prefixlen == 1 and not rule.id else rule.target
        same = (rule.id, whole, rule.action, rule.direction, rule.selector, rule.rate, rule.burst, rule.per)
        if same in kept and whole != rule.target:
            kept[same] = _whole(rule, whole)
        kept.setdefault(same, rule)
    return list(kept.values())


def _whole(rule: Rule, whole: Target) -> Rule:
    return Rule(whole, rule.action, rule.direction, rule.selector, rule.rate, rule.burst, rule.per)


def _say_more(number: int, one: str, many: str) -> Iterator[str]:
    if number > 0:
        yield f"… and {number:,} more {'rule' if number == 1 else 'rules'} {one if number == 1 else many}."


def _say_counts(count: Counter[str], noun: str) -> Iterator[str]:
    """How many of a thing are new, changed or gone, in one phrase; none if nothing is."""
    words = [f"{count[kind]:,} {kind}" for kind in ("new", "changed", "gone") if count[kind]]
    if words:
        yield f"{noun}s of netlimit: {', '.join(words)}"


def _say_ingress(step: WriteIngress) -> Iterator[str]:
    if step.drop:
        yield "What ends on this host is shaped no longer: the programs leave the ingress."
    elif step.ingress is not None:
        yield _say_devices(step.ingress.devices)
    number = sum(map(len, step.add.values())) + sum(map(len, step.remove.values()))
    if number:
        gets = "gets" if number == 1 else "get"
        yield f"What ends on this host: {_count(number, 'address', 'addresses')} {gets} another queue, or none."


def _say_devices(devices: tuple[str, ...]) -> str:
    if not devices:
        return "No program is left on the ingress of any device."
    return f"The program on the ingress of {', '.join(devices)} is put there anew."


def _say_class(device: str, before: QueueClass, after: QueueClass) -> str:
    up_to = f", up to {_say_rate(after.ceil)}" if after.ceil != after.rate else ""
    return f"on {device} changes from {_say_rate(before.rate)} to {_say_rate(after.rate)}{up_to}"


def _say_rate(rate: int) -> str:
    return format_rate(8 * rate, "bits", 1)


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
