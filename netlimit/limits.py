"""The distinct limits that a rule set comes to, and what one rule adds to them.

Rules are many, limits are few: every rule becomes entries in sets, and only a limit that no other rule has needs
rules in a chain. A *group* is a set of limits that exclude each other (the most specific target wins); a *profile* is
one rate in it.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any

from netlimit.addresses import read_address, read_network
from netlimit.errors import RuleError
from netlimit.hashlimit import fit_bucket
from netlimit.marks import USUAL
from netlimit.numbers import PurposeKey
from netlimit.packet import Side
from netlimit.rates import Kind, Rate, parse_rate
from netlimit.rules import HOST, PEER, TARGET, Action, Direction, PortRange, Protocol, Rule, Selector, Target
from netlimit.state import SAFE_PREFIX, SET_PREFIX, IpSet
from netlimit.tree import Topology

_EVERYBODY = "255.255.255.255"
_ONE = ("/32", "/128")
MOST_ENDING = 1024
"""Single addresses that end on a host by its routes, beside its own, that the program on the ingress looks for."""


@dataclass(frozen=True)
class Facts:
    """What compiling needs to know of a host.

    `own` are its addresses and `safe` what no rule may touch, unless one that was forced names the exact address; of
    those `needed` among it, for the host itself talks with them, rules touch what is forwarded. No rule at all touches
    connections that are open to its own TCP ports `management`, nor what routers say to each other, of which
    `peers`, the addresses of other gateways of the same database, are believed more.
    `capabilities` maps what the host can do to None, or to the reason why it cannot; what is not in it, it can.
    `set_size` is the most entries of one set. `topology` says where packets leave, `foreign` which devices have a root
    qdisc of somebody else's (said as tc does), `barred` on the ingress of which no program of ours can be put, with
    what is in the way, `unled` where the program is missing that leads packets to classes, with the reason; `hz` is the
    clock tick. `translated` are the address families in which somebody may translate: where nobody does, rules do not
    have the kernel track connections for the sake of it. `refused` are limits whose buckets the kernel, or the tool
    that tells it, does not take, each with the reason.
    """

    host: str = "localhost"
    mark_mask: int = USUAL
    set_size: int = 2**20
    own: frozenset[str] = frozenset()
    safe: tuple[Target, ...] = ()
    needed: frozenset[Target] = frozenset()
    management: tuple[int, ...] = ()
    peers: frozenset[str] = frozenset()
    capabilities: Mapping[str, str | None] = field(default_factory=dict)
    topology: Topology = field(default_factory=Topology)
    foreign: Mapping[str, str] = field(default_factory=dict)
    barred: Mapping[str, str] = field(default_factory=dict)
    unled: Mapping[str, str] = field(default_factory=dict)
    hz: int = 250
    translated: frozenset[int] = frozenset()
    refused: Mapping[PurposeKey, str] = field(default_factory=dict)

    @cached_property
    def shift(self) -> int:
        """How far a limit's number is shifted to stand under the mask."""
        return (self.mark_mask & -self.mark_mask).bit_length() - 1

    @cached_property
    def most_limits(self) -> int:
        """The highest number that fits under the mask."""
        return self.mark_mask >> self.shift

    @cached_property
    def any_occupied(self) -> bool:
        """Whether somebody else has a set with a name of ours, which a rule may need: then it is no capability."""
        return any(name.startswith(SET_PREFIX) for name in self.capabilities)

    @cached_property
    def vrfs(self) -> frozenset[str]:
        """The devices that stand for a VRF. What comes in by one of its ports passes PREROUTING twice, first by the
        port, then by the VRF; what this host sends passes OUTPUT twice, the other way round."""
        return frozenset(name for name, device in self.topology.every.items() if device.kind == "vrf")

    @cached_property
    def ports_of_vrfs(self) -> frozenset[str]:
        """The devices by which packets have come in only in PREROUTING, the first time: behind it, by the VRF."""
        return frozenset(name for name, device in self.topology.every.items() if device.master in self.vrfs)

    def is_own(self, target: Target) -> bool:
        """Whether the target is one address of the host itself."""
        return target.prefixlen == target.max_prefixlen and str(target.network_address) in self.own

    def overrides(self, rule: Rule) -> bool:
        """Whether a rule comes before the safe set: it was forced, and names a protected address."""
        return rule.forced_by is not None and self.protects(rule.target)

    def stands_here(self, rule: Rule) -> bool:
        """Whether a rule speaks of what ends or begins on the host itself, and spares who is safe: it names an address
        that does so, and was not forced."""
        return rule.forced_by is None and self.is_here(rule.target)

    def is_here(self, target: Target) -> bool:
        """Whether the target is one address of which packets may end on the host: one of its own, one that is local,
        broadcast or anycast by a route, or multicast."""
        if target.prefixlen != target.max_prefixlen:
            return False
        address, (single, wider) = target.network_address, self._local
        if str(address) in self.own or address.is_multicast or str(target) in single:
            return True
        return str(address) == _EVERYBODY or any(address.version == net.version and address in net for net in wider)

    @cached_property
    def ending(self) -> frozenset[str]:
        """The single addresses of which every packet ends on the host, as far as what shapes knows them: its own, the
        broadcast to everybody on a link, and what the local table has (by a route, broadcast, anycast)."""
        return self.own | {_EVERYBODY, *sorted(self._ending_singly)[:MOST_ENDING]}

    @cached_property
    def _ending_singly(self) -> frozenset[str]:
        """What the local table has of them, beside the host's own. Of IPv6, link-local ones come and go with devices,
        with ours too."""
        single = (text.partition("/")[0] for text in self.topology.ending if text.endswith(_ONE))
        return frozenset(each for each in single if not each.startswith("fe80:")) - self.own

    def ends(self, target: Target) -> bool:
        """Whether the target is one of these addresses."""
        return target.prefixlen == target.max_prefixlen and str(target.network_address) in self.ending

    def ends_unshaped(self, target: Target) -> bool:
        """Whether the target is one address of which every packet ends on the host, and nothing shapes that: it lies in
        a network that ends here as a whole, or there are too many such addresses."""
        if target.prefixlen != target.max_prefixlen or self.vrfs or self.ends(target):
            return False
        return str(target.network_address) in self._ending_singly or self._lies_in_ending(target)

    @cached_property
    def _local(self) -> tuple[frozenset[str], tuple[Target, ...]]:
        """What ends here by routes: single addresses, and networks."""
        single = frozenset(text for text in self.topology.local if text.endswith(_ONE))
        return single, tuple(read_network(text) for text in self.topology.local if text not in single)

    def ends_wholly(self, target: Target) -> bool:
        """Whether the target is a network of which every packet ends on the host by a route: none is forwarded, and
        what ends here heeds only rules that name one address."""
        if target.prefixlen == target.max_prefixlen or self.vrfs:
            return False
        return self._lies_in_ending(target)

    def _lies_in_ending(self, target: Target) -> bool:
        wider = (length for length in self._ending_lengths if length <= target.prefixlen)
        return any(target.supernet(new_prefix=length) in self.ending_networks for length in wider)

    @cached_property
    def ending_networks(self) -> frozenset[Target]:
        """The networks, wider than one address, of which every packet ends on the host."""
        return frozenset(read_network(text) for text in self.topology.ending if not text.endswith(_ONE))

    @cached_property
    def _ending_lengths(self) -> tuple[int, ...]:
        return tuple({each.prefixlen for each in self.ending_networks})

    def protects(self, target: Target) -> bool:
        """Whether the target is one address that is the host's own or in the safe set."""
        if target.prefixlen != target.max_prefixlen or not (self.own or self.safe):
            return False
        address = target.network_address
        if str(address) in self.own:
            return True
        return any(address.version == net.version and address in net for net in self.safe)


