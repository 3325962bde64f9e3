"""Which packets meet a rule of a nat table, as nft and iptables print it.

What is not understood of a rule narrows nothing: it is taken for one that more packets meet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from netlimit.detours import STRING
from netlimit.spans import EVERYWHERE, PORTS, Span, Spans, cut, join, leave_out, read_addresses, read_ports

EVERY = frozenset(("tcp", "udp", "icmp", "other"))
"""The protocols, those without a name of their own as one."""
_NAMES = {"tcp": "tcp", "6": "tcp", "udp": "udp", "17": "udp"} | dict.fromkeys(
    ("icmp", "1", "icmpv6", "ipv6-icmp", "58"), "icmp"
)
_VALUE = r"(!= )?(\{[^}]*\}|\S+)"
_DESTINATION = re.compile(rf"(?<!\S)ip6? daddr {_VALUE}")
_TYPE = re.compile(rf"(?<!\S)fib daddr type {_VALUE}")
_PROTOCOL = re.compile(rf"(?<!\S)(?:meta l4proto|ip protocol|ip6 nexthdr) {_VALUE}")
_PORT = re.compile(rf"(?<!\S)(tcp|udp|udplite|dccp|sctp|th) dport {_VALUE}")
_DEVICE = re.compile(rf"(?<!\S)iif(?:name)? {_VALUE}")
_OF_IPTABLES = re.compile(r"(?<!\S)xt (?:match|target) ")
_QUOTED = re.compile(r'"(\d+)"')
_NAME = re.compile(r"[a-z0-9-]+")
_NO_NAMES = frozenset(("all", "map", "vmap"))
_OPTIONS = frozenset(("-d", "-p", "-i", "--dst-type", "--dport", "--dports"))


class Host(NamedTuple):
    """Of a host its own addresses, and by device the first of each family, which a REDIRECT gives to what comes by it
    (of IPv6, no link-local one)."""

    own: Spans = ()
    firsts: tuple[tuple[str, Spans], ...] = ()


class Case(NamedTuple):
    """The packets that meet a rule: their destinations, which it may have `named`, protocols, ports, and the devices
    by which they come (None: any)."""

    places: Spans = EVERYWHERE
    protocols: frozenset[str] = EVERY
    ports: Spans = PORTS
    named: bool = False
    devices: frozenset[str] | None = None

    def narrow(self, other: Case) -> Case:
        """Those that meet both."""
        both = [each for each in (self.devices, other.devices) if each is not None]
        return Case(
            cut(self.places, other.places),
            self.protocols & other.protocols,
            cut(self.ports, other.ports),
            self.named or other.named,
            frozenset.intersection(*both) if both else None,
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
            value = next(words, "")
            case = case if limited and word == "--dst-type" else case.narrow(_read_option(word, value, negated, host))
        negated = word == "!"
    return case


def _read_option(option: str, value: str, negated: bool, host: Host) -> Case:
    if option == "-d":
        return _read_places([value], negated)
    if option == "-i":
        return _read_devices([re.sub(r"\+$", "*", value)], negated, host)
    if option == "--dst-type":
        return _read_types(value.lower().split(","), negated, host)
    if option == "-p":
        return Case(protocols=_read_protocols([value], negated))
    return Case(ports=_read_ports(value.replace(":", "-").split(","), negated))


# -- what nft lists


def read_listed(rule: str, host: Host) -> Case:
    """What a rule of nftables asks for. Of one that iptables-nft has made, iptables says it."""
    if _OF_IPTABLES.search(rule):
        return NOTHING
    quoted = [each[0] for each in STRING.finditer(rule)]
    numbers = iter(range(len(quoted)))
    bare, case = STRING.sub(lambda _: f'"{next(numbers)}"', rule), Case()
    for negated, value in _DEVICE.findall(bare):
        placed = [_QUOTED.fullmatch(each) for each in _split(value)]
        names = [quoted[int(each[1])].strip('"') for each in placed if each]
        if len(names) == len(placed):
            case = case.narrow(_read_devices(names, bool(negated), host))
    for negated, value in _DESTINATION.findall(bare):
        case = case.narrow(_read_places(_split(value), bool(negated)))
    for negated, value in _TYPE.findall(bare):
        kinds = _split(value)
        if _are_names(kinds):
            case = case.narrow(_read_types(kinds, bool(negated), host))
    for negated, value in _PROTOCOL.findall(bare):
        case = case.narrow(Case(protocols=_read_protocols(_split(value), bool(negated))))
    for protocol, negated, value in _PORT.findall(bare):
        case = case.narrow(_read_port(protocol, _split(value), bool(negated)))
    return case


def read_key(fields: Sequence[str], values: Sequence[str]) -> Case:
    """What a key of a map asks for, by the fields that it is made of."""
    case = Case()
    for field, value in zip(fields, values, strict=False):
        kind, _, what = field.partition(" ")
        if what == "dport":
            case = case.narrow(_read_port(kind, [value], False))
        elif what == "daddr":
            case = case.narrow(_read_places([value], False))
    return case


def _read_port(protocol: str, values: Collection[str], negated: bool) -> Case:
    protocols = EVERY - {"icmp"} if protocol == "th" else _read_protocols([protocol], False)
    return Case(protocols=protocols, ports=_read_ports(values, negated))


def _split(value: str) -> list[str]:
    return [each.strip() for each in value.strip("{ }").split(",")]


# -- values: one that is not understood narrows nothing


def _read_places(values: Iterable[str], negated: bool) -> Case:
    spans = _read_each(values, read_addresses)
    if spans is None:
        return Case()
    return Case(leave_out(join(spans), EVERYWHERE)) if negated else Case(join(spans), named=True)


def _read_types(kinds: Collection[str], negated: bool, host: Host) -> Case:
    if "local" not in kinds and negated:
        return Case()
    return Case(leave_out(host.own, EVERYWHERE) if negated or "local" not in kinds else host.own)


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
    return all(_NAME.fullmatch(each) and each not in _NO_NAMES for each in values)


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
