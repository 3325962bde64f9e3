"""From rules to the state that the kernel shall be in.

Each rule compiles on its own (`limits.compile_rule`); a `Compilation` adds the fragments up, so that a change costs
what changed. `compile_rules` does it from nothing, and comes to the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from netlimit.addresses import explain_unused, read_network, unmap
from netlimit.chains import asked_keys, assemble, find_displacing, find_former_bits, keep_rejecting, name_buckets
from netlimit.conflicts import Finding, Spoiled
from netlimit.crowding import Kinds
from netlimit.detours import ANY, ANYWHERE, Areas, read_areas
from netlimit.fragments import find_leak
from netlimit.given import tell_given
from netlimit.hashlimit import TABLE_MAX, find_table_size
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
    stands_under_mark,
    trusted_set,
)
from netlimit.misses import Miss, find_miss, may_miss
from netlimit.numbers import MARK_BITS, TRANSLATED, Numbering, Numbers, PurposeKey, number_families
from netlimit.peers import find_crowded, find_peer_slots, peer_set
from netlimit.publications import Publications, tell_published
from netlimit.rates import Kind
from netlimit.routing import find_entries, leads_towards
from netlimit.rules import PEER, Action, Direction, Protocol, Rule, Target, format_target
from netlimit.shaping import Note, Shaping
from netlimit.state import PEER_PREFIX, Entry, IpSet, State, Structure, exempts
from netlimit.tree import Tree
from netlimit.turnover import Told, Turnover
from netlimit.unforced import Shut, find_shut, may_shut
from netlimit.untouched import open_set

MOST_FEW = 16
"""Up to so many exempt or blocked targets are asked for one by one: at about 5 ns each against 170 for a look into a
set (measured)."""
_PLACED = Spoiled.TRANSLATED, Spoiled.MASKED, Spoiled.HIDDEN, Spoiled.GUIDED
"""What concerns rules by where packets go."""
_RESERVE, _RESERVE_SHARE = 4096, 8
"""The room that rules leave in the set of what is spared to those who will be safe: so much, or this share of it."""


class _Way(NamedTuple):
    """The packets that a rule speaks of. `own`: it names the host itself; `late`: they are asked about only once they
    have been translated; `early`: where they come in; `opens`: what opens connections is; `counts`: by a rate."""

    rule_id: int
    direction: Direction
    target: str
    interface: str | None
    protocol: Protocol
    own: bool = False
    late: bool = False
    has_ports: bool = False
    early: bool = False
    opens: bool = False
    counts: bool = False

    @property
    def family(self) -> int:
        """The address family."""
        return 6 if ":" in self.target else 4

    def is_led_past(self, cause: Spoiled, places: Areas, families: Collection[int]) -> bool:
        """Whether such packets may be others where they are asked about, for they go to, or are answers to, one of the
        places, which are of these families."""
        if self.direction is Direction.TO:
            before_nat = cause in (Spoiled.TRANSLATED, Spoiled.MASKED)
            return not (before_nat and self.late) and places.meet(self.target)
        hidden = cause is Spoiled.HIDDEN or (cause is Spoiled.GUIDED and self.opens)
        return hidden and not (self.early or self.own) and self.family in families

    @property
    def looks_where_it_leaves(self) -> bool:
        """Whether it is asked by which device such packets are about to leave."""
        return self.direction is Direction.TO and bool(self.interface)

    def asks_for(self, devices: tuple[str, ...]) -> bool:
        """Whether it is asked if such packets have come in by one of the devices."""
        return self.direction is Direction.FROM and self.interface in devices

    def may_enter(self, devices: tuple[str, ...], facts: Facts) -> bool:
        """Whether such packets may come in by one of the devices, and would be forwarded."""
        if self.own or self.direction is Direction.TO:
            return not self.own
        if self.interface:
            return self.interface in devices
        return leads_towards(read_network(self.target), devices, facts.topology)

    def may_come_in(self, devices: tuple[str, ...], facts: Facts) -> bool:
        """The same of what ends on this host, too."""
        return (self.own and self.direction is Direction.TO) or self.may_enter(devices, facts)


class _Waiting(NamedTuple):
    """What has rules wait until it is known who a packet is for: the longest prefix `to` which is allowed (-1: none),
    and whether a limit rejects."""

    longest: int
    rejects: bool


@dataclass(slots=True)
class _Slot:
    """What a purpose comes to on this host: the sets that must have room for its rules, the names of those that are
    its own, the entry that its rules have there (without an end), or the reason why it cannot be enforced. `special` is
    the set that its rules have their keys in beside others'; `users` counts its rules, `buckets` those that they can
    come to in the table of hashlimit that they share. It is `short` where only a number for it is missing."""

    sets: tuple[IpSet, ...]
    names: tuple[str, ...]
    entry: Entry
    problem: str | None
    special: str | None = None
    users: int = 0
    buckets: int = 0
    short: bool = False


class Compilation:
    """The desired state, kept up to date rule by rule.

    `numbers` holds what may be in the kernel; what no rule needs any more stays in it until `settle`.
    `touched` names what changed since `settle`: keys by set; `touched_classes`: classids by device. `owners` are the
    rules by the sets in which their keys are, and by key; `problems` says of rules why they cannot be enforced. Not
    thread-safe.
    """

    def __init__(self, facts: Facts, numbering: Mapping[PurposeKey, int] | None = None) -> None:
        self.facts = facts
        self.numbers = Numbers(_find_fitting(numbering or {}, facts))
        self.numbers.keep(MARK_BITS, facts.mark_mask)
        self._keep_translated()
        self.shaping = Shaping(facts, self.numbers)
        self.fragments: dict[int, Fragment] = {}
        self._problems: dict[int, str] = {}
        self._doubtful: dict[int, Rule] = {}
        self._closing: dict[int, Rule] = {}
        self.entries: dict[str, dict[str, Entry]] = {}
        self.touched: dict[str, set[str]] = {}
        self.touched_classes: dict[str, set[int]] = {}
        self.owners: dict[tuple[str, ...], dict[str, int]] = {}
        self._slots: dict[Purpose, _Slot] = {}
        self._special: dict[str, Counter[str]] = {}
        self._left_out: dict[int, int] = {}
        self._freed = False
        self._whole = False
        self._rooms: dict[Group, int] = {}
        self._displacing: Counter[Group] = Counter()
        self._turnover = Turnover()
        self._wide: Told = {}
        self.kinds = Kinds()
        self._lanes: list[OpenLane] = []
        self._capped = False
        self._settled_lanes: list[OpenLane] = []
        self._settled_few: dict[str, tuple[str, ...]] = {}
        self._settled_trees: dict[str, Tree] = {}
        self._settled_ingress: Ingress | None = None
        self._barred_anew = False
        self._structure: Structure | None = None
        self._settled: Structure | None = None
        self.protect(facts)

    def put(self, rule: Rule) -> str | None:
        """Add a rule in force, or put it in the place of the one with its id. Returns why it cannot be enforced."""
        if rule.action is Action.SHAPE:
            return self._shape(rule)
        self.shaping.drop(rule.id)
        fragment = compile_rule(rule, self.facts)
        slot = self._find_slot(rule.id, fragment.purpose)
        problem = slot.problem or _find_misfit(rule) or self._find_lack(slot, fragment)
        if problem is None and not slot.users:
            problem = self.kinds.refuse(fragment.purpose)
        before = self._enforced(rule.id)
        self.fragments[rule.id] = fragment
        self._doubtful.pop(rule.id, None)
        self._closing.pop(rule.id, None)
        if may_miss(rule, self.facts):
            self._doubtful[rule.id] = rule
        if may_shut(rule, self.facts):
            self._closing[rule.id] = rule
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
        self._doubtful.pop(rule.id, None)
        self._closing.pop(rule.id, None)
        return self.shaping.put(rule)

    def drop(self, rule_id: int) -> None:
        """Take a rule out; one that is not there is no error."""
        self.shaping.drop(rule_id)
        before = self._enforced(rule_id)
        self._problems.pop(rule_id, None)
        self.fragments.pop(rule_id, None)
        self._doubtful.pop(rule_id, None)
        self._closing.pop(rule_id, None)
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

    @property
    def misses(self) -> dict[int, Miss]:
        """Why rules that are held hit nothing, or not all, by their ids."""
        held = ((rule_id, rule) for rule_id, rule in self._doubtful.items() if rule_id not in self._problems)
        found = ((rule_id, find_miss(rule, self.facts)) for rule_id, rule in held)
        return {rule_id: miss for rule_id, miss in found if miss is not None}

    @property
    def shut(self) -> Shut:
        """The rules in force that close a port by which the host is managed, though nobody has forced them."""
        if not self._closing:
            return {}
        lost = self._problems.keys() | {i for i, miss in self.misses.items() if not miss.partly}
        return find_shut((rule for i, rule in self._closing.items() if i not in lost), self.facts)

    def sets_of(self, rule_id: int) -> tuple[str, ...]:
        """The sets in which a rule has its keys: first the one that counts what matched, then, for limits, the one that
        counts what was dropped. None for a rule that is not enforced."""
        fragment = self._enforced(rule_id)
        return () if fragment is None else self._slots[fragment.purpose].names

    @property
    def changed(self) -> bool:
        """Whether anything has changed since `settle`."""
        return self._settled is not self.structure or bool(self.touched or self.touched_classes) or self._barred_anew

    @property
    def structure(self) -> Structure:
        """Sets, chains and hooks for the limits in use."""
        self._work_out()
        if self._structure is None:
            limits, verdicts = self._limits(), self._verdicts()
            tables = self._slots_of(), self._wide
            displacing = {*+self._displacing}
            about = self.facts, self._few(), self._lanes, self._capped, *tables
            self._structure = assemble(limits, verdicts, *about, displacing=displacing)
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
            devices = find_entries(verdict.direction, verdict.selector.interface, self.facts.topology)
            if verdict.action is Action.ALLOW and verdict.family in families and devices is not None:
                name, where = matched_set(verdict, self.facts).name, verdict.selector
                ports = where.protocol.value, where.ports, where.source_ports
                exempt.append(IngressLane.copy(name, verdict.family, verdict.side, *ports, devices))
        return replace(ingress, lanes=(*ingress.lanes[:exact], *exempt, *ingress.lanes[exact:]))

    @property
    def settled(self) -> State:
        """What the kernel held at the last `settle`, as far as it takes to know what is new: no entries, no classes."""
        return State(self._settled or Structure(), {}, self._settled_trees, self._settled_ingress)

    def _work_out(self) -> None:
        """Take in what shaping rules have come to, which targets are wide, and who is safe and had no room."""
        self._let_in()
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
        if self._turnover.touched:
            wide = self._turnover.tell(self._slots_of())
            if wide != self._wide:
                self._wide, self._structure = wide, None
        lanes = self.shaping.open_lanes
        if (lanes, self.shaping.capped) != (self._lanes, self._capped):
            self._lanes, self._capped, self._structure = lanes, self.shaping.capped, None

    def transition(self, known: Structure) -> Structure:
        """The desired structure and all that is to go with it, of what the kernel is `known` to hold.

        While entries move from one limit to another both are there, so that nobody is unlimited for a moment.
        """
        keys = (parse_purpose(key) for key in sorted(self.numbers.retired))
        retired = [purpose for purpose in keys if purpose is not None]
        few = self._few_still(known)
        current = {each.lane for each in self._lanes}
        leaving = [each for each in self._settled_lanes if each.lane not in current]
        former = find_former_bits(known, self.facts.mark_mask)
        limits, displacing = self._limits(retired), {*+self._displacing}
        still_displacing = find_displacing(known, limits, self.facts) - displacing
        if not (retired or leaving or former or still_displacing) and few == self._few():
            return self.structure
        lanes, tables = [*self._lanes, *leaving], (self._slots_of(), self._wide)
        verdicts = self._verdicts(retired)
        about = self.facts, few, lanes, self._capped, *tables
        between = assemble(limits, verdicts, *about, former, displacing | still_displacing)
        return keep_rejecting(between, known) if former else between

    def settle(self) -> set[PurposeKey]:
        """Forget what changed, and the numbers of what no rule needs; returns their keys."""
        live = self.structure.sets
        retired = self.numbers.settle()
        self.touched, self.touched_classes, self._barred_anew = {}, {}, False
        self.shaping.recycle()
        for name in [name for name, held in self.entries.items() if not held and name not in live]:
            del self.entries[name]
        self._settled_lanes, self._settled_ingress = self._lanes, self._ingress
        self._settled_few = self._few()
        self._settled_trees = {
            name: Tree(tree.handle, {}, dict(tree.children)) for name, tree in self.shaping.trees.items()
        }
        self._slots = {purpose: slot for purpose, slot in self._slots.items() if slot.users}
        self._settled = self.structure
        return retired

    def protect(self, facts: Facts) -> None:
        """Take new facts; limits whose target is protected now, or no longer, must be put again by the caller."""
        before = self.facts
        if _place(facts) != _place(before):
            self._structure = None
        # Programs go from devices, or come back: that is no drift, and changes no set and no chain.
        self._barred_anew |= facts.barred != before.barred and bool(len(self.shaping))
        self.facts = facts
        if facts.own != before.own:
            self._count_displacing()
        self._keep_translated()
        self.shaping.relocate(facts)
        for family in (4, 6):
            self._protect(family)

    def _keep_translated(self) -> None:
        """For the next boot, when nothing is translated yet."""
        if self.facts.translated:
            self.numbers.keep(TRANSLATED, number_families(self.facts.translated))
        else:
            self.numbers.release(*TRANSLATED)

    def hold_open(self, connections: Mapping[int, Iterable[str]]) -> None:
        """Note the open connections by which this host is managed, by family, for sets that are to be made."""
        for family, keys in connections.items():
            self.entries[open_set(family).name] = dict.fromkeys(keys, _PLAIN)

    def hold_led(self, led: Mapping[str, Iterable[str]]) -> None:
        """Note where programs of this host listen at what may lead to others, by set, for sets that are to be made."""
        for name, keys in led.items():
            self.entries[name] = dict.fromkeys(keys, _PLAIN)

    @property
    def left_out(self) -> str | None:
        """What an operator should know where sets have no room for all who are safe."""
        left_out = sum(self._left_out.values())
        if not left_out:
            return None
        return (
            f"The sets have no room for {left_out} of the networks that are safe: rules may hit them. Raise "
            "NETLIMIT_SET_SIZE, or allow larger subnets."
        )

    @property
    def leaks(self) -> dict[int, str]:
        """Why fragments pass rules, by their ids."""
        if all(self.facts.capabilities.get(name) is None for name in ("conntrack", "conntrack6")):
            return {}
        found = {}
        for rule_id, fragment in self.fragments.items():
            purpose = fragment.purpose.group if isinstance(fragment.purpose, Limit) else fragment.purpose
            reason = find_leak(purpose.family, purpose.selector, self.facts.capabilities)
            if reason is not None:
                found[rule_id] = reason
        return found

    def find_spoiled(self, spoiled: Mapping[Spoiled, Finding]) -> dict[int, str]:
        """Why rules do not hold as they say, by their ids, where something `spoiled` all of their kind."""
        if not spoiled:  # with many rules the rest takes much longer
            return {}
        kinds: dict[int, tuple[Spoiled, ...]] = dict.fromkeys(self.shaping.ids, (Spoiled.SHAPED,))
        kinds |= {rule_id: _find_spoiled(fragment.purpose) for rule_id, fragment in self.fragments.items()}
        if Spoiled.INCOMING in spoiled:
            incoming = self.shaping.find_incoming(spoiled[Spoiled.INCOMING].devices)
            kinds |= {rule_id: (*kinds[rule_id], Spoiled.INCOMING) for rule_id in incoming}
        if Spoiled.TAKEN in spoiled:
            kinds |= {rule_id: (*kinds[rule_id], Spoiled.TAKEN) for rule_id in self.shaping.find_incoming()}
        asked = {Spoiled.ENTERING, Spoiled.BROUTED, Spoiled.HANDED, Spoiled.MIRRORED, Spoiled.REROUTED, *_PLACED}
        ways = list(self._list_ways()) if spoiled.keys() & asked else []
        if (entering := spoiled.get(Spoiled.ENTERING)) is not None:
            met = {way.rule_id for way in ways if way.may_enter(entering.devices, self.facts)}
            kinds |= {rule_id: (*kinds[rule_id], Spoiled.ENTERING) for rule_id in met}
        if (brouted := spoiled.get(Spoiled.BROUTED)) is not None:
            met = {way.rule_id for way in ways if way.asks_for(brouted.devices) and way.rule_id in self.fragments}
            met |= self.shaping.find_incoming(brouted.devices)
            kinds |= {rule_id: (*kinds[rule_id], Spoiled.BROUTED) for rule_id in met}
        if (handed := spoiled.get(Spoiled.HANDED)) is not None:
            met = {way.rule_id for way in ways if way.asks_for(handed.devices) and way.rule_id in self.fragments}
            kinds |= {rule_id: (*kinds[rule_id], Spoiled.HANDED) for rule_id in met}
        if (mirrored := spoiled.get(Spoiled.MIRRORED)) is not None:
            met = {way.rule_id for way in ways if way.asks_for(mirrored.devices) and way.rule_id in self.fragments}
            met |= {way.rule_id for way in ways if way.counts and way.may_come_in(mirrored.devices, self.facts)}
            kinds |= {rule_id: (*kinds[rule_id], Spoiled.MIRRORED) for rule_id in met}
        for cause in _PLACED:
            if (finding := spoiled.get(cause)) is not None:
                areas = {protocol: read_areas(finding.places, protocol.value) for protocol in Protocol}
                families = {6 if ":" in place else 4 for _, place in finding.places}
                led = {way.rule_id for way in ways if way.is_led_past(cause, areas[way.protocol], families)}
                kinds |= {rule_id: (*kinds[rule_id], cause) for rule_id in led}
        if Spoiled.APART in spoiled:
            apart = {way.rule_id for way in self._list_ways() if way.has_ports}
            kinds |= {rule_id: (*kinds[rule_id], Spoiled.APART) for rule_id in apart}
        if Spoiled.REROUTED in spoiled:
            leaving = {way.rule_id for way in ways if way.looks_where_it_leaves and way.rule_id in self.fragments}
            kinds |= {rule_id: (*kinds[rule_id], Spoiled.REROUTED) for rule_id in leaving}
        found = {
            rule_id: next((spoiled[each] for each in (*several, Spoiled.EVERY) if each in spoiled), None)
            for rule_id, several in kinds.items()
        }
        return {rule_id: str(finding) for rule_id, finding in found.items() if finding}

    def find_published(self, published: Publications, given: Publications) -> dict[int, Note]:
        """What is to be said of rules `to` addresses of which something is led elsewhere before they are asked, and of
        rules `from` those that are given on the way out, by their ids."""
        return dict(self._tell_published(published, given)) if published or given else {}

    def _tell_published(self, published: Publications, given: Publications) -> Iterator[tuple[int, Note]]:
        for rule_id, fragment in self.fragments.items():
            each = fragment.purpose.group if isinstance(fragment.purpose, Limit) else fragment.purpose
            allows = isinstance(each, VerdictGroup) and each.action is Action.ALLOW
            if allows or not fragment.keys:
                continue
            target = fragment.keys[0] if len(fragment.keys) == 1 else ANYWHERE[each.family == 6]
            if each.direction is Direction.FROM:
                found, most = given.find(target, ANY, ())
                if found and most:
                    yield rule_id, Note(tell_given(found, target))
                continue
            found, degraded = published.find(target, each.selector.protocol.value, each.selector.ports)
            if found:
                yield rule_id, Note(tell_published(found, target, degraded), degraded)

    def _list_ways(self) -> Iterator[_Way]:
        """What rules block, limit or shape, one for each part of a target."""
        waiting = {family: self._find_waiting(family) for family in (4, 6)}
        for rule_id, fragment in self.fragments.items():
            each = fragment.purpose.group if isinstance(fragment.purpose, Limit) else fragment.purpose
            if isinstance(each, VerdictGroup) and each.action is Action.ALLOW:
                continue
            late = isinstance(each, Group) and each.kind is Kind.CONCURRENT
            opens = late or (isinstance(each, Group) and each.kind is Kind.CONNECTIONS)
            counts = isinstance(each, Group) and not late
            early = self._is_asked_early(each, waiting[each.family])
            for key in fragment.keys:
                where = each.selector
                about = each.direction, key, where.interface, where.protocol
                has_ports = bool(where.ports or where.source_ports)
                yield _Way(rule_id, *about, each.own, late, has_ports, early, opens, counts)
        for rule in self.shaping.list_rules():
            where = rule.selector
            about = rule.direction, str(rule.target), where.interface, where.protocol
            yield _Way(rule.id, *about, has_ports=bool(where.ports or where.source_ports))

    def _find_waiting(self, family: int) -> _Waiting:
        """What in a family has rules wait that would be asked where packets come in."""
        longest, rejects = -1, False
        for purpose in (each.purpose for each in self.fragments.values()):
            if isinstance(purpose, Limit):
                rejects |= purpose.group.family == family and purpose.profile.action is Action.REJECT
            elif (purpose.family, purpose.action) == (family, Action.ALLOW):
                answered = family in self.facts.translated and purpose.selector.ports
                longest = max(longest, purpose.length if purpose.direction is Direction.TO or answered else -1)
        return _Waiting(longest, rejects)

    def _is_asked_early(self, each: Group | VerdictGroup, waiting: _Waiting) -> bool:
        """Whether packets are asked about where they come in, and nowhere else; see `chains`."""
        if each.direction is Direction.TO or each.selector.interface in self.facts.vrfs:
            return False
        if isinstance(each, VerdictGroup):
            return each.length > waiting.longest
        lost = each.scope == PEER or each.selector.interface in self.facts.ports_of_vrfs
        waits = each.kind is Kind.CONCURRENT or waiting.longest >= 0 or waiting.rejects
        return lost and not waits

    def find_moved(self, before: Facts) -> list[int]:
        """The rules that name an address, or a network as a whole, which ends on this host now and did not before, or
        the other way round."""
        wider = (self.facts.ending_networks, self.facts.vrfs) != (before.ending_networks, before.vrfs)
        if not wider and self.facts.topology.local == before.topology.local:
            return []
        keys = ((i, each.keys[0]) for i, each in self.fragments.items() if len(each.keys) == 1)
        named = {i: key for i, key in keys if wider or "/" not in key}
        targets = {key: read_network(key) for key in set(named.values())}
        moved = {key for key, target in targets.items() if _ends_here(target, self.facts) != _ends_here(target, before)}
        return [i for i, key in named.items() if key in moved]

    @property
    def peer_sets(self) -> tuple[str, ...]:
        """The sets of the peers that have buckets."""
        return tuple(name for name in self.structure.sets if name.startswith(PEER_PREFIX))

    def find_crowded(self, counts: Mapping[str, int]) -> dict[int, str]:
        """Why rules may miss peers that are new, by their ids; `counts` says how many entries sets have."""
        crowded = find_crowded(self.structure.sets, counts)
        if not crowded:
            return {}
        groups: dict[Group, str] = {}
        for group, profiles in self._limits().items():
            if group.gated:
                name = peer_set(group, profiles, self._find_slots(group, self._rooms.get(group, 1))).name
                groups |= {group: crowded[name]} if name in crowded else {}
        held = ((i, fragment.purpose) for i, fragment in self.fragments.items())
        limits = ((i, purpose.group) for i, purpose in held if isinstance(purpose, Limit))
        return {i: groups[group] for i, group in limits if group in groups}

    def name_buckets(self) -> dict[str, PurposeKey]:
        """The limits that may be in the kernel, by the names of the tables of their buckets."""
        parsed = map(parse_purpose, self.numbers.retired)
        retired = [purpose for purpose in parsed if purpose is not None]
        return name_buckets(self._limits(retired), self.facts, self._slots_of(), self._wide)

    # -- entries

    def _add(self, slot: _Slot, fragment: Fragment) -> None:
        if slot.users == 0:
            self._structure = None
            self.kinds.add(fragment.purpose)
            self.numbers.used.add(purpose_key(fragment.purpose))
        slot.users += 1
        slot.buckets += _count_buckets(fragment)
        self._turnover.add(fragment)
        self._displace(fragment, 1)
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
            if key not in owners:
                self._make_room(fragment.purpose, key, 1)
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
            self._make_room(fragment.purpose, key, -1)
            for name in slot.names:
                self.entries[name].pop(key, None)
                self.touched.setdefault(name, set()).add(key)
        if not owners:
            self.owners.pop(slot.names, None)
        if slot.special:
            self._unshare(slot.special, fragment.keys)
        slot.users -= 1
        slot.buckets -= _count_buckets(fragment)
        self._turnover.remove(fragment)
        self._displace(fragment, -1)
        if slot.users == 0:
            self._structure = None
            self.kinds.remove(fragment.purpose)
            self.numbers.release(*purpose_key(fragment.purpose))

    def _displace(self, fragment: Fragment, change: int) -> None:
        """Count the rules of a group that name what ends here and may be forwarded all the same: not the host's own."""
        purpose = fragment.purpose
        if isinstance(purpose, Limit) and purpose.group.own and self.facts.own.isdisjoint(fragment.keys):
            before = self._displacing[purpose.group]
            self._displacing[purpose.group] += change
            if not (before and before + change):
                self._structure = None

    def _count_displacing(self) -> None:
        self._displacing.clear()
        self._structure = None
        for rule_id in self.fragments:
            if (fragment := self._enforced(rule_id)) is not None:
                self._displace(fragment, 1)

    def _make_room(self, purpose: Purpose, key: str, sign: int) -> None:
        """Count how many buckets the targets of a group can have; tables that are too small or too large get another
        size."""
        if not isinstance(purpose, Limit):
            return
        group = purpose.group
        buckets = group.count_buckets(key)
        if buckets is None:
            return
        before = self._rooms.get(group, 0)
        after = self._rooms[group] = before + sign * buckets
        if self._find_slots(group, before) != self._find_slots(group, after):
            self._structure = None
        if not after:
            del self._rooms[group]

    def _slots_of(self) -> dict[Group, int]:
        return {group: self._find_slots(group, most) for group, most in self._rooms.items()}

    def _find_slots(self, group: Group, most: int) -> int:
        """The size of the table of buckets, or of the set of peers."""
        return find_peer_slots(most, self.facts.set_size) if group.scope == PEER else find_table_size(most)

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
                self._freed = True
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
        """Have those in sets who are safe; no more than sets have room for, those first that come first."""
        ipset, trusted = safe_set(family, self.facts), trusted_set(family, self.facts)
        nets = [net for net in self.facts.safe if net.version == family]
        safe = dict.fromkeys(key for net in nets for key in set_keys(net))
        held = self.entries.setdefault(ipset.name, {}).keys()
        wanted = dict.fromkeys(islice(safe, min(ipset.size, self._find_room(family, held, len(safe)))))
        self._left_out[family] = len(safe) - len(wanted)
        needed = {key for net in self.facts.needed for key in set_keys(net)}
        self._fill(trusted.name, wanted.keys() - needed)
        gone, new = self._fill(ipset.name, wanted.keys())
        for direction in Direction:
            exempt = exempt_set(family, direction, self.facts).name
            self._share(exempt, new)
            self._unshare(exempt, gone)
            self._special.setdefault(blocked_set(family, direction, self.facts).name, Counter())

    def _fill(self, name: str, wanted: Set[str]) -> tuple[set[str], set[str]]:
        """Have these in a set, and no others; which have gone and come by that."""
        held = self.entries.setdefault(name, {})
        gone, new = held.keys() - wanted, wanted - held.keys()
        for key in gone:
            del held[key]
        self.touched.setdefault(name, set()).update(gone)
        for key in new:
            self._set(name, key, _PLAIN)
        return gone, new

    def _let_in(self) -> None:
        """Where rules have left room, have those in sets who are safe and had none."""
        if self._freed:
            for family in [family for family, missing in self._left_out.items() if missing]:
                self._protect(family)
            self._freed = False

    def _find_room(self, family: int, held: Collection[str], safe: int) -> int:
        """How many of `safe` have room beside all that is allowed; `held` are those who are safe by now."""
        rooms = []
        for direction in Direction:
            exempt = exempt_set(family, direction, self.facts)
            counts: Mapping[str, int] = self._special.get(exempt.name, {})
            if len(counts) + safe > exempt.size:
                rooms.append(exempt.size - sum(count > (key in held) for key, count in counts.items()))
        return max(0, min(rooms, default=safe))

    def _few_still(self, known: Structure) -> dict[str, tuple[str, ...]]:
        """The few, and those that chains still ask for: what goes is looked at closely until its entries are gone."""
        few = self._few()
        asked = asked_keys(known)
        for family in (4, 6):
            for direction in Direction:
                names = [kind(family, direction, self.facts).name for kind in (exempt_set, blocked_set)]
                gone = asked[family, direction].difference(*(few.get(name, ()) for name in names))
                for name in names:
                    going = gone | (asked[family, direction] & {*self._settled_few.get(name, ())})
                    if name in few and not going <= {*few[name]}:
                        few[name] = tuple(sorted({*few[name], *going}))
        return few

    # -- purposes

    def complete(self) -> bool:
        """All rules are in: numbers that none of them uses may go to others from now on, where all are taken. Returns
        whether there are some; who was refused may be put again."""
        self._whole = True
        return bool(self.numbers.retired)

    def _find_slot(self, rule_id: int, purpose: Purpose) -> _Slot:
        """What the purpose comes to. A rule that has another rate than before, and shared the former with none, hands
        its number on where no other is free: in the kernel one rate takes the other's place in one go."""
        slot, before = self._slots.get(purpose) or self._prepare(purpose), self._enforced(rule_id)
        if not slot.short or before is None or self._slots[before.purpose].users > 1:
            return slot
        former = purpose_key(before.purpose)
        if former[0] != purpose_key(purpose)[0]:  # of another kind, where numbers are others
            return slot
        self._remove(before, None)
        del self.fragments[rule_id]
        return self._prepare(purpose, former)

    def _prepare(self, purpose: Purpose, former: PurposeKey | None = None) -> _Slot:
        sets = purpose_sets(purpose, self.facts)
        problem = find_problem(purpose, self.facts)
        entry, short = _PLAIN, False
        if problem is None:
            number = self._number(purpose, former)
            short = number is None
            if number is None:
                problem = (
                    f"All {self.facts.most_limits} numbers under the mark mask {self.facts.mark_mask:#x} are taken by "
                    "other rates of this kind of limit. Use a rate that is in use already, or widen NETLIMIT_MARK_MASK "
                    "(`auto` takes what others leave)."
                )
            elif number:
                entry = Entry(number << self.facts.shift, self.facts.mark_mask)
        slot = _Slot(sets, tuple(ipset.name for ipset in sets), entry, problem, short=short)
        if isinstance(purpose, VerdictGroup):
            kind = exempt_set if purpose.action is Action.ALLOW else blocked_set
            special = kind(purpose.family, purpose.direction, self.facts)
            slot.sets, slot.special = (*sets, special), special.name
        if problem is None:
            self._slots[purpose] = slot
        return slot

    def _find_lack(self, slot: _Slot, fragment: Fragment) -> str | None:
        """Refuse what no set, and no table of hashlimit, has room for: a full table drops whoever is new to it. Who is
        safe comes before rules."""
        self._let_in()
        for ipset in slot.sets:
            held = self.entries.get(ipset.name, {})
            exempting = ipset.name == slot.special and exempts(ipset.name)
            size = ipset.size - (self._find_reserve(ipset) if exempting else 0)
            if len(held) + len(fragment.keys) <= size:
                continue
            new = sum(key not in held for key in fragment.keys)
            if new and len(held) + new > size:
                return (
                    f"The set for this kind of limit is full: it holds {ipset.size} addresses. Name larger subnets, or "
                    "raise NETLIMIT_SET_SIZE."
                )
        before = self._enforced(fragment.rule_id)
        replaced = _count_buckets(before) if before and before.purpose == fragment.purpose else 0
        if (most := slot.buckets - replaced + _count_buckets(fragment)) > TABLE_MAX:
            return (
                f"With it, the rules of this kind that have the same rate would have {most} buckets, and their table "
                f"in the kernel holds {TABLE_MAX}: a full one would drop every new address. Give it a slightly other "
                "rate or burst, which has a table of its own, a smaller target, or `per: /n`."
            )
        return None

    def _find_reserve(self, exempt: IpSet) -> int:
        """How much room is kept for those who will be safe yet."""
        safe = self.entries.get(safe_set(exempt.family, self.facts).name, {})
        return max(0, min(_RESERVE, exempt.size // _RESERVE_SHARE) - len(safe))

    def _number(self, purpose: Purpose, former: PurposeKey | None) -> int | None:
        """The purpose's number, a new one if it has none; 0 when it needs none, None when all are taken. It is not in
        use before a rule is in it."""
        key = purpose_key(purpose)
        number: int | None = 0
        if isinstance(purpose, Limit) and purpose.group.marked:
            among = range(1, self.facts.most_limits + 1)
            number = self.numbers.take(*key, among)
            if number is None and (self._whole or former):
                number = self._take_over(key, among, former)
        else:
            self.numbers.note(key)
        self.numbers.release(*key)
        return number

    def _take_over(self, key: PurposeKey, among: range, former: PurposeKey | None) -> int | None:
        """The number of a limit that has no rule any more, at best of the `former` one. What the kernel holds of it yet
        has the new rate until it goes, a moment later: else who has the new rate would be unlimited meanwhile."""
        loser = self.numbers.take_over(*key, among, former)
        if loser is None:
            return None
        self._slots = {each: slot for each, slot in self._slots.items() if purpose_key(each) != loser}
        return self.numbers.kept[key]

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


def _place(facts: Facts) -> tuple[object, ...]:
    """What decides, of what changes while rules stay the same, which chains stand where."""
    ends_segments = bool(facts.topology.segments)
    return facts.management, facts.peers, facts.vrfs, facts.ports_of_vrfs, facts.translated, ends_segments


def _find_spoiled(purpose: Purpose) -> tuple[Spoiled, ...]:
    """What can spoil a rule, what concerns fewer rules first."""
    if not isinstance(purpose, Limit):
        return ()
    group = purpose.group
    if group.kind is Kind.CONCURRENT:
        return (Spoiled.OPEN,)
    asked_as_sent = group.direction is Direction.TO or group.stands_here
    opened = (Spoiled.OPENED,) if group.kind is Kind.CONNECTIONS else ()
    return (*opened, Spoiled.SENT) if asked_as_sent else opened


def _find_fitting(numbering: Mapping[PurposeKey, int], facts: Facts) -> Numbering:
    """The numbers that may stay: none of what the kernel has refused, and so does not hold. Under other bits of the
    mark entries are in other sets, so those may be given anew for which there is no room."""
    held = {key: number for key, number in numbering.items() if key not in facts.refused}
    if numbering.get(MARK_BITS, facts.mark_mask) == facts.mark_mask:
        return held
    return {key: n for key, n in held.items() if n < facts.most_limits or not stands_under_mark(key)}


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


def _count_buckets(fragment: Fragment) -> int:
    """How many buckets a rule can come to in a table that nothing else bounds: sets of peers bound theirs."""
    limit = fragment.purpose
    if not isinstance(limit, Limit) or limit.group.kind is Kind.CONCURRENT or limit.group.scope == PEER:
        return 0
    return sum(map(limit.group.count_places, fragment.keys))


def _find_misfit(rule: Rule) -> str | None:
    """Why no packet can be in the target of a rule that a former version has kept."""
    unused, plain = explain_unused(rule.target), unmap(rule.target)
    if unused is None and plain is not rule.target:
        unused = f"{rule.target} is an IPv4 network written as one of IPv6; write {format_target(plain)}."
    return f"The target {unused}" if unused else None


_PLAIN = Entry()


def _ends_here(target: Target, facts: Facts) -> bool:
    return facts.is_here(target) or facts.ends_wholly(target)
