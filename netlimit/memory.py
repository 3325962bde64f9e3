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


class TooMuchMemory(NetlimitError):
    """Rules whose buckets may come to more than a kernel should be asked for."""


class Demand:
    """What the buckets of rules in force may come to, by gateway."""

    def __init__(self, rules: Iterable[tuple[Rule, int]] = (), set_size: int = _SIZE) -> None:
        """`rules` come with how many there are that differ in nothing but their target, which has the same length.
        `set_size` is the most entries of a set on the gateways."""
        self._set_size = set_size
        self._rooms: dict[str, dict[Group | Limit, Counter[Limit]]] = {"": {}}
        self._anywhere: int | None = None
        for rule, number in rules:
            self.add(rule, number)

    def add(self, rule: Rule, number: int = 1) -> None:
        """Take in rules that are alike but for their targets."""
        room = count_buckets(rule)
        if room < 2:  # all the single addresses that a gateway can hold come to less than it takes to keep their rules
            return
        limit = find_purpose(rule, _ANYWHERE)
        assert isinstance(limit, Limit)
        together, room = (limit.group, 1) if limit.group.scope == PEER else (limit, room)
        for host in rule.hosts or ("",):
            self._rooms.setdefault(host, {}).setdefault(together, Counter())[limit] += number * room
        self._anywhere = None

    @property
    def hosts(self) -> list[str]:
        """The gateways that rules name; "" stands for those that none names."""
        return sorted(self._rooms)

    def estimate(self, host: str) -> int:
        """The most bytes on a gateway."""
        anywhere = self._rooms[""]
        if self._anywhere is None:
            self._anywhere = sum(map(self._measure, anywhere.values()))
        size = self._anywhere
        # Only what names it is added up anew: there may be thousands of gateways, and of limits.
        for together, rooms in (self._rooms.get(host, {}) if host else {}).items():
            shared = anywhere.get(together, Counter[Limit]())
            size += self._measure(shared + rooms) - self._measure(shared)
        return size

    def _measure(self, rooms: Mapping[Limit, int]) -> int:
        return estimate_buckets(rooms, self._set_size)


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
    """What somebody should know who makes these changes, each from a rule to a rule; None if there is nothing.
    `find_stays` tells those that stay as they are, as `Demand` takes them, and is asked only when it matters. Raises
    TooMuchMemory."""
    new = [after for _, after in changes if after is not None and count_buckets(after) > 1 and after.in_force(now)]
    if sum(map(count_buckets, new)) < FEW:
        return None
    stays = list(find_stays(now))
    gone = [(before, 1) for before, _ in changes if before is not None and before.in_force(now)]
    before, after = Demand([*stays, *gone]), Demand([*stays, *((rule, 1) for rule in new)])
    concerned = {host for rule in new for host in rule.hosts or ("",)}
    sizes = {host: after.estimate(host) for host in (after.hosts if "" in concerned else sorted(concerned))}
    for host, size in sizes.items():
        if size > MOST_MEMORY and size > before.estimate(host):
            raise TooMuchMemory(
                f"With that, the buckets of limits {_name(host)} could come to {show_size(size)} of kernel memory, and "
                f"netlimit asks for {show_size(MOST_MEMORY)} at most: packets from, or to, ever other addresses take a "
                f"bucket for each of them. {ADVICE}"
            )
    most = max(sizes, key=lambda host: sizes[host])
    return say_much(sizes[most], _name(most)) if sizes[most] >= MUCH_MEMORY else None


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
