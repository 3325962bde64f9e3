"""By which devices a rule's traffic leaves: read from the routes, unless the rule names one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_network
from itertools import takewhile
from typing import NamedTuple

from netlimit.limits import Facts
from netlimit.rules import Direction, Rule, Target, format_target
from netlimit.tree import INGRESS_DEVICE, Lookup, Route, Topology


@dataclass(frozen=True, slots=True)
class Way:
    """The devices where a rule is held, in order; or the `problem` why there is none. `note` is for the operator."""

    devices: tuple[str, ...] = ()
    problem: str | None = None
    note: str | None = None


def find_way(rule: Rule, facts: Facts) -> Way:
    """Find where a shaping rule's traffic can be queued.

    `to`: towards the target. `from`: wherever its traffic can leave, and, for what ends on this host, the IFB device.
    A network that the target is in itself is no way out, unless the default route lies there too.
    """
    topology, interface = facts.topology, rule.selector.interface
    if interface:
        if interface in topology.devices:
            return Way((interface,))
        known = ", ".join(sorted(topology.devices)) or "none but loopback"
        return Way(problem=f"There is no device {interface} on this host; there are {known}.")
    own = rule.target.prefixlen == rule.target.max_prefixlen and str(rule.target.network_address) in facts.own
    if rule.direction is Direction.TO:
        if own:
            return Way((INGRESS_DEVICE,))
        devices = find_towards(rule.target, topology)
        if not devices:
            return Way(problem=f"No route leads to {format_target(rule.target)}; name the device in `interface`.")
        return Way(devices, note=_say_many(devices))
    devices = _find_out(rule.target, topology, own)
    if own and not devices:
        return Way(problem=f"No route leads away from {format_target(rule.target)}; name the device in `interface`.")
    return Way(devices if own else (*devices, INGRESS_DEVICE), note=_say_many(devices))


def find_home(target: Target, device: str, topology: Topology) -> Target | None:
    """The network that a target lies in, if what two in it send each other does not leave by a device: one that is
    connected there, or that lies behind others.

    A default route makes nobody a neighbour, with a gateway or without one (ppp, a tunnel).
    """
    best = next((alike for alike in _list_around(target, topology) if alike[0].length), [])
    if best and not any(device in each.route.devices for each in best):
        return best[0].network
    for each in _find_around(target, topology):
        if each.length and each.route.connected and device in each.route.devices:
            return each.network
    return None


def find_towards(target: Target, topology: Topology) -> tuple[str, ...]:
    """The devices of the best routes to all of it, and of those to parts of it."""
    return _devices_of([*_find_best(target, topology), *_find_inside(target, topology)])


def leads_towards(target: Target, devices: tuple[str, ...], topology: Topology) -> bool:
    """Whether `find_towards` names one of the devices: for many targets, where there can be many routes."""
    if any(device in devices for each in _find_best(target, topology) for device in each.route.devices):
        return True
    starts = _read_starts(topology, target.version, devices)
    at = bisect_left(starts, (int(target.network_address), target.prefixlen + 1))
    return at < len(starts) and starts[at][0] <= int(target.broadcast_address)


def _find_out(target: Target, topology: Topology, own: bool) -> tuple[str, ...]:
    table = _read_table(topology, target.version)
    home = () if own else find_towards(target, topology)
    return tuple(device for device in table.devices if own or device in table.default or device not in home)


def _find_around(target: Target, topology: Topology) -> Iterator[_Parsed]:
    """The routes to all of a target, the best first."""
    return (each for alike in _list_around(target, topology) for each in alike)


def _find_best(target: Target, topology: Topology) -> list[_Parsed]:
    """The best routes to all of a target: those of each table that routing rules may lead to, up to the rule behind
    which no packet goes. Who is attached to this host is not looked for by a default route: what goes that way reaches
    him only if it comes back here."""
    tables: dict[int, list[_Parsed]] = {}
    for each in _find_around(target, topology):
        tables.setdefault(each.route.table, []).append(each)
    found: list[_Parsed] = []
    for lookup in _read_table(topology, target.version).lookups:
        best = [each for each in _take_longest(tables.get(lookup.table, ())) if each.length > lookup.suppressed]
        found += best
        if best and lookup.always:
            break
    attached = any(each.route.attached for each in found)
    return [each for each in found if each.length or not attached]


def _take_longest(routes: Sequence[_Parsed]) -> Iterator[_Parsed]:
    return takewhile(lambda each: each.length == routes[0].length, routes)


def _list_around(target: Target, topology: Topology) -> Iterator[list[_Parsed]]:
    """The routes to all of a target, those to one prefix together."""
    table, address = _read_table(topology, target.version), int(target.network_address)
    for length in table.lengths:
        if length <= target.prefixlen and (
            alike := table.routes.get((length, address >> target.max_prefixlen - length))
        ):
            yield alike


def _find_inside(target: Target, topology: Topology) -> list[_Parsed]:
    """The routes to parts of a target."""
    if target.prefixlen == target.max_prefixlen:
        return []
    rest, address = target.max_prefixlen - target.prefixlen, int(target.network_address)
    every = (each for parsed in _read_table(topology, target.version).routes.values() for each in parsed)
    inside = (each for each in every if each.length > target.prefixlen)
    return [each for each in inside if int(each.network.network_address) >> rest == address >> rest]


class _Parsed(NamedTuple):
    route: Route
    network: Target
    length: int


class _Table(NamedTuple):
    """The routes of a family by prefix length and the bits of the prefix, for targets are many and routes can be; and
    the routing rules that lead to any of them."""

    routes: dict[tuple[int, int], list[_Parsed]]
    lengths: list[int]
    lookups: tuple[Lookup, ...]
    devices: tuple[str, ...]
    default: tuple[str, ...]


@lru_cache(maxsize=4)
def _read_table(topology: Topology, family: int) -> _Table:
    parsed = [(route, ip_network(route.prefix)) for route in topology.routes]
    here = [_Parsed(route, network, network.prefixlen) for route, network in parsed if network.version == family]
    routes: dict[tuple[int, int], list[_Parsed]] = {}
    for each in here:
        bits = int(each.network.network_address) >> each.network.max_prefixlen - each.length
        routes.setdefault((each.length, bits), []).append(each)
    lengths = sorted({each.length for each in here}, reverse=True)
    lookups = tuple(_find_lookups(topology, family, {each.route.table for each in here}))
    return _Table(routes, lengths, lookups, _devices_of(here), _devices_of(each for each in here if each.length == 0))


def _find_lookups(topology: Topology, family: int, tables: set[int]) -> Iterator[Lookup]:
    """The rules that lead to any of these tables. One that no rule names can be the table of a VRF, or one that segment
    routing leads to: it counts for whichever packets do not come to the rules."""
    known = [each for each in topology.lookups if each.family == family and each.table in tables]
    yield from (Lookup(family, table) for table in sorted(tables - {each.table for each in known}))
    yield from known


@lru_cache(maxsize=8)
def _read_starts(topology: Topology, family: int, devices: tuple[str, ...]) -> list[tuple[int, int]]:
    """The first address and the length of each prefix that leads to one of the devices, in order."""
    every = (each for alike in _read_table(topology, family).routes.values() for each in alike)
    leading = (each for each in every if any(device in devices for device in each.route.devices))
    return sorted((int(each.network.network_address), each.length) for each in leading)


def _devices_of(routes: Iterable[_Parsed]) -> tuple[str, ...]:
    return tuple(sorted({device for each in routes for device in each.route.devices}))


def _say_many(devices: tuple[str, ...]) -> str | None:
    if len(devices) < 2:
        return None
    names = f"{', '.join(devices[:-1])} and {devices[-1]}"
    return f"Its traffic can leave by {names}: the rate holds on each of them by itself. `interface` names one."
