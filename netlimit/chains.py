"""From limits to chains: where packets meet which limit, in which order.

Every hook of ours reads the same way, top to bottom: what is never touched (loopback, neighbour discovery, open
connections by which this host is managed), rules that name a protected address, the safe set, allow and block from the
longest prefix to the shortest, then the limits: hosts before the budgets that they share, the smaller budget before the
larger. Few packets have an end that is safe, allowed or blocked: one look for each end tells, and the others go to the
limits at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from netlimit.hashlimit import fit_bucket
from netlimit.lanes import Lane, OpenLane, seen_name
from netlimit.limits import (
    Facts,
    Group,
    Limit,
    Profile,
    VerdictGroup,
    blocked_set,
    digest,
    dropped_set,
    exempt_set,
    matched_set,
    safe_set,
    side_of,
)
from netlimit.packet import Side
from netlimit.rates import Kind
from netlimit.rules import HOST, PEER, Action, Direction, Protocol, Selector
from netlimit.state import (
    CHAIN_PREFIX,
    OFFENDER_PREFIX,
    OFFENDER_SECONDS,
    SET_PREFIX,
    Above,
    AddTo,
    ChainId,
    ChainRule,
    Continues,
    Crowded,
    Effect,
    Enters,
    Has,
    HasSocket,
    Icmp6,
    InSet,
    IpSet,
    Is,
    Jump,
    Leaves,
    MapMark,
    MapPriority,
    Marked,
    Match,
    Opens,
    Ports,
    Reject,
    SetMark,
    Structure,
    Syn,
    Table,
    Verdict,
    chain_rule,
)

Hook = Literal["PREROUTING", "INPUT", "FORWARD", "OUTPUT"]
Numbers = Mapping[Group, Mapping[Profile, int]]
Few = Mapping[str, tuple[str, ...]]
"""The keys of sets that have so few that asking for each costs less than a look into the set."""

MOST_PORTS = 15
"""So many ports fit into one rule (xt_multiport)."""

RETURN, DROP = Verdict("RETURN"), Verdict("DROP")
_NEIGHBOUR_DISCOVERY = range(133, 138)
_FANOUT = 2
# After two branches three of four packets that have a limit are gone, and those without one have lost little.
_ASKED_FIRST = 2
_DIGITS = "0123456789abcdefghijklmnopqrstuv"


def offender_set(family: int) -> IpSet:
    """Who was limited in the last minute, with the packets dropped."""
    return IpSet(f"{OFFENDER_PREFIX}{family}", family, "ip", timeout=OFFENDER_SECONDS, rolling=True)


def assemble(
    limits: Numbers, verdicts: Iterable[VerdictGroup], facts: Facts, few: Few, lanes: Iterable[OpenLane] = ()
) -> Structure:
    """Build sets, chains and hooks for the limits in use (each profile with its number), the verdicts, and the lanes of
    what is shaped."""
    sets: dict[str, IpSet] = {}
    chains: dict[ChainId, tuple[ChainRule, ...]] = {}
    hooks: dict[ChainId, tuple[ChainRule, ...]] = {}
    ordered = sorted(verdicts, key=lambda verdict: verdict.key)
    leaving = [each for each in lanes if not each.lane.incoming]
    for family in (4, 6):
        part = _Family(
            family,
            {group: profiles for group, profiles in limits.items() if group.family == family and profiles},
            [verdict for verdict in ordered if verdict.family == family],
            [each for each in leaving if each.lane.family == family],
            facts,
            few,
        )
        if part.limits or part.verdicts or part.lanes:
            part.build(sets, chains, hooks)
    return Structure(sets, chains, hooks)


@dataclass(frozen=True)
class _Family:
    """One address family's share: what to build from, and the steps of building it."""

    family: int
    limits: Numbers
    verdicts: list[VerdictGroup]
    lanes: list[OpenLane]
    facts: Facts
    few: Few

    def build(
        self,
        sets: dict[str, IpSet],
        chains: dict[ChainId, tuple[ChainRule, ...]],
        hooks: dict[ChainId, tuple[ChainRule, ...]],
    ) -> None:
        for ipset in self._sets():
            sets[ipset.name] = ipset
        for table, name, rules in self._chains():
            chains[ChainId(self.family, table, name)] = tuple(rules)
        for table, hook in _places():
            base, close = self._base(table, hook)
            if base:
                chains[ChainId(self.family, table, _base_name(hook))] = tuple(base)
                chains[ChainId(self.family, table, _close_name(hook))] = tuple(close)
                hooks[ChainId(self.family, table, hook)] = (chain_rule(Jump(_base_name(hook))),)
        if self._rejects():
            chains[ChainId(self.family, "filter", f"{CHAIN_PREFIX}REJECT")] = tuple(self._reject_chain())
            jump = chain_rule(Jump(f"{CHAIN_PREFIX}REJECT"), self._rejected())
            for hook in ("INPUT", "FORWARD", "OUTPUT"):
                where = ChainId(self.family, "filter", hook)
                hooks[where] = (jump, *hooks.get(where, ()))

    # -- sets

    def _sets(self) -> Iterator[IpSet]:
        """In the order in which entries must come (and the reverse in which they must go), so that at no moment a
        packet is dropped that is allowed before and after, nor one passes that is not: verdicts from the longest prefix
        to the shortest, allow first, then what makes a packet be looked at closely, limits, and what is safe.
        """
        for verdict in sorted(self.verdicts, key=_by_weight):
            yield matched_set(verdict, self.facts)
        for direction in Direction:
            yield exempt_set(self.family, direction, self.facts)
            yield blocked_set(self.family, direction, self.facts)
        for group, profiles in self.limits.items():
            for profile in profiles:
                yield matched_set(Limit(group, profile), self.facts)
                yield dropped_set(Limit(group, profile), self.facts)
        for each in self.lanes:
            yield from each.sets(self.facts)
        yield offender_set(self.family)
        yield safe_set(self.family, self.facts)

    # -- hooks

    def _base(self, table: Table, hook: Hook) -> tuple[list[ChainRule], list[ChainRule]]:
        """The rules of one hook, and those for a packet that must be looked at closely; empty where nothing is to be
        done."""
        groups = [group for group in self._groups(table) if self._meets(group, table, hook)]
        exact = [group for group in groups if group.exact]
        general = [group for group in groups if not group.exact and not _only_named(group.direction, hook)]
        lanes = self._lanes_at(table, hook)
        blocks = self._blocks(table, hook)
        limited = bool(exact or general or lanes)
        if not (limited or blocks):
            return [], []
        base = list(self._untouched(table, hook))
        base += self._find_special(table, hook, limited, blocks)
        base += self._ask([*exact, *general], table, hook)
        base += self._queue(lanes)
        return base, list(self._look_closely(table, hook, exact, general, blocks))

    def _find_special(self, table: Table, hook: Hook, limited: bool, blocks: list[VerdictGroup]) -> Iterator[ChainRule]:
        """Send what is exempt or blocked to be looked at closely. Where nothing is limited, only what is blocked."""
        for direction in Direction:
            sets = [exempt_set(self.family, direction, self.facts)] if limited else []
            if any(block.direction is direction for block in blocks):
                sets.append(blocked_set(self.family, direction, self.facts))
            side = side_of(direction)
            for ipset in sets:
                # A commit to the tables where connections are counted begins the count anew: they ask the set.
                keys = self.few.get(ipset.name) if table in ("raw", "mangle") else None
                matches: list[Match] = [InSet(ipset.name, side)] if keys is None else [Has(side, key) for key in keys]
                yield from (chain_rule(Jump(_close_name(hook), goto=True), match) for match in matches)

    def _look_closely(
        self, table: Table, hook: Hook, exact: list[Group], general: list[Group], blocks: list[VerdictGroup]
    ) -> Iterator[ChainRule]:
        broad = [block for block in blocks if not block.exact]
        lanes = self._lanes_at(table, hook)
        named = [each for each in lanes if each.lane.exact]
        yield from self._levels([block for block in blocks if block.exact], hook, self._longest)
        if exact or named:
            yield chain_rule(Jump(_exact_name(hook)))
            if table == "mangle" and self._rejects(exact):
                yield chain_rule(RETURN, self._rejected())
        if general or broad or len(named) < len(lanes):
            safe = safe_set(self.family, self.facts).name
            yield chain_rule(RETURN, InSet(safe, "src"))
            yield chain_rule(RETURN, InSet(safe, "dst"))
            limited = general or lanes
            yield from self._levels(broad, hook, 0 if limited else min(block.length for block in broad))
            yield from self._ask(general, table, hook)
            yield from self._queue(each for each in lanes if not each.lane.exact)

    def _untouched(self, table: Table, hook: Hook) -> Iterator[ChainRule]:
        if hook in ("PREROUTING", "INPUT"):
            yield chain_rule(RETURN, Enters("lo"))
        if hook == "OUTPUT":
            yield chain_rule(RETURN, Leaves("lo"))
        if self.family == 6:
            for number in _NEIGHBOUR_DISCOVERY:
                yield chain_rule(RETURN, Is("ipv6-icmp"), Icmp6(number))
        yield from self._keep_managed(hook)
        if table == "mangle" and hook in ("INPUT", "FORWARD") and self._rejects():
            yield chain_rule(RETURN, self._rejected())

    def _keep_managed(self, hook: Hook) -> Iterator[ChainRule]:
        """Let pass what belongs to an open connection by which this host is managed: by its socket, for a `block from`
        stands where connections are not tracked yet. No packet that opens a connection has one, so whoever is blocked
        stays out; and it is the connection alone that passes, for it does not prove who is at its other end."""
        six = "6" if self.family == 6 else ""
        if any(self.facts.capabilities.get(f"{name}{six}") for name in ("socket", "multiport")):
            return
        ports = tuple((port, port) for port in self.facts.management[:MOST_PORTS])
        if ports and hook in ("PREROUTING", "INPUT"):
            yield chain_rule(RETURN, Is("tcp"), Continues(), Ports(ports), HasSocket())
        if ports and hook == "OUTPUT":
            yield chain_rule(RETURN, Is("tcp"), Continues(), Ports(ports, "src"))

    def _levels(self, blocks: list[VerdictGroup], hook: Hook, shortest: int) -> Iterator[ChainRule]:
        """Allow and block by falling prefix length, allow first; down to the length below which nothing is asked."""
        if not blocks and shortest:
            return
        allows = [verdict for verdict in self.verdicts if verdict.action is Action.ALLOW]
        levels = [verdict for verdict in allows if verdict.length >= shortest] + blocks
        for verdict in sorted(levels, key=_by_weight):
            for where in _conditions(verdict.selector, verdict.direction, hook, self.family):
                effect = RETURN if verdict.action is Action.ALLOW else DROP
                yield chain_rule(effect, *where, InSet(matched_set(verdict, self.facts).name, verdict.side))

    def _blocks(self, table: Table, hook: Hook) -> list[VerdictGroup]:
        """Which blocks stand here.

        `from` belongs into raw, so that a flood dies before it is tracked. But there nobody can know yet whether an
        `allow to` that is as specific will apply, for the address may be translated: such blocks wait until it is.
        """
        blocks = [verdict for verdict in self.verdicts if verdict.action is Action.BLOCK]
        waits = self._waits
        if table == "raw" and hook == "PREROUTING":
            return [block for block in blocks if block.direction is Direction.FROM and block.length > waits]
        if table != "mangle" or hook == "PREROUTING":
            return []
        here = []
        for block in blocks:
            if block.direction is Direction.TO and (block.exact or hook != "INPUT"):
                here.append(block)
            if block.direction is Direction.FROM and hook == "OUTPUT" and block.exact:
                here.append(block)
            if block.direction is Direction.FROM and hook in ("INPUT", "FORWARD") and block.length <= waits:
                here.append(block)
        return here

    # -- limits

    def _meets(self, group: Group, table: Table, hook: Hook) -> bool:
        """Whether packets of the group's direction pass this hook where they are still, or already, what they are.

        `from` as early as it can be told what is exempt: only behind routing and translation is it known whether an
        `allow to` applies. Connections are counted behind both anyway, and so is all that goes `to` somewhere.
        """
        if group.direction is Direction.TO:
            return hook != "PREROUTING"
        if hook == "OUTPUT":
            return group.exact
        early = table == "mangle" and self._waits < 0
        return hook == "PREROUTING" if early else hook != "PREROUTING"

    @cached_property
    def _waits(self) -> int:
        """The longest prefix of an `allow to`; -1 if there is none."""
        exempt = (v for v in self.verdicts if v.action is Action.ALLOW and v.direction is Direction.TO)
        return max((verdict.length for verdict in exempt), default=-1)

    def _groups(self, table: Table) -> list[Group]:
        return sorted((group for group in self.limits if self._table(group) == table), key=precedence)

    def _table(self, group: Group) -> Table:
        """Concurrent connections are counted where little is written, for every commit to a table begins the count
        anew; but only the filter table can reject."""
        if group.kind is not Kind.CONCURRENT:
            return "mangle"
        return "filter" if self._rejects([group]) else "security"

    def _ask(self, groups: list[Group], table: Table, hook: Hook) -> Iterator[ChainRule]:
        """Lead packets to the groups that concern them, and leave no mark behind."""
        marked = False
        for group in groups:
            if group.marked and marked:
                yield chain_rule(SetMark(0, self.facts.mark_mask))
            marked |= group.marked
            for where in _conditions(group.selector, group.direction, hook, self.family, group.kind):
                yield chain_rule(Jump(_group_name(group)), *where)
            if table == "mangle" and self._rejects([group]):
                yield chain_rule(RETURN, self._rejected())
        if marked:
            yield chain_rule(SetMark(0, self.facts.mark_mask))

    # -- lanes

    def _lanes_at(self, table: Table, hook: Hook) -> list[OpenLane]:
        """The lanes that packets pass here. A class is found on the way out, behind all that may drop the packet; what
        this host itself sends is shaped `to` somewhere, or where a rule names the very address."""
        if table != "mangle" or hook not in ("FORWARD", "OUTPUT"):
            return []
        here = [
            each for each in self.lanes if hook == "FORWARD" or each.lane.exact or each.lane.direction is Direction.TO
        ]
        return sorted(here, key=lambda each: (not each.lane.exact, each.lane.name))

    def _queue(self, lanes: Iterable[OpenLane]) -> Iterator[ChainRule]:
        for each in lanes:
            for where in _ways_out(each.lane):
                yield chain_rule(_find_class(each), *where)

    def _lane_chain(self, each: OpenLane) -> Iterator[ChainRule]:
        """Who is new and has no class yet is remembered; the mark tells."""
        mask = self.facts.mark_mask
        yield chain_rule(MapPriority(each.lane.name, each.lane.side))
        yield chain_rule(RETURN, Marked(0, mask))
        for number, length in each.newcomers:
            here = Marked(number << self.facts.shift, mask)
            yield chain_rule(AddTo(seen_name(each.lane, length), each.lane.side), here)
        yield chain_rule(SetMark(0, mask))

    def _chains(self) -> Iterator[tuple[Table, str, Iterable[ChainRule]]]:
        for group, profiles in self.limits.items():
            table = self._table(group)
            yield from ((table, name, rules) for name, rules in self._group_chains(group, profiles))
        for each in self.lanes:
            if each.newcomers:
                yield "mangle", _lane_name(each.lane), self._lane_chain(each)
        for table, hook in _places():
            exact = [group for group in self._groups(table) if group.exact and self._meets(group, table, hook)]
            named = [each for each in self._lanes_at(table, hook) if each.lane.exact]
            if exact or named:
                rules = [*self._levels([], hook, 0), *self._ask(exact, table, hook), *self._queue(named)]
                yield table, _exact_name(hook), rules

    def _group_chains(self, group: Group, profiles: Mapping[Profile, int]) -> Iterator[tuple[str, Iterable[ChainRule]]]:
        if group.watch:
            yield _group_name(group), [self._watch(group, profile) for profile in profiles]
            return
        if group.kind is Kind.CONCURRENT:
            yield from self._crowd_chains(group, profiles)
            return
        main = matched_set(Limit(group, next(iter(profiles))), self.facts).name
        by_number = {number: profile for profile, number in sorted(profiles.items(), key=lambda item: item[1])}
        chains = dict(self._dispatch(group, _group_name(group), by_number))
        first, rest = chains[_group_name(group)][:_ASKED_FIRST], chains[_group_name(group)][_ASKED_FIRST:]
        if len(profiles) <= 2 * _FANOUT:
            first, rest = [], [*first, *rest]
        unknown = chain_rule(RETURN, Marked(0, self.facts.mark_mask))
        chains[_group_name(group)] = [chain_rule(MapMark(main, group.side)), *first, unknown, *rest]
        yield from chains.items()
        for action in sorted({profile.action for profile in profiles}):
            limit = Limit(group, next(profile for profile in profiles if profile.action is action))
            yield _end_name(group, action), self._end(limit)

    def _dispatch(
        self, group: Group, chain: str, profiles: Mapping[int, Profile]
    ) -> Iterator[tuple[str, list[ChainRule]]]:
        """A binary tree on the mark, for testing it costs more than the rest of a rule.

        At the bit that parts the numbers most evenly, those that have it go on in a chain of their own.
        """
        rules: list[ChainRule] = []
        here = dict(profiles)
        while len(here) > _FANOUT:
            place = min(range(self.facts.most_limits.bit_length()), key=lambda bit: _unevenness(here, bit))
            others = {number: profile for number, profile in here.items() if number >> place & 1}
            name = f"{chain}{'' if '-' in chain[len(CHAIN_PREFIX) :] else '-'}{_DIGITS[place]}"
            bit = 1 << place + self.facts.shift
            rules.append(chain_rule(Jump(name, goto=True), Marked(bit, bit)))
            yield from self._dispatch(group, name, others)
            here = {number: profile for number, profile in here.items() if number not in others}
        rules += [rule for number, profile in here.items() for rule in self._leaf(group, number, profile)]
        yield chain, rules

    def _leaf(self, group: Group, number: int, profile: Profile) -> Iterator[ChainRule]:
        here = Marked(number << self.facts.shift, self.facts.mark_mask)
        yield chain_rule(Jump(_end_name(group, profile.action), goto=True), here, self._above(group, profile))
        if number == self.facts.most_limits:
            # This number is also how a rejected packet is marked; one that passes must not look like it.
            yield chain_rule(SetMark(0, self.facts.mark_mask), here)

    def _end(self, limit: Limit) -> Iterator[ChainRule]:
        """What happens to a packet over its limit: counted by rule, its address remembered, then dropped."""
        yield self._remember(limit)
        if limit.profile.action is Action.REJECT and limit.group.kind is not Kind.CONCURRENT:
            yield chain_rule(SetMark(self.facts.mark_mask, self.facts.mark_mask))
        elif limit.profile.action is Action.REJECT:
            yield from self._reject_chain()
        else:
            yield chain_rule(DROP)

    def _remember(self, limit: Limit) -> ChainRule:
        side, known = limit.group.bucket_side, offender_set(self.family).name
        twin = InSet(dropped_set(limit, self.facts).name, limit.group.side)
        return chain_rule(AddTo(known, side), twin, InSet(known, side, inverted=True))

    def _watch(self, group: Group, profile: Profile) -> ChainRule:
        limit = Limit(group, profile)
        main, twin = matched_set(limit, self.facts).name, dropped_set(limit, self.facts).name
        over: Match = (
            Crowded(profile.rate.amount, self._bucket_length(group), group.bucket_side)
            if group.kind is Kind.CONCURRENT
            else self._above(group, profile)
        )
        return chain_rule(RETURN, InSet(main, group.side), over, InSet(twin, group.side))

    def _crowd_chains(self, group: Group, profiles: Mapping[Profile, int]) -> Iterator[tuple[str, Iterable[ChainRule]]]:
        """Sets from the longest prefix to the shortest; `goto` lets the first that matches be the last."""
        rules = []
        for profile in sorted(profiles, key=lambda each: (-each.length, each.key)):
            limit = Limit(group, profile)
            leaf = f"{CHAIN_PREFIX}C{digest(f'{group.key} {profile.key}')}"
            rules.append(chain_rule(Jump(leaf, goto=True), InSet(matched_set(limit, self.facts).name, group.side)))
            crowded = Crowded(profile.rate.amount, self._bucket_length(group), group.bucket_side)
            yield leaf, [chain_rule(Jump(f"{leaf}-over", goto=True), crowded)]
            yield f"{leaf}-over", self._end(limit)
        yield _group_name(group), rules

    def _above(self, group: Group, profile: Profile) -> Above:
        bucket = fit_bucket(profile.rate, profile.burst)
        if group.scope == PEER:
            lengths = {group.side: profile.length, group.bucket_side: group.longest}
        else:
            lengths = {group.side: self._bucket_length(group)}
        return Above(
            name=SET_PREFIX + digest(f"{group.key} {profile.key} {bucket} {Above.BUCKETS} {Above.COLLECT_MS}"),
            above=bucket.above,
            above_shown=bucket.shown,
            burst=bucket.burst,
            sides=tuple((side, lengths[side]) for side in _SIDES if side in lengths),
            expire_ms=bucket.expire_ms,
            per_second=float(bucket.per_second),
            depth=bucket.depth,
            bytes=group.kind is Kind.BYTES,
            longest=group.longest,
        )

    def _bucket_length(self, group: Group) -> int:
        return group.longest if group.scope in (HOST, PEER) else group.bucket_length

    # -- reject

    def _rejects(self, groups: Iterable[Group] | None = None) -> bool:
        """Whether any of the groups (all metered ones, if none are given) rejects rather than drops."""
        asked = [group for group in self.limits if group.marked] if groups is None else groups
        return any(profile.action is Action.REJECT for group in asked for profile in self.limits[group])

    def _rejected(self) -> Marked:
        return Marked(self.facts.mark_mask, self.facts.mark_mask)

    def _reject_chain(self) -> Iterator[ChainRule]:
        yield chain_rule(Reject("tcp-reset"), Is("tcp"))
        yield chain_rule(Reject("icmp-port-unreachable" if self.family == 4 else "icmp6-port-unreachable"))

    @property
    def _longest(self) -> int:
        return 32 if self.family == 4 else 128


