"""Ports that a gateway publishes: what a DNAT or REDIRECT of others gives another destination, of what comes for the
gateway's own addresses, and for others that it names.

Read from what nft and iptables print. What is not understood of a rule narrows nothing: it is taken for one that may
lead anything away. Of addresses that are not the host's own that is so where something may choose by destination.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from netlimit.cases import Case, Host, read_listed, read_saved
from netlimit.detours import (
    ANY,
    BY_MAP,
    JUMP,
    LEADS,
    PORT_ALONE,
    RECEIVED,
    TARGET,
    TRANSLATES,
    Rules,
    list_tables,
    read_chains,
    read_places,
)
from netlimit.publications import Publication, Publications
from netlimit.spans import (
    EVERYWHERE,
    FAMILIES,
    PORTS,
    Span,
    Spans,
    cut,
    join,
    leave_out,
    lie_in,
    name,
    number,
    read_addresses,
    read_ports,
)

_REDIRECTED = re.compile(r"(?<!\S)-j REDIRECT(?!\S)(?:.* --to-ports (\S+))?")
_REDIRECTS = re.compile(r"(?<!\S)(?<!jump )(?<!goto )redirect(?!\S)(?: to (:\S+))?")
_AFTER = re.compile(r"(?:^|\]|\.\d+):([^/\s]+)")
_FAMILIES = {"ip": (4,), "ip6": (6,)}
_LINK_LOCAL: Spans = (read_addresses("fe80::/10"),)
_LOOPBACK: Spans = (read_addresses("127.0.0.0/8"), read_addresses("::1"))
_MOST_LOOKS = 50_000
"""At more rules, each as often as chains lead to it, what leads there is not heeded any more."""
_MOST_NAMED = 20_000
"""The same for addresses that are not the host's own: the rest is left out then, and that is told."""


class _Goal(NamedTuple):
    """Where a rule leads, as it says it; `redirects`: to the own address of the device by which that comes."""

    place: str
    redirects: bool = False


@lru_cache(maxsize=1)
def find_publications(
    ruleset: str, nat: tuple[tuple[str, ...], ...], nat6: tuple[tuple[str, ...], ...], host: Host
) -> Publications:
    """What gives another destination to what comes in for some of a host's own addresses, or for others that it names:
    in a ruleset of nftables, and in nat tables of iptables (the rules of each, as it saves them), of either family."""
    met: dict[tuple[object, ...], tuple[Publication, list[Span]]] = {}
    whole = True
    for table in (*_list_saved(nat, 4), *_list_saved(nat6, 6), *_list_listed(ruleset)):
        walk, every = _Walk(table, host), tuple(FAMILIES[each] for each in table.families)
        own, others = Case(cut(every, host.own)), Case(cut(leave_out(host.own, EVERYWHERE), every))
        for rule, case, goal in (*walk.follow(own, _MOST_LOOKS), *walk.follow(others, _MOST_NAMED, gives_up=True)):
            if each := _publish(rule, case, goal, host):
                met.setdefault((rule, *each[2:]), (each, []))[1].extend(each.places)
        whole &= walk.whole
    found: dict[tuple[object, ...], Publication] = {}
    for each, places in met.values():
        every_place = each._replace(places=join(places))
        found.setdefault(every_place[1:], every_place)
    known = [each for each in found.values() if not each.unread]
    return Publications(known, host.own, whole, _put_together(each for each in found.values() if each.unread))


def _put_together(several: Iterable[Publication]) -> Iterator[Publication]:
    """One for all that may be for the same: where destinations are not read, there may be thousands."""
    alike: dict[tuple[object, ...], list[Publication]] = {}
    for each in several:
        alike.setdefault((each.places, each.protocols, each.leads is None), []).append(each)
    for first, *others in alike.values():
        every = (first, *others)
        yield first._replace(
            place=first.place and first.place + " or elsewhere" * any(each.place != first.place for each in others),
            ports=join(span for each in every for span in each.ports),
            leads=first.leads and join(span for each in every for span in each.leads or ()),
            after=first.after if all(each.after == first.after for each in others) else PORTS,
        )


# -- where a rule leads


def _publish(rule: str, case: Case, goal: _Goal, host: Host) -> Publication | None:
    """What becomes of what meets a rule, if it may be something else."""
    places = case.places if case.named or case.unread else cut(case.places, host.ends)
    unread = not case.named and not lie_in(places, host.ends)
    text, leads = goal.place, None
    if goal.redirects:
        places = cut(places, leave_out(_LINK_LOCAL, EVERYWHERE))
        leads = _find_redirected(case, places, host)
        text = " or ".join(_name(low, goal.place) for low, _ in leads) or f"this host{goal.place}"
    elif not PORT_ALONE.match(goal.place):
        ends = read_places(goal.place, _find_families(places))
        leads = join((number(first), number(last)) for first, last in ends)
        places = cut(places, tuple(FAMILIES[first.version] for first, _ in ends))
        text = "" if any(first.is_unspecified for first, _ in ends) else text
    if not case._replace(places=places):
        return None
    away = leads is not None and not lie_in(leads, join((*host.own, *_LOOPBACK)))
    found = Publication(rule, places, case.protocols, case.ports, text, leads, _read_after(goal.place), away, unread)
    return found if found.after or any(found.concerns(each, ANY, ()) for each in places) else None


