"""How much kernel memory the buckets of limits may come to: what is told before it hurts, and what is refused.

hashlimit keeps a bucket for each address that a packet names, in the table of each limit that the packet meets, until
the bucket is full again: up to a day. Addresses can be feigned, and a few seconds suffice for a million of them. So all
that there is room for counts, however soon it would be forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

from netlimit.errors import NetlimitError
from netlimit.hashlimit import TABLE_MAX
from netlimit.limits import Facts, Group, Limit, find_purpose
from netlimit.peers import find_peer_slots
from netlimit.rates import Kind
from netlimit.rules import HOST, PEER, TARGET, Action, Rule
from netlimit.state import SLOT_ROOM

BUCKET = 128
"""Bytes of a bucket, IPv4 as IPv6. Measured on Linux 6.18, x86-64: 120.4, for 34 share a page of 4,096; they cannot be
reclaimed. A full table takes 120 MB."""
PEER_ENTRY = 48
"""Bytes of an entry in a set of peers (measured: 29 for IPv4, 45 for IPv6)."""
MUCH_MEMORY = 512 * 2**20
"""Bytes from which on it is told: four tables that are as large as can be."""
MOST_MEMORY = 4 * 2**30
"""Bytes beyond which no more rules are taken. Those that are kept stay in force whatever they come to."""
FEW = 256
"""A change that adds fewer buckets is not looked at: it costs nobody a look at all rules, and 30 kB at most."""
ADVICE = (
    "What takes less: smaller targets, `per: /n` or `per: target` instead of each host, or fewer kinds of limits "
    "for the same targets (rates, ports, protocols, interfaces)."
)
_SIZE = Facts().set_size
_ANYWHERE = Facts()


_Rooms = dict[Group | Limit, dict[Limit, int]]
"""How many buckets the targets of a limit's rules can have, by what shares a set of peers."""


class TooMuchMemory(NetlimitError):
    """Rules whose buckets may come to more than a kernel should be asked for."""


class Demand:
    """What the buckets of rules in force may come to, by gateway."""

    def __init__(self, rules: Iterable[tuple[Rule, int]] = (), set_size: int = _SIZE) -> None:
        """`rules` come with how many there are that differ in nothing but their target, which has the same length.
        `set_size` is the most entries of a set on the gateways."""
        self._set_size = set_size
        # By the gateways that rules name, as they name them: many rules name the same, and each may name hundreds.
        self._places: dict[tuple[str, ...], int] = {(): 0}
        self._rooms: list[_Rooms] = [{}]
        self._naming: dict[str, list[int]] = {}
        self._merged: dict[tuple[int, ...], int] = {}
        for rule, number in rules:
            self.add(rule, number)

    def add(self, rule: Rule, number: int = 1) -> None:
        """Take in rules that are alike but for their targets; a negative number takes them out."""
        room = count_buckets(rule)
        if room < 2:  # all the single addresses that a gateway can hold come to less than it takes to keep their rules
            return
        limit = find_purpose(rule, _ANYWHERE)
        assert isinstance(limit, Limit)
        together, room = (limit.group, 1) if limit.group.scope == PEER else (limit, room)
        held = self._rooms[self._find_place(rule.hosts)].setdefault(together, {})
        held[limit] = held.get(limit, 0) + number * room
        self._merged.clear()

    @property
    def hosts(self) -> list[str]:
        """The gateways that rules name; "" stands for those that none names."""
        return ["", *sorted(self._naming)]

    def estimate(self, host: str) -> int:
        """The most bytes on a gateway. Those that the same rules name come to the same."""
        naming = tuple(self._naming.get(host, ()))
        if naming not in self._merged:
            self._merged[naming] = self._measure_all(naming)
        return self._merged[naming]

    def _find_place(self, hosts: tuple[str, ...]) -> int:
        place = self._places.setdefault(hosts, len(self._rooms))
        if place == len(self._rooms):
            self._rooms.append({})
            for host in set(hosts):
                self._naming.setdefault(host, []).append(place)
        return place

    def _measure_all(self, naming: tuple[int, ...]) -> int:
        """What stands everywhere, and what names the gateway."""
        anywhere = self._rooms[0]
        if not naming:
            return sum(map(self._measure, anywhere.values()))
        # Only what names it is added up anew: there may be thousands of gateways, and of limits.
        added: _Rooms = {}
        for place in naming:
            for together, rooms in self._rooms[place].items():
                held = added.setdefault(together, {})
                for limit, number in rooms.items():
                    held[limit] = held.get(limit, 0) + number
        size = self.estimate("")
        for together, rooms in added.items():
            shared = anywhere.get(together)
            if shared is None:
                size += self._measure(rooms)
                continue
            both = {limit: shared.get(limit, 0) + rooms.get(limit, 0) for limit in {**shared, **rooms}}
            size += self._measure(both) - self._measure(shared)
        return size

    def _measure(self, rooms: Mapping[Limit, int]) -> int:
        if len(rooms) == 1:
            ((limit, number),) = rooms.items()
            if limit.group.scope != PEER:
                return BUCKET * min(TABLE_MAX, max(0, number))
        return estimate_buckets({limit: number for limit, number in rooms.items() if number > 0}, self._set_size)


