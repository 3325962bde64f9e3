"""What is led elsewhere before rules `to` it are asked, and which rules that concerns."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

from netlimit.cases import EVERY
from netlimit.detours import ANY, read_ends
from netlimit.several import say_more
from netlimit.spans import EVERYWHERE, FAMILIES, PORTS, Span, Spans, count, cut, join, lie_in, name, read_address

_MOST_MET = 1000
"""Of so many single addresses at most it is asked whether a rule for the network around them misses them."""
_SMALL = 16
"""A network of which less than this part is led elsewhere is held all but for that."""
_SHOWN, _NAMED = 120, 3


class Publication(NamedTuple):
    """A rule that may give what comes for some places, of these protocols ("other": of no other name) and to these
    ports, another destination: it `leads` there (None: to the same address), to the ports `after` (None: the same); in
    words to `place` ("": that cannot be read). `away`: that may be another host; `unread`: for which of the places it
    is cannot be read."""

    rule: str
    places: Spans
    protocols: frozenset[str]
    ports: Spans
    place: str
    leads: Spans | None = None
    after: Spans | None = None
    away: bool = False
    unread: bool = False

    def concerns(self, target: Span, protocol: str, ports: Spans) -> bool:
        """Whether it may lead away what a rule `to` a target is about, of a protocol ("any": all) and to ports (none:
        all), so that it does not meet that rule behind it either."""
        if not self.meets(protocol, ports):
            return False
        after = self.after or cut(self.ports, ports or PORTS)
        return not self._stays_in(target) or not lie_in(after, ports or PORTS)

    def meets(self, protocol: str, ports: Spans) -> bool:
        """Whether it is about some of that protocol and these ports."""
        return protocol in (ANY, *self.protocols) and bool(cut(self.ports, ports or PORTS))

    def _stays_in(self, target: Span) -> bool:
        """Whether all that it leads to, of the target's family, is in the target. By the ends, for they may be many."""
        if self.leads is None:
            return True
        low, high = next(each for each in EVERYWHERE if each[0] <= target[0] <= each[1])
        leads = self.leads[bisect_left(self.leads, (low, low)) : bisect_right(self.leads, (high, high))]
        return not leads or (target[0] <= leads[0][0] and leads[-1][1] <= target[1])

    def __str__(self) -> str:
        several = self.ports[1:] or self.ports[0][0] != self.ports[0][1]
        ports = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in self.ports[:_NAMED])
        more = ", …" * (len(self.ports) > _NAMED)
        of = "all" if self.protocols == EVERY else " and ".join(sorted(self.protocols))
        what = of if self.ports == PORTS else f"{of} port{'s' if several else ''} {ports}{more}"
        return f"{what} to {self.place}" if self.place else f"{what} to where cannot be read"


