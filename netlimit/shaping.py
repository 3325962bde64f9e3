"""Shaping rules, on the devices that their traffic leaves by: who has a place there, and who would claim another's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from netlimit.backlog import Backlog
from netlimit.branches import Branches, Wish
from netlimit.bypasses import Bypass, are_peers, find_bypasses, say_bypasses
from netlimit.demand import Demand
from netlimit.htb import bytes_per_second
from netlimit.ingress import Ingress
from netlimit.lanes import Lane, OpenLane, find_lane, seen_name
from netlimit.limits import SEEN, Facts, set_keys
from netlimit.management import find_lack
from netlimit.misses import find_missing
from netlimit.numbers import Numbers
from netlimit.rates import format_rate
from netlimit.routes import read_table
from netlimit.routing import find_entrances, find_home, find_stacked, find_way, leads_towards
from netlimit.rules import TARGET, Direction, Protocol, Rule, Selector, Target, format_target
from netlimit.several import name_some
from netlimit.state import Entries, Entry
from netlimit.traffic import Place, Traffic, unit_length
from netlimit.tree import DIRECT, FIRST_ROOT, INGRESS_DEVICE, REST, LeafKind, Topology, Tree, Usage, classid
from netlimit.waiting import Waiting

NEWCOMERS = 1000
"""So many hosts that have appeared get a class at once: what else there is to be done must not wait for a flood."""
MOST_HOSTS = 16_384
"""Classes for hosts on one device. Each has a queue, and Linux has 32,767 handles for those of a device."""
MOST_BUDGETS = 1024
"""Budgets for subnets on all devices together: those that hosts lie in have a child HTB each, of which there are 4,095;
and two each while they move into another budget."""
MOST_KINDS = 500
"""Lanes on all devices together, for the same reason."""
MOST_NESTED = 6
"""Budgets that lie in one another: HTB has eight levels, of which the device and the hosts take one each."""
_MOST_NAMED = 4
"""Devices that are named for one reason."""
_ROOT = "tc root"
"""What the numbers of devices are kept under."""
_ROOTS = range(1, 256)
_EVEN_ROOTS = 127
"""The first of them have the even handles, as they always had; the odd ones come after."""


class Note(NamedTuple):
    """What an operator should know of a rule that is held; `degraded`: not held for all that it speaks of."""

    text: str
    degraded: bool = False

    def beside(self, other: Note) -> Note:
        """Both, another one first."""
        return Note(f"{other.text} {self.text}", self.degraded or other.degraded)


@dataclass(slots=True)
class _Device:
    """One device. `homes` counts a lane's rules by the network behind the device that their targets lie in, once it is
    asked for. `crowded`: not everybody who appeared has a class; `waiting` tells who has none. `staying` are the
    classes of those who appeared, as of the last reading, the longest idle first, and `leaving` who is to make way for
    rules, the next one last. `closed`: all rules have left it to make room, and it takes none until the kernel is
    told."""

    name: str
    number: int
    branches: Branches
    cap: Rule | None = None
    lanes: dict[Lane, Traffic] = field(default_factory=dict)
    homes: dict[Lane, Counter[Target | None]] = field(default_factory=dict)
    crowded: bool = False
    waiting: Waiting = field(default_factory=Waiting)
    staying: Sequence[int] = ()
    leaving: list[tuple[Traffic, Target]] = field(default_factory=list)
    closed: bool = False

    @property
    def rules(self) -> Iterator[Rule]:
        """All rules that are held there."""
        yield from (self.cap,) if self.cap else ()
        yield from (rule for traffic in self.lanes.values() for rule in traffic.rules)

    @property
    def size(self) -> int:
        """How many those are."""
        return bool(self.cap) + sum(traffic.size for traffic in self.lanes.values())

    @property
    def hosts(self) -> int:
        return sum(traffic.hosts for traffic in self.lanes.values())


class _Ground(NamedTuple):
    """The devices where a rule is to be held, and what is to be told of it: what it is not held for (`lost`), and what
    else (`note`)."""

    devices: tuple[str, ...]
    lost: str
    note: str | None


def is_cap(rule: Rule, device: str) -> bool:
    """Whether a rule is about all that leaves a device, of either family."""
    everything = rule.target.prefixlen == 0 and rule.selector.protocol is Protocol.ANY
    return everything and rule.per == TARGET and device != INGRESS_DEVICE


def _judge(facts: Facts, device: str) -> tuple[str | None, str | None, str]:
    """Whose a device is: somebody's root qdisc, and the bridge or bond that it belongs to; and why nothing is led to
    classes there."""
    found = facts.topology.devices.get(device)
    return facts.foreign.get(device), facts.unled.get(device), found.master if found else ""


def _name_foreign(device: str, root: str) -> str:
    return (
        f"{device} has a qdisc that is not ours ({root}), which netlimit leaves alone. Remove it with `tc qdisc del "
        f"dev {device} root`, or let netlimit put it aside until a teardown: `netlimit apply --take-over {device}`."
    )


class Shaping:
    """The shaping rules of a host, kept up to date rule by rule; all but `problems` is as it should be after `settle`.

    `problems` says of rules why they cannot be held. Not thread-safe.
    """

    def __init__(self, facts: Facts, numbers: Numbers) -> None:
        self.facts = facts
        self.problems: dict[int, str] = {}
        self._numbers = numbers
        self._rules: dict[int, Rule] = {}
        self._homes: dict[int, list[tuple[_Device, Lane | None]]] = {}
        self._notes: dict[int, Note] = {}
        self._bypasses: dict[int, tuple[Bypass, ...]] = {}
        self._cramped: dict[int, dict[str, str]] = {}
        self._named: dict[tuple[Target, Direction], dict[int, Selector]] = {}
        self._devices: dict[str, _Device] = {}
        self._touched: dict[str, set[int]] = {}
        self._begins = True
        self._kinds = 0
        """Lanes on all devices that have rules."""
        self._budgets = 0
        """Budgets for subnets, of more than one address, on all devices."""
        self._kind: tuple[Rule, Facts, Lane] | None = None
        """The lane of the rule that was asked for last, on whatever device: it is asked for on each."""

    def __contains__(self, rule_id: int) -> bool:
        return rule_id in self._rules

    def __len__(self) -> int:
        return len(self._rules)

    @property
    def ids(self) -> Iterable[int]:
        """The rules that shape."""
        return self._rules.keys()

    # -- rules

    def put(self, rule: Rule) -> str | None:
        """Add a rule in force, or put it in the place of the one with its id. Returns why it cannot be held."""
        self.drop(rule.id)
        problem = self._settle_down(rule)
        if problem is not None:
            self._refuse(rule, problem)
        else:
            self._rules[rule.id] = rule
        return problem

    def drop(self, rule_id: int) -> None:
        """Take a rule out; one that is not there is no error."""
        rule = self._rules.pop(rule_id, None)
        self.problems.pop(rule_id, None)
        if rule is not None:
            self._move_out(rule)
            self._forget(rule)

    def relocate(self, facts: Facts) -> list[int]:
        """Take new facts: rules move to where their traffic leaves now, and those that had a problem are tried again.
        Returns the ids of those that moved, or were put anew."""
        before, self.facts = self.facts, facts
        rehomed: set[int] = set()
        if facts.topology is not before.topology:
            rehomed = set(self._find_rehomed(before.topology))
            for name, device in self._devices.items():
                device.homes.clear()
                device.branches.give_room(self._room_of(name))
            for rule in self._rules.values():
                if rule.id not in self.problems:
                    self._look_past(rule)
        asked = self.problems.keys() | self.find_growing() | rehomed
        moved = [rule for rule in self._rules.values() if rule.id in asked or self._moves(rule, before)]
        for rule in sorted(moved, key=lambda each: each.id):
            if rule.id in asked or self._is_another_kind(rule, before) or not self._follow(rule):
                self.put(rule)
        return [rule.id for rule in moved]

    def _is_another_kind(self, rule: Rule, before: Facts) -> bool:
        """Whether its packets are told apart in another way than before, on whatever device."""
        return find_lane(rule, "", before) != find_lane(rule, "", self.facts)

    def _follow(self, rule: Rule) -> bool:
        """Have a rule leave the devices that its traffic does not leave by any more, and come to those that it leaves
        by now: with many rules and devices it takes long to put them anew on each. False where that does not do."""
        ground = self._find_ground(rule)
        if isinstance(ground, str) or rule.id in self.problems:
            return False
        homes = self._homes.get(rule.id, [])
        held = {device.name for device, _ in homes}
        new = tuple(name for name in ground.devices if name not in held)
        if held.isdisjoint(ground.devices) or any(True for name in new for _ in self._find_rivals(rule, name)):
            return False
        self._homes[rule.id] = [home for home in homes if home[0].name in ground.devices]
        for home in homes:
            if home[0].name not in ground.devices:
                self._leave(rule, *home)
        self._forget(rule)
        self._tell(rule, ground, self._fill(rule, new))
        return True

    def _find_rehomed(self, before: Topology) -> Iterator[int]:
        """The rules whose targets lie in another network behind a device than before, where rules of the other
        direction ask for that: which of them exclude each other is another matter now."""
        for device in self._devices.values():
            if len({lane.direction for lane in device.lanes}) > 1:
                for rule in (rule for traffic in device.lanes.values() for rule in traffic.rules):
                    if find_home(rule.target, device.name, before) != self._home(rule, device.name):
                        yield rule.id

    def _moves(self, rule: Rule, before: Facts) -> bool:
        if self._is_another_kind(rule, before):
            return True
        way = find_way(rule, self.facts)
        others = (_judge(before, name) != _judge(self.facts, name) for name in way.devices)
        return way != find_way(rule, before) or any(others)

    def _refuse(self, rule: Rule, problem: str) -> None:
        self._move_out(rule)
        self._forget(rule)
        self._rules[rule.id] = rule
        self.problems[rule.id] = problem

    def _settle_down(self, rule: Rule) -> str | None:
        """Find the rule's place on each of its devices; returns why there is none."""
        ground = self._find_ground(rule)
        if isinstance(ground, str):
            return ground
        devices = ground.devices
        rivals = [(rival, name) for name in devices for rival in self._find_rivals(rule, name)]
        for rival, name in rivals:
            if rival.id < rule.id:
                return _name_both(rule, rival, name)
        for rival, name in rivals:
            self._refuse(rival, _name_both(rival, rule, name))
        full = self._fill(rule, devices)
        if len(full) == len(devices):
            self._give_way(rule, {rival.id: rival for rival, _ in rivals})
            return full[devices[0]]
        self._tell(rule, ground, full)
        return None

    def _find_ground(self, rule: Rule) -> _Ground | str:
        """Where a rule is to be held, or why nowhere."""
        way = find_way(rule, self.facts)
        problem = way.problem or self._find_lack(rule, way.devices)
        if problem:
            return problem
        devices, missing = self._without_ingress(way.devices)
        devices, taken = self._without_foreign(devices)
        devices, unled = self._without_unled(devices)
        lost = " ".join(filter(None, (missing, taken, unled, way.missing)))
        return _Ground(devices, lost, way.note) if devices else lost

    def _tell(self, rule: Rule, ground: _Ground, full: Mapping[str, str]) -> None:
        """Note what is to be told of a rule that is held, but where it found no room."""
        lost = " ".join(filter(None, (ground.lost, *_say_full(full, self._find_default(rule.family)))))
        told = " ".join(filter(None, (lost, ground.note)))
        if told:
            self._notes[rule.id] = Note(told, degraded=bool(lost))
        self._look_past(rule)

    def _fill(self, rule: Rule, devices: tuple[str, ...]) -> Mapping[str, str]:
        """Move in where there is room, first where most leaves, and there others make room; returns why there is none
        on others."""
        default, needed = self._find_default(rule.family), self._find_needed(rule)
        for name in sorted(devices, key=lambda each: (each not in default, each != INGRESS_DEVICE)):
            problem = self._move_in(rule, name)
            if problem is not None and name in needed and self._make_room(rule, name):
                problem = self._move_in(rule, name)
            if problem is not None:
                self._cramped.setdefault(rule.id, {})[name] = problem
        return self._cramped.get(rule.id, {})

    def _find_default(self, family: int) -> tuple[str, ...]:
        return read_table(self.facts.topology, family).default

    def _find_needed(self, rule: Rule) -> set[str | None]:
        """The devices that a rule needs more than others need theirs: most leaves by them, or the rule names it."""
        return {INGRESS_DEVICE, rule.selector.interface, *self._find_default(rule.family)}

    def _make_room(self, rule: Rule, name: str) -> bool:
        """Have rules without `interface` leave a lesser device that they are held on besides, so that there is a handle
        for this one, or room for a kind of traffic there; whether there is now."""
        device = self._devices.get(name)
        if device is None:
            return self._free_handle(name)
        traffic = None if is_cap(rule, name) else device.lanes.get(self._lane_of(rule, name))
        if device.closed or self._kinds < MOST_KINDS or (traffic is not None and traffic.has_rules):
            return False
        lesser = self._find_lesser_lane()
        if lesser is not None:
            self._have_leave(*lesser, _say_no_kind)
        return lesser is not None

    def _free_handle(self, name: str) -> bool:
        """Give a device the number of one that can be left, or, to begin with, that no rule has come to yet. Until the
        kernel is told, both have a tree of this handle: only what goes through both could take the wrong class."""
        unused = {each for group, each in self._numbers.retired if group == _ROOT and self._is_lesser(each)}
        if self._begins and unused:
            former = min(unused, key=lambda each: (each in self.facts.topology.devices, each))
        else:
            lesser = self._find_lesser_device()
            if lesser is None:
                return False
            lesser.closed, former = True, lesser.name
            self._have_leave(lesser, None, _say_no_handle)
            self._numbers.release(_ROOT, former)
        return self._numbers.take_over(_ROOT, name, _ROOTS, (_ROOT, former)) is not None

    def _is_lesser(self, name: str) -> bool:
        return name != INGRESS_DEVICE and not any(name in self._find_default(family) for family in (4, 6))

    def _find_lesser_device(self) -> _Device | None:
        """The one with the fewest rules, the last by its name, of those that all rules can leave."""
        devices = [each for each in self._devices.values() if not each.closed and self._is_lesser(each.name)]
        devices.sort(key=lambda each: each.name, reverse=True)
        return next((each for each in sorted(devices, key=lambda each: each.size) if self._can_leave(each.rules)), None)

    def _has_lesser(self) -> bool:
        """Whether there is such a device; one without rules leaves its handle when the kernel is told."""
        device = self._find_lesser_device()
        return device is not None and device.size > 0

    def _find_lesser_lane(self) -> tuple[_Device, Lane] | None:
        lanes = [
            (traffic.size, device, lane)
            for device in sorted(self._devices.values(), key=lambda each: each.name, reverse=True)
            for lane, traffic in (device.lanes.items() if self._is_lesser(device.name) else ())
            if traffic.has_rules
        ]
        lanes.sort(key=lambda each: each[0])
        return next(
            ((device, lane) for _, device, lane in lanes if self._can_leave(device.lanes[lane].rules)),
            None,
        )

    def _can_leave(self, rules: Iterable[Rule]) -> bool:
        """Whether they are held elsewhere besides, and none of them names the device."""
        return all(not rule.selector.interface and len(self._homes[rule.id]) > 1 for rule in rules)

    def _have_leave(self, device: _Device, lane: Lane | None, why: Callable[[Rule], str]) -> None:
        """Have the rules of a lane leave a device, or all, and tell why."""
        for rule in list(device.rules if lane is None else device.lanes[lane].rules):
            homes = self._homes[rule.id]
            homes.remove(left := next(home for home in homes if home[0] is device))
            self._leave(rule, *left)
            full = self._cramped.setdefault(rule.id, {})
            full[device.name] = why(rule)
            ground = self._find_ground(rule)
            if rule.id in self._rules and not isinstance(ground, str):
                self._tell(rule, ground, full)

    def _give_way(self, rule: Rule, rivals: Mapping[int, Rule]) -> None:
        """Let those back whom a rule has driven out that has no room itself."""
        self._move_out(rule)
        for _, rival in sorted(rivals.items()):
            self.put(rival)

    def find_growing(self) -> set[int]:
        """The rules that are held on some of their devices, and for which others of them have room now; by ids."""
        new = self._numbers.has_room(_ROOT, _ROOTS)
        has_lesser = cache(self._has_lesser)
        return {
            rule_id
            for rule_id, full in self._cramped.items()
            if any(self._has_room(self._rules[rule_id], name) for name in full if new or name in self._devices)
            or (full.keys() & self._find_needed(self._rules[rule_id]) - self._devices.keys() and has_lesser())
        }

    def _has_room(self, rule: Rule, name: str) -> bool:
        if self._move_in(rule, name) is not None:
            return False
        self._leave(rule, *self._homes[rule.id].pop())
        return True

    def _look_past(self, rule: Rule) -> None:
        """Note by which devices the rule misses something, or, of one that names its device, that another need not."""
        bypasses = find_bypasses(rule, self.facts)
        if bypasses:
            self._bypasses[rule.id] = bypasses
        else:
            self._bypasses.pop(rule.id, None)
        if rule.selector.interface:
            self._named.setdefault((rule.target, rule.direction), {})[rule.id] = rule.selector

    def _forget(self, rule: Rule) -> None:
        self._notes.pop(rule.id, None)
        self._cramped.pop(rule.id, None)
        self._bypasses.pop(rule.id, None)
        about = rule.target, rule.direction
        named = self._named.get(about, {})
        if named.pop(rule.id, None) and not named:
            del self._named[about]

    def _find_missed(self, rule: Rule) -> tuple[Bypass, ...]:
        """The devices by which a rule misses something that no other rule for the same target shapes there."""
        missed = self._bypasses[rule.id]
        named = self._named.get((rule.target, rule.direction))
        if not named:
            return missed
        kept = {each.interface for each in named.values() if replace(each, interface=None) == rule.selector}
        return tuple(each for each in missed if each.device not in kept)

    def _find_lack(self, rule: Rule, devices: Iterable[str]) -> str | None:
        suffix = "6" if rule.family == 6 else ""
        for need in (f"ip{suffix}tables", "ipset", f"mangle{suffix}", "marks", "htb", "bpf"):
            reason = self.facts.capabilities.get(need)
            if reason is not None:
                return reason
        for device in devices if self.facts.any_occupied or rule.selector.interface else ():
            reason = self.facts.capabilities.get(self._lane_of(rule, device).name)
            if reason is not None:
                return reason
            miss = find_missing(device, Direction.TO, self.facts.topology) if rule.selector.interface else None
            if miss is not None and not is_cap(rule, device):
                return miss.text  # what the port itself sends can be capped, but nobody can be told apart there
        return None

    def _without_foreign(self, devices: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
        """Leave out the devices on which a qdisc of somebody else stands, and say so: what the others hold stays."""
        taken = [device for device in devices if device in self.facts.foreign]
        left = tuple(device for device in devices if device not in taken)
        told = [f"What leaves by {device} is not shaped." for device in taken if left]
        told += [_name_foreign(device, self.facts.foreign[device]) for device in taken]
        return left, " ".join(told) or None

    def _without_unled(self, devices: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
        """Leave out the devices on which nobody could lead packets to classes, and say so."""
        unled = [device for device in devices if device in self.facts.unled]
        if not unled:
            return devices, None
        left = tuple(device for device in devices if device not in unled)
        return left, f"What leaves by {name_some(unled, _MOST_NAMED)} is not shaped: {self.facts.unled[unled[0]]}."

    def _without_ingress(self, devices: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
        """Leave out the IFB device where the host has none, and say why."""
        reason = self.facts.capabilities.get("ifb")
        if reason is None or INGRESS_DEVICE not in devices:
            return devices, None
        others = tuple(device for device in devices if device != INGRESS_DEVICE)
        return others, f"What ends on this host is not shaped: {reason}"

    def _find_rivals(self, rule: Rule, name: str) -> Iterator[Rule]:
        """Rules that would claim the same packet on this device, and are neither around this one nor within it."""
        device = self._devices.get(name)
        if device is None:
            return
        if is_cap(rule, name):
            yield from [device.cap] if device.cap else []
            return
        lane = self._lane_of(rule, name)
        for other, traffic in device.lanes.items():
            if other == lane:
                yield from _find_twins(rule, traffic)
            elif not other.overlaps(lane) or (lane.incoming and other.rank != lane.rank):
                continue  # of what ends on this host, a rule that names the very address is asked first
            elif other.direction is not lane.direction:
                yield from self._find_opposite(rule, device, lane, other)
            elif other.rank == lane.rank:
                yield from traffic.find_overlapping(rule.target)

    def _find_opposite(self, rule: Rule, device: _Device, lane: Lane, other: Lane) -> Iterator[Rule]:
        """Rules of the other direction: any two meet in a packet, unless both ends lie in one network, and neither is
        this host or somebody safe whom a rule was forced to hit."""
        home = None if lane.stands_here or other.stands_here else self._home(rule, device.name)
        homes = self._count_homes(device, other)
        if home is None or homes.keys() - {home}:
            yield from (
                each for each in device.lanes[other].rules if home is None or self._home(each, device.name) != home
            )

    def _home(self, rule: Rule, device: str) -> Target | None:
        return find_home(rule.target, device, self.facts.topology)

    def _count_homes(self, device: _Device, lane: Lane) -> Counter[Target | None]:
        if lane not in device.homes:
            device.homes[lane] = Counter(self._home(rule, device.name) for rule in device.lanes[lane].rules)
        return device.homes[lane]

    def _lane_of(self, rule: Rule, device: str) -> Lane:
        kind = self._kind
        if kind is None or kind[0] is not rule or kind[1] is not self.facts:
            kind = self._kind = rule, self.facts, find_lane(rule, "", self.facts)
        return replace(kind[2], device=device)

    def _move_in(self, rule: Rule, name: str) -> str | None:
        """Take a place on a device; returns why there is none, and then the rule has not come."""
        device = self._open(name)
        if device is None:
            return _say_no_handle(rule)
        self._enter(rule, device)
        lane = self._homes[rule.id][-1][1]
        problem = self._find_crowd(device, device.lanes[lane], rule) if lane is not None else None
        if problem is not None:
            self._leave(rule, *self._homes[rule.id].pop())
        else:
            _make_way(device)
        return problem

    def _enter(self, rule: Rule, device: _Device) -> None:
        name = device.name
        lane = None if is_cap(rule, name) else self._lane_of(rule, name)
        self._homes.setdefault(rule.id, []).append((device, lane))
        if lane is None:
            device.cap = rule
            return
        traffic = device.lanes.get(lane)
        if traffic is None:
            traffic = device.lanes[lane] = Traffic(lane, device.branches, self._numbers)
        self._kinds += not traffic.has_rules
        traffic.enter(rule)
        if lane in device.homes:
            device.homes[lane][self._home(rule, name)] += 1
        self._budgets += _is_subnet(rule)

    def _find_crowd(self, device: _Device, traffic: Traffic, rule: Rule) -> str | None:
        if sum(other.size for other in device.lanes.values()) > MOST_HOSTS:
            return (
                f"{device.name} has classes for {MOST_HOSTS} hosts already, the most there can be. Police this one "
                '(`action: "drop"`), or shape blocks of addresses together (`per: /n`).'
            )
        if _is_subnet(rule) and self._budgets > MOST_BUDGETS:
            return f"This host has {MOST_BUDGETS} budgets for subnets on all its devices, the most there can be."
        if self._kinds > MOST_KINDS:
            return _say_no_kind(rule)
        if not unit_length(rule) and traffic.nesting(rule.target) > MOST_NESTED:
            return (
                f"{format_target(rule.target)} would make {MOST_NESTED + 1} budgets that lie in one another on "
                f"{device.name}; HTB holds {MOST_NESTED}, and the hosts in them. Take one out between."
            )
        length = unit_length(rule)
        if length not in (0, rule.target.prefixlen) and self._number(traffic.lane, length) is None:
            return (
                f"On {device.name}, hosts or blocks of {self.facts.most_limits - 1} other sizes have a class each "
                "already, the most that can be told apart by the bits of the packet mark that netlimit has "
                f"({self.facts.mark_mask:#x}). Use one of those sizes in `per`, or widen NETLIMIT_MARK_MASK."
            )
        return None

    def _number(self, lane: Lane, length: int) -> int | None:
        """The number that tells in a lane that a newcomer's class is for this prefix length; None if all are taken."""
        return self._numbers.take(_marks(lane), str(length), range(1, self.facts.most_limits))

    def _move_out(self, rule: Rule) -> None:
        for device, lane in self._homes.pop(rule.id, ()):
            self._leave(rule, device, lane)

    def _leave(self, rule: Rule, device: _Device, lane: Lane | None) -> None:
        if lane is None:
            device.cap = None
        else:
            traffic = device.lanes[lane]
            traffic.leave(rule)
            self._kinds -= not traffic.has_rules
            if lane in device.homes:
                device.homes[lane] -= Counter([self._home(rule, device.name)])
            self._budgets -= _is_subnet(rule)

    def _open(self, name: str) -> _Device | None:
        device = self._devices.get(name)
        if device is not None and device.closed:
            return None
        if device is None:
            number = self._numbers.take(_ROOT, name, _ROOTS)
            if number is None:
                return None
            backlog, demand = Backlog(self._numbers, name), Demand(self._numbers)
            handle, room = _root_handle(number), self._room_of(name)
            branches = Branches(handle, self.facts.hz, self._leaf, backlog, demand, room)
            device = self._devices[name] = _Device(name, number, branches)
        return device

    def _room_of(self, name: str) -> int:
        """How many packets the root of a device has to be told to take; 0: it takes enough by itself."""
        known = self.facts.topology.devices.get(name)
        return 0 if known is not None and known.queue >= DIRECT else DIRECT

    @property
    def _leaf(self) -> LeafKind:
        return "bfifo" if self.facts.capabilities.get("fq_codel") else "fq_codel"

    # -- who comes and goes

    @property
    def lanes(self) -> list[Lane]:
        """The lanes that rules are in."""
        return [lane for device in self._devices.values() for lane in device.lanes]

    def adopt(self, found: Entries) -> None:
        """Take in the entries of lanes that the kernel holds. Who has a class there keeps it."""
        for device in self._devices.values():
            for lane, traffic in device.lanes.items():
                traffic.revisit({key: entry.prio for key, entry in found.get(lane.name, {}).items()})

    @property
    def seen_sets(self) -> dict[str, Lane]:
        """The sets in which newcomers are remembered, with their lanes; a lane of the ingress has one of its name."""
        return {
            each.lane.name if each.lane.incoming else seen_name(each.lane, length): each.lane
            for each in self.open_lanes
            for _, length in each.newcomers
        }

    def welcome(self, seen: Mapping[str, Iterable[str]]) -> None:
        """Give classes to addresses that were seen without one, by the set in which they are: to some of them, if they
        are many. The others will be seen again."""
        left = NEWCOMERS
        for device in self._devices.values():
            for traffic in device.lanes.values():
                for length in {unit_length(rule) for rule in traffic.wide.values()}:
                    name = traffic.lane.name if traffic.lane.incoming else seen_name(traffic.lane, length)
                    addresses = device.waiting.put_first(name, seen.get(name, ()))
                    before = device.hosts
                    fits = traffic.welcome(addresses, length, min(left, MOST_HOSTS - before))
                    left -= device.hosts - before
                    if not fits and device.hosts >= MOST_HOSTS:
                        device.crowded = True
                        device.waiting.note(name, addresses)

    @property
    def fills_up(self) -> bool:
        """Whether more than half of the classes that a device can have for hosts are taken, on any device."""
        return any(device.hosts > MOST_HOSTS // 2 for device in self._devices.values())

    def count_waiting(self, name: str) -> int:
        """How many keep sending that have found no room on a full device; no more than get a class at once."""
        device = self._devices.get(name)
        return min(NEWCOMERS, device.waiting.count()) if device and device.hosts >= MOST_HOSTS else 0

    def look(self, name: str, usages: Mapping[int, Usage], at: float) -> None:
        """Take in what the classes of a device have counted, at a time in seconds: guarantees go by who sends."""
        device = self._devices.get(name)
        if device is not None:
            device.branches.look(usages, at)

    def dismiss(self, name: str, numbers: set[int], staying: Sequence[int] = ()) -> None:
        """Take the classes of those on a device that came by themselves, by a reading; of the others those that are
        `staying`, in this order, are the first to make way for rules."""
        device = self._devices.get(name)
        if device is not None:
            for traffic in device.lanes.values():
                traffic.dismiss(numbers)
            device.staying = staying
            device.leaving.clear()
            device.waiting.turn()
            device.crowded &= device.waiting.lasts or device.hosts >= MOST_HOSTS

    # -- what it comes to

    def settle(self) -> Iterator[tuple[str, str, Entry | None]]:
        """Work out what the rules come to; yields the entries that changed: set, key, and entry (None: gone)."""
        for device in list(self._devices.values()):
            for lane, traffic in list(device.lanes.items()):
                traffic.arrange()
                for target in traffic.changed:
                    for part in traffic.list_parts(target):
                        yield lane.name, set_keys(part)[0], self._entry(lane, traffic.find_place(part))
                traffic.changed.clear()
                learned = {str(unit_length(rule)) for rule in traffic.wide.values()}
                self._numbers.release_all(_marks(lane), learned)
                if not traffic.places:
                    del device.lanes[lane]
                    device.homes.pop(lane, None)
            self._limit(device)
            device.branches.settle()
            if not device.lanes and device.cap is None:
                self._numbers.release(_ROOT, device.name)
                self._touched.setdefault(device.name, set()).update(device.branches.touched)
                del self._devices[device.name]

    def _limit(self, device: _Device) -> None:
        """The device's cap: what nothing claims is under it too."""
        rest = classid(device.branches.tree.handle, REST)
        if device.cap is None:
            device.branches.limit(None)
            device.branches.cut(rest)
            return
        assert device.cap.rate is not None
        rate = bytes_per_second(device.cap.rate)
        device.branches.limit(rate, device.cap.burst)
        device.branches.branch(rest, device.branches.top, Wish(None, rate, device.cap.burst), leaf=True)

    def _entry(self, lane: Lane, place: Place | None) -> Entry | None:
        if place is None:
            return None
        facts = self.facts
        ends = place.ends if not lane.incoming else None
        expires = math.ceil(ends.timestamp()) if ends else 0
        if not place.learns:
            return Entry(expires=expires, prio=place.number)
        number = self._number(lane, place.learns)
        return Entry((number or 0) << facts.shift, facts.mark_mask, expires, place.number)

    @property
    def trees(self) -> dict[str, Tree]:
        """The trees of all devices that have one."""
        in_use = {name: device for name, device in self._devices.items() if device.lanes or device.cap}
        return {name: device.branches.tree for name, device in in_use.items()}

    @property
    def capped(self) -> bool:
        """Whether any device has a cap, and so classes beside it."""
        return any(device.cap for device in self._devices.values())

    def take_touched(self) -> dict[str, set[int]]:
        """The classes that changed since the last time, by device."""
        touched, self._touched = self._touched, {}
        for name, device in self._devices.items():
            touched.setdefault(name, set()).update(device.branches.touched)
            device.branches.touched = set()
        return touched

    def recycle(self) -> None:
        """The kernel holds nothing any more but what is as it should be."""
        self._begins = False
        for device in self._devices.values():
            device.branches.recycle()

    @property
    def open_lanes(self) -> list[OpenLane]:
        """The lanes in use, those of the ingress too."""
        return [
            OpenLane(lane, tuple(self._newcomers(traffic)))
            for _, device in sorted(self._devices.items())
            for lane, traffic in sorted(device.lanes.items(), key=lambda item: (item[0].rank, item[0].name))
        ]

    def _newcomers(self, traffic: Traffic) -> Iterator[tuple[int, int]]:
        for length in sorted({place.learns for place in self._regions(traffic)} - {0}):
            number = self._number(traffic.lane, length)
            if number:
                yield number, length

    def _regions(self, traffic: Traffic) -> Iterator[Place]:
        yield from (traffic.places[target] for target in (*traffic.wide, *traffic.inner))

    @property
    def exact_lanes(self) -> set[str]:
        """The names of lanes of the ingress whose rules were forced, and name a protected address."""
        return {lane.name for lane in self.lanes if lane.incoming and lane.exact}

    @property
    def ingress(self) -> Ingress | None:
        """What the ingress of devices must do; None if nothing ends here that is shaped."""
        incoming = sorted((each for each in self.open_lanes if each.lane.incoming), key=lambda each: each.lane.rank)
        lanes = [each.ingress for each in incoming]
        if not lanes:
            return None
        ending, translated = tuple(sorted(self.facts.ending)), tuple(sorted(self.facts.translated))
        topology = self.facts.topology
        devices = tuple(device for device in find_entrances(topology) if device not in self.facts.barred)
        return Ingress(devices, ending, tuple(lanes), translated, find_stacked(topology))

    def classes(self) -> dict[int, list[tuple[str, int]]]:
        """The classes that count each rule's traffic: device and classid."""
        counted: dict[int, list[tuple[str, int]]] = {}
        for name, device in self._devices.items():
            if device.cap is not None:
                counted.setdefault(device.cap.id, []).append((name, device.branches.top))
            for traffic in device.lanes.values():
                for target, number in traffic.inner.items():
                    if target in traffic.budgets:  # else it has gone, and nothing is arranged yet
                        counted.setdefault(traffic.budgets[target].id, []).append((name, number))
                for place in traffic.places.values():
                    if traffic.inner.get(place.rule.target) is None or unit_length(place.rule):
                        counted.setdefault(place.rule.id, []).append((name, place.number))
        return counted

    def find_incoming(self, devices: tuple[str, ...] | None = None) -> set[int]:
        """The rules that shape what ends on this host and may come in by one of the devices (None: by any), by ids."""
        here, topology = self._devices.get(INGRESS_DEVICE), self.facts.topology
        found = set()
        for rule in (rule for traffic in (here.lanes.values() if here else ()) for rule in traffic.rules):
            anywhere = devices is None or rule.direction is Direction.TO
            if anywhere or leads_towards(rule.target, devices or (), topology):
                found.add(rule.id)
        return found

    def list_rules(self) -> list[Rule]:
        """The rules that are held, but for the caps of whole devices; one that is held on several is told as often."""
        every = (traffic for device in self._devices.values() for traffic in device.lanes.values())
        return [rule for traffic in every for rule in traffic.rules]

    def passing(self, name: str) -> set[int]:
        """The classes on a device of those that came by themselves."""
        lanes = self._devices[name].lanes.values() if name in self._devices else ()
        return {
            traffic.places[block].number for traffic in lanes for block in traffic.present if block in traffic.places
        }

    def _tell_bypasses(self) -> Iterator[tuple[int, Note]]:
        for rule_id in self._bypasses:
            missed = self._find_missed(self._rules[rule_id])
            if missed:
                yield rule_id, Note(say_bypasses(missed), degraded=True)

    def _tell_peers(self) -> Iterator[tuple[int, Note]]:
        """Rules for what somebody sends, some of which waits in queues of rules for what his peers are sent."""
        for device in self._devices.values():
            if len({lane.direction for lane in device.lanes}) < 2:
                continue
            found = {lane: self._find_peers(device, lane) for lane in device.lanes}
            for lane in (lane for lane in found if lane.direction is Direction.FROM and found[lane]):
                receiving = (other for other in found if other.direction is Direction.TO and other.overlaps(lane))
                received = {home for other in receiving for home in found[other]}
                homes = ((rule.id, self._home(rule, device.name)) for rule in device.lanes[lane].rules if received)
                yield from ((number, _say_received(home, device.name)) for number, home in homes if home in received)

    def _tell_outrun(self) -> Iterator[tuple[int, Note]]:
        """Rules that name what may end here as well, and so have lanes apart, where a lane that is asked after theirs
        knows what leaves, too."""
        for device in self._devices.values():
            apart = [lane for lane in device.lanes if lane.own and not lane.incoming]
            for lane in apart:
                for rule in (rule for rule in device.lanes[lane].rules if not self.facts.is_own(rule.target)):
                    found = self._find_outrunning(device, lane, rule)
                    if found is not None:
                        yield rule.id, _say_outrun(rule, found, device.name)

    def _find_outrunning(self, device: _Device, lane: Lane, rule: Rule) -> Rule | None:
        others = (
            traffic
            for other, traffic in device.lanes.items()
            if other.direction is lane.direction and not other.stands_here and other.overlaps(lane)
        )
        return next((found for traffic in others for found in traffic.find_overlapping(rule.target)), None)

    def _find_peers(self, device: _Device, lane: Lane) -> set[Target]:
        """The networks that rules of a lane are for, of which the hosts have no neighbours."""
        homes = (home for home in self._count_homes(device, lane) if home is not None)
        return {home for home in homes if are_peers(home, device.name, self.facts.topology)}

    def _tell_passing(self) -> Iterator[tuple[int, str]]:
        """What is not held of what ends on this host, where answers to others have its address as well."""
        here = self._devices.get(INGRESS_DEVICE)
        for lane, traffic in here.lanes.items() if here else ():
            if lane.direction is Direction.TO and lane.family in self.facts.translated:
                yield from ((rule.id, _PASSING) for rule in traffic.rules)

    def _tell_barred(self) -> Iterator[tuple[int, Note]]:
        """Rules that miss what ends on this host and comes in by a device on whose ingress somebody is in the way."""
        missed: dict[int, list[str]] = {}
        for device in find_entrances(self.facts.topology) if self.facts.barred else ():
            for rule_id in self.find_incoming((device,)) if device in self.facts.barred else ():
                missed.setdefault(rule_id, []).append(device)
        for rule_id, devices in missed.items():
            yield rule_id, _say_barred(devices, self.facts.barred[devices[0]])

    @property
    def notes(self) -> dict[int, Note]:
        """What operators should know of rules that are held."""
        notes = dict(self._notes)
        for rule_id, text in self._tell_passing():
            notes.setdefault(rule_id, Note(text, degraded=True))
        for rule_id, note in (
            *self._tell_peers(),
            *self._tell_bypasses(),
            *self._tell_outrun(),
            *self._tell_barred(),
        ):
            notes[rule_id] = note.beside(notes[rule_id]) if rule_id in notes else note
        for device in self._devices.values():
            lack = find_lack(4, self.facts)
            if device.cap and lack:
                notes[device.cap.id] = _say_unguarded(lack)
            branches = [(device.cap, device.branches.top)] if device.cap and device.lanes else []
            for traffic in device.lanes.values():
                branches += [(traffic.budgets[target], number) for target, number in traffic.inner.items()]
                if device.crowded:
                    notes |= {rule.id: _say_crowded(device.name) for rule in traffic.wide.values()}
            for rule, number in branches:
                asked, room = device.branches.asked(number)
                if asked > room:
                    notes.setdefault(rule.id, _say_sum(asked, room))
        return notes


_PASSING = (
    "Somebody may translate here, so that what comes for this address may be for a host behind it: what has no ports "
    "(ICMP, GRE, later fragments) and the SYNs of TCP are not shaped. Limit those beside it (`action: drop`)."
)


def _make_way(device: _Device) -> None:
    """Rules come before those who have a class because they appeared: strangers can bring about any number of these,
    and who loses his shares one until he is seen again."""
    while device.hosts > MOST_HOSTS:
        device.leaving = device.leaving or _line_up(device)
        traffic, block = device.leaving.pop()
        traffic.evict(block)


def _line_up(device: _Device) -> list[tuple[Traffic, Target]]:
    """Those who appeared on a device, the longest idle last."""
    ranks = {number: rank for rank, number in enumerate(device.staying)}

    def rank(each: tuple[Traffic, Target]) -> int:
        place = each[0].places.get(each[1])
        return ranks.get(place.number, len(ranks)) if place else len(ranks)

    guests = [(traffic, block) for traffic in device.lanes.values() for block in traffic.present]
    return sorted(guests, key=rank, reverse=True)


def _root_handle(number: int) -> int:
    """The handle of the root qdisc of the device that has this number."""
    return FIRST_ROOT - 1 + 2 * number if number <= _EVEN_ROOTS else FIRST_ROOT + 2 * (number - _EVEN_ROOTS - 1)


def _marks(lane: Lane) -> str:
    return f"{SEEN}{lane.digest}"


def _find_twins(rule: Rule, traffic: Traffic) -> Iterator[Rule]:
    """Rules of the lane for the very same target, or for blocks of another size in or around it."""
    length = unit_length(rule)
    same = (traffic.units if length else traffic.budgets).get(rule.target)
    if same is not None:
        yield same
    if length and traffic.lengths.keys() - {0, length}:
        overlapping = traffic.find_overlapping(rule.target)
        yield from (other for other in overlapping if unit_length(other) not in (0, length))


def _is_subnet(rule: Rule) -> bool:
    """Whether a rule is a budget of more than one address."""
    return not unit_length(rule) and rule.target.prefixlen < rule.target.max_prefixlen


def _name_both(rule: Rule, rival: Rule, device: str) -> str:
    name = f"{rival.name} (rule {rival.id})" if rival.name else f"rule {rival.id}"
    return (
        f"On {device} a packet would belong to this rule and to {name}, `{rival}`; it can wait in one queue only. Name "
        "different devices in `interface`, or ports or targets that do not meet."
    )


def _say_no_handle(rule: Rule) -> str:
    advice = "" if rule.selector.interface else " Name in `interface` the one that matters."
    return f"netlimit shapes on {len(_ROOTS)} devices already, the most there can be.{advice}"


def _say_no_kind(rule: Rule) -> str:
    advice = "" if rule.selector.interface else " Name in `interface` the device that matters."
    return (
        f"{MOST_KINDS} kinds of traffic (by device, direction, protocol and ports) are shaped on this host already, "
        f"the most there can be.{advice}"
    )


def _say_full(full: Mapping[str, str], default: Collection[str]) -> Iterator[str]:
    """What is not held on the devices where there is no room, by why there is none; first those by which most
    leaves."""
    reasons: dict[str, list[str]] = {}
    for name, why in full.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        away = sorted((each for each in names if each != INGRESS_DEVICE), key=lambda each: (each not in default, each))
        missed = [f"leaves by {name_some(away, _MOST_NAMED)}"] if away else []
        missed += ["ends on this host"] if len(away) < len(names) else []
        yield f"What {' or '.join(missed)} is not shaped: {why}"


def _say_received(home: Target, device: str) -> Note:
    return Note(
        f"What it sends to another in {format_target(home)} by {device} waits in that one's queue, where a rule `to` "
        "gives it one, and not in a queue of this rule: a packet waits in one only."
    )


def _say_outrun(rule: Rule, other: Rule, device: str) -> Note:
    return Note(
        f"What leaves by {device} waits in the queue of rule {other.id}, `{other}`, not of this one: packets with "
        f"{format_target(rule.target)} may end on this host as well, by a route or for it is multicast, and a rule "
        "that names such an address has queues apart. Name other ports in one of them, or limit "
        '(`action: "drop"`).',
        degraded=True,
    )


def _say_barred(devices: list[str], why: str) -> Note:
    """What is in the way on the first device, and which others there are."""
    others = devices[1:]
    also = f" The same goes for {name_some(others, _MOST_NAMED - 1)}." if others else ""
    return Note(f"What comes in by {devices[0]} and ends on this host is not shaped: {why}{also}", degraded=True)


def _say_crowded(device: str) -> Note:
    return Note(
        f"More hosts are active on {device} than the {MOST_HOSTS} that can have a class; the others share one. Police "
        'them (`action: "drop"`), or shape blocks of addresses together (`per: /n`).',
        degraded=True,
    )


def _say_unguarded(reason: str) -> Note:
    text = f"Who manages this gateway by this device waits under its cap, with all others. {reason}"
    return Note(text, degraded=True)


def _say_sum(asked: int, room: int) -> Note:
    promised, held = (format_rate(8 * rate, "bits", 1) for rate in (asked, room))
    return Note(
        f"What lies in it adds up to {promised}, more than the {held} that it has: when all want theirs at "
        "once, not everybody gets it."
    )
