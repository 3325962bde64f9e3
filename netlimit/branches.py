"""The tree of one device while it is worked out: branches that share, and the leaves that hosts have.

A class guarantees `rate` and may borrow up to `ceil`. HTB lets a class send at its own rate whatever the class above
it has left, so what is guaranteed below a branch must not add up to more than the branch has; where rules ask for
more, it goes by what those below it want (see `demand`), and within a child HTB everybody gets as much at a time as his
quantum says. What is borrowed HTB parts in the same way.

HTB takes time for each class in proportion to those that its qdisc has, so hosts are dealt out to child HTBs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain

from netlimit.backlog import Backlog
from netlimit.demand import Crowd, Demand, part
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
    Usage,
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

    @property
    def least(self) -> int:
        """The most that one of the hosts is promised: who begins must have that before anybody has looked."""
        return max(self.hosts.values(), default=0)

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

    def __init__(self, handle: int, hz: int, leaf: LeafKind, backlog: Backlog, demand: Demand, direct: int = 0) -> None:
        self.tree = Tree(handle, {}, {}, direct)
        self.classes: dict[int, QueueClass] = self.tree.classes  # type: ignore[assignment]  # it is ours to write
        self.touched: set[int] = set()
        self.spent: set[int] = set()
        self.shards: dict[int, Shard] = {}
        self._children: dict[int, int] = self.tree.children  # type: ignore[assignment]
        self._hz = hz
        self._leaf: LeafKind = leaf
        self._backlog = backlog
        self._demand = demand
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
        self._mark(parent)
        self._stale |= set() if leaf else {number}

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
            self._mark(branch.parent)
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
            self._demand.recall(number)
            self._mark(parent)
        return shard

    def host(self, shard: Shard, minor: int, rate: int, ceil: int, burst: int | None) -> int:
        """Put a host into a child HTB, or give it new rates; returns its classid."""
        shard.total += rate - shard.hosts.get(minor, 0)
        shard.hosts[minor] = rate
        number = classid(shard.handle, minor)
        above = classid(shard.handle, TOP)
        self._write(number, size_class(above, rate, ceil, self._hz, burst, self._leaf, shard.share))
        self._mark(self._branches[shard.under].parent)
        return number

    def remove(self, number: int) -> None:
        """Take a host out; a child HTB without any goes with it."""
        shard = self.shards[(number >> 16) - FIRST_CHILD + 1]
        shard.total -= shard.hosts.pop(number & 0xFFFF)
        self.spent.add(number)
        self._drop(number)
        self._mark(self._branches[shard.under].parent)
        if not shard.hosts:
            del self.shards[shard.number], self._children[shard.handle]
            self._demand.forget(shard.number)
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

    def look(self, usages: Mapping[int, Usage], at: float) -> None:
        """Take in what the classes have counted, at a time in seconds: who sends in which child HTB."""
        crowds = (Crowd(shard.number, shard.handle, shard.hosts) for shard in self.shards.values())
        for number in self._demand.look(crowds, usages, at):
            self._stale.add(self._branches[self.shards[number].under].parent)

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
        return sum(self._promised(child) or 0 for child in branch.children), branch.wish.rate or branch.wish.ceil

    def _mark(self, number: int) -> None:
        """What is below a branch has changed: it is to be parted anew, and what is around it as well, for that goes by
        the least that those below it want."""
        while number in self._branches:
            self._stale.add(number)
            number = self._branches[number].parent

    def _find_shard(self, number: int) -> Shard | None:
        """The child HTB that hangs on a class."""
        shard = self.shards.get(number & 0xFFFF)
        return shard if shard is not None and shard.under == number else None

    def _promised(self, number: int) -> int | None:
        """What all in a branch are promised together; None: what is left."""
        shard = self._find_shard(number)
        return self._branches[number].wish.rate if shard is None else shard.total

    def _find_wanted(self, shard: Shard) -> int:
        return min(max(self._demand.find(shard.number), shard.least), shard.total)

    def _find_least(self, number: int) -> int:
        """The most that one host is promised in a branch."""
        shard, branch = self._find_shard(number), self._branches[number]
        if shard is not None:
            return shard.least
        rate = branch.wish.rate or 0
        return rate if branch.leaf else min(rate, max(map(self._find_least, branch.children), default=0))

    def _part(self, number: int) -> None:
        branch = self._branches[number]
        if number == self.top:
            self._write(number, self._size(branch, branch.wish.rate or LINE))
        if number not in self.classes:
            return  # it is parted when it has got its own share
        room = self._find_room(number)
        wants = {child: want for child in branch.children if (want := self._promised(child)) is not None}
        promised, idle = sum(wants.values()), len(branch.children) - len(wants)
        left = max(room - promised, room // REMAINDER) // idle if idle else 0
        if promised > room - left * idle:
            # Nobody is guaranteed what is left then: who begins borrows it before anybody has looked.
            shards = ((child, self._find_shard(child)) for child in wants)
            wants |= {child: self._find_wanted(shard) for child, shard in shards if shard is not None}
        shares = part(wants, {child: self._find_least(child) for child in wants}, room - left * idle)
        for child in branch.children:
            self._give(child, max(shares.get(child, left), _LEAST))

    def _find_room(self, number: int) -> int:
        """What a class has to part among its branches: bytes a second."""
        services = self.classes.get(classid(self.tree.handle, SERVICES)) if number == self.top else None
        return max(self.classes[number].rate - (services.rate if services else 0), 0)

    def _give(self, number: int, rate: int) -> None:
        branch, shard = self._branches[number], self._find_shard(number)
        if shard is None:
            before = self.classes.get(number)
            self._write(number, self._size(branch, rate))
            if before is None or before.rate != self.classes[number].rate:
                self._stale |= set() if branch.leaf else {number}
            return
        ceil = self._branches[branch.parent].wish.ceil
        sized = size_class(branch.parent, min(rate, ceil), ceil, self._hz)
        self._write(number, sized._replace(quantum=self._find_quantum(shard)))
        self._write(classid(shard.handle, TOP), size_class(classid(shard.handle, 0), ceil, ceil, self._hz))

    def _find_quantum(self, shard: Shard) -> int:
        """What is borrowed goes round by quantum: as much as those have together who send, wherever they are."""
        hosts, total = max(len(shard.hosts), 1), max(shard.total, 1)
        everybody = min(max(total // self._hz, hosts * MTU), hosts * LARGEST_QUANTUM)
        one = min(max(shard.least // self._hz, MTU), LARGEST_QUANTUM)
        return max(everybody * self._find_wanted(shard) // total, one)

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