def side_of(direction: Direction) -> Side:
    """Where the target stands in a packet."""
    return "src" if direction is Direction.FROM else "dst"


class _Keyed:
    """Compared and hashed by its key, which is made once: there are few of them, asked for very often."""

    key: Any

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Keyed) and type(self) is type(other) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True, eq=False)
class Group(_Keyed):
    """Limits that share a set: alike in everything but target and rate.

    `scope` is "host", "peer" or "target"; for the last, targets of one length and buckets of one length make a group,
    since shared budgets nest. `exact` groups hold rules that were forced, name a protected address, and stand before
    the safe set; `own` groups hold others that name the host's own address, and stand behind it.
    `watch` tells observing rules apart by rate, so that they displace nothing.
    """

    family: int
    direction: Direction
    selector: Selector
    kind: Kind
    scope: str
    target_length: int = 0
    bucket_length: int = 0
    exact: bool = False
    watch: str = ""
    own: bool = False

    @cached_property
    def key(self) -> str:
        """A text that tells groups apart, and from which `parse_purpose` makes the group again."""
        lengths, own = (self.target_length, self.bucket_length), (True,) * self.own
        return write_key(
            self.family, self.direction, self.selector, self.kind, self.scope, *lengths, self.exact, self.watch, *own
        )

    @property
    def stands_here(self) -> bool:
        """Whether it is asked about what ends or begins on the host itself, at the end that is the host."""
        return self.exact or self.own

    @property
    def displaced_by_own(self) -> bool:
        """Whether who is in the group that is alike, but `own`, is not asked about in this one: shared budgets nest,
        of others only the longest prefix counts."""
        return not self.stands_here and self.scope != TARGET and not self.counts_each

    @property
    def counts_each(self) -> bool:
        """Whether each of its rules counts for itself: they observe, and targets of each length have their own set."""
        return bool(self.watch) and (self.scope == PEER or self.kind is Kind.CONCURRENT)

    @cached_property
    def digest(self) -> str:
        """A short name for it."""
        return digest(self.key)

    @property
    def side(self) -> Side:
        """Where the target stands in a packet."""
        return side_of(self.direction)

    @property
    def bucket_side(self) -> Side:
        """Where the address stands whose bucket it is: with `per: peer`, at the other end."""
        if self.scope == PEER:
            return "dst" if self.side == "src" else "src"
        return self.side

    @property
    def longest(self) -> int:
        """The prefix length of one address."""
        return 32 if self.family == 4 else 128

    def count_buckets(self, key: str) -> int | None:
        """How many buckets there can be for a target, as sets have it (`per: peer`: one for each peer); None if the
        table is of the usual size whatever there is: there are few groups that speak of all traffic."""
        particular = self.selector.ports or self.selector.source_ports or self.selector.interface or self.watch
        if self.scope == PEER:
            return 1
        return self.count_places(key) if particular else None

    def count_places(self, key: str) -> int:
        """How many buckets the addresses of a target come to, as sets have it."""
        length = int(key.partition("/")[2] or self.longest)
        return 1 << max(0, (self.longest if self.scope == HOST else self.bucket_length) - length)

    @property
    def gated(self) -> bool:
        """Whether a set remembers the peers that have a bucket."""
        return self.scope == PEER and self.kind is not Kind.CONCURRENT

    @property
    def marked(self) -> bool:
        """Whether the set tells the profile by a mark."""
        return self.kind is not Kind.CONCURRENT and not self.watch


