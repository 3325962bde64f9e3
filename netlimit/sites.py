"""Which gateways rules close, of all that are known and all that rules name: there can be thousands of either.

Each gateway is looked at with the rules that speak of it alone, and only if the change does. Those of which nothing is
known differ in nothing but their rules: of those that the same ones name, one is looked at for all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime

from netlimit.closure import (
    SHARE,
    Closed,
    Part,
    Site,
    Way,
    World,
    cut,
    is_closed,
    is_on,
    list_ways,
    may_close,
    measure,
    measure_addresses,
    need,
)
from netlimit.rules import Rule

_LITTLE = 1e-6
"""More than what adding shares in another order can make of them."""
_FAMILIES = (4, 6)
UNKNOWN = Site("", heard=False)
"""A gateway of which nothing is known, whatever its name."""
_FINEST = 24
"""What is finer than this power of two of all addresses is taken as this."""


class Naming:
    """Rules by the gateways that they name, in their order."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = list(rules)
        self._everywhere = [number for number, rule in enumerate(self._rules) if not rule.hosts]
        self._named: dict[str, list[int]] = {}
        for number, rule in enumerate(self._rules):
            for host in set(rule.hosts):
                self._named.setdefault(host, []).append(number)

    @property
    def everywhere(self) -> list[Rule]:
        """Those that name none."""
        return [self._rules[number] for number in self._everywhere]

    def speak_of(self, name: str) -> bool:
        """Whether any of them is for this gateway."""
        return bool(self._everywhere) or name in self._named

    def key(self, name: str) -> tuple[int, ...]:
        """What those that name a gateway have in common with those that name another, if it is the same."""
        return tuple(self._named.get(name, ()))

    def by_name(self, name: str) -> list[Rule]:
        """Those that name it."""
        return [self._rules[number] for number in self._named.get(name, ())]

    def at(self, name: str) -> list[Rule]:
        """All that are for it."""
        return [self._rules[number] for number in sorted([*self._everywhere, *self._named.get(name, ())])]


class Common:
    """What rules for every gateway close of one that only rules name, found out once for all of those."""

    def __init__(self, rules: Sequence[Rule], ways: Collection[Way]) -> None:
        self._parts = {
            (family, way): [part for part in cut(rules, UNKNOWN, family) if is_on(part, way)]
            for family in _FAMILIES
            for way in ways
        }
        self._measured = {
            (family, way): sum(measure(part, way, _find_world(family).areas[0]) for part in parts)
            for (family, way), parts in self._parts.items()
        }
        self._known: dict[tuple[int, Way, int], bool] = {}

    def stays_open(self, site: Site, named: Sequence[Rule]) -> bool:
        """Whether it can be told without a closer look that a gateway stays open with these rules that name it."""
        cuts = {family: cut(named, site, family) for family in _FAMILIES}
        return all(
            self._is_open(family, way, [part for part in cuts[family] if is_on(part, way)])
            for family, way in self._parts
        )

    def _is_open(self, family: int, way: Way, added: Collection[Part]) -> bool:
        area = _find_world(family).areas[0]
        if self._measured[family, way] + sum(measure(part, way, area) for part in added) < need(way) - _LITTLE:
            return True
        # Even if nothing of what they close were closed already.
        more = sum(measure_addresses(part, area) for part in added) + _LITTLE
        if more >= SHARE:
            return False
        return not self._is_nearly_closed(family, way, min(_FINEST, math.floor(-math.log2(more))))

    def _is_nearly_closed(self, family: int, way: Way, fineness: int) -> bool:
        """Whether it would be closed with this part of all addresses (2^-fineness) more."""
        key = family, way, fineness
        if key not in self._known:
            share = SHARE - math.ldexp(1, -fineness)
            self._known[key] = share <= 0 or is_closed(self._parts[family, way], way, _find_world(family), share)
        return self._known[key]


def _find_world(family: int) -> World:
    (world,) = UNKNOWN.worlds[family]
    return world


def pick(sites: Iterable[Site], changing: Naming, *namings: Naming) -> Iterator[Site]:
    """The gateways of which something that changes speaks; of those of which nothing is known, the first of all that
    the same rules name."""
    seen = set()
    for site in sites:
        if not changing.speak_of(site.name):
            continue
        if not site.heard:
            key = tuple(naming.key(site.name) for naming in namings)
            if key in seen:
                continue
            seen.add(key)
        yield site


def find_closed(before: Iterable[Rule], after: Iterable[Rule], sites: Iterable[Site], now: datetime) -> Closed | None:
    """The first gateway that rules close which did not close it before, now or once others have ended."""
    sites = list(sites)
    places = frozenset[str]().union(*(site.places for site in sites if site.heard))
    old, new = ([rule for rule in rules if may_close(rule, places)] for rules in (before, after))
    known = set(old)
    changed = {rule for rule in new if rule not in known}
    if not changed:
        return None
    moments = sorted({now, *(rule.expires_at for rule in old if rule.expires_at and rule.expires_at > now)})
    were, are = Naming(old), Naming(new)
    common = Common(are.everywhere, tuple(list_ways(UNKNOWN, ())))
    for site in pick(sites, Naming(changed), were, are):
        if not site.heard and common.stays_open(site, are.by_name(site.name)):
            continue
        closed = _find_closed_at(site, were.at(site.name), are.at(site.name), changed, moments)
        if closed is not None:
            return closed
    return None


def _find_closed_at(
    site: Site, old: Sequence[Rule], new: Sequence[Rule], changed: Collection[Rule], moments: Sequence[datetime]
) -> Closed | None:
    for family in _FAMILIES:
        are = cut(new, site, family)
        for way in list_ways(site, are):
            here = [part for part in are if is_on(part, way)]
            mine = [part.rule for part in here if part.rule in changed]
            if not mine:
                continue
            shut = [world for world in site.worlds[family] if is_closed(here, way, world)]
            if not shut:
                continue
            were = [part for part in cut(old, site, family) if is_on(part, way)]
            world = next((world for world in shut if _comes_to_close(were, here, way, world, moments)), None)
            if world is not None:
                rule = min(mine, key=lambda rule: rule.target.prefixlen)
                return Closed(site.name, world.name, way.port, way.address, rule)
    return None


def _comes_to_close(
    were: Collection[Part], are: Collection[Part], way: Way, world: World, moments: Sequence[datetime]
) -> bool:
    """Whether a way is closed at one of these moments, that was not before. Rules end, and none begins: what is open
    at one of them is so at all later ones."""
    if not is_closed(_last(are, moments[0]), way, world):
        return False
    low, high = 0, len(moments)
    while high - low > 1:
        middle = (low + high) // 2
        if is_closed(_last(are, moments[middle]), way, world):
            low = middle
        else:
            high = middle
    return not is_closed(_last(were, moments[low]), way, world)


def _last(parts: Iterable[Part], at: datetime) -> list[Part]:
    return [part for part in parts if not part.rule.expired(at)]
