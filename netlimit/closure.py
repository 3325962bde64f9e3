"""Rules that close a gateway, alone or together: to nearly everybody, to all networks that it is attached to, or at one
of its own addresses at a port by which it is managed.

Who is safe is spared by them, but nobody else can come to manage the gateway, and all that it forwards ends. What a
rule closes is a box: addresses at the far end, the port there, and the port here; rules that fill the space together
close what each of them leaves open. What comes by which device is not asked, but for the networks that are behind it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache
from ipaddress import ip_network
from itertools import pairwise
from typing import NamedTuple

from netlimit.effort import spend
from netlimit.queueing import is_cap
from netlimit.rates import Kind
from netlimit.rules import PEER, TARGET, Action, Direction, PortRange, Protocol, Rule, Target

SHARE = 0.75
"""What closes this share of all addresses closes the gateway."""
LONGEST = {4: 20, 6: 24}
"""Prefixes that are longer do not count, but for those of networks nearby: it takes more of them than a gateway has
room for."""
_EVERYWHERE = {4: (1 << 24, 224 << 24), 6: (2 << 124, 4 << 124)}
"""Where hosts have their addresses: IPv4 below multicast, IPv6 in 2000::/3 (RFC 4291)."""
_PRIVATE = {
    4: tuple(map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))),
    6: (ip_network("fc00::/7"),),
}
"""RFC 1918 and RFC 4193: the world of a gateway of which nothing better is known."""
_LINK_LOCAL = ip_network("fe80::/10")
_PARTS = 8
"""A network nearby counts as closed by prefixes that are up to so much longer."""
_MOST_NETWORKS = 16
"""So many networks nearby are looked at, the largest; if all of them are closed, the others do not save it."""
MANAGED_BY = (22,)
"""The ports of a gateway that has told of none."""
_ANY_PORT = (0, 65535)
_CLIENTS = ((32768, 60999), (49152, 65535), (1024, 65535))
"""The ports that clients take: those of Linux, those of the others (RFC 6335), and all that are no servers'."""
_TRANSPORTS = (Protocol.TCP, Protocol.UDP)
_HOST = {4: 32, 6: 64}
"""The prefix of one host's addresses."""
_CROWD = {4: 24, 6: 48}
"""A bucket for a prefix that is so many bits shorter needs `_CROWDED` times as much, and others in proportion of their
logarithms: the more share it, the less it takes of each to use it up."""
_LEAST = {Kind.PACKETS: 1.0, Kind.BYTES: 2000.0, Kind.CONNECTIONS: 1 / 60, Kind.CONCURRENT: 1.0}
"""With less than that (a second, but for connections at once) a host can do nothing. Bytes: 16 kbit/s."""
_CROWDED = 10


class Area(NamedTuple):
    """Addresses from `low` to before `end`, and the devices by which they come; None: any."""

    low: int
    end: int
    devices: tuple[str, ...] | None = None


class World(NamedTuple):
    """Those who may come to manage a gateway, as words and as areas. It is closed if all areas are."""

    name: str
    areas: tuple[Area, ...]


@dataclass(frozen=True, eq=False)
class Site:
    """What is known of a gateway: the ports by which it is managed, its own addresses, and, if that is known, the
    prefixes of its routes that need no gateway and of its default routes, each with its devices. Nothing is known
    (`heard` is False) of one that only rules name."""

    name: str
    ports: tuple[int, ...] = MANAGED_BY
    own: frozenset[Target] = frozenset()
    networks: Mapping[Target, tuple[str, ...]] = field(default_factory=dict)
    heard: bool = True

    @cached_property
    def worlds(self) -> Mapping[int, tuple[World, ...]]:
        """Who can come to it, by address family: everybody; and where it has no address that everybody can reach, its
        neighbours."""
        found = {}
        for family in (4, 6):
            worlds = [World(f"to nearly every IPv{family} address", (Area(*_EVERYWHERE[family]),))]
            near = self._near(family)
            if near:
                areas = tuple(_make_area(network, devices) for network, devices in near.items())
                name = (
                    f"to every IPv{family} network that it is attached to" if self.networks else "to private networks"
                )
                worlds.append(World(name, areas))
            found[family] = tuple(worlds)
        return found

    @cached_property
    def places(self) -> frozenset[str]:
        """The targets, beside wide ones, of rules that can close it: as texts."""
        near = (network for family in (4, 6) for network in self._near(family))
        return frozenset(map(str, self.own)).union(*map(_list_parts, near))

    def _near(self, family: int) -> Mapping[Target, tuple[str, ...] | None]:
        own = [each for each in self.own if each.version == family]
        default = not self.networks or any(net.prefixlen == 0 for net in self.networks if net.version == family)
        if not self.heard or (default and any(each.is_global for each in own)):
            return {}
        if not self.networks:
            return dict.fromkeys(_PRIVATE[family])
        attached = {net: devices for net, devices in self.networks.items() if net.version == family and net.prefixlen}
        largest = sorted(attached, key=lambda net: (net.prefixlen, net.network_address))[:_MOST_NETWORKS]
        if not largest and any(each.is_link_local for each in own) and family == _LINK_LOCAL.version:
            return {_LINK_LOCAL: None}
        return {net: attached[net] for net in largest}