class Publications:
    """What is published on a host with some `own` addresses, to be asked of the target of one rule after the other.
    `whole`: nothing that was printed has been left out; `unread`: those of which it is not known for whom they are."""

    def __init__(
        self,
        found: Iterable[Publication] = (),
        own: Spans = (),
        whole: bool = True,
        unread: Iterable[Publication] = (),
    ) -> None:
        self.found, self.whole, self.unread = tuple(found), whole, tuple(unread)
        self._own = {low for low, _ in own}
        self._single: dict[str, list[Publication]] = {}
        self._wide: dict[Span, list[Publication]] = {}
        places = set[int]()
        for each in self.found:
            for low, high in each.places:
                if low == high:
                    self._single.setdefault(name(low), []).append(each)
                    places.add(low)
                else:
                    self._wide.setdefault((low, high), []).append(each)
        self._places, self._areas = sorted(places), sorted(self._wide)
        self._reach = [*accumulate((high for _, high in self._areas), max)]
        self._meeting: dict[tuple[Span, str, Spans], list[Publication]] = {}

    def __bool__(self) -> bool:
        return bool(self.found or self.unread) or not self.whole

    def find(self, target: str, protocol: str, ports: Spans) -> tuple[list[Publication], bool]:
        """Those that concern a rule `to` a target as sets have it, and whether that is a good part of what it is about;
        if there is none, those of which it cannot be read. A network is not asked about the host's own addresses in it:
        rules for it are not about these."""
        single = "/" not in target
        read = not single or target in self._single or bool(self._areas)
        if not read and not self.unread:  # with many rules the rest takes much longer
            return [], False
        family, first, last = read_ends(target)
        place = FAMILIES[family][0] + first, FAMILIES[family][0] + last
        inside = self._places[bisect_left(self._places, place[0]) : bisect_right(self._places, place[1])]
        near = [(place, each) for each in self._single.get(target, ())] if single else [*self._list_those(inside)]
        met = {}
        for part, each in (*near, *self._list_around(place, protocol, ports)) if read else ():
            if each.concerns(place, protocol, ports):
                met[part, each.place] = each
        if met:
            # Of single ones that are too many to be asked it is taken that they are like the first.
            parts = count(join(part for part, _ in met)) + max(0, len(inside) - _MOST_MET)
            return [*met.values()], parts * _SMALL > last - first
        around = (each for each in self.unread if cut(each.places, (place,)))
        return [each for each in around if each.concerns(place, protocol, ports)], False

    def _list_those(self, inside: Sequence[int]) -> Iterator[tuple[Span, Publication]]:
        for each in inside[:_MOST_MET]:
            if each not in self._own:
                yield from (((each, each), publication) for publication in self._single[name(each)])

    def _list_around(self, place: Span, protocol: str, ports: Spans) -> Iterator[tuple[Span, Publication]]:
        """Some for each of the networks that have some of it."""
        for index in range(bisect_right(self._areas, (place[1], place[1] << 1)) - 1, -1, -1):
            if self._reach[index] < place[0]:
                return
            low, high = around = self._areas[index]
            if high >= place[0]:
                part = max(low, place[0]), min(high, place[1])
                concerned = (each for each in self._list_meeting(around, protocol, ports)
                             if each.concerns(place, protocol, ports))  # fmt: skip
                yield from ((part, each) for each in islice(concerned, _NAMED + 1))

    def _list_meeting(self, around: Span, protocol: str, ports: Spans) -> list[Publication]:
        """Those of a network that are about a protocol and ports, found once for all rules that are: they may be
        thousands."""
        about = around, protocol, ports
        if about not in self._meeting:
            self._meeting[about] = [each for each in self._wide[around] if each.meets(protocol, ports)]
        return self._meeting[about]


def find_led(listening: Iterable[tuple[str, int]], published: Publications) -> frozenset[tuple[str, int]]:
    """Of the addresses and TCP ports at which something listens those from which something may be led to others."""
    ports: dict[int, list[int]] = {}
    known = {}
    for address, port in sorted(listening):
        low, _ = read_address(address)
        known[low] = address
        ports.setdefault(low, []).append(port)
    places = sorted(ports)
    away = (each for each in published.found if each.away and "tcp" in each.protocols)
    ways = {(around, span) for each in away for around in each.places for span in each.ports}
    return frozenset(
        (known[place], port)
        for around, (low, high) in ways
        for place in places[bisect_left(places, around[0]) : bisect_right(places, around[1])]
        for port in ports[place][bisect_left(ports[place], low) : bisect_right(ports[place], high)]
    )


def say_published(published: Publications) -> str:
    """What of what comes in is led where, in a few words."""
    said = []
    if published.found:
        rules, ways = _say(published.found)
        said.append(f"What comes in is given another destination in nat PREROUTING ({rules}): {ways}.")
    if published.unread:
        rules, ways = _say(published.unread)
        said.append(
            "Of addresses that are not the gateway's own it cannot be read which are given another destination in nat "
            f"PREROUTING, by a set, a map, a mark or the like ({rules}): {ways}."
        )
    if not published.whole:
        said.append(
            "The rules of nat PREROUTING are more than are looked through: of addresses that are not the gateway's own "
            "it is not known of all whether they are led elsewhere."
        )
    return " ".join(said)


def tell_published(found: Sequence[Publication], target: str, degraded: bool) -> str:
    """What an operator should know of a rule `to` a target that they concern; not `degraded`: a small part of it, or
    nobody can read whether it is."""
    rules, ways = _say(found)
    some = f"What comes for {target}" if degraded else f"Some of what comes for {target}"
    given = f"{some} may be given another destination in nat PREROUTING ({rules}), and does not meet this rule then"
    if found[0].unread:
        given = (
            f"Whether what comes for {target} is given another destination in nat PREROUTING cannot be read "
            f"({rules}): a set, a map, a mark or the like says so there. If it is, it does not meet this rule"
        )
    return f"{given}: {ways}. Name in a rule `to` where that leads, with the port there."


def _say(found: Sequence[Publication]) -> tuple[str, str]:
    more = say_more(found, kind="such rule")
    ways = "; ".join(map(str, found[:_NAMED])) + ("; …" if len(found) > _NAMED else "")
    return f"`{found[0].rule[:_SHOWN]}`{more}", ways