def _unevenness(numbers: Iterable[int], bit: int) -> int:
    """By how much more of the numbers have the bit than have it not, or the other way round."""
    return abs(sum(1 if number >> bit & 1 else -1 for number in numbers))


def _by_weight(verdict: VerdictGroup) -> tuple[int, bool]:
    """The longest prefix decides; where two are alike, allow does."""
    return -verdict.length, verdict.action is Action.BLOCK


_SIDES: tuple[Side, Side] = ("src", "dst")


def _places() -> Iterator[tuple[Table, Hook]]:
    tables: tuple[Table, ...] = ("raw", "mangle", "filter", "security")
    hooks: tuple[Hook, ...] = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT")
    yield from ((table, hook) for table in tables for hook in hooks)


def _close_name(hook: Hook) -> str:
    return f"{CHAIN_PREFIX}{hook}-CLOSE"


def _base_name(hook: Hook) -> str:
    return CHAIN_PREFIX + hook


def _exact_name(hook: Hook) -> str:
    return f"{CHAIN_PREFIX}{hook}-EXACT"


def _group_name(group: Group) -> str:
    return f"{CHAIN_PREFIX}G{group.digest}"


def _lane_name(lane: Lane) -> str:
    return f"{CHAIN_PREFIX}Q{lane.digest}"