@dataclass(frozen=True, eq=False)
class Profile(_Keyed):
    """One rate in a group. `length` is the target's prefix length where buckets depend on it, else 0; `holder` the
    target itself where they belong to it alone (peers of concurrent connections)."""

    rate: Rate
    burst: int | None
    action: Action
    length: int = 0
    holder: str = ""

    @cached_property
    def key(self) -> str:
        """A text that tells profiles of a group apart."""
        return write_key(self.rate.text, self.burst, self.action, self.length, self.holder)


@dataclass(frozen=True, eq=False)
class VerdictGroup(_Keyed):
    """Targets of one prefix length that are allowed or blocked."""

    family: int
    direction: Direction
    selector: Selector
    action: Action
    length: int
    exact: bool = False
    own: bool = False

    @cached_property
    def key(self) -> str:
        """A text that tells groups apart."""
        own = (True,) * self.own
        return write_key(self.family, self.direction, self.selector, self.action, self.length, self.exact, *own)

    @property
    def stands_here(self) -> bool:
        """Whether it is asked about what ends or begins on the host itself, at the end that is the host."""
        return self.exact or self.own

    @property
    def side(self) -> Side:
        """Where the target stands in a packet."""
        return side_of(self.direction)


@dataclass(frozen=True, eq=False)
class Limit(_Keyed):
    """A profile in its group."""

    group: Group
    profile: Profile

    @cached_property
    def key(self) -> PurposeKey:
        """Two texts that stand for it."""
        return self.group.key, self.profile.key


