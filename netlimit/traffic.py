"""The traffic of one lane: which target has which class of the device's tree.

A budget that nothing else lies in is a class among the hosts'. What is around others becomes a branch, with a class of
its own for what nobody below it claims (its remainder). Hosts hang under the smallest budget around them; of rules for
hosts the most specific counts, and until a host has its class it shares one with all that are new under that rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from ipaddress import ip_network
from typing import NamedTuple

from netlimit.branches import RANKS, SHARD_HOSTS, Branches, Shard, Wish
from netlimit.htb import bytes_per_second
from netlimit.lanes import Lane, block_of
from netlimit.limits import set_keys
from netlimit.numbers import Numbers
from netlimit.rules import HOST, TARGET, Rule, Target
from netlimit.tree import FIRST_BUDGET, FIRST_CHILD, LAST_BUDGET, LAST_CHILD, classid

SHARDS = "tc shard"
_CHILDREN = range(FIRST_CHILD, LAST_CHILD + 1)
_SHARD_NUMBERS = range(1, len(_CHILDREN) + 1)
_MINORS = range(FIRST_BUDGET, LAST_BUDGET)
_LEVEL_MINORS = range(FIRST_BUDGET, LAST_BUDGET, RANKS)
"""Those that are no rank."""


class Place(NamedTuple):
    """Where a target's packets go: a class, the rule that it is for, and, for those in it that shall get a class of
    their own, their prefix length (0: none). They go there until the class is for no rule any more (`ends`; None: for
    good), and from then on, by themselves, to `after`: the class of a budget for the same target that lasts longer."""

    number: int
    rule: Rule
    learns: int = 0
    ends: datetime | None = None
    after: Place | None = None


class _Want(NamedTuple):
    under: int
    wish: Wish
    rule: Rule
    region: bool = False
    learns: int = 0


def unit_length(rule: Rule) -> int:
    """The prefix length of what has a class of its own; 0 for a budget."""
    if rule.per == TARGET:
        return 0
    return int(rule.target.max_prefixlen) if rule.per == HOST else int((rule.per or "/0")[1:])


class Traffic:
    """See the module. `budgets` and `units` (rules for hosts or blocks) are by target; `wide` are the units for many,
    `inner` the budgets around others with their branches, `present` who has appeared. `places` is what it comes to,
    after `arrange`; `changed` are the targets whose place is another since it was last emptied. `held` is who has which
    class in the kernel already, until the first `arrange`. `lengths` counts the rules by the prefix length of what has
    a class of its own (0: budgets). `split` are the targets that stand in the set as their halves, too."""

    def __init__(self, lane: Lane, branches: Branches, numbers: Numbers) -> None:
        self.lane = lane
        self.budgets: dict[Target, Rule] = {}
        self.units: dict[Target, Rule] = {}
        self.wide: dict[Target, Rule] = {}
        self.inner: dict[Target, int] = {}
        self.present: set[Target] = set()
        self.places: dict[Target, Place] = {}
        self.changed: set[Target] = set()
        self.split: set[Target] = set()
        self.held: Mapping[str, int] = {}
        self.lengths: Counter[int] = Counter()
        self._branches = branches
        self._numbers = numbers
        self._pending: set[Target] = set()
        self._stale = False
        self._adopted = False
        self._inside: Counter[Target] = Counter()
        self._shards: dict[int, list[Shard]] = {}

    @property
    def rules(self) -> Iterator[Rule]:
        """All rules of the lane."""
        yield from self.budgets.values()
        yield from self.units.values()

    @property
    def has_rules(self) -> bool:
        """Whether any rule is in the lane."""
        return bool(self.budgets or self.units)

    @property
    def size(self) -> int:
        """How many rules are in the lane."""
        return len(self.budgets) + len(self.units)

    @property
    def hosts(self) -> int:
        """How many classes hosts, blocks and plain budgets have, at most."""
        return len(self.units) + len(self.budgets) + len(self.present)

    def enter(self, rule: Rule) -> None:
        """Add a rule; there is none for the same target."""
        length = unit_length(rule)
        (self.units if length else self.budgets)[rule.target] = rule
        self.lengths[length] += 1
        self._look(rule.target, length, 1)

    def leave(self, rule: Rule) -> None:
        """Take a rule out."""
        length = unit_length(rule)
        del (self.units if length else self.budgets)[rule.target]
        self.lengths -= Counter([length])
        self._look(rule.target, length, -1)

    def find_overlapping(self, target: Target) -> Iterator[Rule]:
        """The rules for targets around this one, the same, or within it."""
        for known in (self.budgets, self.units):
            if target.prefixlen == target.max_prefixlen:
                around = (target.supernet(new_prefix=length) for length in range(target.prefixlen, -1, -1))
                yield from (known[each] for each in around if each in known)
            else:
                yield from (rule for each, rule in known.items() if each.overlaps(target))

    def _look(self, target: Target, length: int, change: int) -> None:
        """A rule for one host concerns nobody else, unless it makes a budget one that others lie in, or no longer."""
        single = target.prefixlen == (length or target.max_prefixlen)
        both = target in (self.budgets if length else self.units)
        covered = not length and smallest_around(self.wide, target) is not None
        around = smallest_around(self.budgets, target.supernet()) if self.budgets and target.prefixlen else None
        if around is not None:
            self._inside[around] += change
        if not (self._adopted and single) or both or covered:
            self._stale = True
        elif around is None or (around in self.inner and self._inside[around]):
            self._pending.add(target)
        else:
            self._stale = True

    def revisit(self, held: Mapping[str, int]) -> None:
        """See anew who has which class in the kernel: somebody else may have given out some."""
        self.held = held
        self._stale = True

    def nesting(self, target: Target) -> int:
        """How many budgets lie in one another, on the longest way through a target."""
        lengths = {each.prefixlen for each in self.budgets}

        def count_around(each: Target, beyond: int) -> int:
            within = (length for length in lengths if beyond <= length <= each.prefixlen)
            return sum(each.supernet(new_prefix=length) in self.budgets for length in within)

        inside: Iterable[Target] = ()
        if target.prefixlen < target.max_prefixlen:
            inside = (each for each in self.budgets if each.prefixlen > target.prefixlen and each.overlaps(target))
        return count_around(target, 0) + max((count_around(each, target.prefixlen + 1) for each in inside), default=0)

    def welcome(self, addresses: Iterable[str], length: int, room: int) -> bool:
        """Give classes to those that were seen without one, of this prefix length; False if not all have room."""
        for address in addresses:
            block = block_of(address, length)
            if block in self.present or not self._belongs(block):
                continue
            if room <= 0:
                return False
            room -= 1
            self.present.add(block)
            self._pending.add(block)
        return True

    def dismiss(self, numbers: set[int]) -> None:
        """Take the classes of those that came by themselves."""
        gone = {block for block in self.present if block in self.places and self.places[block].number in numbers}
        self.present -= gone
        self._pending |= gone

    def evict(self, block: Target) -> None:
        """Take the class of somebody who came by himself; who has gone already is no error."""
        if block in self.present:
            self.present.discard(block)
            self._pending.add(block)

    def list_parts(self, target: Target) -> Iterator[Target]:
        """The parts of a target that the set has, or had, for it. It keeps everything as its halves. Of a place that
        another comes after it has halves beside the whole: of what knows a packet the longest prefix counts, and when
        the halves have ended, the whole leads to what comes after."""
        parts: list[Target] = list(target.subnets()) if target.prefixlen == 0 else [target]
        place = self.places.get(target)
        splits = place is not None and place.after is not None
        halves = [half for part in parts for half in part.subnets()] if splits or target in self.split else []
        (self.split.add if splits else self.split.discard)(target)
        yield from (*parts, *halves)

    def find_place(self, part: Target) -> Place | None:
        """Where the set leads a part of a target."""
        place = self._find_whole(part)
        if place is not None:
            return place.after or place
        whole = self._find_whole(part.supernet()) if part.prefixlen else None
        return whole if whole is not None and whole.after is not None else None

    def _find_whole(self, target: Target) -> Place | None:
        """The place of a target, or, for half of everything, that of everything."""
        place = self.places.get(target)
        return self.places.get(target.supernet()) if place is None and target.prefixlen == 1 else place

    # -- arranging

    def arrange(self) -> None:
        """Bring places and the device's tree up to date."""
        before = self.inner
        if self._stale:
            self._sort_out()
        # Who has a class in the kernel comes first, lest somebody else take it.
        for target in sorted(self._pending, key=lambda each: (not self._find_held(each), *_by_place(each))):
            self._arrange(target)
        self._pending.clear()
        self.held = {}
        for target in sorted(before, key=_by_place, reverse=True):
            if self.inner.get(target) != before[target]:
                self._cut(before[target])

    def _sort_out(self) -> None:
        """See anew who lies in whom, and who has appeared under which rule."""
        self._stale, self._adopted = False, True
        self.wide = {target: rule for target, rule in self.units.items() if unit_length(rule) != target.prefixlen}
        if self.wide:
            hosts = (ip_network(key) for key, number in self.held.items() if number >> 16 in _CHILDREN)
            self.present |= {block for block in hosts if self._belongs(block)}
        gone = {block for block in self.present if not self._belongs(block)}
        self.present -= gone
        inner, self.inner = self._find_inner(), {}
        for target in sorted(inner, key=_by_place):
            parent = self._branch_around(target)
            number = self.inner[target] = self._minor("budget", target, parent)
            self._branches.branch(number, parent, _wish(self.budgets[target]), leaf=False)
        self._pending |= {*gone, *self.budgets, *self.units, *self.present, *self.places}

    def _find_inner(self) -> set[Target]:
        """Budgets around anything else, and those within a rule for many hosts."""
        inner = {each for each in self.budgets if each in self.units or smallest_around(self.wide, each) is not None}
        self._inside.clear()
        stack: list[Target] = []
        for target in sorted(
            {*self.budgets, *self.units}, key=lambda each: (int(each.network_address), each.prefixlen)
        ):
            while stack and not target.subnet_of(stack[-1]):  # type: ignore[arg-type]  # a lane has one family
                stack.pop()
            for around in stack[-1:]:
                inner.add(around)
                self._inside[around] += (target in self.budgets) + (target in self.units)
            if target in self.budgets:
                stack.append(target)
        return inner

    def _belongs(self, block: Target) -> bool:
        """Whether a block is one of those that a rule for many gives classes to."""
        if block in self.units:
            return False
        unit = smallest_around(self.wide, block)
        return unit is not None and unit_length(self.wide[unit]) == block.prefixlen

    def _branch_around(self, target: Target) -> int:
        """The branch of the smallest budget around a target, or the top."""
        around = smallest_around(self.inner, target)
        return self._branches.top if around is None else self.inner[around]

    def _arrange(self, target: Target) -> None:
        """Give a target the class that it shall have, or none."""
        want, before = self._find_want(target), self.places.get(target)
        place = None if want is None else self._find_place_for(target, want, before)
        if before is not None and (place is None or place.number != before.number):
            self._vacate(before.number)
        former, after = _number_after(before), _number_after(place)
        if former and former != after:
            self._cut(former)
        if place is None:
            self.places.pop(target, None)
        else:
            self.places[target] = place
        if place != before:
            self.changed.add(target)

    def _find_place_for(self, target: Target, want: _Want, before: Place | None) -> Place:
        """A class, and what comes when the rule that it is for ends and nobody is there to arrange things anew: a
        budget for the same target that lasts longer must not end with it."""
        place = Place(self._seat(target, want, before), want.rule, want.learns, want.rule.expires_at)
        budget = self.budgets.get(target)
        if budget is None or not _outlasts(budget, want.rule) or self.lane.incoming:
            return place
        next_one, wish, single = self._find_next(target, want.rule, budget), _wish(budget), _is_single(target)
        if want.wish.ceil >= wish.ceil and (next_one is None or single):
            return place._replace(ends=budget.expires_at)  # it lies in the budget, and holds nobody further down
        if single:
            return place
        under = self.inner[target]
        number = self._minor("after", target, under, _LEVEL_MINORS)
        kept = Wish(None, wish.ceil, wish.burst) if next_one is None else _wish(next_one)
        self._branches.branch(number, under, kept, leaf=True)
        return place._replace(after=Place(number, next_one or budget, ends=budget.expires_at))

    def _find_next(self, target: Target, rule: Rule, budget: Rule) -> Rule | None:
        """The rule for many hosts around a target that holds once another has ended, for as long as a budget; none if
        it holds nobody further down than that."""
        for length in range(target.prefixlen, -1, -1):
            other = self.wide.get(target.supernet(new_prefix=length))
            if other is not None and _outlasts(other, rule):
                lasts = not _outlasts(budget, other)
                return other if lasts and _wish(other).ceil < _wish(budget).ceil else None
        return None

    def _find_want(self, target: Target) -> _Want | None:
        under = self._branch_around(target)
        unit, budget = self.units.get(target), self.budgets.get(target)
        if unit is not None and target not in self.wide:
            return _Want(under, _wish(unit), unit)
        around = smallest_around(self.wide, target)
        ruler = None if around is None else self.wide[around]
        if ruler is not None and target in self.present:
            return _Want(under, _wish(ruler), ruler)
        if ruler is not None and (unit is not None or budget is not None):
            return _Want(under, _wish(ruler), ruler, region=True, learns=unit_length(ruler))
        if budget is None:
            return None
        wish = _wish(budget)
        if target in self.inner:
            return _Want(under, Wish(None, wish.ceil, wish.burst), budget, region=True)
        return _Want(under, wish, budget)

    def _seat(self, target: Target, want: _Want, before: Place | None) -> int:
        if want.region:
            number = self._minor("rest", target, want.under, _LEVEL_MINORS)
            self._branches.branch(number, want.under, want.wish, leaf=True)
            return number
        shard, minor = self._find_seat(target, want.under, before)
        assert want.wish.rate is not None
        return self._branches.host(shard, minor, want.wish.rate, want.wish.ceil, want.wish.burst)

    def _find_seat(self, target: Target, under: int, before: Place | None) -> tuple[Shard, int]:
        """The child HTB and the minor for a host: those that it has, here or in the kernel, or the first free ones."""
        shards = self._shards.setdefault(under, [])
        if before is not None:
            shard = next((each for each in shards if each.handle == before.number >> 16), None)
            if shard is not None:
                return shard, before.number & 0xFFFF
        held = self._find_held(target)
        name = self._numbers.find(SHARDS, (held >> 16) - FIRST_CHILD + 1) if held else None
        if name is not None and name.startswith(self._shard_name(under, "")):
            shard = self._open_shard(under, name)
            if held & 0xFFFF not in shard.hosts:
                return shard, held & 0xFFFF
        # The last one has room, if any has: hosts that go leave gaps, which the next ones close.
        shard = next((each for each in reversed(shards) if len(each.hosts) < SHARD_HOSTS), None)
        if shard is None:
            taken = {self._numbers.find(SHARDS, each.number) for each in shards}
            places = (self._shard_name(under, str(place)) for place in range(len(shards) + 1))
            shard = self._open_shard(under, next(name for name in places if name not in taken))
        return shard, shard.take(self._branches.spent)

    def _find_held(self, target: Target) -> int:
        """The class that a target has in the kernel, and keeps: not one that is a rank, as earlier versions gave them
        out. 0: none."""
        held = self.held.get(set_keys(target)[0], 0)
        return 0 if held % RANKS else held

    def _open_shard(self, under: int, name: str) -> Shard:
        number = self._numbers.take(SHARDS, name, _SHARD_NUMBERS)
        assert number is not None, "there are more numbers than hosts fit on all devices"
        shard = self._branches.shard(number, under)
        if shard not in self._shards[under]:
            self._shards[under].append(shard)
        return shard

    def _shard_name(self, under: int, place: str) -> str:
        return f"{self.lane.digest} under {under:x} {place}"

    def _vacate(self, number: int) -> None:
        if number >> 16 not in _CHILDREN:
            self._cut(number)
            return
        self._branches.remove(number)
        shard = (number >> 16) - FIRST_CHILD + 1
        if shard not in self._branches.shards:
            for shards in self._shards.values():
                shards[:] = [each for each in shards if each.number != shard]
            self._numbers.release(SHARDS, self._numbers.find(SHARDS, shard) or "")

    def _minor(self, what: str, target: Target, parent: int, first: range = range(0)) -> int:
        """The class of the root HTB for a purpose. A class cannot move, so one under another parent is another."""
        name = f"{self.lane.digest} {what} {target} under {parent:x}"
        minor = self._numbers.take(self._group, name, _MINORS, first)
        assert minor is not None, "budgets are counted before they come here"
        return classid(self._branches.tree.handle, minor)

    def _cut(self, number: int) -> None:
        self._branches.cut(number)
        self._numbers.release(self._group, self._numbers.find(self._group, number & 0xFFFF) or "")

    @property
    def _group(self) -> str:
        return f"tc {self.lane.device}"


