"""Ports that a gateway publishes: what a DNAT of others leads to other hosts, of what comes for its own addresses.

Read from what nft and iptables print. What is not understood of a rule narrows nothing: it is taken for one that may
lead anything away.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple, TypeVar

from netlimit.addresses import Address
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
    read_span,
)

PortRange = tuple[int, int]
_EVERY = frozenset(("tcp", "udp", "icmp", "other"))
_NAMES = {"tcp": "tcp", "6": "tcp", "udp": "udp", "17": "udp"} | dict.fromkeys(
    ("icmp", "1", "icmpv6", "ipv6-icmp", "58"), "icmp"
)
_LAST = 65535
_ALL: tuple[PortRange, ...] = ((0, _LAST),)
_VALUE = r"(!= )?(\{[^}]*\}|\S+)"
_DESTINATION = re.compile(rf"(?<!\S)ip6? daddr {_VALUE}")
_TYPE = re.compile(rf"(?<!\S)fib daddr type {_VALUE}")
_PROTOCOL = re.compile(rf"(?<!\S)(?:meta l4proto|ip protocol|ip6 nexthdr) {_VALUE}")
_PORT = re.compile(rf"(?<!\S)(tcp|udp|udplite|dccp|sctp|th) dport {_VALUE}")
_FROM_HERE = re.compile(r'(?<!\S)iif(?:name)? "lo"(?!\S)')
_OF_IPTABLES = re.compile(r"(?<!\S)xt (?:match|target) ")
_BY_PORT = re.compile(r"(?:tcp|udp) dport map \{")
_PAIR = re.compile(r"([^,{}]+?) : ([^,}]+)")
_NAME = re.compile(r"[a-z0-9-]+")
_NO_NAMES = frozenset(("all", "map", "vmap"))
_MOST_LOOKS = 50_000
"""At more rules, each as often as chains lead to it, what leads there is not heeded any more."""
_SHOWN, _NAMED = 120, 3
_Value = TypeVar("_Value")


class Publication(NamedTuple):
    """A rule that may lead what comes for some `own` addresses, of these protocols ("other": of no other name) and to
    these ports, to another host: to `place`, as it says it ("": that cannot be read)."""

    rule: str
    own: frozenset[str]
    protocols: frozenset[str]
    ports: tuple[PortRange, ...]
    place: str

    def concerns(self, address: str, protocol: str, ports: Sequence[PortRange]) -> bool:
        """Whether it may lead away what comes for an own address, of a protocol ("any": all) and to ports (none: all),
        as rules name them."""
        if address not in self.own or protocol not in (ANY, *self.protocols):
            return False
        return not ports or bool(_cut(self.ports, ports))

    def __str__(self) -> str:
        several = self.ports[1:] or self.ports[0][0] != self.ports[0][1]
        ports = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in self.ports[:_NAMED])
        more = ", …" * (len(self.ports) > _NAMED)
        of = "all" if self.protocols == _EVERY else " and ".join(sorted(self.protocols))
        what = of if self.ports == _ALL else f"{of} port{'s' if several else ''} {ports}{more}"
        return f"{what} to {self.place}" if self.place else f"{what} to where cannot be read"


def say_published(found: Sequence[Publication]) -> tuple[str, str]:
    """The rules, and what they lead where, each in a few words."""
    more = f", and {len(found) - 1} more such rules" if len(found) > 1 else ""
    ways = "; ".join(map(str, found[:_NAMED])) + ("; …" if len(found) > _NAMED else "")
    return f"`{found[0].rule[:_SHOWN]}`{more}", ways


def tell_published(found: Sequence[Publication], address: str) -> str:
    """What an operator should know of a rule `to` an own address that they concern."""
    rules, ways = say_published(found)
    return (
        f"What comes for {address} may be led to another host in nat PREROUTING ({rules}), and does not meet this rule "
        f"then: {ways}. Name in a rule `to` where that leads, with the port there."
    )


@lru_cache(maxsize=1)
def find_publications(
    ruleset: str, tables: tuple[tuple[str, ...], ...], own: frozenset[str]
) -> tuple[Publication, ...]:
    """What leads to other hosts what comes in for some of the `own` addresses: in a ruleset of nftables, and in nat
    tables of iptables (the rules of each, as it saves them)."""
    met = (*_walk_tables(tables, own), *_walk_ruleset(ruleset, own))
    found: dict[tuple[object, ...], Publication] = {}
    for rule, case, families, place in met:
        for known, family in _list_elsewhere(place, families, own):
            here = frozenset(each for each in case.own if ip_address(each).version in family)
            if here:
                each = Publication(rule, here, case.protocols, case.ports, known)
                found.setdefault(each[1:], each)
    return tuple(found.values())


def find_led(listening: Iterable[tuple[str, int]], publications: Iterable[Publication]) -> frozenset[tuple[str, int]]:
    """Of the addresses and TCP ports at which something listens those from which something may be led away."""
    ports: dict[str, list[int]] = {}
    for address, port in sorted(listening):
        ports.setdefault(address, []).append(port)
    ways = {(each.own, span) for each in publications if "tcp" in each.protocols for span in each.ports}
    return frozenset(
        (address, port)
        for own, (low, high) in ways
        for address in own & ports.keys()
        for port in ports[address][bisect_left(ports[address], low) : bisect_right(ports[address], high)]
    )


def _list_elsewhere(place: str, families: tuple[int, ...], own: frozenset[str]) -> Iterator[tuple[str, set[int]]]:
    """Where a rule leads ("": that cannot be read), if not to this host, with the families that it may be about."""
    ends = [] if PORT_ALONE.match(place) else read_places(place, families)
    if any(first.is_unspecified for first, _ in ends):
        yield "", {first.version for first, _ in ends}
        return
    for first, last in ends:
        stays = first == last and str(first) in own
        if not stays and not (first.is_loopback and last.is_loopback):
            yield place, {first.version}


# -- which packets meet a rule


class _Case(NamedTuple):
    """The packets that meet a rule, as far as it is understood."""

    own: frozenset[str]
    protocols: frozenset[str] = _EVERY
    ports: tuple[PortRange, ...] = _ALL

    def narrow(self, other: _Case) -> _Case:
        return _Case(self.own & other.own, self.protocols & other.protocols, _cut(self.ports, other.ports))


def _cut(some: Iterable[PortRange], others: Sequence[PortRange]) -> tuple[PortRange, ...]:
    """The ports that both have."""
    pairs = ((max(low, first), min(high, last)) for low, high in some for first, last in others)
    return tuple((low, high) for low, high in pairs if low <= high)


_Met = tuple[str, _Case, tuple[int, ...], str]
"""A rule that translates, the packets that meet it, the families that it may be about, and where it leads."""


def _walk_tables(tables: Iterable[Sequence[str]], own: frozenset[str]) -> Iterator[_Met]:
    for lines in tables:
        chains = read_chains(lines)
        for rule, case in _walk(chains, ["PREROUTING"], lambda rule: _read_saved(rule, own), _Case(own), LEADS):
            if (target := TARGET.search(rule)) is not None:
                yield rule, case, (4, 6), target[1]


def _walk_ruleset(ruleset: str, own: frozenset[str]) -> Iterator[_Met]:
    for family, chains in list_tables(ruleset, RECEIVED):
        names = [name for name, rules in chains.items() if any(map(RECEIVED.match, rules))]
        for rule, case in _walk(chains, names, lambda rule: _read_listed(rule, own), _Case(own), JUMP):
            if (match := TRANSLATES.search(STRING.sub('""', rule))) is not None:
                families = {"ip": (4,), "ip6": (6,)}.get(match[1] or family, (4, 6))
                for ports, place in _read_goals(match[2]):
                    if cut := _cut(case.ports, ports):  # else no packet that meets the rule is led there
                        yield rule, case._replace(ports=cut), families, place


def _read_goals(text: str) -> Iterator[tuple[tuple[PortRange, ...], str]]:
    """Where `dnat to` leads, of which ports."""
    if " map " not in f" {text}":
        yield _ALL, text.split(" ")[0]
        return
    by_port = _BY_PORT.match(text) is not None
    pairs = _PAIR.findall(text)
    for key, value in pairs:
        ports = _read_each([key.strip()], _read_range) if by_port else None
        yield tuple(ports or _ALL), value.strip().replace(" . ", ":")
    if not pairs:
        yield _ALL, ""


def _walk(
    chains: Rules, names: Sequence[str], read: Callable[[str], _Case], everything: _Case, jump: re.Pattern[str]
) -> Iterator[tuple[str, _Case]]:
    """The rules that some packet meets from chains on, with the packets that do: once for each way that differs."""
    waiting = [(name, everything) for name in names]
    seen, mapped, wide, looks = set(waiting), set[_Case](), set[str](), 0
    readings: dict[str, _Case] = {}
    while waiting:
        name, case = waiting.pop()
        if looks > _MOST_LOOKS:
            if name in wide:
                continue
            wide.add(name)
            case = everything
        for rule in chains.get(name, ()):
            looks += 1
            if rule not in readings:
                readings[rule] = read(rule)
            met = case.narrow(readings[rule])
            if not all(met):
                continue
            yield rule, met
            if BY_MAP.search(rule) is not None and met not in mapped:
                mapped.add(met)
                leads = {*chains}
            else:
                leads = chains.keys() & {*jump.findall(rule)}
            fresh = {(each, met) for each in leads} - seen
            looks += len(fresh)
            waiting += sorted(fresh, key=lambda way: way[0])
            seen |= fresh


# -- what iptables saves


def _read_saved(rule: str, own: frozenset[str]) -> _Case:
    """What a rule of iptables asks for."""
    case, negated, words = _Case(own), False, iter(rule.split())
    limited = " --limit-iface-" in rule  # then the type is that on one device
    for word in words:
        if word in _OPTIONS:
            value = next(words, "")
            case = case if limited and word == "--dst-type" else case.narrow(_read_option(word, value, negated, own))
        negated = word == "!"
    return case


_OPTIONS = frozenset(("-d", "-p", "-i", "--dst-type", "--dport", "--dports"))


def _read_option(option: str, value: str, negated: bool, own: frozenset[str]) -> _Case:
    if option == "-d":
        return _Case(_sift(own, [value], negated))
    if option == "-i":
        return _Case(own if negated or value != "lo" else frozenset())
    if option == "--dst-type":
        return _Case(own if ("LOCAL" in value.split(",")) != negated else frozenset())
    if option == "-p":
        return _Case(own, _read_protocols([value], negated))
    return _Case(own, ports=_read_ports(value.replace(":", "-").split(","), negated))


# -- what nft lists


def _read_listed(rule: str, own: frozenset[str]) -> _Case:
    """What a rule of nftables asks for. Of one that iptables-nft has made, iptables says it."""
    if _OF_IPTABLES.search(rule) or _FROM_HERE.search(rule):
        return _Case(frozenset())
    bare, case = STRING.sub('""', rule), _Case(own)
    for negated, value in _DESTINATION.findall(bare):
        case = case.narrow(_Case(_sift(own, _split(value), bool(negated))))
    for negated, value in _TYPE.findall(bare):
        kinds = _split(value)
        if _are_names(kinds) and ("local" in kinds) == bool(negated):
            return _Case(frozenset())
    for negated, value in _PROTOCOL.findall(bare):
        case = case.narrow(_Case(own, _read_protocols(_split(value), bool(negated))))
    for protocol, negated, value in _PORT.findall(bare):
        protocols = _EVERY - {"icmp"} if protocol == "th" else _read_protocols([protocol], False)
        case = case.narrow(_Case(own, protocols, _read_ports(_split(value), bool(negated))))
    return case


def _split(value: str) -> list[str]:
    return [each.strip() for each in value.strip("{ }").split(",")]


# -- values: one that is not understood narrows nothing


def _sift(own: frozenset[str], values: Iterable[str], negated: bool) -> frozenset[str]:
    """The own addresses that are among some networks and ranges, or are not."""
    spans = _read_each(values, read_span)
    if spans is None:
        return own
    return frozenset(each for each in own if any(_lies_in(ip_address(each), span) for span in spans) != negated)


def _lies_in(address: Address, span: tuple[Address, Address]) -> bool:
    return address.version == span[0].version and int(span[0]) <= int(address) <= int(span[1])


def _read_protocols(values: Collection[str], negated: bool) -> frozenset[str]:
    if not _are_names(values):
        return _EVERY
    known = frozenset(_NAMES.get(each, "other") for each in values)
    # What has no name of its own is many protocols: without some of them there are others.
    return _EVERY - (known - {"other"}) if negated else known


def _are_names(values: Iterable[str]) -> bool:
    return all(_NAME.fullmatch(each) and each not in _NO_NAMES for each in values)


def _read_ports(values: Iterable[str], negated: bool) -> tuple[PortRange, ...]:
    ranges = _read_each(values, _read_range)
    if ranges is None:
        return _ALL
    left = _ALL
    for low, high in ranges if negated else ():
        left = _cut(left, ((0, low - 1), (high + 1, _LAST)))
    return left if negated else tuple(ranges)


def _read_range(value: str) -> PortRange:
    low, _, high = value.partition("-")
    return int(low), int(high or low)


def _read_each(values: Iterable[str], read: Callable[[str], _Value]) -> list[_Value] | None:
    """All of them; None where one is not understood."""
    try:
        return [read(each) for each in values]
    except ValueError:
        return None
