"""The IP rules that the limiter enforces in the kernel's place, and which of them hit a client.

In the terms of docs/rules.md, as the kernel has it and `explain` tells it: an `allow` exempts from everything, of it
and a `block` the longer prefix wins; of limits of one kind `per` host or peer the most specific one is asked, and
shared budgets nest. The rules that the kernel enforces are known here too, for they take precedence over others; but
nothing of them is enforced.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from netlimit.fallback import find_obstacle
from netlimit.l7.gate import Charge
from netlimit.l7.limit import LARGEST_AMOUNT, Algorithm, Limit
from netlimit.l7.rules import Match, Mode
from netlimit.l7.rules import Rule as LimitRule
from netlimit.limits import Facts, Group, VerdictGroup, compile_rule, own_addresses, parse_safe
from netlimit.rates import Kind, Rate
from netlimit.rules import HOST, PEER, TARGET, Action, Rule
from netlimit.sequence import precedence

DOMAIN = ""
"""The domain of the counters of IP rules: that of a document is never empty."""
LEASE_SECONDS = 10
"""A request that nobody says the end of is in flight for so long."""
_OUT_OF_BLOCKS = -1
_FAMILIES = {4: (socket.AF_INET, 32), 6: (socket.AF_INET6, 128)}


@dataclass(slots=True)
class Count:
    """What one IP rule has counted in this process: requests that it was asked about and the bytes of their bodies, and
    of these what was refused (for `observe`: what would have been)."""

    requests: int = 0
    bytes: int = 0
    refused: int = 0
    refused_bytes: int = 0

    def note(self, size: int, refused: bool) -> None:
        """Count a request. For one thread."""
        self.requests += 1
        self.bytes += size
        if refused:
            self.refused += 1
            self.refused_bytes += size


class Hit(NamedTuple):
    """A limit that a client is asked for: its rule and whose counter it is, what is charged, and what it counts."""

    match: Match
    limit: Limit
    charge: Charge
    tally: Count

    @property
    def observes(self) -> bool:
        """Whether it refuses nothing."""
        return self.match.rule.mode is Mode.OBSERVE


class Standing(NamedTuple):
    """How a client stands. `allowed`, `blocked`: what counts it, if the limiter enforces a rule that says so. A client
    who is blocked gets 403, and neither is asked for any limit. `hits` stand in the order in which they are to be
    asked: the first that refuses ends it, so that a flooder does not eat what is for all."""

    hits: tuple[Hit, ...] = ()
    blocked: Count | None = None
    allowed: Count | None = None
    rule: LimitRule | None = None
    """The rule that blocks or allows."""


FREE = Standing()
"""Nothing is to be enforced."""


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A rule at its target. `group` tells limits of one kind apart, None for verdicts; `rank` is the order of asking;
    `named` says that it holds though the address is safe; `shift` is how far an address is cut for its bucket, and
    _OUT_OF_BLOCKS for the one bucket of the target."""

    action: Action
    group: str | None
    rank: tuple[object, ...]
    named: bool
    mine: bool
    rule: LimitRule
    limit: Limit | None
    charge: Charge
    shift: int
    tally: Count


@dataclass(slots=True)
class _Family:
    """The rules of IPv4, or of IPv6: by how far an address is shifted to the right, the longest prefix first, and then
    by what is left of it. Those at one place stand so that verdicts come first, `allow` before `block`."""

    tables: list[tuple[int, dict[int, list[_Place]]]] = field(default_factory=list)
    safe: list[tuple[int, frozenset[int]]] = field(default_factory=list)


class AddressRules:
    """The IP rules of a gateway, as they are at one moment. They never change: others take their place.

    `rules` are those in force on the gateway; of these the limiter enforces those in `assigned`, by id. `own` and
    `safe` are the gateway's addresses and its safe set. `counts`, by the id of a rule, go on from the rules before.
    `gateway` names whose buckets these are: other gateways, also of other databases, may share the counters.
    """

    def __init__(
        self,
        rules: Iterable[Rule] = (),
        assigned: Collection[int] = (),
        own: Iterable[str] = (),
        safe: Iterable[str] = (),
        counts: Mapping[int, Count] | None = None,
        gateway: str = "",
    ) -> None:
        self.counts = dict(counts or {})
        self._gateway = gateway
        self.flights: dict[str, LimitRule] = {}
        """The rules that limit requests in flight, by name."""
        self._facts = Facts(own=own_addresses(tuple(own)), safe=parse_safe(tuple(safe)))
        self._families = {4: _Family(), 6: _Family()}
        self.empty = not assigned
        """Whether nothing is to be enforced for anybody."""
        if assigned:
            self._place(rules, frozenset(assigned))
            self._protect()

    def find_limits(self, address: str) -> Standing:
        """How a client stands, by its address; FREE for what is no address, and for loopback. Costs some microseconds,
        whatever the number of rules."""
        if self.empty:
            return FREE
        known = _read(address)
        if known is None:
            return FREE
        version, number = known
        family = self._families[version]
        found: list[_Place] = []
        for shift, table in family.tables:
            here = table.get(number >> shift)
            if here is not None:
                found += here
        if not found:
            return FREE
        if any(number >> shift in held for shift, held in family.safe):
            found = [place for place in found if place.named]
        return _judge(found, number)

    def _place(self, rules: Iterable[Rule], assigned: frozenset[int]) -> None:
        tables: dict[tuple[int, int], dict[int, list[_Place]]] = {}
        for rule in rules:
            if find_obstacle(rule) is None:
                shift = rule.target.max_prefixlen - rule.target.prefixlen
                table = tables.setdefault((rule.family, shift), {})
                place = self._make_place(rule, rule.id in assigned)
                table.setdefault(int(rule.target.network_address) >> shift, []).append(place)
        for (version, shift), table in sorted(tables.items(), key=lambda item: item[0]):
            for places in table.values():
                places.sort(key=_order)
            self._families[version].tables.append((shift, table))

    def _make_place(self, rule: Rule, mine: bool) -> _Place:
        purpose = compile_rule(rule, self._facts).purpose
        tally = self.counts.setdefault(rule.id, Count()) if mine else _NOBODY
        facts = self._facts
        named = rule.action is Action.ALLOW or facts.overrides(rule) or facts.stands_here(rule)
        made, charge = make_rule(rule, self._gateway)
        if mine and charge is Charge.FLIGHT:
            self.flights[made.name] = made
        limit = made.limit or made.concurrency
        if isinstance(purpose, VerdictGroup):
            return _Place(rule.action, None, (), named, mine, made, limit, charge, 0, tally)
        group = purpose.group
        shift = _find_shift(group, rule)
        rank = (group.kind is Kind.CONCURRENT, precedence(group))
        return _Place(rule.action, group.key, rank, named, mine, made, limit, charge, shift, tally)

    def _protect(self) -> None:
        networks = [*map(ip_network, self._facts.own), *self._facts.safe]
        for version, family in self._families.items():
            longest = _FAMILIES[version][1]
            held: dict[int, set[int]] = {}
            for net in networks:
                if net.version == version:
                    shift = longest - net.prefixlen
                    held.setdefault(shift, set()).add(int(net.network_address) >> shift)
            family.safe = [(shift, frozenset(numbers)) for shift, numbers in held.items()]