def smallest_around(known: Mapping[Target, object], block: Target) -> Target | None:
    """The longest prefix among those known (of the block's family) that holds all of a block."""
    if len(known) <= _FEW:
        around = [each for each in known if block.subnet_of(each)]  # type: ignore[arg-type]
        return max(around, key=lambda each: each.prefixlen, default=None)
    for length in range(block.prefixlen, -1, -1):
        around_it = block.supernet(new_prefix=length)
        if around_it in known:
            return around_it
    return None


def _number_after(place: Place | None) -> int:
    """The class that comes after a place; 0: none."""
    return place.after.number if place is not None and place.after is not None else 0


def _is_single(target: Target) -> bool:
    return target.prefixlen == int(target.max_prefixlen)


def _outlasts(rule: Rule, other: Rule) -> bool:
    """Whether a rule is in force for longer than another."""
    return other.expires_at is not None and (rule.expires_at is None or rule.expires_at > other.expires_at)


def _wish(rule: Rule) -> Wish:
    assert rule.rate is not None
    rate = bytes_per_second(rule.rate)
    return Wish(rate, bytes_per_second(rule.ceil) if rule.ceil else rate, rule.burst)


def _by_place(target: Target) -> tuple[int, int]:
    return target.prefixlen, int(target.network_address)


_FEW = 4
"""So many targets are looked through faster than all prefixes of a block are looked up."""
