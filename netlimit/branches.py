"""The tree of one device while it is worked out: branches that share, and the leaves that hosts have.

A class guarantees `rate` and may borrow up to `ceil`. HTB lets a class send at its own rate whatever the class above
it has left, so what is guaranteed below a branch must not add up to more than the branch has; where rules ask for
more, it goes by what those below it want (see `demand`), and within a child HTB everybody gets as much at a time as his
quantum says. What is borrowed HTB parts in the same way.

HTB takes time for each class in proportion to those that its qdisc has, so hosts are dealt out to child HTBs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain

from netlimit.backlog import Backlog
from netlimit.demand import Claim, Crowd, Demand, part, round_down
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
_FOR_NEWCOMERS = 16
"""Where not all have their promise, this part is for hosts without a class, while none of them sends: of what those who
send leave, or of all if they leave nothing."""


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
        self._contested: set[int] = set()
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
            self._demand.recall(number)
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
            self._demand.forget(number)
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
        """Take in what the classes have counted, at a time in seconds: who sends where."""
        crowds = {crowd.number: (above, crowd) for above, crowd in self._list_crowds()}
        changed = set(self._demand.look((crowd for _, crowd in crowds.values()), usages, at))
        tight = self._find_tight()
        changed |= {number for number, (above, _) in crowds.items() if above in tight and self._demand.sharpen(number)}
        for number in changed:
            above, _ = crowds[number]
            if above in self._contested:
                self._mark(above)

    def settle(self) -> None:
        """Part what each branch has among those below it, where anything has changed, down to the smallest."""
        if self._stale:
            self._find_contested()
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

    # -- who may have how much

    def _list_crowds(self) -> Iterator[tuple[int, Crowd]]:
        """Those who want by what they send, and the branch that each is in."""
        for shard in self.shards.values():
            yield self._branches[shard.under].parent, Crowd(shard.number, shard.handle, shard.hosts)
        for number, branch in self._branches.items():
            if branch.leaf and (promised := self._find_promised_leaf(branch)):
                yield branch.parent, Crowd(number, self.tree.handle, {number & 0xFFFF: promised})

    def _find_promised_leaf(self, branch: _Branch) -> int:
        """What a class that hosts share may want: its rate, or what the others in a budget leave."""
        return self._leave(branch.parent)[0] if branch.wish.rate is None else branch.wish.rate

    def _find_contested(self) -> None:
        """Find the branches that are promised more than they have, and all that are in one: in others everybody has
        what it is promised, whoever sends."""
        before, self._contested = self._contested, set(self._find_below(self._is_contested))
        for number in before ^ self._contested:
            self._mark(number)
        self._demand.follow({crowd.number for above, crowd in self._list_crowds() if above in self._contested})

    def _find_tight(self) -> set[int]:
        """The branches in which what is hoped for does not fit, and all that are in one."""
        return set(self._find_below(self._is_tight))

    def _find_below(self, holds: Callable[[int], bool]) -> Iterator[int]:
        """The branches of which something holds, and all that are in one."""
        below = [(self.top, False)]
        while below:
            number, found = below.pop()
            found = found or holds(number)
            if found:
                yield number
            inner = (each for each in self._branches[number].children if self._is_inner(each))
            below += [(each, found) for each in inner]

    def _is_inner(self, number: int) -> bool:
        return not self._branches[number].leaf and self._find_shard(number) is None

    def _is_contested(self, number: int) -> bool:
        left, promised, room = self._leave(number)
        return promised > room - left

    def _is_tight(self, number: int) -> bool:
        if number not in self._contested:
            return False
        room = self._leave(number)[2]
        hopes = (self._claim(each).hopes for each in self._branches[number].children)
        return sum(hopes) > room - room // REMAINDER

    def _leave(self, number: int) -> tuple[int, int, int]:
        """What is left to those in a branch that are promised no rate, together, if it has all it is promised; what all
        others are promised, and what there is of it."""
        branch = self._branches[number]
        promises = [self._promised(child) for child in branch.children]
        promised = sum(each for each in promises if each is not None)
        room = max((branch.wish.rate or LINE) - self._find_services(number), 0)
        return max(room - promised, room // REMAINDER) if None in promises else 0, promised, room

    def _find_services(self, number: int) -> int:
        """What of a class is this host's own: bytes a second."""
        services = self.classes.get(classid(self.tree.handle, SERVICES)) if number == self.top else None
        return services.rate if services else 0

    def _find_wanted(self, shard: Shard) -> int:
        if self._branches[shard.under].parent not in self._contested:
            return shard.total
        return min(max(self._demand.find(shard.number, shard.least), shard.least), shard.total)

    def _claim(self, number: int) -> Claim:
        """What a class may have of a branch where more is promised than there is."""
        shard, branch = self._find_shard(number), self._branches[number]
        if shard is not None:
            wants = min(self._demand.find(shard.number, shard.least), shard.total)
            return Claim(wants, shard.least, max(wants, shard.least))
        if branch.leaf:
            promised = self._find_promised_leaf(branch)
            least = branch.wish.rate or 0
            wants = min(self._demand.find(number, promised), promised)
            return Claim(wants, least, max(wants, least))
        rate = branch.wish.rate or branch.wish.ceil
        below = [self._claim(child) for child in branch.children]
        wants, hopes = sum(claim.wants for claim in below), sum(claim.hopes for claim in below)
        least = max((claim.least for claim in below), default=0)
        return Claim(min(rate, wants), min(rate, least), min(rate, hopes))

    def _part(self, number: int) -> None:
        branch = self._branches[number]
        if number == self.top:
            self._write(number, self._size(branch, branch.wish.rate or LINE))
        if number not in self.classes:
            return  # it is parted when it has got its own share
        room = max(self.classes[number].rate - self._find_services(number), 0)
        shares = self._part_wants(branch, room) if number in self._contested else self._part_promises(number)
        for child in branch.children:
            self._give(child, max(shares[child], _LEAST))

    def _part_promises(self, number: int) -> dict[int, int]:
        """Everybody has what it is promised, for that fits."""
        promises = {child: self._promised(child) for child in self._branches[number].children}
        left = self._leave(number)[0] // max(list(promises.values()).count(None), 1)
        return {child: left if promise is None else promise for child, promise in promises.items()}

    def _part_wants(self, branch: _Branch, room: int) -> dict[int, int]:
        """It goes by what those want who are below. Where no rate is promised, a little stays in any case."""
        claims = {child: self._claim(child) for child in branch.children}
        others = {child for child in claims if self._promised(child) is None}
        kept = room // REMAINDER // len(others) if others else 0
        for child in others:
            wants = max(claims[child].wants - kept, 0)
            claims[child] = Claim(wants, 0, wants)
        room -= kept * len(others)
        self._lower_newcomers(claims, room)
        shares = part(claims, room)
        return {child: share + kept if child in others else share for child, share in shares.items()}

    def _lower_newcomers(self, claims: dict[int, Claim], room: int) -> None:
        """Have those who have just appeared, or may, keep little from others while they do not send."""
        newcomers = [child for child in claims if self._branches[child].leaf]
        asked, free = sum(claims[child].least for child in newcomers), room - sum(c.wants for c in claims.values())
        most = round_down(free if free > 0 else room) // _FOR_NEWCOMERS
        for child in newcomers if asked > most else ():
            claims[child] = claims[child]._replace(least=claims[child].least * most // asked)

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