Purpose = Limit | VerdictGroup
"""What rules that limit, allow or block come to. Its key as a `PurposeKey`: a group's and a profile's; the latter is
empty for verdicts."""


def purpose_key(purpose: Purpose) -> PurposeKey:
    """Two texts that stand for a purpose."""
    return purpose.key if isinstance(purpose, Limit) else (purpose.key, "")


def parse_purpose(key: PurposeKey) -> Purpose | None:
    """Make the purpose again from what `purpose_key` gave; None for one of another version, which is not understood, or
    has taken what no kernel can be told, so that none holds it."""
    try:
        family, direction, selector, *rest = json.loads(key[0])
        protocol, ports, source_ports, interface = selector
        where = Selector(Protocol(protocol), _pairs(ports), _pairs(source_ports), interface)
        if not key[1]:
            return VerdictGroup(family, Direction(direction), where, Action(rest[0]), *rest[1:])
        group = Group(family, Direction(direction), where, Kind(rest[0]), *rest[1:])
        rate, burst, action, length, holder = json.loads(key[1])
        profile = Profile(parse_rate(rate), burst, Action(action), length, holder)
        if group.kind is not Kind.CONCURRENT:
            fit_bucket(profile.rate, burst)
        return Limit(group, profile)
    except (ValueError, TypeError, IndexError, RuleError):
        return None


SEEN = "tc seen "
"""How the groups of numbers begin that tell which newcomers shall be remembered."""


def stands_under_mark(key: PurposeKey) -> bool:
    """Whether a number is carried by entries under the bits of the packet mark."""
    purpose = parse_purpose(key)
    return key[0].startswith(SEEN) or (isinstance(purpose, Limit) and purpose.group.marked)


@dataclass(frozen=True, slots=True)
class Fragment:
    """What one rule adds to the kernel: its keys in the sets of `purpose`, until `expires` (Unix time, 0: for good)."""

    rule_id: int
    purpose: Purpose
    keys: tuple[str, ...]
    expires: int = 0


def compile_rule(rule: Rule, facts: Facts) -> Fragment:
    """Turn one rule in force (not for shaping) into what it adds. Depends on nothing but the rule and the host."""
    expires = math.ceil(rule.expires_at.timestamp()) if rule.expires_at else 0
    return Fragment(rule.id, find_purpose(rule, facts), set_keys(rule.target), expires)


def find_purpose(rule: Rule, facts: Facts) -> Purpose:
    """What a rule (not for shaping) comes to."""
    return _purpose(
        rule.family,
        rule.direction,
        rule.selector,
        rule.action,
        rule.rate,
        rule.burst,
        rule.per,
        rule.target.prefixlen,
        str(rule.target) if rule.per == PEER else "",
        facts.overrides(rule),
        facts.stands_here(rule),
    )


