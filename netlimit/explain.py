"""Which rules hit a packet, in which order, and which do not and why.

Speaks of rules, not of chains: it says what `chains` makes the kernel do, and a property test holds the two together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from ipaddress import ip_network

from netlimit.adverts import find_advert
from netlimit.limits import Facts, Group, Limit, VerdictGroup, compile_rule, own_addresses, parse_safe
from netlimit.management import find_place
from netlimit.packet import Packet
from netlimit.queueing import ask_caps, ask_queues, find_elsewhere, find_exit, is_cap
from netlimit.rates import Kind
from netlimit.rules import HOST, PEER, Action, Direction, PortRange, Protocol, Rule, Target, format_target
from netlimit.sequence import Sequence, find_longest_exemption
from netlimit.tree import INGRESS_DEVICE, Topology
from netlimit.untouched import NEIGHBOUR_DISCOVERY, NEVER_FORWARDED


@dataclass(frozen=True, slots=True)
class Step:
    """What one rule has to do with the packet; without a rule, what is never touched."""

    rule: Rule | None
    hits: bool
    reason: str

    def __str__(self) -> str:
        if self.rule is None:
            return self.reason
        name = self.rule.name or f"rule {self.rule.id}"
        return f"{'hits' if self.hits else '    '} {name} ({self.rule}): {self.reason}"


@dataclass(frozen=True)
class _Way:
    """How a packet goes through this host: the order in which it meets limits and blocks depends on whoever is allowed,
    and of connections at once on what rejects, whether that speaks of the packet or not. `others` are looked at only
    where that makes a difference."""

    packet: Packet
    facts: Facts
    rules: Iterable[Rule]
    others: Iterable[Rule]

    def line_up(self, groups: Collection[Group]) -> list[Group]:
        """Limits in the order in which the packet meets them."""
        depends = any(group.scope == PEER or group.kind is Kind.CONCURRENT for group in groups)
        rejects = (rule for rule in self._around if rule.action is Action.REJECT) if depends else ()
        rejecting = {_find_group(rule, self.facts) for rule in rejects}
        waits = depends and (self._waits >= 0 or any(group.marked for group in rejecting))
        sequence = Sequence(self.facts, waits, rejecting)
        return sorted(groups, key=lambda group: sequence.rank(group, self._sent_here))

    def find_first(self, blocks: Collection[Rule]) -> Rule:
        """The block that the packet meets first: as it comes in only some `from` are asked."""
        depends = not self._sent_here and len({rule.direction for rule in blocks}) > 1
        waits = self._waits if depends else 0

        def rank(rule: Rule) -> tuple[object, ...]:
            purpose = compile_rule(rule, self.facts).purpose
            assert isinstance(purpose, VerdictGroup)
            late = rule.direction is Direction.TO or _length(rule) <= waits
            return depends and late, not purpose.exact, -_length(rule), purpose.key

        return min(blocks, key=rank)

    @cached_property
    def _around(self) -> list[Rule]:
        return [rule for rule in (*self.rules, *self.others) if rule.family == self.packet.src.version]

    @cached_property
    def _waits(self) -> int:
        """The longest prefix of an `allow` of which nobody knows as a packet comes in whether it applies."""
        allowed = (compile_rule(rule, self.facts).purpose for rule in self._around if rule.action is Action.ALLOW)
        verdicts = (purpose for purpose in allowed if isinstance(purpose, VerdictGroup))
        return find_longest_exemption(verdicts, answered=self.packet.src.version in self.facts.translated)

    @property
    def _sent_here(self) -> bool:
        return self.packet.in_interface is None and str(self.packet.src) in self.facts.own


@dataclass(frozen=True, slots=True)
class Explanation:
    """`verdict` is "passes", "limited", "shaped" (limited by queues alone), "allowed" or "blocked"; `steps` stand in
    the order in which rules are asked, those that hit first. It is `doubtful` where one that hits may not hold."""

    verdict: str
    steps: tuple[Step, ...]
    doubtful: bool = False

    @property
    def text(self) -> str:
        """For an operator to read."""
        doubt = ", unless it gets past a rule that hits it and is degraded" if self.doubtful else ""
        first = "No rule limits the packet." if self.verdict == "passes" else f"The packet is {self.verdict}{doubt}."
        return "\n".join((first, *map(str, self.steps)))


def explain(
    rules: Iterable[Rule],
    packet: Packet,
    own: Iterable[str] = (),
    safe: Mapping[str, str] | None = None,
    management: Iterable[int] = (),
    peers: Iterable[str] = (),
    local: Iterable[str] = (),
    others: Iterable[Rule] = (),
    needed: Iterable[str] = (),
) -> Explanation:
    """Explain what rules in force do to a packet on a host with these own addresses, this safe set (why each network is
    in it), these ports by which it is managed, these addresses of other gateways of the same database (`peers`), and
    what else ends on it by its routes (`local`). What is `needed` of the safe set is not safe where it is forwarded.
    `others` are more rules in force: they do not speak of the packet, but
    by some that allow or reject limits are asked later. They are not looked at where that makes no difference.

    An interface that is None is not known; a rule that names one then does not hit, and says so.
    """
    reasons = safe or {}
    facts = Facts(
        own=own_addresses(tuple(own)),
        safe=parse_safe(tuple(reasons)),
        needed=frozenset(parse_safe(tuple(needed))),
        management=tuple(management),
        peers=frozenset(peers),
        topology=Topology(local=tuple(local), ending=tuple(local)),
    )
    if _is_loopback(packet):
        return Explanation("passes", (Step(None, False, "Loopback is never touched."),))
    device = find_exit(packet, facts)
    misses: list[Step] = []
    concerned: list[Rule] = []
    caps: list[Rule] = []
    rules = tuple(rules)
    for rule in rules:
        if is_cap(rule, device):
            caps.append(rule)
            continue
        reason = _find_mismatch(rule, packet, device) or _find_exemption(rule, packet, facts, device, reasons)
        if reason:
            misses.append(Step(rule, False, reason))
        else:
            concerned.append(rule)
    if _is_neighbour_discovery(packet):
        misses = [Step(None, False, "Neighbour discovery (ICMPv6 133 to 137 that nobody forwards) is never touched.")]
        verdict, steps = "passes", list[Step]()
    elif (advert := find_advert(packet, facts)) is not None:
        misses = [Step(None, False, f"It is {advert}, which keeps gateways alive towards each other: never touched.")]
        verdict, steps = "passes", list[Step]()
    else:
        verdict, steps = _judge(concerned, device, facts, _Way(packet, facts, rules, others))
    # Who has a class of his own on the device waits there, and so under the cap.
    queued = any(step.hits and step.rule is not None and step.rule.action is Action.SHAPE for step in steps)
    beside = None if queued else find_place(packet, facts)
    return _conclude(verdict, [*steps, *_ask_caps(caps, device, verdict, beside)], misses)


def _conclude(verdict: str, steps: list[Step], misses: list[Step]) -> Explanation:
    hits = [step.rule.action for step in steps if step.hits and step.rule is not None]
    if verdict == "passes" and any(action is Action.SHAPE for action in hits):
        verdict = "shaped"
    return Explanation(verdict, (*sorted(steps, key=lambda step: not step.hits), *misses))


def _ask_caps(caps: list[Rule], device: str | None, verdict: str, beside: str | None) -> list[Step]:
    """What is capped is the device, not this traffic: nothing exempts from it but being dropped before, and what this
    host itself sends to be managed (`beside`: why the packet stands beside the cap)."""
    if verdict == "blocked":
        return [Step(rule, False, "blocked before it leaves") for rule in caps]
    if beside is not None:
        return [Step(rule, False, find_elsewhere(rule, device) or beside) for rule in caps]
    return [Step(*finding) for finding in ask_caps(caps, device)]


def _judge(rules: list[Rule], device: str | None, facts: Facts, way: _Way) -> tuple[str, list[Step]]:
    """Allow and block by the longest prefix, then the limits, then the queues."""
    allows = sorted((rule for rule in rules if rule.action is Action.ALLOW), key=_length, reverse=True)
    blocks = sorted((rule for rule in rules if rule.action is Action.BLOCK), key=_length, reverse=True)
    limits = [rule for rule in rules if rule.action.limits and rule.action is not Action.SHAPE]
    queues = [rule for rule in rules if rule.action is Action.SHAPE]
    if blocks and (not allows or _length(blocks[0]) > _length(allows[0])):
        first = way.find_first([rule for rule in blocks if not allows or _length(rule) > _length(allows[0])])
        others = [*(rule for rule in blocks if rule is not first), *allows, *limits, *queues]
        steps = [Step(first, True, "blocked: no allow is as specific")]
        return "blocked", steps + [Step(rule, False, f"blocked already by rule {first.id}") for rule in others]
    if allows:
        # What ends here is queued before netfilter: what was forced for the very address heeds nobody who is allowed.
        named = [rule for rule in queues if device == INGRESS_DEVICE and facts.overrides(rule)]
        first, others = allows[0], [*allows[1:], *blocks, *limits, *(rule for rule in queues if rule not in named)]
        steps = [Step(first, True, "allowed: limited and blocked by nothing")]
        steps += [Step(rule, False, f"allowed by rule {first.id}") for rule in others]
        return "allowed", [*steps, *(Step(*finding) for finding in ask_queues(named, device, facts))]
    steps = list(_ask_limits(limits, facts, way))
    limited = any(step.hits and step.rule is not None and step.rule.action is not Action.OBSERVE for step in steps)
    return "limited" if limited else "passes", [
        *steps,
        *(Step(*finding) for finding in ask_queues(queues, device, facts)),
    ]


def _ask_limits(rules: list[Rule], facts: Facts, way: _Way) -> Iterator[Step]:
    groups: dict[Group, list[Rule]] = {}
    for rule in rules:
        groups.setdefault(_find_group(rule, facts), []).append(rule)
    for group in way.line_up(groups):
        if group.counts_each:
            yield from (Step(rule, True, _describe(rule)) for rule in groups[group])
            continue
        first, *others = sorted(groups[group], key=_length, reverse=True)
        named = groups.get(replace(group, own=True), []) if group.displaced_by_own else []
        if named:
            first, *others = named[0], first, *others
        else:
            yield Step(first, True, _describe(first))
        for rule in others:
            yield Step(
                rule, False, f"rule {first.id} of the same kind is more specific ({format_target(first.target)})"
            )


def _find_group(rule: Rule, facts: Facts) -> Group:
    purpose = compile_rule(rule, facts).purpose
    assert isinstance(purpose, Limit)
    return purpose.group


def _describe(rule: Rule) -> str:
    assert rule.rate is not None
    whose = {
        HOST: f"each address in {format_target(rule.target)}",
        PEER: f"each {'address' if rule.family == 4 else '/64'} that talks with {format_target(rule.target)}",
    }
    bucket = whose.get(
        rule.per or "", f"all of {format_target(rule.target)}" if rule.per == "target" else f"each {rule.per} of it"
    )
    verb = "counted only" if rule.action is Action.OBSERVE else f"over the rate: {rule.action}"
    counts = {
        Kind.CONNECTIONS: ", counted by the first packet of a connection",
        Kind.CONCURRENT: ", checked when a connection opens",
    }.get(rule.rate.kind, "")
    return f"{rule.rate.text} for {bucket}{counts}; {verb}"


def _is_loopback(packet: Packet) -> bool:
    return "lo" in (packet.in_interface, packet.out_interface) or packet.src.is_loopback or packet.dst.is_loopback


def _is_neighbour_discovery(packet: Packet) -> bool:
    forwarded = packet.in_interface is not None and packet.out_interface is not None
    kind = packet.protocol == "icmp" and packet.src.version == 6 and packet.icmp_type in NEIGHBOUR_DISCOVERY
    return kind and packet.hop_limit == NEVER_FORWARDED and not forwarded


def _find_mismatch(rule: Rule, packet: Packet, device: str | None) -> str | None:
    """Why the rule does not speak of this packet; None if it does."""
    end = packet.src if rule.direction is Direction.FROM else packet.dst
    if end.version != rule.family or end not in rule.target:
        what = "source" if rule.direction is Direction.FROM else "destination"
        return f"{end} is not in {format_target(rule.target)} ({what})"
    selector = rule.selector
    if selector.protocol is not Protocol.ANY and selector.protocol.value != packet.protocol:
        return f"the protocol is {packet.protocol}, not {selector.protocol}"
    for name, ranges, port in (
        ("destination port", selector.ports, packet.port),
        ("source port", selector.source_ports, packet.source_port),
    ):
        if ranges and not _within(port, ranges):
            return f"the {name} is {'not given' if port is None else port}"
    if rule.action is Action.SHAPE:
        return find_elsewhere(rule, device)
    interface = packet.in_interface if rule.direction is Direction.FROM else packet.out_interface
    if selector.interface and selector.interface != interface:
        way = "enters by" if rule.direction is Direction.FROM else "leaves by"
        return f"it {way} {interface or 'an interface not given'}, not {selector.interface}"
    return None


def _find_exemption(
    rule: Rule, packet: Packet, facts: Facts, device: str | None, reasons: Mapping[str, str]
) -> str | None:
    """Why a rule that speaks of the packet may not touch it; one that was forced for the exact address may, unless this
    host is managed by this connection."""
    if rule.action is Action.SHAPE and device is None and facts.is_here(ip_network(packet.dst)):
        return f"{packet.dst} ends on this host, where nothing is shaped that is multicast or has no route of its own"
    incoming = rule.action is Action.SHAPE and device == INGRESS_DEVICE
    port = packet.port if packet.out_interface is None else packet.source_port
    if packet.established and not packet.opens and port in facts.management and not incoming:
        return f"it belongs to an open connection to port {port} of this host, by which it is managed"
    if rule.action is Action.ALLOW or facts.overrides(rule):
        return None
    # Nobody is safe by talking with this host itself, though a network that is safe may hold its addresses.
    led_here = packet.out_interface is None and facts.is_here(ip_network(packet.dst)) and not packet.dst.is_multicast
    ends = (packet.src,) if incoming or led_here else (packet.src, packet.dst)
    forwarded = not incoming and _is_forwarded(packet, facts)
    for end in (each for each in ends if str(each) not in facts.own):
        told = packet.protocol == "icmp" and end == packet.src and _blocks_from(rule)
        for net, (text, reason) in zip(facts.safe, reasons.items(), strict=True):
            if end.version == net.version and end in net and (told or not (forwarded and net in facts.needed)):
                where = str(end) if net.prefixlen == net.max_prefixlen else f"{end} (in {text})"
                return f"{where} is in the safe set ({reason}), and {_say_why_spared(rule, net)}"
    end = packet.src if rule.direction is Direction.FROM else packet.dst
    ends_here = rule.direction is Direction.TO and packet.out_interface is None and facts.is_here(ip_network(end))
    if ends_here and str(end) not in facts.own and not facts.is_here(rule.target):
        return f"{end} ends on this host, and the rule does not name it"
    if str(end) in facts.own and not facts.is_own(rule.target):
        return f"{end} is this host's own address, and the rule does not name it"
    return None


def _is_forwarded(packet: Packet, facts: Facts) -> bool:
    """Whether it is, as far as its ends tell, neither for this host nor sent by it."""
    for_here = packet.out_interface is None and facts.is_here(ip_network(packet.dst))
    return not (for_here or (packet.in_interface is None and str(packet.src) in facts.own))


def _blocks_from(rule: Rule) -> bool:
    return rule.action is Action.BLOCK and rule.direction is Direction.FROM


def _say_why_spared(rule: Rule, net: Target) -> str:
    names = rule.target.version == net.version and rule.target.subnet_of(net)  # type: ignore[arg-type]  # of one family
    return "the rule was not forced" if names else "the rule does not name it"


def _within(port: int | None, ranges: tuple[PortRange, ...]) -> bool:
    return port is not None and any(low <= port <= high for low, high in ranges)


def _length(rule: Rule) -> int:
    return rule.target.prefixlen
