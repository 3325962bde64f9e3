"""The routes of a host, kept so that those of a target are found fast: targets are many, and routes can be."""

from __future__ import annotations

import socket
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from netlimit.rules import Target
from netlimit.tree import Lookup, Route, Topology


class Parsed(NamedTuple):
    """A route with its prefix in numbers: the first address, the length, and the last address. A full table has a
    million of them, and an object of each network would take most of the time and of the memory."""

    first: int
    length: int
    last: int
    route: Route

    @property
    def version(self) -> int:
        """The family: 4 or 6."""
        return 6 if ":" in self.route.prefix else 4

    @property
    def longest(self) -> int:
        """The length of the prefix of one address."""
        return _BITS[self.version]

    @property
    def network(self) -> Target:
        """The prefix as a network."""
        return (IPv4Network if self.version == 4 else IPv6Network)((self.first, self.length))

    def is_within(self, other: Parsed) -> bool:
        """Whether its prefix lies in another's, or is the same."""
        return other.first <= self.first and self.last <= other.last


_BITS = {4: 32, 6: 128}
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_find_place = itemgetter(0, 1)


class Table(NamedTuple):
    """The routes of a family in the order of their first addresses and lengths (`ordered`; `starts` are those alone),
    and where those to a prefix begin there (`places`); the lengths that there are, the longest first; the routing rules
    that lead to any of them; their devices, and those of default routes; whether `every` route is one for all packets
    to its prefix, and none has another table asked; those that do, by table (`throws`)."""

    ordered: list[Parsed]
    starts: list[tuple[int, int]]
    places: dict[tuple[int, int], int]
    lengths: list[int]
    lookups: tuple[Lookup, ...]
    devices: tuple[str, ...]
    default: tuple[str, ...]
    every: bool
    throws: dict[int, list[Parsed]]

    def find(self, first: int, length: int) -> list[Parsed]:
        """The routes to a prefix."""
        begin = self.places.get((first, length))
        if begin is None:
            return []
        end = begin + 1
        while end < len(self.starts) and self.starts[end] == self.starts[begin]:
            end += 1
        return self.ordered[begin:end]


@lru_cache(maxsize=4)
def read_table(topology: Topology, family: int) -> Table:
    """The routes of a family, put in order once for each reading."""
    ordered = sorted(_parse(topology.routes, family), key=_find_place)
    throws: dict[int, list[Parsed]] = {}
    for each in _parse(topology.throws, family):
        throws.setdefault(each.route.table, []).append(each)
    starts = list(map(_find_place, ordered))
    places = dict(zip(reversed(starts), reversed(range(len(starts))), strict=True))
    lengths = sorted({each.length for each in ordered}, reverse=True)
    lookups = tuple(_find_lookups(topology, family, {each.route.table for each in ordered}))
    default = devices_of(each for each in ordered if each.length == 0)
    every = not throws and not any(each.route.partial for each in ordered)
    return Table(ordered, starts, places, lengths, lookups, devices_of(ordered), default, every, throws)


def _parse(routes: Iterable[Route], family: int) -> Iterator[Parsed]:
    kind, masks = _FAMILIES[family], _MASKS[family]
    for route in routes:
        if (":" in route.prefix) == (family == 6):
            address, _, bits = route.prefix.partition("/")
            first, length = int.from_bytes(socket.inet_pton(kind, address)), int(bits)
            yield Parsed(first, length, first | masks[length], route)


_MASKS = {family: [(1 << bits - length) - 1 for length in range(bits + 1)] for family, bits in _BITS.items()}
"""The bits behind a prefix, by its length."""


def _find_lookups(topology: Topology, family: int, tables: set[int]) -> Iterator[Lookup]:
    """The rules that lead to any of these tables. One that no rule names can be the table of a VRF, or one that segment
    routing leads to: it counts for whichever packets do not come to the rules."""
    known = [each for each in topology.lookups if each.family == family and each.table in tables]
    yield from (Lookup(family, table) for table in sorted(tables - {each.table for each in known}))
    yield from known


@lru_cache(maxsize=8)
def read_starts(topology: Topology, family: int, devices: tuple[str, ...]) -> list[tuple[int, int]]:
    """The first address and the length of each prefix that leads to one of the devices, in order."""
    table, wanted = read_table(topology, family), frozenset(devices)
    led = zip(table.starts, table.ordered, strict=True)
    return [start for start, each in led if not wanted.isdisjoint(each.route.devices)]


def find_around(target: Target, topology: Topology) -> Iterator[Parsed]:
    """The routes to all of a target, those with the longest prefix first."""
    return (each for alike in list_around(target, topology) for each in alike)


def list_around(target: Target, topology: Topology) -> Iterator[list[Parsed]]:
    """The routes to all of a target, those to one prefix together."""
    table, address = read_table(topology, target.version), int(target.network_address)
    masks = _MASKS[target.version]
    for length in table.lengths:
        if length <= target.prefixlen and (alike := table.find(address & ~masks[length], length)):
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
        around, passes = _find_thrown(target, table.throws.get(lookup.table, ()))
        found += [each for each in best if each.length >= around]
        if lookup.always and not passes and any(not each.route.partial and each.length > around for each in best):
            break
    attached = any(each.route.attached for each in found)
    return [each for each in found if each.length or not attached]


def _find_thrown(target: Target, throws: Iterable[Parsed]) -> tuple[int, bool]:
    """The length from which on routes of a table still count for a target, for shorter ones are behind a route that has
    the next table asked (-1: all do), and whether that is so of a part of it. One for some packets alone hides nothing
    from the others."""
    first, last = int(target.network_address), int(target.broadcast_address)
    around, passes = -1, False
    for each in throws:
        if each.first <= first and last <= each.last and not each.route.partial:
            around = max(around, each.length)
        elif each.first <= last and first <= each.last:
            passes = True
    return around, passes


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
    return tuple(sorted({*chain.from_iterable({each.route.devices for each in routes})}))