def make_rule(rule: Rule, gateway: str = "") -> tuple[LimitRule, Charge]:
    """An IP rule as a rule of the limiter, and what is charged. Its buckets are as the kernel's: filled at the rate, as
    deep as `burst`. When the counters cannot be asked it is counted here, for a kernel would go on limiting."""
    mode = Mode.OBSERVE if rule.action is Action.OBSERVE else Mode.HARD
    name, alias = f"{gateway}/{rule.id}" if gateway else str(rule.id), rule.name or f"rule {rule.id}"
    if rule.rate is None:
        return LimitRule(DOMAIN, name, alias=alias), Charge.REQUEST
    if rule.rate.kind is Kind.CONCURRENT:
        flight = Limit(rule.rate.amount, LEASE_SECONDS, Algorithm.CONCURRENCY)
        return LimitRule(DOMAIN, name, concurrency=flight, mode=mode, alias=alias), Charge.FLIGHT
    assert rule.bucket is not None
    amount, seconds = _fit(rule.rate)
    limit = Limit(amount, seconds, Algorithm.GCRA, min(rule.bucket.depth, LARGEST_AMOUNT))
    charge = Charge.BODY if rule.rate.kind is Kind.BYTES else Charge.REQUEST
    return LimitRule(DOMAIN, name, limit, mode=mode, alias=alias), charge


def _fit(rate: Rate) -> tuple[int, int]:
    """Hits (bytes, not bits) in seconds: exactly, unless that takes larger numbers than a limit can have."""
    assert rate.seconds is not None
    amount, seconds = rate.amount, rate.seconds
    if rate.unit == "bits":
        amount, seconds = (amount // 8, seconds) if amount % 8 == 0 else (amount, 8 * seconds)
    return (amount, seconds) if amount <= LARGEST_AMOUNT else (round(rate.per_second), 1)


def _find_shift(group: Group, rule: Rule) -> int:
    """The peer of every client is the one service that is asked for: per peer, all of the target share a bucket."""
    if group.scope == HOST:
        return 0
    if group.scope == PEER or rule.per == TARGET:
        return _OUT_OF_BLOCKS
    return group.longest - group.bucket_length


def _order(place: _Place) -> tuple[bool, bool]:
    return place.group is not None, place.action is not Action.ALLOW


def _judge(found: list[_Place], number: int) -> Standing:
    """Of places with the longest prefix first: the first verdict decides, else every group's first."""
    limits: dict[str, _Place] = {}
    for place in found:
        if place.group is None:
            if not place.mine:
                return FREE  # the kernel sees to it, if it blocks
            if place.action is Action.ALLOW:
                return Standing(allowed=place.tally, rule=place.rule)
            return Standing(blocked=place.tally, rule=place.rule)
        limits.setdefault(place.group, place)
    mine = sorted((place for place in limits.values() if place.mine), key=lambda place: place.rank)
    return Standing(tuple(_make_hit(place, number) for place in mine))


def _make_hit(place: _Place, number: int) -> Hit:
    assert place.limit is not None
    key = "" if place.shift == _OUT_OF_BLOCKS else f"{number >> place.shift:x}"
    return Hit(Match(place.rule, key), place.limit, place.charge, place.tally)


def _read(address: str) -> tuple[int, int] | None:
    """The version and the number of an address; an IPv4 address that is mapped into IPv6 is one of IPv4."""
    version = 6 if ":" in address else 4
    try:
        packed = socket.inet_pton(_FAMILIES[version][0], address)
    except (OSError, ValueError):
        return None
    number = int.from_bytes(packed)
    if version == 6 and number >> 32 == 0xFFFF:
        version, number = 4, number & 0xFFFFFFFF
    loopback = number >> 24 == 127 if version == 4 else number == 1
    return None if loopback else (version, number)


def is_address(text: str) -> bool:
    """Whether a text is an IP address."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


_NOBODY = Count()
"""What rules count that others enforce: nothing."""