class Closed(NamedTuple):
    """What would be closed, and the rule that does most of it among those that change: a gateway, to whom; with a
    `port`, all that manages it by that; with an `address`, at that one of its own."""

    gateway: str
    whom: str
    port: int | None
    address: Target | None
    rule: Rule


class Way(NamedTuple):
    """A way to a gateway: to a port of its own, at one of its addresses or (None) any; or (None) through it."""

    port: int | None = None
    address: Target | None = None


class Part(NamedTuple):
    """What a rule closes for one gateway: addresses at the far end, the ports there and here, and (None: all) at which
    of the gateway's own addresses."""

    rule: Rule
    low: int
    end: int
    near: tuple[PortRange, ...]
    far: tuple[PortRange, ...]
    address: Target | None


def may_close(rule: Rule, places: Collection[str]) -> bool:
    """Whether a rule is harsh enough to count, and wide enough or for one of these targets (of `Site.places`)."""
    wide = rule.target.prefixlen <= LONGEST[rule.family]
    return _is_harsh(rule) and (wide or str(rule.target) in places)


def select_harsh(rules: Iterable[Rule], site: Site, now: datetime) -> list[Rule]:
    """Those that can close a gateway at a moment."""
    return [rule for rule in rules if may_close(rule, site.places) and rule.in_force(now)]


def list_shut(rules: Iterable[Rule], site: Site, family: int, now: datetime) -> list[Way]:
    """The ports by which a gateway is managed that rules close to some world at a moment, but for what is allowed."""
    parts = cut(select_harsh(rules, site, now), site, family)
    return [
        way
        for way in map(Way, site.ports)
        if any(is_closed([part for part in parts if is_on(part, way)], way, world) for world in site.worlds[family])
    ]


def cut(rules: Sequence[Rule], site: Site, family: int) -> list[Part]:
    """What rules close of a family at a gateway."""
    spend(len(rules))
    found = []
    for rule in rules:
        if rule.family != family or (rule.hosts and site.name not in rule.hosts):
            continue
        ports, others = rule.selector.ports, rule.selector.source_ports
        inwards = rule.direction is Direction.FROM
        if rule.target not in site.own:
            low, end, _ = _make_area(rule.target, None)
            near, far = (ports, others) if inwards else (others, ports)
            found.append(Part(rule, low, end, near, far, None))
        elif rule.action is Action.BLOCK:  # a limit on an own address is kept: who is safe has no part in it
            near, far = (others, ports) if inwards else (ports, others)
            found.append(Part(rule, 0, 1 << rule.target.max_prefixlen, near, far, rule.target))
    return found


def list_ways(site: Site, parts: Iterable[Part]) -> Iterator[Way]:
    """The ways to a gateway that parts can close."""
    yield Way()
    addresses = sorted({part.address for part in parts if part.address is not None}, key=str)
    for port in site.ports:
        yield Way(port)
        yield from (Way(port, address) for address in addresses)


def is_on(part: Part, way: Way) -> bool:
    """Whether a part closes something of a way."""
    if part.address not in (None, way.address):
        return False
    if way.port is None:
        return True
    return part.rule.selector.protocol is not Protocol.UDP and _has(part.near, way.port)


def is_closed(parts: Sequence[Part], way: Way, world: World, share: float = SHARE) -> bool:
    """Whether parts that are on a way close it to a world; `share` is that of the addresses that has to be closed."""
    spend(len(parts))
    if sum(measure(part, way, world.areas[0]) for part in parts) < need(way, share):
        return False  # not even if no two of them overlapped
    if way.port is not None:
        return is_shut(parts, world, share)
    return any(
        _is_dammed([part for part in parts if _speaks(part, protocol)], world, share) for protocol in _TRANSPORTS
    )


def need(way: Way, share: float = SHARE) -> float:
    """What those that close a way measure at least, all together."""
    return share / (4 if way.port is None else 2)


def _speaks(part: Part, protocol: Protocol) -> bool:
    return part.rule.selector.protocol in (Protocol.ANY, protocol)


def measure(part: Part, way: Way, area: Area) -> float:
    """The most that a part can add to what is closed: its share of the addresses, and of the ports."""
    near = 1.0 if way.port is not None else _count(part.near, _ANY_PORT)
    return measure_addresses(part, area) * near * max(_count(part.far, client) for client in _CLIENTS)


def measure_addresses(part: Part, area: Area) -> float:
    """Its share of the addresses."""
    return max(0, min(part.end, area.end) - max(part.low, area.low)) / (area.end - area.low)


