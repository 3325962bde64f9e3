"""How many kinds of limits a host can hold: what is told before it hurts, and what is refused.

A kind (family, direction, protocol, ports, interface, kind of rate, whose bucket) has sets, chains and a table of
buckets of its own, however few targets: kernel memory, and time with every change of the tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from math import prod

from netlimit.hashlimit import TABLE_MAX, TABLE_SIZES, find_table_size
from netlimit.limits import Group, Limit, Purpose, VerdictGroup
from netlimit.peers import find_peer_slots
from netlimit.rates import Kind
from netlimit.rules import Action, Direction, Rule, Selector

MOST_KINDS = 4096
"""Of each address family."""
MANY_KINDS = 1024
MOST_PLACES = 8192
"""Of each address family, for the ports of all kinds: packets are led to a kind by a tree, which halves the range of
ports, and each port or aligned part of a range has a place there of its own, with two to three rules."""
MOST_STRANGERS = 1000
"""So many gateways that have not reported rules may name: each of them is one more that rules may close."""
MOST_MET = 256
"""Of the kinds that a packet must be asked one after the other: those of all traffic, or of wide ranges of ports."""
_WIDE = 64
_Cell = tuple[int, Direction, bool, str, int]
MOST_MEMORY = 256 * 2**20
"""Bytes of kernel memory for kinds, without the entries of sets (about 100 bytes each) and buckets in use (128)."""
PREFIX = "Many kinds of limits"
_ADVICE = (
    "Each takes kernel memory, and time with every change. Write ports as ranges or lists of one rule (15 ports), give "
    "targets the same rate, or leave ports out."
)


class Kinds:
    """Counts the kinds that are held."""

    def __init__(self) -> None:
        self._held: Counter[Group | Purpose] = Counter()
        self._number = Counter[int]()
        self._met = Counter[_Cell]()
        self._places = Counter[int]()
        self.memory = 0

    def add(self, purpose: Purpose) -> None:
        """A purpose has its first rule."""
        kind = _kind_of(purpose)
        if kind not in self._held:
            self._number[_family_of(purpose)] += 1
            self._met.update(_find_cells(purpose))
            self._places[_family_of(purpose)] += count_places(_selector_of(purpose))
        self._held[kind] += 1
        self.memory += estimate_memory(purpose)

    def remove(self, purpose: Purpose) -> None:
        """A purpose has lost its last rule."""
        kind = _kind_of(purpose)
        self._held[kind] -= 1
        if not self._held[kind]:
            del self._held[kind]
            self._number[_family_of(purpose)] -= 1
            self._met.subtract(_find_cells(purpose))
            self._places[_family_of(purpose)] -= count_places(_selector_of(purpose))
        self.memory -= estimate_memory(purpose)

    def refuse(self, purpose: Purpose) -> str | None:
        """Why there is no room for one more purpose; None if there is."""
        family = _family_of(purpose)
        new = _kind_of(purpose) not in self._held
        if new and self._number[family] >= MOST_KINDS:
            return _say_most(family)
        if new and self._places[family] + count_places(_selector_of(purpose)) > MOST_PLACES:
            return _say_places(family)
        if new and any(self._met[cell] >= _find_most(cell) for cell in _find_cells(purpose)):
            return (
                f"A packet would be asked by more than {MOST_MET} kinds of limits that speak of the same wide range of "
                "ports, or of all traffic; so many would cost every packet tens of microseconds. Name single ports or "
                "narrow ranges, or give targets (and what is observed) the same rate."
            )
        if self.memory + estimate_memory(purpose) > MOST_MEMORY:
            return (
                f"What is limited on this host takes {self.memory >> 20} MB of kernel memory for sets and tables, the "
                f"most that netlimit asks for. {_ADVICE}"
            )
        return None

    @property
    def warning(self) -> str | None:
        """What an operator should know before it hurts."""
        most = max(self._number.values(), default=0)
        met = max((count * MOST_MET // _find_most(cell) for cell, count in self._met.items()), default=0)
        places = max(self._places.values(), default=0)
        few = most < MANY_KINDS and met < MOST_MET // 2 and places < MOST_PLACES // 2
        if few and self.memory < MOST_MEMORY // 2:
            return None
        return (
            f"{PREFIX}: {most} of the {MOST_KINDS} that there can be of an address family, {met} of the {MOST_MET} "
            f"that can be asked of one packet, {places} of {MOST_PLACES} places of ports, about "
            f"{max(1, self.memory >> 20)} of {MOST_MEMORY >> 20} MB of kernel memory. {_ADVICE}"
        )


def find_crowd(rules: Iterable[Rule]) -> str | None:
    """Why rules can never all be held together; None if they may. Quick, for there can be 200,000."""
    kinds: dict[tuple[int, str], set[tuple[Direction, Selector]]] = {}
    for rule in rules:
        if rule.enabled and rule.action is not Action.SHAPE:
            for host in rule.hosts or ("",):
                kinds.setdefault((rule.family, host), set()).add((rule.direction, rule.selector))
    for (family, _), each in kinds.items():
        if len(each) > MOST_KINDS:
            return _say_most(family, len(each))
        places = sum(count_places(selector) for _, selector in each)
        if places > MOST_PLACES:
            return _say_places(family, places)
    return None


def find_strangers(
    rules: Iterable[Rule], known: Collection[str], find_kept: Callable[[], Collection[str]]
) -> str | None:
    """Why no more gateways can be named that nobody knows; None if there are few, or if rules bring none. `find_kept`
    tells those that other rules name, and is asked only when it matters."""
    new = {host for rule in rules for host in rule.hosts}.difference(known)
    if not new:
        return None
    kept = set(find_kept()).difference(known)
    number = len(kept | new)
    if number <= MOST_STRANGERS or new <= kept:
        return None
    return (
        f"With that, rules would name {number:,} gateways that have never reported, such as '{min(new - kept)}'; there "
        f"can be {MOST_STRANGERS:,}. Leave `hosts` out of rules for all gateways, or remove those for gateways that "
        "will not come."
    )


def is_particular(rule: Rule) -> bool:
    """Whether a rule speaks of ports or of an interface, so that it adds to the kinds."""
    selector = rule.selector
    return bool(selector.ports or selector.source_ports or selector.interface)


@lru_cache(maxsize=MOST_KINDS)
def count_places(selector: Selector) -> int:
    """How many places a selector has in the trees of ports, at most; 0 for one that names none."""
    sides = [ranges for ranges in (selector.ports, selector.source_ports) if ranges]
    return prod(sum(_count_parts(*each) for each in ranges) for ranges in sides) if sides else 0


def _count_parts(low: int, high: int) -> int:
    """How many aligned blocks, each of a power of two, a range of ports consists of."""
    parts = 0
    while low <= high:
        size = low & -low or 1 << 16
        while low + size - 1 > high:
            size >>= 1
        low, parts = low + size, parts + 1
    return parts


def estimate_memory(purpose: Purpose) -> int:
    """Bytes of kernel memory for a purpose, without entries (measured on Linux 6.18, x86-64)."""
    if isinstance(purpose, VerdictGroup):
        return 3_000
    group = purpose.group
    if group.kind is Kind.CONCURRENT:
        return 9_000
    if group.gated:
        return 9_000 + 8 * (TABLE_SIZES[-1] + find_peer_slots(1, TABLE_MAX))
    return 9_000 + 8 * find_table_size(group.count_buckets(f"/{group.longest}"))


def _family_of(purpose: Purpose) -> int:
    """The address family that a purpose is about."""
    return purpose.group.family if isinstance(purpose, Limit) else purpose.family


def _selector_of(purpose: Purpose) -> Selector:
    return purpose.group.selector if isinstance(purpose, Limit) else purpose.selector


def _find_cells(purpose: Purpose) -> Iterator[_Cell]:
    """Where a kind meets many packets: everywhere, or in blocks of ports that a wide range of it touches."""
    if isinstance(purpose, VerdictGroup):
        return  # asked only of those whom some verdict names
    group = purpose.group
    selector = group.selector
    if selector.interface:
        return
    where = group.family, group.direction, group.kind is Kind.CONCURRENT
    side = "dst" if selector.ports else "src"
    ranges = selector.ports or selector.source_ports
    if not ranges:
        yield (*where, "", 0)
    for low, high in ranges:
        if high - low >= _WIDE:
            yield from ((*where, f"{selector.protocol} {side}", block) for block in range(low >> 12, (high >> 12) + 1))


def _find_most(cell: _Cell) -> int:
    """Connections at once are asked about when one opens, and not of every packet."""
    return 4 * MOST_MET if cell[2] else MOST_MET


def _kind_of(purpose: Purpose) -> Group | Purpose:
    """Limits that are told apart by a mark share sets."""
    return purpose.group if isinstance(purpose, Limit) and purpose.group.marked else purpose


def _say_most(family: int, asked: int | None = None) -> str:
    first = (
        "This host holds" if asked is None else f"With these rules there are {asked} kinds of IPv{family}; a host holds"
    )
    return (
        f"{first} {MOST_KINDS} kinds of limits of IPv{family} (by direction, protocol, ports, interface, kind of "
        f"rate), the most there can be. {_ADVICE}"
    )


def _say_places(family: int, asked: int | None = None) -> str:
    first = (
        f"The limits of IPv{family} on this host name"
        if asked is None
        else f"The limits of IPv{family} would then name"
    )
    number = "all the" if asked is None else f"{asked:,}"
    return (
        f"{first} {number} ports that can be told apart: {MOST_PLACES:,} single ports, or aligned parts of ranges such "
        "as 1024-2047, of all kinds together. More would make each change take tens of seconds. Write ports as ranges, "
        "name the same ports in more rules, or leave ports out."
    )
