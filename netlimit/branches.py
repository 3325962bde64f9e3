"""The tree of one device while it is worked out: branches that share, and the leaves that hosts have.

A class guarantees `rate` and may borrow up to `ceil`. HTB lets a class send at its own rate whatever the class above
it has left, so what is guaranteed below a branch must not add up to more than the branch has; where rules ask for
more, those of the branches are cut in proportion, and within a child HTB everybody gets as much at a time as his
quantum says. What is borrowed HTB parts in the same way.

HTB takes time for each class in proportion to those that its qdisc has, so hosts are dealt out to child HTBs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain

from netlimit.backlog import Backlog
from netlimit.htb import LARGEST_QUANTUM, MTU, size_beside, size_class, size_leaf, size_services
from netlimit.tree import (
    BESIDE,
    FIRST_CHILD,
    LAST_BUDGET,
    LINE,
    SERVICES,
    TOP,
    LeafKind,
    QueueClass,
    Tree,
    classid,
)

SHARD_HOSTS = 1000
"""The most hosts of one child HTB."""
RANKS = 16
"""The priority stays with a packet on its way to lower devices (of a VLAN, a bond, a tunnel), where pfifo_fast, prio,
mqprio and taprio take its low four bits for a rank. So classes of hosts are multiples of it, which is what packets
have of which nobody says anything."""
_LEAST = 32
"""Bytes a second; the least that a class is guaranteed, for tc counts how long a burst takes in 32 bits."""
REMAINDER = 100
"""What has no guarantee of its own gets what the others leave, and at least this part of the branch."""


@dataclass(slots=True)
class Wish:
    """What a class is asked to be: bytes a second guaranteed (None: what is left) and at most, and its burst."""

    rate: int | None
    ceil: int
    burst: int | None = None


@dataclass(slots=True)
class _Branch:
    """An inner class, or the class that a child HTB hangs on (`shard`)."""

    parent: int
    wish: Wish
    leaf: bool
    children: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Shard:
    """A child HTB: its number, the class it hangs on, what the hosts in it have been guaranteed in all, and how many
    bytes may wait for each (None: as many as if it were alone)."""

    number: int
    under: int
    hosts: dict[int, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    total: int = 0
    share: int | None = None

    @property
    def handle(self) -> int:
        """Of the child HTB."""
        return FIRST_CHILD - 1 + self.number

    def take(self, spent: set[int]) -> int:
        """A minor that nobody has; not one of the classids that are `spent`."""
        while self.free:
            minor = heappop(self.free)
            if minor not in self.hosts:
                return minor
        # Those found in the kernel leave gaps.
        minors = chain(range(RANKS * (len(self.hosts) + 1), LAST_BUDGET, RANKS), range(1, LAST_BUDGET))
        return next(each for each in minors if each not in self.hosts and classid(self.handle, each) not in spent)


class Branches:
    """The HTB of one device. `touched` are the classes that changed, `tree` is what they come to. `spent` are the
    classes of hosts that went, which nobody else may have while the kernel leads packets there."""

    def __init__(self, handle: int, hz: int, leaf: LeafKind, backlog: Backlog, direct: int = 0) -> None:
        self.tree = Tree(handle, {}, {}, direct)
        self.classes: dict[int, QueueClass] = self.tree.classes  # type: ignore[assignment]  # it is ours to write
        self.touched: set[int] = set()
        self.spent: set[int] = set()
        self.shards: dict[int, Shard] = {}
        self._children: dict[int, int] = self.tree.children  # type: ignore[assignment]
        self._hz = hz
        self._leaf: LeafKind = leaf
        self._backlog = backlog
        self.top = classid(handle, TOP)
        self._branches: dict[int, _Branch] = {self.top: _Branch(classid(handle, 0), Wish(LINE, LINE), False)}
        self._stale: set[int] = set()
        self._write(self.top, self._size(self._branches[self.top], LINE))

    def give_room(self, direct: int) -> None:
        """Let the root take so many packets without a class, should it be made anew. Another device needs another
        number, and so does one of which others have changed how much it takes by itself."""
        if direct != self.tree.direct:
            self.tree = replace(self.tree, direct=direct)

    # -- branches

    def branch(self, number: int, parent: int, wish: Wish, *, leaf: bool) -> None:
        """Put a class into the root HTB, or give the one that is there new values: an inner one, or a leaf."""
        before = self._branches.get(number)
        if before is not None and (before.parent, before.leaf) != (parent, leaf):
            self.cut(number)
            before = None
        if before is None:
            self._branches[number] = _Branch(parent, wish, leaf)
            self._branches[parent].children.add(number)
        elif before.wish == wish:
            return
        else:
            before.wish = wish
        self._stale |= {parent} if leaf else {parent, number}

    def limit(self, rate: int | None, burst: int | None = None) -> None:
        """Give the whole device a rate, or none. Where there is one, there are classes beside it, and one under it,
        for what this host itself sends."""
        handle = self.tree.handle
        own = size_beside(classid(handle, 0), rate, self._hz, self._leaf) if rate else {}
        if rate:
            own[SERVICES] = size_services(self.top, rate, self._hz, self._leaf)
        for minor in (*BESIDE, SERVICES):
            if minor in own:
                self._write(classid(handle, minor), own[minor])
            else:
                self._drop(classid(handle, minor))
        wish = Wish(rate or LINE, rate or LINE, burst)
        if self._branches[self.top].wish != wish:
            self._branches[self.top].wish = wish
            self._stale.add(self.top)

    def cut(self, number: int) -> None:
        """Take a class out of the root HTB; one that is not there is no error."""
        branch = self._branches.pop(number, None)
        if branch is not None:
            self._branches[branch.parent].children.discard(number)
            self._stale.add(branch.parent)
            self._stale.discard(number)
            self._drop(number)

    def knows(self, number: int) -> bool:
        """Whether the class is in the root HTB."""
        return number in self._branches

    # -- hosts

    def shard(self, number: int, parent: int) -> Shard:
        """The child HTB of this number, made under an inner class if it is new."""
        shard = self.shards.get(number)
        if shard is None:
            shard = self.shards[number] = Shard(number, classid(self.tree.handle, number))
            self._branches[shard.under] = _Branch(parent, Wish(0, self._branches[parent].wish.ceil), False)
            self._branches[parent].children.add(shard.under)
            self._children[shard.handle] = shard.under
            self._stale |= {parent, shard.under}
        return shard

    def host(self, shard: Shard, minor: int, rate: int, ceil: int, burst: int | None) -> int:
        """Put a host into a child HTB, or give it new rates; returns its classid."""
        shard.total += rate - shard.hosts.get(minor, 0)
        shard.hosts[minor] = rate
        number = classid(shard.handle, minor)
        above = classid(shard.handle, TOP)
        self._write(number, size_class(above, rate, ceil, self._hz, burst, self._leaf, shard.share))
        self._stale.add(self._branches[shard.under].parent)
        return number

    def remove(self, number: int) -> None:
        """Take a host out; a child HTB without any goes with it."""
        shard = self.shards[(number >> 16) - FIRST_CHILD + 1]
        shard.total -= shard.hosts.pop(number & 0xFFFF)
        self.spent.add(number)
        self._drop(number)
        self._stale.add(self._branches[shard.under].parent)
        if not shard.hosts:
            del self.shards[shard.number], self._children[shard.handle]
            self._drop(classid(shard.handle, TOP))
            self.cut(shard.under)

    def recycle(self) -> None:
        """The kernel leads nothing any more to where those were that went."""
        for number in self.spent:
            shard = self.shards.get((number >> 16) - FIRST_CHILD + 1)
            if shard is not None:
                heappush(shard.free, number & 0xFFFF)
        self.spent.clear()

    # -- sharing

    def settle(self) -> None:
        """Part what each branch has among those below it, where anything has changed, down to the smallest."""
        while self._stale:
            number = self._stale.pop()
            if number in self._branches:
                self._part(number)
        self._share()

    def asked(self, number: int) -> tuple[int, int]:
        """What all below a branch are to be guaranteed, and what it has: bytes a second."""
        branch = self._branches[number]
        return sum(self._wants(child) or 0 for child in branch.children), branch.wish.rate or branch.wish.ceil

    def _wants(self, number: int) -> int | None:
        shard = self.shards.get(number & 0xFFFF)
        return shard.total if shard is not None and shard.under == number else self._branches[number].wish.rate

    def _part(self, number: int) -> None:
        branch = self._branches[number]
        if number == self.top:
            self._write(number, self._size(branch, branch.wish.rate or LINE))
        if number not in self.classes:
            return  # it is parted when it has got its own share
        asked, room = self.asked(number)[0], self._find_room(number)
        idle = [child for child in branch.children if self._wants(child) is None]
        left = max(room - asked, room // REMAINDER) // len(idle) if idle else 0
        cut = room - left * len(idle)
        for child in branch.children:
            want = self._wants(child)
            share = left if want is None else want if asked <= cut else want * cut // asked
            self._give(child, max(share, _LEAST))

    def _find_room(self, number: int) -> int:
        """What a class has to part among its branches: bytes a second."""
        services = self.classes.get(classid(self.tree.handle, SERVICES)) if number == self.top else None
        return max(self.classes[number].rate - (services.rate if services else 0), 0)

    def _give(self, number: int, rate: int) -> None:
        branch = self._branches[number]
        shard = self.shards.get(number & 0xFFFF)
        if shard is None or shard.under != number:
            before = self.classes.get(number)
            self._write(number, self._size(branch, rate))
            if before is None or before.rate != self.classes[number].rate:
                self._stale |= set() if branch.leaf else {number}
            return
        ceil = self._branches[branch.parent].wish.ceil
        # What is borrowed goes round by quantum: as much as the hosts in it have together, wherever they are.
        hosts = max(len(shard.hosts), 1)
        quantum = min(max(shard.total // self._hz, hosts * MTU), hosts * LARGEST_QUANTUM)
        sized = size_class(branch.parent, min(rate, ceil), ceil, self._hz)
        self._write(number, sized._replace(quantum=quantum))
        self._write(classid(shard.handle, TOP), size_class(classid(shard.handle, 0), ceil, ceil, self._hz))

    def _share(self) -> None:
        """Size the queues of hosts by how many there are."""
        hosts: Counter[int] = Counter()
        for shard in self.shards.values():
            hosts[self._branches[shard.under].parent] += len(shard.hosts)
        crowds = {above: (count, self._find_speed(above)) for above, count in hosts.items()}
        shares = self._backlog.share(crowds, self._find_speed(self.top))
        for shard in self.shards.values():
            share = shares[self._branches[shard.under].parent]
            if share != shard.share:
                shard.share = share
                self._resize(shard)

    def _resize(self, shard: Shard) -> None:
        for minor in shard.hosts:
            number = classid(shard.handle, minor)
            made = self.classes[number]
            self._write(number, made._replace(leaf=size_leaf(self._leaf, made.ceil, shard.share)))

    def _find_speed(self, number: int) -> int:
        """What a class can send at most, by itself and by all that is around it: bytes a second."""
        speed = LINE
        while number in self._branches:
            branch = self._branches[number]
            speed, number = min(speed, branch.wish.ceil), branch.parent
        return speed

    def _size(self, branch: _Branch, rate: int) -> QueueClass:
        wish = branch.wish
        leaf = self._leaf if branch.leaf else None
        return size_class(branch.parent, min(rate, wish.ceil), wish.ceil, self._hz, wish.burst, leaf)

    def _write(self, number: int, value: QueueClass) -> None:
        if self.classes.get(number) != value:
            self.classes[number] = value
            self.touched.add(number)

    def _drop(self, number: int) -> None:
        if self.classes.pop(number, None) is not None:
            self.touched.add(number)