def count_buckets(rule: Rule) -> int:
    """How many buckets a rule can come to, if nothing but its table bounds them."""
    metered = rule.rate is not None and rule.rate.kind is not Kind.CONCURRENT and rule.action is not Action.SHAPE
    if not metered or rule.per is None:
        return 0
    if rule.per == TARGET:
        return 1
    if rule.per == PEER:
        return find_peer_slots(1, _SIZE) * SLOT_ROOM
    bucket = rule.target.max_prefixlen if rule.per == HOST else int(rule.per[1:])
    return 1 << max(0, bucket - rule.target.prefixlen)


def estimate_buckets(rooms: Mapping[Limit, int], set_size: int = _SIZE) -> int:
    """The most bytes that the buckets of limits come to, each of which has a table. `rooms` says how many buckets the
    targets of its rules can have, or, for peers, how many targets there are: how many peers each of them has, a set
    bounds, which all limits of a group share."""
    targets = Counter[Group]()
    for limit, number in rooms.items():
        if limit.group.scope == PEER:
            targets[limit.group] += number
    peers = {group: find_peer_slots(number, set_size) * SLOT_ROOM for group, number in targets.items()}
    tables = (min(TABLE_MAX, number * peers.get(limit.group, 1)) for limit, number in rooms.items())
    return BUCKET * sum(tables) + PEER_ENTRY * sum(peers.values())


def weigh(
    changes: Sequence[tuple[Rule | None, Rule | None]],
    find_stays: Callable[[datetime], Iterable[tuple[Rule, int]]],
    now: datetime,
) -> str | None:
    """What somebody should know who makes these changes, each from a rule to a rule; None if there is nothing, or if
    none of them can take more than before. `find_stays` tells those that stay as they are, as `Demand` takes them, and
    is asked only when it matters. Raises TooMuchMemory, and what `find_stays` raises."""
    grown = [after for change in changes if (after := _find_grown(*change, now)) is not None]
    if sum(map(count_buckets, grown)) < FEW:
        return None
    demand = Demand(find_stays(now))
    concerned = {host for rule in grown for host in rule.hosts or ("",)}
    come = [after for _, after in changes if after is not None and after.in_force(now)]
    for rule in come:
        demand.add(rule)
    sizes = {host: demand.estimate(host) for host in (demand.hosts if "" in concerned else sorted(concerned))}
    beyond = {host: size for host, size in sizes.items() if size > MOST_MEMORY}
    if beyond:
        for rule in come:
            demand.add(rule, -1)
        for before, _ in changes:
            if before is not None and before.in_force(now):
                demand.add(before)
    for host, size in beyond.items():
        if size > demand.estimate(host):
            raise TooMuchMemory(
                f"With that, the buckets of limits {_name(host)} could come to {show_size(size)} of kernel memory, and "
                f"netlimit asks for {show_size(MOST_MEMORY)} at most: packets from, or to, ever other addresses take a "
                f"bucket for each of them. {ADVICE}"
            )
    most = max(sizes, key=lambda host: sizes[host])
    return say_much(sizes[most], _name(most)) if sizes[most] >= MUCH_MEMORY else None


def _find_grown(before: Rule | None, after: Rule | None, now: datetime) -> Rule | None:
    """What comes of a change, if it can take more memory than what was before."""
    if after is None or not after.in_force(now) or (room := count_buckets(after)) < 2:
        return None
    if before is None or not before.in_force(now) or count_buckets(before) < room:
        return after
    widened = bool(before.hosts) and not (after.hosts and set(after.hosts) <= set(before.hosts))
    return after if widened or find_purpose(before, _ANYWHERE) != find_purpose(after, _ANYWHERE) else None


def say_much(size: int, where: str) -> str:
    """What an operator should know before it hurts."""
    return (
        f"The buckets of limits {where} could come to {show_size(size)} of kernel memory: packets from, or to, ever "
        "other addresses, which may be feigned, take a bucket for each of them, and it stays until it is full again "
        f"(hours, with slow rates). Beyond {show_size(MOST_MEMORY)} no more rules are taken. {ADVICE}"
    )


def show_size(size: int) -> str:
    """Bytes as people read them."""
    return f"{f'{size / 2**30:.1f}'.removesuffix('.0')} GB" if size >= 2**30 else f"{max(1, size >> 20)} MB"


def _name(host: str) -> str:
    return f"on {host}" if host else "on a gateway"
