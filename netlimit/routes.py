"""The routes of a host, kept so that those of a target are found fast: targets are many, and routes can be."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import lru_cache
from ipaddress import ip_network
from typing import NamedTuple

from netlimit.rules import Target
from netlimit.tree import Lookup, Route, Topology


class Parsed(NamedTuple):
    """A route with its prefix as a network: the length, and the first and the last address as numbers."""

    route: Route
    network: Target
    length: int
    first: int
    last: int

    def is_within(self, other: Parsed) -> bool:
        """Whether its prefix lies in another's, or is the same."""
        return other.first <= self.first and self.last <= other.last


class Table(NamedTuple):
    """The routes of a family by prefix length and the bits of the prefix, and in the order of their first addresses
    (`ordered`, `starts`); the routing rules that lead to any of them; their devices, and those of default routes;
    whether `every` route is one for all packets to its prefix."""

    routes: dict[tuple[int, int], list[Parsed]]
    lengths: list[int]
    ordered: list[Parsed]
    starts: list[tuple[int, int]]
    lookups: tuple[Lookup, ...]
    devices: tuple[str, ...]
    default: tuple[str, ...]
    every: bool


@lru_cache(maxsize=4)
def read_table(topology: Topology, family: int) -> Table:
    """The routes of a family, put in order once for each reading."""
    ordered = sorted(_parse(topology, family), key=lambda each: (each.first, each.length))
    routes: dict[tuple[int, int], list[Parsed]] = {}
    for each in ordered:
        bits = each.first >> each.network.max_prefixlen - each.length
        routes.setdefault((each.length, bits), []).append(each)
    lengths = sorted({each.length for each in ordered}, reverse=True)
    starts = [(each.first, each.length) for each in ordered]
    lookups = tuple(_find_lookups(topology, family, {each.route.table for each in ordered}))
    default = devices_of(each for each in ordered if each.length == 0)
    every = not any(each.route.partial for each in ordered)
    return Table(routes, lengths, ordered, starts, lookups, devices_of(ordered), default, every)


def _parse(topology: Topology, family: int) -> Iterator[Parsed]:
    for route in topology.routes:
        if (":" in route.prefix) == (family == 6):
            network = ip_network(route.prefix)
            first = int(network.network_address)
            yield Parsed(route, network, network.prefixlen, first, first | int(network.hostmask))


def _find_lookups(topology: Topology, family: int, tables: set[int]) -> Iterator[Lookup]:
    """The rules that lead to any of these tables. One that no rule names can be the table of a VRF, or one that segment
    routing leads to: it counts for whichever packets do not come to the rules."""
    known = [each for each in topology.lookups if each.family == family and each.table in tables]
    yield from (Lookup(family, table) for table in sorted(tables - {each.table for each in known}))
    yield from known


@lru_cache(maxsize=8)
def read_starts(topology: Topology, family: int, devices: tuple[str, ...]) -> list[tuple[int, int]]:
    """The first address and the length of each prefix that leads to one of the devices, in order."""
    every = read_table(topology, family).ordered
    return [(each.first, each.length) for each in every if any(device in devices for device in each.route.devices)]


def find_around(target: Target, topology: Topology) -> Iterator[Parsed]:
    """The routes to all of a target, those with the longest prefix first."""
    return (each for alike in list_around(target, topology) for each in alike)


def list_around(target: Target, topology: Topology) -> Iterator[list[Parsed]]:
    """The routes to all of a target, those to one prefix together."""
    table, address = read_table(topology, target.version), int(target.network_address)
    own, longest = target.prefixlen, target.max_prefixlen
    for length in table.lengths:
        if length <= own and (alike := table.routes.get((length, address >> longest - length))):
            yield alike


def find_best(target: Target, topology: Topology) -> list[Parsed]:
    """The best routes to all of a target: those of each table that routing rules may lead to, up to the rule behind
    which no packet goes. Who is attached to this host is not looked for by a default route: what goes that way reaches
    him only if it comes back here."""
    table = read_table(topology, target.version)
    lookups = table.lookups
    if len(lookups) == 1 and lookups[0].suppressed < 0 and table.every:  # as nearly everywhere
        return next(list_around(target, topology), [])
    tables: dict[int, list[Parsed]] = {}
    for each in find_around(target, topology):
        tables.setdefault(each.route.table, []).append(each)
    found: list[Parsed] = []
    for lookup in lookups:
        best = [each for each in _take_longest(tables.get(lookup.table, ())) if each.length > lookup.suppressed]
        found += best
        if lookup.always and any(not each.route.partial for each in best):
            break
    attached = any(each.route.attached for each in found)
    return [each for each in found if each.length or not attached]


def _take_longest(routes: Iterable[Parsed]) -> Iterator[Parsed]:
    """Of routes by falling length of their prefixes, those up to the first that is for all packets, and its likes."""
    shortest = -1
    for each in routes:
        if each.length < shortest:
            return
        yield each
        if not each.route.partial:
            shortest = each.length


def find_inside(target: Target, topology: Topology) -> list[Parsed]:
    """The routes to parts of a target."""
    if target.prefixlen == target.max_prefixlen:
        return []
    table, first = read_table(topology, target.version), int(target.network_address)
    begin = bisect_left(table.starts, (first, target.prefixlen + 1))
    end = bisect_left(table.starts, (first | int(target.hostmask), target.max_prefixlen + 1))
    return table.ordered[begin:end]


def devices_of(routes: Iterable[Parsed]) -> tuple[str, ...]:
    """The devices of some routes, by name."""
    return tuple(sorted({device for each in routes for device in each.route.devices}))