def set_keys(target: Target) -> tuple[str, ...]:
    """A target as ipset prints it. `hash:net` takes no /0, so everything is two halves."""
    length = target.prefixlen
    if length == 0:
        return tuple(key for half in target.subnets() for key in set_keys(half))
    address = _show_address(target)
    return (address,) if length == target.max_prefixlen else (f"{address}/{length}",)


def matched_set(purpose: Purpose, facts: Facts) -> IpSet:
    """The set whose counters tell what a rule matched."""
    size = facts.set_size
    if isinstance(purpose, VerdictGroup):
        kind = "a" if purpose.action is Action.ALLOW else "b"
        return IpSet(f"{SET_PREFIX}{kind}{purpose.family}-{digest(f'{purpose.key} {size}')}", purpose.family, size=size)
    group = purpose.group
    return IpSet(f"{SET_PREFIX}l{_set_stem(purpose, facts)}", group.family, marks=group.marked, size=size)


def dropped_set(limit: Limit, facts: Facts) -> IpSet:
    """Its twin, which a packet passes before it is dropped: its counters tell what was dropped."""
    return IpSet(f"{SET_PREFIX}d{_set_stem(limit, facts)}", limit.group.family, size=facts.set_size)


def safe_set(family: int, facts: Facts) -> IpSet:
    """The set of what no rule may touch."""
    return IpSet(f"{SAFE_PREFIX}{family}", family, size=min(facts.set_size, 65536))


def trusted_set(family: int, facts: Facts) -> IpSet:
    """The set of what of it no rule may touch where it is forwarded, either."""
    return replace(safe_set(family, facts), name=f"{SAFE_PREFIX}{family}-trusted")


def exempt_set(family: int, direction: Direction, facts: Facts) -> IpSet:
    """The set of all that is safe or allowed at one end: most packets miss it, and need no closer look."""
    return IpSet(f"{SET_PREFIX}exempt{family}-{direction}", family, size=facts.set_size)


def blocked_set(family: int, direction: Direction, facts: Facts) -> IpSet:
    """The set of all that is blocked at one end, for the same purpose."""
    return IpSet(f"{SET_PREFIX}blocked{family}-{direction}", family, size=facts.set_size)


def purpose_sets(purpose: Purpose, facts: Facts) -> tuple[IpSet, ...]:
    """Every set in which a rule of this purpose has its keys."""
    if isinstance(purpose, VerdictGroup):
        return (matched_set(purpose, facts),)
    return matched_set(purpose, facts), dropped_set(purpose, facts)


def find_problem(purpose: Purpose, facts: Facts) -> str | None:
    """Why the host cannot enforce it; None if it can."""
    if facts.refused and (reason := facts.refused.get(purpose_key(purpose))) is not None:
        return f"The kernel does not take such a bucket ({reason}): use another rate, or another burst."
    needs = _requirements(purpose)
    if facts.any_occupied:
        needs += tuple(ipset.name for ipset in purpose_sets(purpose, facts))
    for name in needs:
        reason = facts.capabilities.get(name)
        if reason is not None:
            return reason
    return None


def digest(text: str) -> str:
    """Ten letters that stand for a text; two texts have the same once in a trillion."""
    return sha256(text.encode()).hexdigest()[:10]


def write_key(*parts: object) -> str:
    """A text that tells apart what differs in any part, and from which all of them can be read again."""
    return json.dumps(parts, default=_write_selector, separators=(",", ":"))


def _write_selector(selector: object) -> list[object]:
    assert isinstance(selector, Selector)
    return [selector.protocol, selector.ports, selector.source_ports, selector.interface]


def _pairs(ranges: list[list[int]]) -> tuple[PortRange, ...]:
    return tuple((low, high) for low, high in ranges)


