"""Which packets meet a rule of a nat table, as nft and iptables print it.

What is not understood of a rule narrows nothing: it is taken for one that more packets meet. Where that may be what it
says of a destination, the case is `unread`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from netlimit.detours import STRING
from netlimit.elements import write_out
from netlimit.spans import EVERYWHERE, PORTS, Span, Spans, cut, join, leave_out, read_addresses, read_ports

EVERY = frozenset(("tcp", "udp", "icmp", "other"))
"""The protocols, those without a name of their own as one."""
_NAMES = {"tcp": "tcp", "6": "tcp", "udp": "udp", "17": "udp"} | dict.fromkeys(
    ("icmp", "1", "icmpv6", "ipv6-icmp", "58"), "icmp"
)
_ASKS = re.compile(
    r"(?<!\S)(iif(?:name)?|(?:ip6?|ct original) daddr|fib daddr(?: \. \w+)* type|meta l4proto|ip protocol|ip6 nexthdr"
    r"|(?:tcp|udp|udplite|dccp|sctp|th) dport) (!= )?(?:vmap )?(\{[^}]*\}|\S+)"
)
"""A field that is read, and what it is to be."""
_INSIDE = re.compile(
    r"(?<!\S)(?<!protocol )(?<!nexthdr )(?<!l4proto )(?<!= )"
    r"(reply|vxlan|geneve|gre|gretap) (ip6?|tcp|udp|udplite|dccp|sctp|th) "
)
"""Fields that are not the packet's own."""
_MAY_CHOOSE = re.compile(r"\bdaddr\b|@(?:ll|nh|ih),|\b(?:mark|label)\b(?! set)")
"""What may go by the destination, where it is not read: marks may have been written for some alone."""
_OF_IPTABLES = re.compile(r"(?<!\S)xt (?:match|target) ")
_QUOTED = re.compile(r'"(\d+)"')
_NAME = re.compile(r"[a-z0-9]+|ipv6-icmp")
"""Of a protocol or a type; with another hyphen it is a range."""
_PLACES = frozenset(("-d", "--dst-range", "--ctorigdst"))
_OPTIONS = _PLACES | {"-p", "-i", "--dst-type", "--dport", "--dports"}
_BLIND = re.compile(
    r"addrtype|ah|comment|connbytes|connlimit|conntrack|cpu|dccp|devgroup|dscp|ecn|esp|hashlimit|helper|hl|icmp|"
    r"icmp6|iprange|length|limit|mac|multiport|nfacct|osf|owner|physdev|pkttype|policy|quota|recent|sctp|set|"
    r"socket|state|statistic|tcp|tcpmss|time|tos|ttl|udp|udplite"
)
"""Matches of iptables that go by no destination, but for options that are read."""


class Host(NamedTuple):
    """Of a host its own addresses, by device the first of each family, which a REDIRECT gives to what comes by it (of
    IPv6, no link-local one), and what else is local to it, by a route."""

    own: Spans = ()
    firsts: tuple[tuple[str, Spans], ...] = ()
    routed: Spans = ()

    @property
    def ends(self) -> Spans:
        """All of which the kernel says that it is local."""
        return join((*self.own, *self.routed))


class Case(NamedTuple):
    """The packets that meet a rule: their destinations, which it may have `named`, or chosen in a way that is `unread`,
    protocols, ports, and the devices by which they come (None: any)."""

    places: Spans = EVERYWHERE
    protocols: frozenset[str] = EVERY
    ports: Spans = PORTS
    named: bool = False
    devices: frozenset[str] | None = None
    unread: bool = False

    def narrow(self, other: Case) -> Case:
        """Those that meet both."""
        both = [each for each in (self.devices, other.devices) if each is not None]
        return Case(
            cut(self.places, other.places),
            self.protocols & other.protocols,
            cut(self.ports, other.ports),
            self.named or other.named,
            frozenset.intersection(*both) if both else None,
            self.unread or other.unread,
        )

    def __bool__(self) -> bool:
        return bool(self.places and self.protocols and self.ports)


NOTHING = Case(())


# -- what iptables saves


def read_saved(rule: str, host: Host) -> Case:
    """What a rule of iptables asks for."""
    case, negated, words = Case(), False, iter(rule.split())
    limited = " --limit-iface-" in rule  # then the type is that on one device
    for word in words:
        if word in _OPTIONS:
            case = case.narrow(_read_option(word, next(words, ""), negated, limited, host))
        elif word == "-m":
            case = case.narrow(Case(unread=not _BLIND.fullmatch(next(words, ""))))
        elif word == "--match-set":
            _, fields = next(words, ""), next(words, "")
            case = case.narrow(Case(unread=not negated and "dst" in fields.split(",")))
        elif word == "--rdest":
            case = case.narrow(Case(unread=True))
        negated = word == "!"
    return case