def _is_dammed(parts: Sequence[Part], world: World, share: float) -> bool:
    """Whether they close at least half of the ports near, and so what is forwarded."""
    cuts = _list_cuts((part.near for part in parts), _ANY_PORT)
    known: dict[tuple[int, ...], bool] = {}
    closed = 0
    for low, end in pairwise(cuts):
        spend(len(parts))
        here = tuple(number for number, part in enumerate(parts) if _has(part.near, low))
        if here not in known:
            known[here] = is_shut([parts[number] for number in here], world, share)
        closed += (end - low) * known[here]
    return 2 * closed >= 1 << 16


def is_shut(parts: Sequence[Part], world: World, share: float = SHARE) -> bool:
    """Whether they are closed to most addresses for at least half of the ports that some clients take."""
    if not any(part.far for part in parts):
        return _cover(parts, world, share)
    return any(2 * _count_shut(parts, world, client, share) > client[1] - client[0] for client in _CLIENTS)


def _count_shut(parts: Sequence[Part], world: World, client: PortRange, share: float) -> int:
    cuts = _list_cuts((part.far for part in parts), client)
    shut = 0
    for low, end in pairwise(cuts):
        spend(len(parts))
        shut += (end - low) * _cover([part for part in parts if _has(part.far, low)], world, share)
    return shut


def _cover(parts: Sequence[Part], world: World, share: float) -> bool:
    return all(_cover_area(parts, area, share) for area in world.areas)


def _cover_area(parts: Sequence[Part], area: Area, share: float) -> bool:
    spend(len(parts))
    by_device = (part.rule.selector.interface for part in parts)
    spans = sorted(
        (part.low, part.end)
        for part, device in zip(parts, by_device, strict=True)
        if device is None or area.devices is None or device in area.devices
    )
    covered, reached = 0, area.low
    for first, end in spans:
        first, end = max(first, reached), min(end, area.end)
        if end > first:
            covered, reached = covered + end - first, end
    return covered >= share * (area.end - area.low)


def _list_cuts(each: Iterable[tuple[PortRange, ...]], bounds: PortRange) -> list[int]:
    """Where ranges begin and end, in order, within bounds."""
    edges = {edge for ranges in each for low, high in ranges for edge in (low, high + 1)}
    return sorted({bounds[0], bounds[1] + 1, *(edge for edge in edges if bounds[0] < edge <= bounds[1])})


def _has(ranges: tuple[PortRange, ...], port: int) -> bool:
    return not ranges or any(low <= port <= high for low, high in ranges)


def _count(ranges: tuple[PortRange, ...], bounds: PortRange) -> float:
    """The share of bounds that is in ranges, which do not overlap."""
    if not ranges:
        return 1.0
    low, high = bounds
    inside = sum(max(0, min(top, high) - max(bottom, low) + 1) for bottom, top in ranges)
    return inside / (high - low + 1)


def _is_harsh(rule: Rule) -> bool:
    """Whether what it leaves is nothing, or as good as nothing."""
    if not rule.enabled or rule.selector.protocol is Protocol.ICMP:
        return False
    return rule.action is Action.BLOCK or _starves(rule)


def _starves(rule: Rule) -> bool:
    """Whether what a limit leaves is as good as nothing."""
    if rule.rate is None or rule.action not in (Action.DROP, Action.REJECT, Action.SHAPE):
        return False
    if is_cap(rule, rule.selector.interface):
        return False  # what the gateway itself needs to be managed stands beside it
    shorter = max(0, _HOST[rule.family] - _find_bucket(rule))
    needed = _LEAST[rule.rate.kind] * math.pow(_CROWDED, shorter / _CROWD[rule.family])
    return float(rule.rate.per_second) < needed


def _find_bucket(rule: Rule) -> int:
    """The length of the prefix whose hosts share a bucket. `per: peer` gives a gateway's address one, which is for all
    of the target together."""
    if rule.per in (TARGET, PEER):
        return rule.target.prefixlen
    if rule.per and rule.per.startswith("/"):
        return max(int(rule.per[1:]), rule.target.prefixlen)
    return rule.target.max_prefixlen


def _make_area(network: Target, devices: tuple[str, ...] | None) -> Area:
    return Area(int(network.network_address), int(network.broadcast_address) + 1, devices)


@lru_cache(maxsize=256)
def _list_parts(network: Target) -> frozenset[str]:
    """A network, those around it that are not wide, and those in it that count, as texts."""
    longest = min(network.max_prefixlen, network.prefixlen + _PARTS)
    around = (network.supernet(new_prefix=n) for n in range(LONGEST[network.version] + 1, network.prefixlen))
    inside = (each for n in range(network.prefixlen, longest + 1) for each in network.subnets(new_prefix=n))
    return frozenset(map(str, (*around, *inside)))