def _find_class(each: OpenLane) -> Effect:
    return Jump(_lane_name(each.lane)) if each.newcomers else MapPriority(each.lane.name, each.lane.side)


def _ways_out(lane: Lane) -> Iterator[tuple[Match, ...]]:
    """What selects the packets of a lane where they leave."""
    way = Selector(lane.selector.protocol, lane.selector.ports, lane.selector.source_ports, lane.device)
    yield from _conditions(way, Direction.TO, "FORWARD", lane.family)


def _end_name(group: Group, action: Action) -> str:
    return f"{CHAIN_PREFIX}{'J' if action is Action.REJECT else 'D'}{group.digest}"


def asked_keys(structure: Structure) -> dict[tuple[int, Direction], set[str]]:
    """The addresses and subnets that chains ask for one by one, by family and end."""
    asked: dict[tuple[int, Direction], set[str]] = {(f, direction): set() for f in (4, 6) for direction in Direction}
    for chain, rules in structure.chains.items():
        for rule in rules:
            words = rule.text.split()
            if len(words) == 4 and words[0] in ("-s", "-d") and words[3] == f"{chain.name}-CLOSE":
                key = words[1].removesuffix("/32" if chain.family == 4 else "/128")
                asked[chain.family, Direction.FROM if words[0] == "-s" else Direction.TO].add(key)
    return asked


