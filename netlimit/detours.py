"""Who leads packets another way than by where rules of ours stand: read from what nft and iptables print.

What they print of names and comments anybody may have written: a line that is not understood is passed over, or taken
for one that may lead anywhere, and nothing here ends over it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_address, ip_network
from socket import AF_INET, AF_INET6, inet_pton
from typing import NamedTuple

from netlimit.addresses import Address

Rules = dict[str, list[str]]
"""The rules of a table by chain."""
_TABLE = re.compile(r"table (?:(ip6?|inet|netdev|arp|bridge) )?(.+?) \{(?: #.*)?")
"""A table that has an owner is listed with his name behind it (firewalld makes its own so, unless it is told not to);
one of a family that nobody knows yet is taken for one of both."""
_CHAIN = re.compile(r"\tchain (.+?) \{(?: #.*)?")
JUMP = re.compile(r"\b(?:jump|goto) ([^\s,}]+)")
BY_MAP = re.compile(r"\bvmap @")
"""Verdicts in a map with a name: `nft -t` does not tell them."""
STRING = re.compile(r'((?:^| )comment )?"[^"]*"')
"""What nft quotes, in which nothing is escaped, with the word before it where it is a comment."""
_INGRESS = re.compile(r"type filter hook ingress (?:device (\S+)|devices = \{ (.*?) \}) priority ")
_EGRESS = re.compile(r"type filter hook egress (?:device (\S+)|devices = \{ (.*?) \}) priority ")
_FORWARD = re.compile(r'\bfwd (?:ip6? )?to (?:.* device )?("[^"]*")?')
_ENTRY = re.compile(r"type \w+ hook (?:prerouting|output) priority (-?\d+)?")
_BRIDGED = re.compile(r"type filter hook prerouting\b")
_BROUTES = re.compile(r"(?<!\S)meta broute set (?!0(?!\S))")
_DROPS = re.compile(r"(?<!\S)(?:-j|--[a-z]+-target) DROP(?!\S)")
"""What in the broute table of ebtables hands a frame to IP by the port itself, or has another target do so."""
_OF_ARP = re.compile(r"(?<!\S)-p (?:ARP|0x0?806)(?!\S)")
_UNTRACKS = re.compile(r"(?<!\S)notrack(?!\S)")
_PUT_TOGETHER = -400
"""NF_IP_PRI_CONNTRACK_DEFRAG (linux/netfilter_ipv4.h), that of IPv6 too."""
_SENT = re.compile(r"type nat hook output\b")
RECEIVED = re.compile(r"type nat hook prerouting\b")
LEFT = re.compile(r"type nat hook postrouting\b")
_ACCEPTED = re.compile(r"type nat hook input\b")
_REROUTED = re.compile(r"type route hook output\b")
_PASSED = re.compile(r"type (?:filter|route|nat) hook (?:ingress|prerouting|input|forward|output)\b")
_REWRITES = re.compile(
    r"(?<!\S)(?:ip6? [sd]addr|(?:tcp|udp|udplite|dccp|sctp|th) [sd]port|@(?:nh|th),\d+,\d+) set |-j RAW[SD]NAT(?!\S)"
    r"|^-A (?!POSTROUTING ).*-j [SD]NPT(?!\S)|(?<!\S)xt target (?:RAW[SD]NAT|[SD]NPT)(?!\S)"
)
"""What writes addresses or ports into packets, and leaves connection tracking out of it. What translates prefixes (RFC
6296) where packets leave, no rule of ours comes behind."""
_ARRIVED = re.compile(r"type (?:filter|nat) hook (?:ingress|prerouting)\b")
_RAISES = re.compile(r"(?<!\S)(?:ip ttl|ip6 hoplimit) set |(?<!\S)(?:-j|xt target) (?:TTL|HL)(?!\S)")
_BEHIND = re.compile(r"^-A (?:INPUT|FORWARD|OUTPUT|POSTROUTING) ")
"""Where the kernel does not ask any more how far a packet goes."""
_MAY_REWRITE = re.compile(r" set |xt target ")
EXTENSION = re.compile(r'\bxt target "(\w+)"')
"""A target of iptables-nft; nft of some versions writes its name in quotes."""
_QUEUED = re.compile(r"(?<!\S)-j NFQUEUE(?!\S)")
_CHARGED = "PREROUTING", "INPUT", "FORWARD", "OUTPUT"
"""The chains of the kernel's that lead to rates."""
_TAKES = re.compile(r"(?<!\S)(?:redirect|-j REDIRECT)(?!\S)")
TRANSLATES = re.compile(r"\bdnat (?:(ip6?) )?(?:addr \. port |interval |prefix )?to (.+)")
_MASKS = re.compile(r"(?<!\S)(?:snat (?:ip6? )?(?:prefix )?to|-j SNAT|-j NETMAP)(?!\S)")
OF_SOURCE = re.compile(r"(?<!\S)(?:(?<!! )-s|ip6? saddr) (\S+)")
_FOR = re.compile(r"(?<!\S)(?:(?<!! )-d|ip6? daddr) (\S+)")
PORT_ALONE = re.compile(r":(?!:)")
_VALUE = re.compile(r" : ([^\s,}]+)")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|(?<= --comment )[^\s"]\S*')
"""What iptables quotes, and a comment that it does not."""
_ADDED = re.compile(r"-A (\S+) ")
LEADS = re.compile(r"(?<!\S)-[jg] (\S+)")
TARGET = re.compile(r"(?<!\S)-j (?:DNAT\b.* --to-destination|NETMAP\b.* --to) (\S+)")
_LONGEST = {4: 32, 6: 128}
ANYWHERE = "0.0.0.0/0", "::/0"
ANY = "any"
_OF = re.compile(
    r"(?<!\S)(?:(?<!! )-p|(?:meta l4proto|ip protocol)(?= \w)) (\S+)(?!\S)|(?<!\S)(tcp|udp) [ds]port(?!\S)",
)
_PROTOCOLS = {"tcp": "tcp", "udp": "udp", "icmp": "icmp", "ipv6-icmp": "icmp"}


class Translation(NamedTuple):
    """A rule that gives what this host sends another destination: the rule, the first and last address, and of which
    protocol it is, as rules of ours name it ("any" where it does not tell)."""

    rule: str
    first: Address
    last: Address
    protocol: str = ANY

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def find_forwards(ruleset: str, harmless: Collection[str] = (), leaving: bool = False) -> dict[str, str]:
    """The devices of which nftables forwards by itself (`fwd`) what comes in, or what is `leaving` by them, each with
    the rule; `harmless` are devices from which packets come back."""
    found: dict[str, str] = {}
    for (family, _), chains in (_read_ruleset(ruleset) if "fwd " in ruleset else {}).items():
        for header, rules in _find_hooked(chains, _EGRESS if leaving else _INGRESS) if family == "netdev" else ():
            rule = next((each for each in rules if _is_forward(each, harmless)), None)
            if rule is not None:
                found |= dict.fromkeys(_read_devices(header), rule)
    return found


def find_brouting(ruleset: str, listed: str) -> Iterator[str]:
    """The rules by which a port of a bridge hands packets to IP in the bridge's place: in a ruleset of nftables, and in
    the broute table as ebtables lists it, where a chain whose policy does so counts, too."""
    for family, rule in follow_hooked(ruleset, _BRIDGED) if "meta broute set " in ruleset else ():
        if family == "bridge" and _BROUTES.search(STRING.sub('""', rule)):
            yield rule
    for line in map(str.strip, listed.splitlines()):
        if line.startswith("Bridge chain: "):
            if line.endswith("policy: DROP"):
                yield line
        elif _DROPS.search(line) and not _OF_ARP.search(line):
            yield line


def find_untracked_early(ruleset: str) -> str | None:
    """A rule of nftables that has packets not tracked, where their fragments have not been put together yet."""
    for (family, _), chains in (_read_ruleset(ruleset) if "notrack" in ruleset else {}).items():
        for header, rules in _find_hooked(chains, _ENTRY) if family in ("ip", "ip6", "inet") else ():
            # One that has a name (`raw`) is not so early.
            if int(header[1] or 0) < _PUT_TOGETHER and (found := next(filter(_UNTRACKS.search, rules), None)):
                return found
    return None


def _is_forward(rule: str, harmless: Collection[str]) -> bool:
    match = _FORWARD.search(rule)
    return match is not None and (match[1] or "").strip('"') not in harmless


def _read_devices(header: re.Match[str]) -> list[str]:
    return [each.strip('"') for each in (header[1] or header[2]).split(", ")]


def find_translations(
    ruleset: str, tables: Iterable[Sequence[str]], own: Collection[str] = ()
) -> Iterator[Translation]:
    """What gives packets of this host another destination, or port, but for one of its `own` and loopback: in a ruleset
    of nftables, and in nat tables of iptables (the rules of each, as it saves them)."""
    for rule, families, place in (*_list_translating(ruleset, _SENT), *_list_targets(tables, "OUTPUT")):
        if PORT_ALONE.match(place):
            meant = _FOR.search(STRING.sub('""', rule))
            place = meant[1] if meant else ""
        for first, last in read_places(place, families):
            mine = first == last and str(first) in own
            if not mine and not (first.is_loopback and last.is_loopback):
                yield Translation(rule, first, last, _read_protocol(rule))


def _read_protocol(rule: str) -> str:
    """The one protocol that a rule of either kind asks for."""
    told = {each[1] or each[2] for each in _OF.finditer(STRING.sub('""', rule))}
    return _PROTOCOLS.get(told.pop(), ANY) if len(told) == 1 else ANY


def find_taking(ruleset: str, tables: Iterable[Sequence[str]], own: Collection[str]) -> Iterator[str]:
    """The rules that may lead what comes in to a socket of this host, whatever port or address it is for: those that
    redirect, and those that give it an address of its `own` or of loopback, or another port alone. Read from what
    `find_translations` reads."""
    listed = (rule for _, rule in follow_hooked(ruleset, RECEIVED))
    for rule in (*listed, *follow_tables(tables, "PREROUTING")):
        if _TAKES.search(rule) and _TAKES.search(STRING.sub('""', rule)):
            yield rule
    addresses = {*map(ip_address, own)}
    for rule, families, place in (*_list_translating(ruleset, RECEIVED), *_list_targets(tables, "PREROUTING")):
        ends = read_places(place, families)
        if PORT_ALONE.match(place) or any(_is_taking(first, last, addresses) for first, last in ends):
            yield rule


def find_masked(ruleset: str, tables: Iterable[Sequence[str]]) -> Iterator[Translation]:
    """What gives those who come to this host another source behind its rules, so that it answers to that one: the rules
    of nat INPUT, each with the addresses that it is about. Read from what `find_translations` reads."""
    listed = (
        (rule, {"ip": (4,), "ip6": (6,)}.get(family, (4, 6))) for family, rule in follow_hooked(ruleset, _ACCEPTED)
    )
    saved = ((rule, (4, 6)) for rule in follow_tables(tables, "INPUT"))
    for rule, families in (*listed, *saved):
        bare = STRING.sub('""', rule)
        if _MASKS.search(bare):
            source = OF_SOURCE.search(bare)
            for first, last in read_places(source[1] if source else "", families):
                yield Translation(rule, first, last, _read_protocol(rule))


def find_queued(tables: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rules by which packets wait for a program's word in a table where rates stand: those of mangle tables, as
    iptables saves them. A packet that the program has repeated begins that table anew."""
    rules = dict.fromkeys(rule for chain in _CHARGED for rule in follow_tables(tables, chain))
    yield from filter(_QUEUED.search, rules)


def find_rewriting(ruleset: str, rules: Iterable[str]) -> Iterator[str]:
    """The rules, of nftables and of the `rules` of iptables, that write other addresses or ports into packets by
    themselves before these have passed all hooks of ours."""
    listed = (rule for _, rule in follow_hooked(ruleset, _PASSED)) if _MAY_REWRITE.search(ruleset) else ()
    bare = map(_strip_quotes, (*listed, *rules))
    yield from filter(_REWRITES.search, bare)


def find_raising(ruleset: str, rules: Iterable[str]) -> Iterator[str]:
    """The rules, of nftables and of the `rules` of iptables, that write another hop limit into what has come in before
    the kernel asks how far it goes."""
    listed = (rule for _, rule in follow_hooked(ruleset, _ARRIVED)) if _MAY_REWRITE.search(ruleset) else ()
    bare = map(_strip_quotes, (*listed, *rules))
    yield from (rule for rule in bare if _RAISES.search(rule) and not _BEHIND.match(rule))


def _strip_quotes(rule: str) -> str:
    """A rule without what is quoted in it; rules are many, and most have no quotes."""
    return STRING.sub('""', EXTENSION.sub(r"xt target \1", rule)) if '"' in rule else rule


def follow_rerouted(ruleset: str) -> Iterator[str]:
    """The rules of nftables after which what this host sends may be routed once more."""
    yield from (rule for _, rule in follow_hooked(ruleset, _REROUTED))


def _is_taking(first: Address, last: Address, own: Collection[Address]) -> bool:
    if first.is_unspecified:  # nobody knows where it leads: most likely to some server
        return False
    if first == last:
        return first in own or first.is_loopback
    inside = (int(first) <= int(each) <= int(last) for each in own if each.version == first.version)
    return first.is_loopback or any(inside)


def _list_translating(ruleset: str, hook: re.Pattern[str]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """The rules of nftables with the families that they may be about, and where each leads ("" for anywhere)."""
    for family, rule in follow_hooked(ruleset, hook):
        if (match := TRANSLATES.search(rule)) is not None:
            families = {"ip": (4,), "ip6": (6,)}.get(match[1] or family, (4, 6))
            places = _VALUE.findall(match[2]) if " map " in f" {match[2]}" else [match[2].split(" ")[0]]
            yield from ((rule, families, place) for place in places or [""])


def follow_hooked(ruleset: str, hook: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """The rules of nftables that a packet may meet at a hook, each with the family of its table."""
    for family, chains in list_tables(ruleset, hook):
        for _, rules in _find_hooked(chains, hook):
            yield from ((family, rule) for rule in rules)


def list_tables(ruleset: str, hook: re.Pattern[str]) -> Iterator[tuple[str, Rules]]:
    """The tables of nftables, where some chain stands at a hook: of each its family and chains."""
    for (family, _), chains in (_read_ruleset(ruleset) if hook.search(ruleset) else {}).items():
        yield family, chains


def _list_targets(tables: Iterable[Sequence[str]], chain: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    for rule in follow_tables(tables, chain):
        if (target := TARGET.search(rule)) is not None:
            yield rule, (4, 6), target[1]


def follow_tables(tables: Iterable[Sequence[str]], chain: str) -> Iterator[str]:
    """The rules of iptables that a packet may meet in a chain of the kernel's, but for quotes and comments."""
    for lines in tables:
        yield from _follow(read_chains(lines), [chain], LEADS)


def read_chains(lines: Iterable[str]) -> Rules:
    """The rules of a table, as iptables saves them, without what is quoted in them."""
    chains: Rules = {}
    for line in lines:
        if (added := _ADDED.match(line)) is not None:
            quotes = '"' in line or " --comment " in line  # most have none
            chains.setdefault(added[1], []).append(_QUOTED.sub('""', line) if quotes else line)
    return chains


def read_places(text: str, families: tuple[int, ...]) -> list[tuple[Address, Address]]:
    """The addresses, from the first to the last, that are given with or without ports; all where none is understood,
    and none where only ports are."""
    if PORT_ALONE.match(text):
        return []
    if "[" in text:
        text = text.rpartition("]")[0].replace("[", "").replace("]", "")
    elif "." in text.partition(":")[0]:
        text = text.partition(":")[0]
    try:
        return [read_span(text)]
    except ValueError:
        every = (ip_network(each) for each in ANYWHERE)
        return [(each[0], each[-1]) for each in every if each.version in families]


def read_span(text: str) -> tuple[Address, Address]:
    """The first address and the last of a network, of a range (`10.2.0.1-10.2.0.9`), or of one alone. Raises
    ValueError."""
    if "/" in text:
        network = ip_network(text, strict=False)
        return network[0], network[-1]
    begin, _, end = text.partition("-")
    first = ip_address(begin)
    return first, ip_address(end) if end else first


# -- areas


class Areas:
    """Addresses that are given as networks, as single ones, or from the first to the last."""

    def __init__(self, places: Iterable[str]) -> None:
        ends: dict[int, list[tuple[int, int]]] = {4: [], 6: []}
        for place in places:
            first, _, last = place.partition("-")
            ends[ip_address(first).version].append((int(ip_address(first)), int(ip_address(last or first))))
        self._ends = {family: list(merge(sorted(each))) for family, each in ends.items()}

    def meet(self, target: str) -> bool:
        """Whether some address of a target, as sets have it, is among them."""
        family, first, last = read_ends(target)
        ends = self._ends[family]
        before = bisect_right(ends, (last, 1 << _LONGEST[6]))
        return before > 0 and ends[before - 1][1] >= first


@lru_cache(maxsize=16)
def read_areas(places: tuple[tuple[str, str], ...], protocol: str) -> Areas:
    """Areas, of those given with their protocols, where a packet can be of one protocol. They are asked again and
    again: with kube-proxy there are thousands."""
    return Areas(place for other, place in places if ANY in (protocol, other) or protocol == other)


def read_ends(target: str) -> tuple[int, int, int]:
    """The family of a network, and its first and last address as numbers. By hand, for targets are many."""
    address, _, length = target.partition("/")
    family, kind = (6, AF_INET6) if ":" in address else (4, AF_INET)
    first = int.from_bytes(inet_pton(kind, address), "big")
    return family, first, first | (1 << _LONGEST[family] - int(length or _LONGEST[family])) - 1


def merge(ends: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same without what overlaps: who ends last is behind all others, then."""
    held: tuple[int, int] | None = None
    for first, last in ends:
        if held is not None and first <= held[1]:
            held = held[0], max(held[1], last)
            continue
        if held is not None:
            yield held
        held = first, last
    if held is not None:
        yield held


# -- what nft prints


def _read_ruleset(text: str) -> dict[tuple[str, str], Rules]:
    """The chains of `nft list ruleset`, by family and name of the table, without what is only said of them."""
    tables: dict[tuple[str, str], Rules] = {}
    chains: Rules = {}
    rules: list[str] = []
    for line in text.splitlines():
        if (table := _TABLE.fullmatch(line)) is not None:
            chains = tables.setdefault((table[1] or "inet", table[2]), {})
        elif (chain := _CHAIN.fullmatch(line)) is not None:
            rules = chains.setdefault(chain[1], [])
        elif line.startswith("\t\t"):
            rules.append(STRING.sub(lambda found: "" if found[1] else found[0], line.strip()))
        elif line == "\t}":
            rules = []
    return tables


def _find_hooked(chains: Rules, hook: re.Pattern[str]) -> Iterator[tuple[re.Match[str], list[str]]]:
    """What a packet may meet at a hook: of each chain that stands there what it says of it, and its rules with those of
    the chains where they lead."""
    for name, rules in chains.items():
        header = next(filter(None, map(hook.match, rules)), None)
        if header is not None:
            yield header, list(_follow(chains, [name], JUMP))


def _follow(chains: Mapping[str, list[str]], names: list[str], jump: re.Pattern[str]) -> Iterator[str]:
    """The rules of chains, and of those where they lead: each once, and all from the first map of verdicts on."""
    waiting, seen, anywhere = list(names), set(names), False
    while waiting:
        for rule in chains.get(waiting.pop(), ()):
            yield rule
            if anywhere:
                continue
            anywhere = BY_MAP.search(rule) is not None
            next_ones = (chains.keys() if anywhere else chains.keys() & {*jump.findall(rule)}) - seen
            waiting += sorted(next_ones)
            seen |= next_ones