def _read_option(option: str, value: str, negated: bool, limited: bool, host: Host) -> Case:
    if option in _PLACES:
        return _read_places([value], negated)
    if option == "-i":
        return _read_devices([re.sub(r"\+$", "*", value)], negated, host)
    if option == "--dst-type":
        return _read_types(value.lower().split(","), negated, limited, host)
    if option == "-p":
        return Case(protocols=_read_protocols([value], negated))
    return Case(ports=_read_ports(value.replace(":", "-").split(","), negated))


# -- what nft lists


def read_listed(rule: str, host: Host) -> Iterator[tuple[str, Case]]:
    """The rules that one of nftables is, written out, but for what is quoted; each with what it asks for. Of one that
    iptables-nft has made, iptables says it."""
    if _OF_IPTABLES.search(rule):
        return
    quoted = [each[0].strip('"') for each in STRING.finditer(rule)]
    numbers = iter(range(len(quoted)))
    for each in write_out(STRING.sub(lambda _: f'"{next(numbers)}"', rule)):
        yield each, _read_plain(_INSIDE.sub(r"\1-\2-", each), quoted, host)


def _read_plain(rule: str, quoted: Sequence[str], host: Host) -> Case:
    case = Case(unread=_MAY_CHOOSE.search(_ASKS.sub(" ", rule)) is not None)
    for field, negated, value in _ASKS.findall(rule):
        values = [each.strip() for each in value.strip("{ }").split(",")]
        if not field.startswith("iif"):
            case = case.narrow(_read_field(field, values, bool(negated), host))
        elif all(names := [_QUOTED.fullmatch(each) for each in values]):
            devices = [quoted[int(each[1])] for each in names if each]
            case = case.narrow(_read_devices(devices, bool(negated), host))
    return case


def _read_field(field: str, values: Sequence[str], negated: bool, host: Host) -> Case:
    kind, _, what = field.partition(" ")
    if what == "dport":
        protocols = EVERY - {"icmp"} if kind == "th" else _read_protocols([kind], False)
        return Case(protocols=protocols, ports=_read_ports(values, negated))
    if field.endswith("daddr"):
        return _read_places(values, negated)
    if kind == "fib":
        return _read_types(values, negated, " . " in what, host)
    return Case(protocols=_read_protocols(values, negated))


# -- values: one that is not understood narrows nothing


def _read_places(values: Iterable[str], negated: bool) -> Case:
    spans = _read_each(values, read_addresses)
    if spans is None:
        return Case(unread=not negated)
    return Case(leave_out(join(spans), EVERYWHERE)) if negated else Case(join(spans), named=True)


def _read_types(kinds: Sequence[str], negated: bool, limited: bool, host: Host) -> Case:
    """`limited`: it is the type that a destination has on one device."""
    if [*kinds] == ["local"] and not negated:
        return Case(host.ends)
    if limited or ("local" in kinds) != negated or not _are_names(kinds):
        return Case()
    return Case(leave_out(host.own, EVERYWHERE))


def _read_devices(patterns: Collection[str], negated: bool, host: Host) -> Case:
    if not negated and patterns == ["lo"]:  # what comes by it has been translated as it was sent
        return NOTHING
    known = [name for name, _ in host.firsts]
    met = {name for name in known for each in patterns if _is_called(name, each)}
    return Case(devices=frozenset(met.symmetric_difference(known) if negated else met))


def _is_called(device: str, pattern: str) -> bool:
    return device.startswith(pattern[:-1]) if pattern.endswith("*") else device == pattern


def _read_protocols(values: Collection[str], negated: bool) -> frozenset[str]:
    if not _are_names(values):
        return EVERY
    known = frozenset(_NAMES.get(each, "other") for each in values)
    # What has no name of its own is many protocols: without some of them there are others.
    return EVERY - (known - {"other"}) if negated else known


def _are_names(values: Iterable[str]) -> bool:
    return all(_NAME.fullmatch(each) and each != "all" for each in values)


def _read_ports(values: Iterable[str], negated: bool) -> Spans:
    ranges = _read_each(values, read_ports)
    if ranges is None:
        return PORTS
    return leave_out(join(ranges), PORTS) if negated else join(ranges)


def _read_each(values: Iterable[str], read: Callable[[str], Span]) -> list[Span] | None:
    """All of them; None where one is not understood."""
    try:
        return [read(each) for each in values]
    except ValueError:
        return None
