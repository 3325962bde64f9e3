"""A kernel in memory: the same errors, and packets walk through its chains.

It enforces what the real one enforces (a rule cannot name a set or chain that is not there, a set in use cannot be
destroyed, a full set takes no more), fails on demand, and traces a packet rule by rule, with token buckets that fill
by the clock that it is given. One conformance suite runs over both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address, ip_network

from netlimit.conflicts import HostReport
from netlimit.errors import KernelError, LeadMissing
from netlimit.ingress import Ingress
from netlimit.kernel.base import TURN_SECONDS, Addresses, Connection, HostFacts, Reading, Unanswered
from netlimit.kernel.headers import BFD, BFD_ECHO, NEVER_FORWARDED
from netlimit.kernel.queues import add_up
from netlimit.marks import MarkUse
from netlimit.packet import Address, Packet, Side
from netlimit.plan import Step, SwitchTable, WriteIngress, WriteSets, WriteTree
from netlimit.state import (
    TABLES,
    Above,
    AddTo,
    ChainId,
    ChainRule,
    Confirmed,
    Connected,
    Continues,
    Crowded,
    Diverted,
    Ended,
    EndsNothing,
    Enters,
    Entry,
    Has,
    HasSocket,
    HopLimit,
    Icmp6,
    InSet,
    Invalid,
    IpSet,
    Is,
    IsOwn,
    Jump,
    Leaves,
    Led,
    MapMark,
    MapPriority,
    Marked,
    Match,
    Opens,
    Ports,
    Reaches,
    Reject,
    SetClass,
    SetMark,
    Structure,
    Syn,
    Table,
    Verdict,
)
from netlimit.tree import (
    BESIDE_HANDLE,
    INGRESS_DEVICE,
    REST,
    QueueClass,
    Queues,
    SavedRoot,
    Topology,
    Tree,
    Usage,
    classid,
    format_handle,
    is_beside,
    major,
)
from netlimit.tunnels import Hop, Tunnels

_UNUSED = Usage(0, 0, 0, 0, 0, 0)
_DEEPEST = 8
"""TC_HTB_MAXDEPTH (linux/pkt_sched.h): the classes of one HTB from its top to a leaf."""


@dataclass
class _Element:
    entry: Entry
    packets: int = 0
    bytes: int = 0


@dataclass
class _Walk:
    """A packet under way: its mark, its priority, which is the class that it goes to, and where NAT will lead it."""

    packet: Packet
    priority: int = 0
    mark: int = 0
    led: Address | None = None
    diverted: bool = False

    def __post_init__(self) -> None:
        self.mark = self.packet.mark

    def divert(self) -> None:
        """Go to where NAT leads."""
        if self.led is not None:
            self.packet, self.diverted = replace(self.packet, dst=self.led), True

    def write(self, value: int, mask: int) -> None:
        """Give the mark a value under a mask."""
        self.mark = self.mark & ~mask ^ value


@dataclass
class FakeKernel:
    """See `base.Kernel` for the contract. `now` gives Unix time; `facts` and `where` are what it answers of the host.

    `foreign` counts rules of others by table and chain: they stand first, are never touched, and do nothing. `marking`
    are marks (value and mask) that others write behind our rules, by table and chain. `routes` is what there is of
    devices and routes, `roots` are root qdiscs of others, by device, all of which can be put back.
    `opened` are the open connections to whatever port is asked for; `translated` are families in which others are said
    to translate.
    """

    now: Callable[[], float] = time.time
    facts: HostFacts = field(default_factory=lambda: HostFacts({}, 250, ()))
    where: Addresses = field(default_factory=lambda: Addresses((), ()))
    foreign: dict[ChainId, int] = field(default_factory=dict)
    marking: dict[ChainId, tuple[int, int]] = field(default_factory=dict)
    routes: Topology = field(default_factory=Topology)
    roots: dict[str, SavedRoot] = field(default_factory=dict)
    report: HostReport = field(default_factory=HostReport)
    mark_use: MarkUse = field(default_factory=MarkUse)
    opened: tuple[Connection, ...] = ()
    ended: Tunnels = field(default_factory=Tunnels)
    translated: frozenset[int] = frozenset()
    ways: dict[str, tuple[Hop, ...]] = field(default_factory=dict)
    ways_from: dict[tuple[str, str], tuple[Hop, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sets: dict[str, IpSet] = {}
        self.elements: dict[str, dict[str, _Element]] = {}
        self.chains: dict[ChainId, tuple[ChainRule, ...]] = {}
        self.hooks: dict[ChainId, tuple[ChainRule, ...]] = {}
        self.trees: dict[str, Tree] = {}
        self.lanes: dict[str, dict[str, _Element]] = {}
        self.program: Ingress | None = None
        self.kept: set[str] = set()
        self.obstacles: dict[str, str] = {}
        self.unborne: set[str] = set()
        """Bursts that it refuses."""
        self.unled: str | None = None
        """Why it has no program any more that leads packets to classes; where that is in place, it stays."""
        self.used: dict[str, dict[int, Usage]] = {}
        self._seen: dict[str, dict[str, int]] = {}
        self.applied: list[Step] = []
        self._failing: int | None = None
        self._expired_at: float | None = None
        self._buckets: dict[tuple[str, str], tuple[float, float]] = {}
        self._flows: dict[tuple[int, Table, int, str], int] = {}

    # -- the contract

    def probe(self) -> HostFacts:
        """Answer with `facts`; it is not known whether it will have again what it has lost."""
        lost = {"bpf": Unanswered(self.unled)} if self.unled else {}
        return self.facts._replace(capabilities={**self.facts.capabilities, **lost})

    def survey(self, thorough: bool = True) -> HostReport:
        """Answer with `report`."""
        del thorough
        return self.report

    def marks(self, patience: float = 0.0) -> MarkUse:
        """Answer with `mark_use`."""
        del patience
        return self.mark_use

    def addresses(self) -> Addresses:
        """Answer with `where`."""
        return self.where

    def tunnels(self) -> Tunnels:
        """Answer with `ended`."""
        return self.ended

    def hops(
        self, addresses: Iterable[str], near: Mapping[str, Collection[str]] | None = None
    ) -> Mapping[str, tuple[Hop, ...]]:
        """Answer with `ways`, and with those `ways_from` the own addresses that are near."""
        return {
            address: (
                *self.ways.get(address, ()),
                *(hop for each in (near or {}).get(address, ()) for hop in self.ways_from.get((each, address), ())),
            )
            for address in addresses
        }

    def connections(self, ports: Iterable[int], owners: Collection[int]) -> Iterable[Connection]:
        """Answer with what of `opened` is theirs, or nobody's."""
        del ports
        return [each for each in self.opened if each.owner is None or each.owner in owners]

    def exclusive(self, patience: float = TURN_SECONDS) -> AbstractContextManager[None]:
        """One process has it anyway."""
        del patience
        return nullcontext()

    def sole(self) -> AbstractContextManager[None]:
        """Every kernel in memory has the controller of its own process alone."""
        return nullcontext()

    def controlled(self) -> bool:
        """Nobody but this process knows of it."""
        return False

    def put_off(self) -> AbstractContextManager[None]:
        """There is no other process."""
        return nullcontext()

    def is_put_off(self) -> bool:
        """Nobody can."""
        return False

    def end_hanging_writer(self) -> str | None:
        """Nobody else writes."""
        return None

    def structure(self) -> Structure:
        """Read sets (without entries), chains and hooks."""
        return Structure(dict(self.sets), dict(self.chains), dict(self.hooks))

    def readings(self, names: Iterable[str]) -> dict[str, dict[str, Reading]]:
        """Read the entries of some sets with their counters."""
        self._expire()
        return {
            name: {key: Reading(e.entry, e.packets, e.bytes) for key, e in self.elements[name].items()}
            for name in names
            if name in self.sets
        }

    def apply(self, step: Step) -> None:
        """Take one step. Raises KernelError."""
        if self._failing is not None:
            self._failing -= 1
            if self._failing < 0:
                self._failing = None
                raise KernelError(str(step), "told to fail")
        if isinstance(step, WriteSets):
            self._write_sets(step)
        elif isinstance(step, SwitchTable):
            self._switch_table(step)
        elif isinstance(step, WriteTree):
            self._write_tree(step)
        else:
            self._write_ingress(step)
        self.applied.append(step)

    def reopened(self) -> FakeKernel:
        """In a copy of a process, it is a copy."""
        return self

    def fail_at(self, step: int) -> None:
        """Refuse the step with this number, counted from 0 from now on; once."""
        self._failing = step

    # -- sets

    def _write_sets(self, step: WriteSets) -> None:
        self._expire()
        for ipset in step.create:
            if self.sets.get(ipset.name) != ipset:
                self.elements[ipset.name] = {}
            self.sets[ipset.name] = ipset
        for name, entries in step.add.items():
            for key, entry in entries.items():
                self._add(step, name, key, entry)
        for name, keys in step.remove.items():
            for key in keys:
                self.elements.get(name, {}).pop(key, None)
        for name in step.destroy:
            if name in self._named_sets(self.chains):
                raise KernelError(str(step), "Set cannot be destroyed: it is in use by a kernel component")
            self.sets.pop(name, None)
            self.elements.pop(name, None)

    def _add(self, step: Step, name: str, key: str, entry: Entry) -> None:
        if name not in self.sets:
            raise KernelError(str(step), "The set with the given name does not exist")
        ipset, held = self.sets[name], self.elements[name]
        networks = [ip_network(part) for part in key.split(",") if not part.startswith("tcp:")]
        if len(networks) != (2 if ipset.kind == "ip,port,ip" else 1) or any(
            network.version != ipset.family or network.prefixlen == 0 for network in networks
        ):
            raise KernelError(str(step), f"Syntax error: {key} does not fit into {name}")
        if entry.expires and entry.expires <= self.now():
            return
        if key not in held and len(held) >= ipset.size and not ipset.rolling:
            raise KernelError(str(step), "Hash is full, cannot add more elements")
        held[key] = _Element(entry)

    def _expire(self) -> None:
        now = self.now()
        if now == self._expired_at:  # nothing comes that has ended already
            return
        self._expired_at = now
        for held in self.elements.values():
            for key in [key for key, element in held.items() if 0 < element.entry.expires <= now]:
                del held[key]

    # -- queues

    def leftovers(self) -> tuple[str, ...]:
        """Nobody else uses what is ours."""
        return ()

    def held(self) -> tuple[str, ...]:
        """Nobody else uses what is ours."""
        return ()

    def counts(self, names: Iterable[str]) -> dict[str, int]:
        """Count the entries of some sets."""
        self._expire()
        return {name: len(self.elements[name]) for name in names if name in self.sets}

    def translating(self) -> frozenset[int]:
        """Answer with `translated`."""
        return self.translated

    def topology(self) -> Topology:
        """Answer with `routes`."""
        return self.routes

    def queues(self) -> Queues:
        """Read our trees, and who else has a root qdisc."""
        self._forget()
        foreign = {device: f"{root.kind} {format_handle(root.handle)}" for device, root in self.roots.items()}
        return Queues(dict(self.trees), foreign)

    def _forget(self) -> None:
        """A device that goes takes with it what it has."""
        for device in [each for each in self.trees if each not in (*self.routes.devices, INGRESS_DEVICE)]:
            del self.trees[device]
            self.used.pop(device, None)

    def usages(self, device: str) -> dict[int, Usage]:
        """Answer with what `used` says of leaves, added up; classes without a word there have counted nothing."""
        self._forget()
        tree = self.trees.get(device)
        if tree is None:
            return {}
        used = {number: self.used.get(device, {}).get(number, _UNUSED) for number in tree.classes}
        above = {number: _find_above(each, tree) for number, each in tree.classes.items()}
        return add_up(used, above)

    def save_root(self, device: str) -> SavedRoot:
        """Read a foreign root qdisc so that it can be put back. Raises KernelError if there is none."""
        if device not in self.roots:
            raise KernelError(f"save the root qdisc of {device}", "there is none that is not ours")
        return self.roots[device]

    def _write_tree(self, step: WriteTree) -> None:
        device = step.device
        self._forget()
        if device not in self.routes.devices and device != INGRESS_DEVICE:
            if not (step.root or step.classes or step.children):
                return
            raise KernelError(str(step), f'Cannot find device "{device}"')
        if step.root is not None:
            if self.roots.get(device) != step.put_back and device in self.roots:
                raise KernelError(str(step), f"{device} has a root qdisc that is not ours")
            self.roots.pop(device, None)
            before = self.trees.get(device)
            if before is None or before.handle != step.root.handle:
                self.trees[device] = Tree(step.root.handle)
        if step.drop:
            self.used.pop(device, None)
            if self.trees.pop(device, None) is not None and step.put_back is not None:
                self.roots[device] = step.put_back
            return
        tree = self.trees.get(device)
        if tree is None:
            if not (step.classes or step.children):
                return
            raise KernelError(str(step), "Parent Qdisc doesn't exists")
        if self.unled and not _is_led(tree.classes, tree.children) and _is_led(step.classes, step.children):
            raise LeadMissing(str(step), self.unled)
        classes, children = dict(tree.classes), dict(tree.children)
        hanging = {number: handle for handle, number in step.children.items()}
        for number, each in step.classes.items():
            self._check_parent(step, each, tree.handle, classes, children)
            # A class does not move: it keeps its parent, whatever it is told.
            classes[number] = each._replace(parent=classes[number].parent) if number in classes else each
            if number in hanging:
                children[hanging[number]] = number
        for number in step.gone:
            _take_out(number, classes, children)
        self.trees[device] = Tree(tree.handle, classes, children)
        self.used[device] = {n: usage for n, usage in self.used.get(device, {}).items() if n in classes}

    def _check_parent(
        self,
        step: WriteTree,
        each: QueueClass,
        root: int,
        classes: Mapping[int, QueueClass],
        children: Mapping[int, int],
    ) -> None:
        there = each.parent in classes if each.parent & 0xFFFF else major(each.parent) in (root, *children)
        if not there:
            raise KernelError(str(step), "Parent class or qdisc does not exist")
        if _find_depth(each, classes) > _DEEPEST:
            raise KernelError(str(step), "sch_htb: tree is too deep")

    # -- the ingress

    def refused_buckets(self, step: SwitchTable) -> Mapping[str, str]:
        """Which of the buckets have a burst that is not borne."""
        return {each.name: "out of range" for each in _list_buckets(step) if each.burst in self.unborne}

    def ingress(self) -> Mapping[str, str]:
        """The devices that have our program on their ingress, with its digest."""
        return dict.fromkeys(self.program.devices or (INGRESS_DEVICE,), self.program.digest) if self.program else {}

    def barred(self) -> Mapping[str, str]:
        """The devices on whose ingress no program of ours can be put, with what is in the way and what to do."""
        return dict(self.obstacles)

    def kept_clsacts(self) -> tuple[str, ...]:
        """The devices whose clsact qdisc is kept for the next program on their ingress."""
        return tuple(sorted(self.kept))

    def ingress_readings(self, names: Iterable[str]) -> dict[str, dict[str, Reading]]:
        """Read the entries of lanes with their counters."""
        return {
            name: {key: Reading(e.entry, e.packets, e.bytes) for key, e in self.lanes[name].items()}
            for name in names
            if self.lanes.get(name)
        }

    def ingress_seen(self, names: Iterable[str]) -> dict[str, dict[str, int]]:
        """Read which addresses have been seen, with the mark under which, and forget them."""
        return {name: self._seen.pop(name) for name in names if name in self._seen}

    def _write_ingress(self, step: WriteIngress) -> None:
        self.kept |= set(self.program.devices if self.program else ())
        if step.drop:
            self.program, self.lanes, self._seen = None, {}, {}
            self.kept = set() if step.whole else self.kept
            return
        if step.ingress is None and self.program is None:
            return  # nobody would look at the entries
        if step.ingress is not None:
            there = {*self.routes.devices, *self.trees}
            if INGRESS_DEVICE not in there:
                raise KernelError(str(step), f'Cannot find device "{INGRESS_DEVICE}"')
            devices = tuple(each for each in step.ingress.devices if each in there and each not in self.obstacles)
            step = replace(step, ingress=replace(step.ingress, devices=devices))
        for name, entries in step.add.items():
            for key, entry in entries.items():
                self.lanes.setdefault(name, {})[key] = _Element(entry._replace(expires=0))
        if step.ingress is not None:
            self.program = step.ingress
            lanes = {lane.name for lane in step.ingress.lanes}
            self.lanes = {name: held for name, held in self.lanes.items() if name in lanes}
        for name, keys in step.remove.items():
            for key in keys:
                self.lanes.get(name, {}).pop(key, None)

    # -- tables

    def _switch_table(self, step: SwitchTable) -> None:
        if self.refused_buckets(step):
            raise KernelError(str(step), "out of range")
        chains = dict(self.chains)
        hooks = dict(self.hooks)
        for name, rules in step.chains.items():
            chains[ChainId(step.family, step.table, name)] = rules
        for name in step.gone:
            chains.pop(ChainId(step.family, step.table, name), None)
        for name, rules in step.hooks.items():
            where = ChainId(step.family, step.table, name)
            if rules:
                hooks[where] = rules
            else:
                hooks.pop(where, None)
        self._check_names(step, chains, hooks)
        self.chains, self.hooks = chains, hooks
        # Whoever writes to a table begins its counts of connections anew.
        self._flows = {key: count for key, count in self._flows.items() if key[:2] != (step.family, step.table)}

    def _check_names(
        self,
        step: SwitchTable,
        chains: Mapping[ChainId, tuple[ChainRule, ...]],
        hooks: Mapping[ChainId, tuple[ChainRule, ...]],
    ) -> None:
        strangers = [rule for rules in step.hooks.values() for rule in rules if not isinstance(rule.effect, Jump)]
        if strangers:
            raise KernelError(str(step), f"nobody would know it for ours: {strangers[0].text}")
        for where, rules in (*chains.items(), *hooks.items()):
            for rule in rules:
                target = rule.effect.chain if isinstance(rule.effect, Jump) else None
                if target and ChainId(where.family, where.table, target) not in chains:
                    raise KernelError(str(step), f"can't append entry to chain {where.name}: no chain {target}")
                if isinstance(rule.effect, MapMark | MapPriority) and where.table != "mangle":
                    raise KernelError(str(step), "--map-set only usable from mangle table")
                if isinstance(rule.effect, Reject) and where.table != "filter":
                    raise KernelError(str(step), "can't commit: Invalid argument")
        missing = self._named_sets(chains) - self.sets.keys()
        if missing:
            raise KernelError(str(step), f"Set {sorted(missing)[0]} doesn't exist.")

    def _named_sets(self, chains: Mapping[ChainId, tuple[ChainRule, ...]]) -> set[str]:
        parts = (part for rules in chains.values() for rule in rules for part in (*rule.matches, rule.effect))
        return {
            part.name for part in parts if isinstance(part, InSet | Connected | Reaches | MapMark | MapPriority | AddTo)
        }

    # -- packets

    def trace(self, packet: Packet, led: Address | None = None) -> str:
        """Send a packet through: "accept", "drop" or "reject". Counters and buckets are moved as the kernel would.

        `led` is where NAT leads it when it has passed PREROUTING; its `out_interface` is the one that leads there."""
        self._expire()
        return self._walk(_Walk(packet, led=led))

    def find_class(self, packet: Packet) -> int | None:
        """The class in which a packet waits where it leaves or ends, by classid; None if it does not, or is dropped."""
        walk = _Walk(packet)
        verdict = self._walk(walk)
        device = packet.out_interface
        if device is None:
            device, walk.priority = INGRESS_DEVICE, self._find_incoming(packet)
        tree = self.trees.get(device)
        if verdict != "accept" or tree is None:
            return None
        priority = walk.priority
        if major(priority) == BESIDE_HANDLE:
            priority = classid(tree.handle, priority & 0xFFFF)
        rest = classid(tree.handle, REST)
        return next((number for number in (priority, rest) if number in tree.classes), None)

    def _find_incoming(self, packet: Packet) -> int:
        program = self.program
        if program is None or str(packet.dst) not in program.own or packet.in_interface not in program.devices:
            return 0
        if _keeps_alive(packet) or packet.src == IPv4Address(0):
            return 0
        for lane in program.lanes:
            address = _end(packet, lane.side)
            fits = lane.family == address.version and lane.protocol in ("any", packet.protocol)
            fits = fits and (not lane.devices or self.routes.devices[packet.in_interface].index in lane.devices)
            if not (fits and _is_in(packet.port, lane.ports) and _is_in(packet.source_port, lane.source_ports)):
                continue
            held = self.lanes.get(lane.name, {})
            element = next((held[key] for key in _keys(address) if key in held), None)
            if element is not None:
                self._count(packet, element)
                if element.entry.mark:
                    self._seen.setdefault(lane.name, {})[str(address)] = element.entry.mark
                return element.entry.prio
        return 0

    def _walk(self, walk: _Walk) -> str:
        for table, hook in _path(walk.packet):
            if hook != "PREROUTING":
                walk.divert()
            verdict = self._enter(walk, table, hook)
            if verdict != "accept":
                return verdict
        return "accept"

    def _enter(self, walk: _Walk, table: Table, hook: str) -> str:
        where = ChainId(walk.packet.src.version, table, hook)
        verdict = self._run(walk, table, self.hooks.get(where, ()))
        if verdict is None and where in self.marking:
            walk.write(*self.marking[where])
        return verdict or "accept"

    def _run(self, walk: _Walk, table: Table, rules: tuple[ChainRule, ...]) -> str | None:
        """Walk a chain. None: came to its end, or returned."""
        for rule in rules:
            if not all(self._matches(walk, table, match) for match in rule.matches):
                continue
            effect = rule.effect
            if isinstance(effect, Verdict):
                return {"DROP": "drop", "ACCEPT": "accept", "RETURN": None}[effect.name]
            if isinstance(effect, Reject):
                return "reject"
            if isinstance(effect, Jump):
                inner = self._run(walk, table, self.chains[ChainId(walk.packet.src.version, table, effect.chain)])
                if inner is not None or effect.goto:
                    return inner
            else:
                self._change(walk, effect)
        return None

    def _change(self, walk: _Walk, effect: SetMark | SetClass | MapMark | MapPriority | AddTo | None) -> None:
        if isinstance(effect, SetMark):
            walk.write(effect.value, effect.mask)
        elif isinstance(effect, SetClass):
            walk.priority = effect.number
        elif isinstance(effect, MapMark | MapPriority):
            element = self._find(effect.name, _end(walk.packet, effect.side))
            if element is not None:
                self._count(walk.packet, element)
                walk.write(element.entry.mark, element.entry.mask)
                if isinstance(effect, MapPriority):
                    walk.priority = element.entry.prio
        elif isinstance(effect, AddTo):
            ends = int(self.now()) + self.sets[effect.name].timeout
            ipset, block = self.sets[effect.name], self._key_in(effect.name, _end(walk.packet, effect.side))
            held, key = self.elements[effect.name], str(block)
            if effect.refresh and key in held:
                held[key].entry = Entry(expires=ends)
            elif len(held) < ipset.room or ipset.rolling:
                held.setdefault(key, _Element(Entry(expires=ends)))

    def _matches(self, walk: _Walk, table: Table, match: Match) -> bool:
        packet = walk.packet
        if isinstance(match, InSet):
            element = self._find(match.name, self._key_in(match.name, _end(packet, match.side)))
            if element is not None and not match.quiet:
                self._count(packet, element)
            return (element is not None) != match.inverted
        if isinstance(match, Connected):
            return _show_connection(packet, match.side) in self.elements[match.name]
        if isinstance(match, Reaches):
            return f"{packet.dst},{packet.protocol}:{packet.port},{packet.dst}" in self.elements[match.name]
        if isinstance(match, IsOwn):
            return (str(_end(packet, match.side)) in self._own) != match.inverted
        if isinstance(match, Diverted):
            return walk.diverted and not match.answers
        if isinstance(match, Marked):
            return walk.mark & match.mask == match.value
        if isinstance(match, Above):
            return self._is_above(packet, match)
        if isinstance(match, Crowded):
            return self._is_crowded(packet, table, match)
        return _selects(packet, match)

    @property
    def _own(self) -> set[str]:
        return {str(ip_address(text)) for text in self.where.own}

    def _key_in(self, name: str, address: Address) -> Address:
        """An address as a set keeps it."""
        netmask = self.sets[name].netmask
        return ip_network((address, netmask), strict=False).network_address if netmask else address

    def _find(self, name: str, address: Address) -> _Element | None:
        """The entry with the longest prefix that holds the address."""
        held = self.elements[name]
        return next((held[key] for key in _keys(address) if key in held), None) if held else None

    def _count(self, packet: Packet, element: _Element) -> None:
        element.packets += 1
        element.bytes += packet.length

    def _is_above(self, packet: Packet, match: Above) -> bool:
        """A token bucket; bytes are charged in chunks of 16, as xt_hashlimit does it."""
        key = " ".join(_block(_end(packet, side), length) for side, length in match.sides)
        tokens, last = self._buckets.get((match.name, key), (float(match.depth), self.now()))
        tokens = min(match.depth, tokens + (self.now() - last) * match.per_second)
        cost = min((packet.length // 16 + 1) * 16, match.depth) if match.bytes else 1
        over = tokens < cost
        self._buckets[match.name, key] = (tokens if over else tokens - cost, self.now())
        return over

    def _is_crowded(self, packet: Packet, table: Table, match: Crowded) -> bool:
        key = (packet.src.version, table, id(match), _block(_end(packet, match.side), match.length))
        count = self._flows.get(key, 0) + 1
        if count <= match.above:
            self._flows[key] = count
        return count > match.above

    def damage(self, *, set_name: str | None = None, chain: ChainId | None = None) -> None:
        """Take something away behind the controller's back, as another program would."""
        if set_name is not None:
            self.elements[set_name].clear()
        if chain is not None:
            self.chains[chain] = ()


def _take_out(number: int, classes: dict[int, QueueClass], children: dict[int, int]) -> None:
    """Take out a class, and all that hangs on it."""
    classes.pop(number, None)
    hanging = [handle for handle, above in children.items() if above == number]
    for handle in hanging:
        del children[handle]
    parents = {number, *(classid(handle, 0) for handle in hanging)}
    for below in [each for each, value in classes.items() if value.parent in parents]:
        _take_out(below, classes, children)


def _find_above(each: QueueClass, tree: Tree) -> int:
    """The class above one; above the top of a child HTB it is the class on which that hangs. 0: there is none."""
    return each.parent if each.parent & 0xFFFF else tree.children.get(major(each.parent), 0)


def _is_led(classes: Iterable[int], children: Mapping[int, int]) -> bool:
    """Whether a packet reaches some of these by the program alone."""
    return bool(children) or any(map(is_beside, classes))


def _find_depth(each: QueueClass, classes: Mapping[int, QueueClass]) -> int:
    """How many classes stand from the top of the HTB down to this one."""
    depth = 1
    while each.parent in classes:
        each, depth = classes[each.parent], depth + 1
    return depth


def _list_buckets(step: SwitchTable) -> Iterator[Above]:
    rules = (rule for rules in step.chains.values() for rule in rules)
    return (match for rule in rules for match in rule.matches if isinstance(match, Above))


def _path(packet: Packet) -> Iterator[tuple[Table, str]]:
    """The hooks that a packet passes: forwarded, for this host, or from it."""
    if packet.in_interface is not None:
        yield "raw", "PREROUTING"
        yield "mangle", "PREROUTING"
        hook = "INPUT" if packet.out_interface is None else "FORWARD"
    else:
        hook = "OUTPUT"
    for table in TABLES[1:]:
        yield table, hook


def _selects(packet: Packet, match: Match) -> bool:
    if isinstance(match, Has):
        return _end(packet, match.side) in _network(match.key)
    if isinstance(match, Enters):
        return _goes_by(packet.in_interface, match.interface)
    if isinstance(match, Leaves):
        return _goes_by(packet.out_interface, match.interface)
    if isinstance(match, Is):
        protocol = "ipv6-icmp" if packet.protocol == "icmp" and packet.src.version == 6 else packet.protocol
        return (protocol == match.protocol) != match.inverted
    if isinstance(match, Ports):
        port = packet.port if match.side == "dst" else packet.source_port
        return port is not None and any(low <= port <= high for low, high in match.ranges)
    if isinstance(match, Led):  # it translates nothing
        return match.inverted
    if isinstance(match, Syn | Opens):
        return packet.opens
    if isinstance(match, Continues):
        return packet.protocol == "tcp" and not packet.opens
    if isinstance(match, EndsNothing):
        return packet.protocol == "tcp" and not packet.ends
    if isinstance(match, HopLimit):
        return packet.hop_limit < match.value if match.below else packet.hop_limit == match.value
    if isinstance(match, HasSocket):
        return packet.established
    if isinstance(match, Ended | Invalid | Confirmed):  # each opens a flow of its own, that is sound, and never over
        return False
    return isinstance(match, Icmp6) and packet.icmp_type == match.type


def _goes_by(interface: str | None, name: str) -> bool:
    """Whether it is the interface of this name, or one whose name begins so (`eth+`)."""
    return (interface or "").startswith(name[:-1]) if name.endswith("+") else interface == name


def _show_connection(packet: Packet, side: Side) -> str:
    """The connection of a packet whose far end is at `side`, as a set has it."""
    far, port, near = packet.src, packet.source_port, packet.dst
    if side == "dst":
        far, port, near = packet.dst, packet.port, packet.src
    return f"{far},tcp:{port},{near}"


def _keeps_alive(packet: Packet) -> bool:
    """Whether a program on the ingress lets it pass as what gateways say to each other."""
    if packet.protocol == "udp":
        return (packet.port, packet.hop_limit) in ((BFD, NEVER_FORWARDED), (BFD_ECHO, NEVER_FORWARDED - 1))
    return packet.protocol == "ospf" or (packet.protocol == "vrrp" and packet.hop_limit == NEVER_FORWARDED)


@lru_cache(maxsize=4096)
def _network(key: str) -> IPv4Network | IPv6Network:
    return ip_network(key)


@lru_cache(maxsize=4096)
def _block(address: Address, length: int) -> str:
    return str(ip_network((address, length), strict=False))


@lru_cache(maxsize=4096)
def _keys(address: Address) -> tuple[str, ...]:
    """The address, then every network around it, from the longest prefix to the shortest."""
    lengths = range(address.max_prefixlen - 1, 0, -1)
    return str(address), *(str(ip_network((address, length), strict=False)) for length in lengths)


def _is_in(port: int | None, ranges: tuple[tuple[int, int], ...]) -> bool:
    return not ranges or (port is not None and any(low <= port <= high for low, high in ranges))


def _end(packet: Packet, side: Side) -> Address:
    return packet.src if side == "src" else packet.dst