def _set_stem(limit: Limit, facts: Facts) -> str:
    # connlimit is told nothing by marks, so each of its limits has a set of its own. Marks under other bits are in sets
    # of their own, for those of a set must all be read by the same chains.
    text = limit.group.key if limit.group.marked else f"{limit.group.key} {limit.profile.key}"
    bits = f" {facts.mark_mask:#x}" if limit.group.marked and facts.mark_mask != USUAL else ""
    return f"{limit.group.family}-{digest(f'{text} {facts.set_size}{bits}')}"


@lru_cache(maxsize=65536)
def _purpose(
    family: int,
    direction: Direction,
    selector: Selector,
    action: Action,
    rate: Rate | None,
    burst: int | None,
    per: str | None,
    length: int,
    target: str,
    exact: bool,
    own: bool,
) -> Purpose:
    if rate is None or per is None:
        blocks = action is Action.BLOCK
        return VerdictGroup(family, direction, selector, action, length, exact and blocks, own and blocks)
    kind = rate.kind
    watch = f"{rate.text} {burst}" if action is Action.OBSERVE else ""
    if per == HOST:
        group = Group(family, direction, selector, kind, HOST, 0, 0, exact, watch, own)
        return Limit(group, Profile(rate, burst, action, length if kind is Kind.CONCURRENT else 0))
    if per == PEER:
        group = Group(family, direction, selector, kind, PEER, 0, 0, exact, watch, own)
        return Limit(group, Profile(rate, burst, action, length, target if kind is Kind.CONCURRENT else ""))
    bucket = length if per == TARGET else int(per[1:])
    group = Group(family, direction, selector, kind, TARGET, length, bucket, exact, watch, own)
    return Limit(group, Profile(rate, burst, action))


def _requirements(purpose: Purpose) -> tuple[str, ...]:
    """The capabilities that it takes, by the names that `kernel.capabilities` gives them."""
    group = purpose.group if isinstance(purpose, Limit) else purpose
    needs = ["multiport"] if group.selector.ports or group.selector.source_ports else []
    needs += ["addrtype", "hl"] if group.family == 6 else ["addrtype"]
    if isinstance(purpose, VerdictGroup):
        needs.append("raw" if purpose.action is Action.BLOCK else "mangle")
    else:
        if purpose.profile.action is Action.REJECT:
            needs.append("reject")
        if purpose.group.kind is Kind.CONCURRENT:
            needs += ["conntrack", "connlimit", "security"]
        else:
            needs += ["conntrack"] if purpose.group.kind is Kind.CONNECTIONS else []
            needs += ["mangle", "hashlimit"]
    marks: list[str] = []
    if isinstance(purpose, Limit) and purpose.group.marked:
        hooks = _find_hooks(purpose.group) if purpose.profile.action is Action.REJECT else ()
        marks = ["marks", *(f"reject marks {hook}{'6' if group.family == 6 else ''}" for hook in hooks)]
    if group.family == 6:
        return ("ip6tables", "ipset", *(f"{need}6" for need in needs), *marks)
    return ("iptables", "ipset", *needs, *marks)


def _find_hooks(group: Group) -> Iterator[str]:
    """Where packets meet a limit that rejects: none is asked before routing."""
    yield "FORWARD"
    if group.direction is Direction.FROM or group.stands_here:
        yield "INPUT"
    if group.direction is Direction.TO or group.stands_here:
        yield "OUTPUT"


def _show_address(target: Target) -> str:
    address = target.network_address
    return str(address) if target.version == 4 else socket.inet_ntop(socket.AF_INET6, address.packed)


def parse_safe(texts: tuple[str, ...]) -> tuple[Target, ...]:
    """Read a safe set, as settings and status have it."""
    return tuple(read_network(text) for text in texts)


def own_addresses(texts: tuple[str, ...]) -> frozenset[str]:
    """Bring addresses into the form in which `Facts.own` compares them."""
    return frozenset(str(read_address(text)) for text in texts)