def precedence(group: Group) -> tuple[bool, int, int, int, str]:
    """Watchers see everything; then hosts and peers, then shared budgets from the smallest to the largest."""
    rank = {HOST: 0, PEER: 1}.get(group.scope, 2)
    return not group.watch, rank, -group.bucket_length, -group.target_length, group.key


def _only_named(direction: Direction, hook: Hook) -> bool:
    """What reaches this host itself is limited only by a rule that names the address."""
    return direction is Direction.TO and hook == "INPUT"


def _conditions(
    selector: Selector, direction: Direction, hook: Hook, family: int, kind: Kind = Kind.PACKETS
) -> Iterator[tuple[Match, ...]]:
    """The alternatives of matches that select the traffic at this hook; none where it cannot pass."""
    matches: list[Match] = []
    if selector.interface:
        if hook not in (("PREROUTING", "INPUT", "FORWARD") if direction is Direction.FROM else ("FORWARD", "OUTPUT")):
            return
        matches.append(Enters(selector.interface) if direction is Direction.FROM else Leaves(selector.interface))
    ports: list[Match] = []
    if selector.ports:
        ports.append(Ports(selector.ports))
    if selector.source_ports:
        ports.append(Ports(selector.source_ports, "src"))
    opens: list[Match] = [Opens()] if kind in (Kind.CONNECTIONS, Kind.CONCURRENT) else []
    if selector.protocol is Protocol.ANY:
        if not opens:
            yield tuple(matches)
            return
        yield (*matches, Is("tcp"), Syn(), *opens)
        yield (*matches, Is("tcp", inverted=True), *opens)
        return
    name = "ipv6-icmp" if selector.protocol is Protocol.ICMP and family == 6 else selector.protocol.value
    syn = [Syn()] if opens and selector.protocol is Protocol.TCP else []
    yield (*matches, Is(name), *ports, *syn, *opens)