def _find_redirected(case: Case, places: Spans, host: Host) -> Spans:
    """The addresses that a REDIRECT gives, of the families that it is about."""
    firsts = [own for device, own in host.firsts if case.devices is None or device in case.devices]
    about = tuple(FAMILIES[family] for family in _find_families(places))
    return cut(join(each for own in firsts for each in own), about)


def _find_families(places: Spans) -> tuple[int, ...]:
    return tuple(family for family, span in FAMILIES.items() if cut(places, (span,)))


def _name(place: int, port: str) -> str:
    address = name(place)
    return f"[{address}]{port}" if port and ":" in address else f"{address}{port}"


def _read_after(place: str) -> Spans | None:
    """The ports that are given; all where that cannot be read."""
    if (match := _AFTER.search(place)) is None:
        return None
    try:
        return (read_ports(match[1]),)
    except ValueError:
        return PORTS


def _read_saved_goal(rule: str) -> _Goal | None:
    if (target := TARGET.search(rule)) is not None:
        return _Goal(target[1])
    redirected = _REDIRECTED.search(rule)
    return redirected and _Goal(f":{redirected[1]}" if redirected[1] else "", redirects=True)


def _read_listed_goal(rule: str) -> _Goal | None:
    if (match := TRANSLATES.search(rule)) is not None:
        return _Goal(match[2].split(" ")[0])
    redirected = _REDIRECTS.search(rule)
    return redirected and _Goal(redirected[1] or "", redirects=True)


# -- which packets come to a rule


class _Step(NamedTuple):
    """What a rule asks for, to which chains it leads (`by_map`: to any), and what it translates to."""

    case: Case
    chains: frozenset[str]
    by_map: bool = False
    goal: _Goal | None = None


class _Table(NamedTuple):
    """A table of nat: its families, the chains where packets come in, and how its rules are read."""

    families: tuple[int, ...]
    chains: Rules
    entries: Sequence[str]
    read: Callable[[str, Host], Iterator[_Step]]


def _list_saved(tables: Sequence[Sequence[str]], family: int) -> Iterator[_Table]:
    for lines in tables:
        yield _Table((family,), read_chains(lines), ["PREROUTING"], _read_saved)


def _read_saved(rule: str, host: Host) -> Iterator[_Step]:
    yield _Step(read_saved(rule, host), frozenset(LEADS.findall(rule)), goal=_read_saved_goal(rule))


def _list_listed(ruleset: str) -> Iterator[_Table]:
    for family, chains in list_tables(ruleset, RECEIVED):
        entries = [name for name, rules in chains.items() if any(map(RECEIVED.match, rules))]
        yield _Table(_FAMILIES.get(family, (4, 6)), chains, entries, _read_listed)


def _read_listed(rule: str, host: Host) -> Iterator[_Step]:
    for plain, case in read_listed(rule, host):
        goal, chains = _read_listed_goal(plain), frozenset(JUMP.findall(plain))
        family = match[1] if (match := TRANSLATES.search(plain)) else None
        about = Case(tuple(FAMILIES[each] for each in _FAMILIES.get(family or "", (4, 6))))
        yield _Step(case.narrow(about), chains, BY_MAP.search(plain) is not None, goal)


class _Walk:
    """A way through the chains of a table. It is not `whole` where it has been given up."""

    def __init__(self, table: _Table, host: Host) -> None:
        self._table, self._host, self.whole = table, host, True
        self._steps: dict[str, list[_Step]] = {}

    def follow(self, everything: Case, most: int, gives_up: bool = False) -> Iterator[tuple[str, Case, _Goal]]:
        """The rules that translate and that some packet meets, with the packets that do and what to: once for each way
        that differs. From so many rules on it looks at what every packet may meet, or gives up."""
        chains = self._table.chains
        waiting = [(name, everything) for name in self._table.entries] if everything else []
        seen, mapped, wide, looks = set(waiting), set[Case](), set[str](), 0
        while waiting:
            name, case = waiting.pop()
            if looks > most:
                if gives_up:
                    self.whole = False
                    return
                if name in wide:
                    continue
                wide.add(name)
                case = everything
            for rule, step in self._list_steps(name):
                looks += 1
                met = case.narrow(step.case)
                if not met:
                    continue
                if step.goal is not None:
                    yield rule, met, step.goal
                leads = step.chains & chains.keys()
                if step.by_map and met not in mapped:
                    mapped.add(met)
                    leads = frozenset(chains)
                fresh = {(each, met) for each in leads} - seen
                looks += len(fresh)
                waiting += sorted(fresh, key=lambda way: way[0])
                seen |= fresh

    def _list_steps(self, chain: str) -> Iterator[tuple[str, _Step]]:
        for rule in self._table.chains.get(chain, ()):
            if (steps := self._steps.get(rule)) is None:
                steps = self._steps[rule] = [*self._table.read(rule, self._host)]
            yield from ((rule, step) for step in steps)
