"""Ports that a gateway publishes: what a DNAT or REDIRECT of others gives another destination, of what comes for the
gateway's own addresses, and for others that it names.

Read from what nft and iptables print. What is not understood of a rule narrows nothing: it is taken for one that may
lead anything away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from netlimit.cases import Case, Host, read_key, read_listed, read_saved
from netlimit.detours import (
    ANY,
    BY_MAP,
    JUMP,
    LEADS,
    PORT_ALONE,
    RECEIVED,
    STRING,
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
_REDIRECTS = re.compile(r"(?<!\S)(?<!jump )(?<!goto )redirect(?!\S)(?: to (:.+))?")
_PAIR = re.compile(r"([^,{}]+?) : ([^,}]+)")
_PORTS_OF = re.compile(r"(\S*:)([a-z].*)")
"""Where a map tells the ports alone: `10.1.0.2:tcp dport map`."""
_AFTER = re.compile(r"(?:^|\]|\.\d+):([^/\s]+)")
_FAMILIES = {"ip": (4,), "ip6": (6,)}
_LINK_LOCAL: Spans = (read_addresses("fe80::/10"),)
_LOOPBACK: Spans = (read_addresses("127.0.0.0/8"), read_addresses("::1"))
_MOST_LOOKS = 50_000
"""At more rules, each as often as chains lead to it, what leads there is not heeded any more."""
_MOST_NAMED = 20_000
"""The same for addresses that are not the host's own: the rest is left out then, and that is told."""


class _Goal(NamedTuple):
    """Where a rule leads, as it says it, of what it meets in a `case`; `redirects`: to the own address of the device by
    which that comes."""

    place: str
    case: Case = Case()
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
        for rule, case in (*walk.follow(own, _MOST_LOOKS), *walk.follow(others, _MOST_NAMED, gives_up=True)):
            for goal in table.read_goals(rule):
                if each := _publish(rule, case.narrow(goal.case), goal, host):
                    met.setdefault((rule, *each[2:]), (each, []))[1].extend(each.places)
        whole &= walk.whole
    found: dict[tuple[object, ...], Publication] = {}
    for each, places in met.values():
        every_place = each._replace(places=join(places))
        found.setdefault(every_place[1:], every_place)
    return Publications(found.values(), host.own, whole)


# -- where a rule leads


def _publish(rule: str, case: Case, goal: _Goal, host: Host) -> Publication | None:
    """What becomes of what meets a rule, if it may be something else."""
    places = case.places if case.named else cut(case.places, host.own)
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
    found = Publication(rule, places, case.protocols, case.ports, text, leads, _read_after(goal.place), away)
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


def _read_saved_goals(rule: str) -> Iterator[_Goal]:
    if (target := TARGET.search(rule)) is not None:
        yield _Goal(target[1])
    elif (redirected := _REDIRECTED.search(rule)) is not None:
        yield _Goal(f":{redirected[1]}" if redirected[1] else "", redirects=True)


def _read_listed_goals(rule: str) -> Iterator[_Goal]:
    bare = STRING.sub('""', rule)
    if (match := TRANSLATES.search(bare)) is not None:
        about = Case(tuple(FAMILIES[each] for each in _FAMILIES.get(match[1] or "", (4, 6))))
        yield from (_Goal(place, about.narrow(case)) for case, place in _read_map(match[2]))
    elif (match := _REDIRECTS.search(bare)) is not None:
        yield from (_Goal(place, case, redirects=True) for case, place in _read_map(match[1] or ""))


def _read_map(text: str) -> Iterator[tuple[Case, str]]:
    """Where `dnat to` leads, or `redirect to`, and of what."""
    key, found, _ = f" {text}".partition(" map ")
    if not found:
        yield Case(), text.split(" ")[0]
        return
    of_ports = _PORTS_OF.fullmatch(key.strip())
    before, key = (of_ports[1], of_ports[2]) if of_ports else ("", key.strip())
    pairs = _PAIR.findall(text.partition(" map ")[2])
    for each, value in pairs:
        address, _, port = value.strip().partition(" . ")
        place = f"[{address}]:{port}" if port and ":" in address else f"{address}:{port}" if port else address
        yield read_key(key.split(" . "), each.strip().split(" . ")), f"{before}{place}"
    if not pairs:
        yield read_key(key.split(" . "), ()), before and f"{before}?"


# -- which packets come to a rule


class _Table(NamedTuple):
    """A table of nat: its families, the chains where packets come in, and how its rules are read."""

    families: tuple[int, ...]
    chains: Rules
    entries: Sequence[str]
    jump: re.Pattern[str]
    read_case: Callable[[str, Host], Case]
    read_goals: Callable[[str], Iterator[_Goal]]


def _list_saved(tables: Sequence[Sequence[str]], family: int) -> Iterator[_Table]:
    for lines in tables:
        yield _Table((family,), read_chains(lines), ["PREROUTING"], LEADS, read_saved, _read_saved_goals)


def _list_listed(ruleset: str) -> Iterator[_Table]:
    for family, chains in list_tables(ruleset, RECEIVED):
        entries = [name for name, rules in chains.items() if any(map(RECEIVED.match, rules))]
        yield _Table(_FAMILIES.get(family, (4, 6)), chains, entries, JUMP, read_listed, _read_listed_goals)


class _Step(NamedTuple):
    """What a rule asks for, and where it leads."""

    case: Case
    chains: frozenset[str]
    by_map: bool
    translates: bool


class _Walk:
    """A way through the chains of a table. It is not `whole` where it has been given up."""

    def __init__(self, table: _Table, host: Host) -> None:
        self._table, self._host, self.whole = table, host, True
        self._steps: dict[str, _Step] = {}

    def follow(self, everything: Case, most: int, gives_up: bool = False) -> Iterator[tuple[str, Case]]:
        """The rules that translate and that some packet meets, with the packets that do: once for each way that
        differs. From so many rules on it looks at what every packet may meet, or gives up."""
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
            for rule in chains.get(name, ()):
                looks += 1
                step = self._steps.get(rule) or self._read(rule)
                met = case.narrow(step.case)
                if not met:
                    continue
                if step.translates:
                    yield rule, met
                leads = step.chains
                if step.by_map and met not in mapped:
                    mapped.add(met)
                    leads = frozenset(chains)
                fresh = {(each, met) for each in leads} - seen
                looks += len(fresh)
                waiting += sorted(fresh, key=lambda way: way[0])
                seen |= fresh

    def _read(self, rule: str) -> _Step:
        table = self._table
        leads = frozenset(table.chains.keys() & {*table.jump.findall(rule)})
        translates = next(table.read_goals(rule), None) is not None
        step = _Step(table.read_case(rule, self._host), leads, BY_MAP.search(rule) is not None, translates)
        self._steps[rule] = step
        return step
