"""A kernel in memory: the same errors, and packets walk through its chains.

It enforces what the real one enforces (a rule cannot name a set or chain that is not there, a set in use cannot be
destroyed, a full set takes no more), fails on demand, and traces a packet rule by rule, with token buckets that fill
by the clock that it is given. One conformance suite runs over both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_network

from netlimit.errors import KernelError
from netlimit.kernel.base import Addresses, HostFacts, Reading
from netlimit.packet import Address, Packet
from netlimit.plan import Step, SwitchTable, WriteSets
from netlimit.state import (
    TABLES,
    Above,
    AddTo,
    ChainId,
    ChainRule,
    Crowded,
    Enters,
    Entry,
    Has,
    Icmp6,
    InSet,
    IpSet,
    Is,
    Jump,
    Leaves,
    MapMark,
    Marked,
    Match,
    Opens,
    Ports,
    Reject,
    SetMark,
    Side,
    Structure,
    Syn,
    Table,
    Verdict,
)


@dataclass
class _Element:
    entry: Entry
    packets: int = 0
    bytes: int = 0


@dataclass
class _Walk:
    """A packet under way: its mark, and the table it is in."""

    packet: Packet
    mark: int = 0


@dataclass
class FakeKernel:
    """See `base.Kernel` for the contract. `now` gives Unix time; `facts` and `where` are what it answers of the host.

    `foreign` counts rules of others by table and chain: they stand first, are never touched, and do nothing.
    """

    now: Callable[[], float] = time.time
    facts: HostFacts = field(default_factory=lambda: HostFacts({}, 250, ()))
    where: Addresses = field(default_factory=lambda: Addresses((), ()))
    foreign: dict[ChainId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sets: dict[str, IpSet] = {}
        self.elements: dict[str, dict[str, _Element]] = {}
        self.chains: dict[ChainId, tuple[ChainRule, ...]] = {}
        self.hooks: dict[ChainId, tuple[ChainRule, ...]] = {}
        self.applied: list[Step] = []
        self._failing: int | None = None
        self._buckets: dict[tuple[str, str], tuple[float, float]] = {}
        self._flows: dict[tuple[int, str], int] = {}

    # -- the contract

    def probe(self, mark_mask: int) -> HostFacts:
        """Answer with `facts`."""
        del mark_mask
        return self.facts

    def addresses(self) -> Addresses:
        """Answer with `where`."""
        return self.where

    def exclusive(self) -> AbstractContextManager[None]:
        """One process has it anyway."""
        return nullcontext()

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
        else:
            self._switch_table(step)
        self.applied.append(step)

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
        network = ip_network(key)
        if network.version != ipset.family or network.prefixlen == 0:
            raise KernelError(str(step), f"Syntax error: {key} does not fit into {name}")
        if entry.expires and entry.expires <= self.now():
            return
        if key not in held and len(held) >= ipset.size and not ipset.rolling:
            raise KernelError(str(step), "Hash is full, cannot add more elements")
        held[key] = _Element(entry)

    def _expire(self) -> None:
        now = self.now()
        for held in self.elements.values():
            for key in [key for key, element in held.items() if 0 < element.entry.expires <= now]:
                del held[key]

    # -- tables

    def _switch_table(self, step: SwitchTable) -> None:
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

    def _check_names(
        self,
        step: SwitchTable,
        chains: Mapping[ChainId, tuple[ChainRule, ...]],
        hooks: Mapping[ChainId, tuple[ChainRule, ...]],
    ) -> None:
        for where, rules in (*chains.items(), *hooks.items()):
            for rule in rules:
                target = rule.effect.chain if isinstance(rule.effect, Jump) else None
                if target and ChainId(where.family, where.table, target) not in chains:
                    raise KernelError(str(step), f"can't append entry to chain {where.name}: no chain {target}")
                if isinstance(rule.effect, MapMark) and where.table != "mangle":
                    raise KernelError(str(step), "--map-set only usable from mangle table")
                if isinstance(rule.effect, Reject) and where.table != "filter":
                    raise KernelError(str(step), "can't commit: Invalid argument")
        missing = self._named_sets(chains) - self.sets.keys()
        if missing:
            raise KernelError(str(step), f"Set {sorted(missing)[0]} doesn't exist.")

    def _named_sets(self, chains: Mapping[ChainId, tuple[ChainRule, ...]]) -> set[str]:
        parts = (part for rules in chains.values() for rule in rules for part in (*rule.matches, rule.effect))
        return {part.name for part in parts if isinstance(part, InSet | MapMark | AddTo)}

    # -- packets

    def trace(self, packet: Packet) -> str:
        """Send a packet through: "accept", "drop" or "reject". Counters and buckets are moved as the kernel would."""
        self._expire()
        walk = _Walk(packet)
        for table, hook in _path(packet):
            verdict = self._enter(walk, table, hook)
            if verdict != "accept":
                return verdict
        return "accept"

    def _enter(self, walk: _Walk, table: Table, hook: str) -> str:
        where = ChainId(walk.packet.src.version, table, hook)
        return self._run(walk, table, self.hooks.get(where, ())) or "accept"

    def _run(self, walk: _Walk, table: Table, rules: tuple[ChainRule, ...]) -> str | None:
        """Walk a chain. None: came to its end, or returned."""
        for rule in rules:
            if not all(self._matches(walk, table, match) for match in rule.matches):
                continue
            effect = rule.effect
            if isinstance(effect, Verdict):
                return "drop" if effect.name == "DROP" else None
            if isinstance(effect, Reject):
                return "reject"
            if isinstance(effect, Jump):
                inner = self._run(walk, table, self.chains[ChainId(walk.packet.src.version, table, effect.chain)])
                if inner is not None or effect.goto:
                    return inner
            else:
                self._change(walk, effect)
        return None

    def _change(self, walk: _Walk, effect: SetMark | MapMark | AddTo | None) -> None:
        if isinstance(effect, SetMark):
            walk.mark = walk.mark & ~effect.mask ^ effect.value
        elif isinstance(effect, MapMark):
            element = self._find(effect.name, _end(walk.packet, effect.side))
            if element is not None:
                self._count(walk.packet, element)
                walk.mark = walk.mark & ~element.entry.mask ^ element.entry.mark
        elif isinstance(effect, AddTo):
            ends = int(self.now()) + self.sets[effect.name].timeout
            self.elements[effect.name].setdefault(str(_end(walk.packet, effect.side)), _Element(Entry(expires=ends)))

    def _matches(self, walk: _Walk, table: Table, match: Match) -> bool:
        packet = walk.packet
        if isinstance(match, InSet):
            element = self._find(match.name, _end(packet, match.side))
            if element is not None:
                self._count(packet, element)
            return (element is not None) != match.inverted
        if isinstance(match, Marked):
            return walk.mark & match.mask == match.value
        if isinstance(match, Above):
            return self._is_above(packet, match)
        if isinstance(match, Crowded):
            return self._is_crowded(packet, match)
        return _selects(packet, match)

    def _find(self, name: str, address: Address) -> _Element | None:
        """The entry with the longest prefix that holds the address."""
        held = self.elements[name]
        return next((held[key] for key in _keys(address) if key in held), None) if held else None

    def _count(self, packet: Packet, element: _Element) -> None:
        element.packets += 1
        element.bytes += packet.length

    def _is_above(self, packet: Packet, match: Above) -> bool:
        """A token bucket; bytes are charged in chunks of 16, as xt_hashlimit does it."""
        key = " ".join(str(ip_network((_end(packet, side), length), strict=False)) for side, length in match.sides)
        tokens, last = self._buckets.get((match.name, key), (float(match.depth), self.now()))
        tokens = min(match.depth, tokens + (self.now() - last) * match.per_second)
        cost = min((packet.length // 16 + 1) * 16, match.depth) if match.bytes else 1
        over = tokens < cost
        self._buckets[match.name, key] = (tokens if over else tokens - cost, self.now())
        return over

    def _is_crowded(self, packet: Packet, match: Crowded) -> bool:
        key = (id(match), str(ip_network((_end(packet, match.side), match.length), strict=False)))
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
        return _end(packet, match.side) in ip_network(match.key)
    if isinstance(match, Enters):
        return packet.in_interface == match.interface
    if isinstance(match, Leaves):
        return packet.out_interface == match.interface
    if isinstance(match, Is):
        protocol = "ipv6-icmp" if packet.protocol == "icmp" and packet.src.version == 6 else packet.protocol
        return (protocol == match.protocol) != match.inverted
    if isinstance(match, Ports):
        port = packet.port if match.side == "dst" else packet.source_port
        return port is not None and any(low <= port <= high for low, high in match.ranges)
    if isinstance(match, Syn | Opens):
        return packet.opens
    return isinstance(match, Icmp6) and packet.icmp_type == match.type


@lru_cache(maxsize=4096)
def _keys(address: Address) -> tuple[str, ...]:
    """The address, then every network around it, from the longest prefix to the shortest."""
    lengths = range(address.max_prefixlen - 1, 0, -1)
    return str(address), *(str(ip_network((address, length), strict=False)) for length in lengths)


def _end(packet: Packet, side: Side) -> Address:
    return packet.src if side == "src" else packet.dst
