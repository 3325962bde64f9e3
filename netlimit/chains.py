"""From limits to chains: where packets meet which limit, in which order.

Every hook of ours reads the same way, top to bottom: what is never touched (loopback, neighbour discovery, open
connections by which this host is managed), rules that were forced and name a protected address, the safe set, allow and
block from the longest prefix to the shortest, then the limits: hosts before the budgets that they share, the smaller
budget before the larger. Few packets have an end that is safe, allowed or blocked: one look for each end tells, and the
others go to the limits at once.

Marks carry what a set says to the rule behind it. Others write marks too: where ours are looked at they are cleared
first, so a mark that a packet brings is never taken for one of ours, and they are zero again when it leaves. Only a
packet to be rejected bears all of them, from mangle to filter in the same hook, past the rules of others in mangle.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from netlimit import adverts, dying, management
from netlimit.conditions import Matches, ask_for_sent_ports, may_meet, select, select_all, select_sent
from netlimit.dispatch import Ask, Dispatch
from netlimit.fragments import DEFRAG, join
from netlimit.hashlimit import TABLE_MAX, TABLE_SIZES, fit_bucket
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
    trusted_set,
)
from netlimit.numbers import PurposeKey
from netlimit.packet import Side
from netlimit.peers import block_of, find_peer_slots, fit_peer_bucket, peer_set
from netlimit.rates import Kind
from netlimit.rules import HOST, PEER, Action, Direction, Selector
from netlimit.sequence import Sequence, find_longest_exemption, precedence
from netlimit.state import (
    CHAIN_PREFIX,
    OFFENDER_PREFIX,
    OFFENDER_SECONDS,
    ROLLING_SLOTS,
    SET_PREFIX,
    Above,
    AddTo,
    ChainId,
    ChainRule,
    Confirmed,
    Crowded,
    Effect,
    Ended,
    Enters,
    Has,
    Hook,
    InSet,
    IpSet,
    Is,
    IsOwn,
    Jump,
    Led,
    MapMark,
    MapPriority,
    Marked,
    Match,
    Reject,
    SetMark,
    Structure,
    Table,
    Verdict,
    chain_rule,
)
from netlimit.untouched import open_set, spare

Numbers = Mapping[Group, Mapping[Profile, int]]
Few = Mapping[str, tuple[str, ...]]
"""The keys of sets that have so few that asking for each costs less than a look into the set."""

RETURN, DROP, ACCEPT = Verdict("RETURN"), Verdict("DROP"), Verdict("ACCEPT")
_FANOUT = 2
# After two branches three of four packets that have a limit are gone, and those without one have lost little.
_ASKED_FIRST = 2
_BITS = re.compile(r"^(?:-j MARK --set-xmark 0x0|-m mark --mark 0x[0-9a-f]+)/(0x[0-9a-f]+)(?: -j NL-REJECT)?$")
_TOLD = re.compile(rf"^-m set --match-set ({SET_PREFIX}d\S+) (src|dst) ! --update-counters -g {CHAIN_PREFIX}REFUSE$")
_LEFT_OUT = re.compile(rf"^-m set --match-set ({SET_PREFIX}\S+) (?:src|dst) ! --update-counters -j RETURN$")
_DIGITS = "0123456789abcdefghijklmnopqrstuv"
_COUNTING: tuple[Table, ...] = ("filter", "security")
"""Where connections at once are counted. A commit to such a table begins its counts anew, and what is open by then is
never counted again: nothing stands there that comes and goes with what does not concern them."""
_FORESEEN = {4: (8, 16, 24, 32), 6: (32, 48, 56, 64, 128)}
"""Prefix lengths of what is allowed that are asked there from the beginning, while nothing is in their sets, too."""


def offender_set(family: int) -> IpSet:
    """Who was limited in the last minute, with the packets dropped."""
    return IpSet(
        f"{OFFENDER_PREFIX}{family}", family, "ip", timeout=OFFENDER_SECONDS, rolling=True, slots=ROLLING_SLOTS
    )


def assemble(
    limits: Numbers,
    verdicts: Iterable[VerdictGroup],
    facts: Facts,
    few: Few,
    lanes: Iterable[OpenLane] = (),
    capped: bool = False,
    slots: Mapping[Group, int] | None = None,
    wide: Numbers | None = None,
    former: tuple[int, ...] = (),
    displacing: Collection[Group] = (),
) -> Structure:
    """Build sets, chains and hooks for the limits in use (each profile with its number), the verdicts, and the lanes of
    what is shaped; and, where a device is `capped`, for what stands beside the cap. `slots` are the sizes of tables of
    buckets (of groups `per: peer`, of sets of peers), by group, where they are not the usual ones; `wide` tells the
    wide targets of limits; `former` are bits of the packet mark that chains and entries of ours may still write,
    besides those that are ours now. `displacing` are the groups of rules that name what ends here, as far as some of
    it may be forwarded as well."""
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
            slots or {},
            wide or {},
            former,
            displacing,
        )
        if part.limits or part.verdicts or part.lanes:
            part.build(sets, chains, hooks)
        if capped and management.find_lack(family, facts) is None:
            safe, hook = safe_set(family, facts), ChainId(family, "mangle", "OUTPUT")
            sets[safe.name] = safe
            chains[ChainId(family, "mangle", management.CHAIN)] = tuple(management.classify(family, facts))
            hooks[hook] = (chain_rule(Jump(management.CHAIN)), *hooks.get(hook, ()))
    return Structure(sets, chains, hooks)


def name_buckets(
    limits: Numbers, facts: Facts, slots: Mapping[Group, int] | None = None, wide: Numbers | None = None
) -> dict[str, PurposeKey]:
    """The limits by the names of the tables of their buckets; arguments as those of `assemble`."""
    found: dict[str, PurposeKey] = {}
    for family in (4, 6):
        of_family = {group: profiles for group, profiles in limits.items() if group.family == family}
        metered = {group: profiles for group, profiles in of_family.items() if group.kind is not Kind.CONCURRENT}
        part = _Family(family, metered, [], [], facts, {}, slots or {}, wide or {}, (), ())
        found |= {
            part.above(group, profile).name: Limit(group, profile).key
            for group in metered
            for profile in metered[group]
        }
    return found


@dataclass(frozen=True)
class _Family:
    """One address family's share: what to build from, and the steps of building it."""

    family: int
    limits: Numbers
    verdicts: list[VerdictGroup]
    lanes: list[OpenLane]
    facts: Facts
    few: Few
    slots: Mapping[Group, int]
    wide: Numbers
    former: tuple[int, ...] = ()
    displacing: Collection[Group] = ()
    trees: dict[Table, Dispatch] = field(default_factory=dict)

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
                here = {_base_name(hook): base, _close_name(hook): close}
                if _leads(base, _blocked_name(hook)):
                    here[_blocked_name(hook)] = [*self._spare(table, hook), chain_rule(_go_on(_close_name(hook)))]
                if any(_leads(rules, adverts.near_name(hook)) for rules in here.values()):
                    here[adverts.near_name(hook)] = list(self._near(table, hook))
                if any(_leads(rules, adverts.PERHAPS) for rules in here.values()):
                    diverted = adverts.find_diverted(self.family, self.facts)
                    here[adverts.PERHAPS] = [*diverted, chain_rule(_go_on(_close_name(hook)))]
                if any(_leads(rules, adverts.AGAIN) for rules in here.values()):
                    here[adverts.AGAIN] = list(self._ask_again(table, hook))
                if any(_leads(rules, _told_name(hook)) for rules in here.values()):
                    here[_told_name(hook)] = list(self._hear(table, hook))
                chains.update({ChainId(self.family, table, name): tuple(rules) for name, rules in here.items()})
                hooks[ChainId(self.family, table, hook)] = (chain_rule(Jump(_base_name(hook))),)
        if self._hears_ends and any(dying.lead(self.family, self.facts)):
            chains[ChainId(self.family, "raw", dying.CHAIN)] = tuple(dying.silence(self.family, self.facts))
        for table, dispatch in self.trees.items():
            chains.update({ChainId(self.family, table, name): rules for name, rules in dispatch.chains.items()})
        # In every table of ours: fragments are put together from the very moment in which its rules begin to hold.
        for table in {where.table for where in hooks if where.family == self.family}:
            rules = join(self.family, self._selectors_in(table), self.facts.capabilities)
            if rules:
                chains[ChainId(self.family, table, DEFRAG)] = rules
        if self._any_rejects:
            chains[ChainId(self.family, "filter", f"{CHAIN_PREFIX}REJECT")] = tuple(self._find_rejected())
            chains[ChainId(self.family, "filter", f"{CHAIN_PREFIX}REFUSE")] = tuple(self._reject_chain())
            masks = (self.facts.mark_mask, *self.former)
            jumps = [chain_rule(Jump(f"{CHAIN_PREFIX}REJECT"), Marked(mask, mask)) for mask in masks]
            for hook in self._rejecting_hooks():
                where = ChainId(self.family, "filter", hook)
                hooks[where] = (*jumps, *hooks.get(where, ()))

    # -- sets

    def _sets(self) -> Iterator[IpSet]:
        """In the order in which entries must come (and the reverse in which they must go), so that at no moment a
        packet is dropped that is allowed before and after, nor one passes that is not: verdicts from the longest prefix
        to the shortest, allow first, then what makes a packet be looked at closely, limits, and what is safe.
        """
        for verdict in sorted([*self.verdicts, *self._foreseen], key=_by_weight):
            yield matched_set(verdict, self.facts)
        for direction in Direction:
            yield exempt_set(self.family, direction, self.facts)
            yield blocked_set(self.family, direction, self.facts)
        # Who is named in an `own` group is there before the subnet around him is, and goes after it.
        for group, profiles in sorted(self.limits.items(), key=lambda each: not each[0].own):
            for profile in profiles:
                # Who is led to a limit that rejects must be known in filter, which asks the former.
                yield dropped_set(Limit(group, profile), self.facts)
                yield matched_set(Limit(group, profile), self.facts)
            if group.gated:
                yield self._peers_of(group)
        for each in self.lanes:
            yield from each.sets(self.facts)
        yield offender_set(self.family)
        if self.facts.management:
            yield open_set(self.family)
        if self._hears_ends and any(dying.lead(self.family, self.facts)):
            yield dying.led_set(self.family)
        yield safe_set(self.family, self.facts)
        yield trusted_set(self.family, self.facts)

    # -- hooks

    def _base(self, table: Table, hook: Hook) -> tuple[list[ChainRule], list[ChainRule]]:
        """The rules of one hook, and those for a packet that must be looked at closely; empty where nothing is to be
        done."""
        groups = self._groups_at(table, hook)
        exact = [group for group in groups if group.exact]
        general = [group for group in groups if not group.exact]
        lanes = self._lanes_at(table, hook)
        blocks = self._blocks(table, hook)
        again = self._lead_again(table, hook)
        limited = bool(exact or general or lanes)
        untracked = (table, hook) == ("raw", "PREROUTING")
        unheard = list(dying.lead(self.family, self.facts)) if untracked and self._hears_ends else []
        if not (limited or blocks or again):
            return unheard, []
        looks = any(group.marked for group in groups) or any(each.newcomers for each in lanes)
        base = [self._clear] if looks else []
        base += unheard
        base += self._spare(table, hook) if limited or again else []
        base += again
        base += self._find_special(table, hook, limited, blocks)
        base += self._ask([*exact, *general], table, hook)
        base += self._queue(lanes)
        return base, list(self._look_closely(table, hook, exact, general, blocks))

    def _spare(self, table: Table, hook: Hook) -> list[ChainRule]:
        """The rules that let pass what is never touched. Where nothing is limited, few packets come to them: those with
        an end that is blocked."""
        spared = spare(self.family, hook, self.facts, opening=table in _COUNTING)
        return [*spared, *adverts.lead(self.family, hook, self.facts)]

    def _near(self, table: Table, hook: Hook) -> Iterator[ChainRule]:
        """The rules for what may be spared."""
        yield from adverts.spare(self.family, hook, self.facts)
        yield from self._lead_again(table, hook, on_link=True)
        yield chain_rule(_go_on(_close_name(hook)))

    def _lead_again(self, table: Table, hook: Hook, on_link: bool = False) -> list[ChainRule]:
        """The rules that ask again of what is forwarded what PREROUTING may have spared."""
        early = hook == "FORWARD" and self._asked_early(table)
        return list(adverts.ask_again(self.family, self.facts, on_link)) if early else []

    def _ask_again(self, table: Table, hook: Hook) -> Iterator[ChainRule]:
        """The rules for what was spared in PREROUTING and is forwarded now all the same, for its destination was
        translated."""
        early, here = self._asked_early(table), self._groups_at(table, hook)
        if any(group.marked for group in early):
            yield self._clear  # not in the hook itself, where all that is forwarded would pay for it
        yield from self._ask([group for group in early if group.exact], table, hook)
        exact = [group for group in here if group.exact]
        general = [group for group in (*early, *here) if not group.exact]
        yield from self._look_closely(table, hook, exact, general, self._blocks(table, hook))

    def _asked_early(self, table: Table) -> list[Group]:
        """The groups that packets meet in PREROUTING."""
        return self._groups_at(table, "PREROUTING") if table == "mangle" else []

    def _find_special(self, table: Table, hook: Hook, limited: bool, blocks: list[VerdictGroup]) -> Iterator[ChainRule]:
        """Send what is exempt or blocked to be looked at closely. Where nothing is limited, only what is blocked."""
        spared = not limited and bool(self._spare(table, hook))
        close = _go_on(_blocked_name(hook) if spared else _close_name(hook))
        for direction in Direction:
            side = side_of(direction)
            if limited:
                exempt = exempt_set(self.family, direction, self.facts)
                yield from (chain_rule(close, match) for match in self._any_of(exempt, side, table))
            if any(block.direction is direction for block in blocks):
                blocked = blocked_set(self.family, direction, self.facts)
                if hook == "FORWARD" and direction is Direction.FROM and self._is_asked_before:
                    # What comes by loopback was spared: MPLS hands on by it what it has unpacked. And some multicast,
                    # which bridges and multicast routing pass on; and what is for this host, but in a frame to another,
                    # to whom a bridge hands it.
                    ways: list[tuple[Match, ...]] = [(Enters("lo"),), (Has("dst", adverts.MULTICAST[self.family]),)]
                    ways += adverts.sent_to_one(self.family, self.facts)
                    yield from (chain_rule(close, *way, InSet(blocked.name, side)) for way in ways)
                else:
                    yield from (chain_rule(close, match) for match in self._any_of(blocked, side, table))

    def _any_of(self, ipset: IpSet, side: Side, table: Table) -> list[Match]:
        """The alternatives for an end that is in a set."""
        # A commit to the tables where connections are counted begins the count anew: they ask the set.
        keys = self.few.get(ipset.name) if table in ("raw", "mangle") else None
        return [InSet(ipset.name, side)] if keys is None else [Has(side, key) for key in keys]

    @cached_property
    def _is_asked_before(self) -> bool:
        """Whether of all that is forwarded PREROUTING has asked for who is blocked `from`: no such block waits, and
        nothing was spared there for what it was sent to, and led to another since. NAT does that, with answers through
        a masquerade, too; with IPv6 so do prefixes that are translated (NPT) and routing headers; VRFs leave open what
        is this host's own; and what SRv6 takes out of tunnels passes no PREROUTING."""
        blocks = (block for block in self.verdicts if block.action is Action.BLOCK)
        # Whoever may translate by now: he may go, and mangle is switched before raw is.
        longest = find_longest_exemption(self.verdicts, answered=True)
        waiting = any(block.direction is Direction.FROM and block.length <= longest for block in blocks)
        led = self.family == 6 or self.family in self.facts.translated
        return not (waiting or led or self.facts.vrfs or self.facts.topology.segments)

    def _look_closely(
        self, table: Table, hook: Hook, exact: list[Group], general: list[Group], blocks: list[VerdictGroup]
    ) -> Iterator[ChainRule]:
        broad = [block for block in blocks if not block.exact]
        lanes = self._lanes_at(table, hook)
        named = [each for each in lanes if each.lane.exact]
        yield from self._levels(table, [block for block in blocks if block.exact], hook, self._longest)
        if exact or named:
            yield chain_rule(Jump(_exact_name(hook)))
        if general or broad or len(named) < len(lanes):
            yield from self._spare_safe(table, hook)
            if hook == "FORWARD" and any(block.direction is Direction.FROM for block in broad):
                foreign = IsOwn("src", inverted=True)
                yield chain_rule(_go_on(_told_name(hook)), Is(self._icmp), self._is_safe("src"), foreign)
            limited = general or lanes
            yield from self._levels(table, broad, hook, 0 if limited else min(block.length for block in broad))
            yield from self._ask(general, table, hook)
            yield from self._queue(each for each in lanes if not each.lane.exact)

    def _hear(self, table: Table, hook: Hook) -> Iterator[ChainRule]:
        """The rules for what routers that this host needs tell others by ICMP, as that packets are too big: no block of
        their network concerns it. All else does, for anybody may feign to be one of them."""
        blocks = [each for each in self._blocks(table, hook) if each.direction is Direction.TO and not each.exact]
        general = [group for group in self._groups_at(table, hook) if not group.exact]
        lanes = [each for each in self._lanes_at(table, hook) if not each.lane.exact]
        if blocks or general or lanes:
            yield from self._levels(table, blocks, hook, 0)
        yield from self._ask(general, table, hook)
        yield from self._queue(lanes)

    def _spare_safe(self, table: Table, hook: Hook) -> Iterator[ChainRule]:
        """Let pass who is safe. Nobody is by talking with this host itself, or by feigning to be it: a network that is
        safe may hold addresses of its own. Of what is forwarded only who is trusted is, not whom this host needs."""
        trusted, safe, foreign = trusted_set(self.family, self.facts).name, self._is_safe, IsOwn("src", inverted=True)
        if hook == "OUTPUT":
            yield chain_rule(RETURN, safe("dst"))
        elif hook == "INPUT":  # it ends here, whatever it is sent to: TPROXY leaves it another's address
            yield chain_rule(RETURN, safe("src"), foreign)
            yield chain_rule(RETURN, Has("dst", adverts.MULTICAST[self.family]), safe("dst"))
        elif hook == "FORWARD":
            yield chain_rule(RETURN, InSet(trusted, "src"), foreign)
            yield chain_rule(RETURN, InSet(trusted, "dst"))
        else:
            # Not before it is translated back is it known what is for this host, but blocks ask again then.
            asked_again = table == "raw" and not self._is_asked_before
            yield chain_rule(RETURN, safe("src") if asked_again else InSet(trusted, "src"), foreign)
            yield from () if asked_again else self._spare_needed(table, safe("src"), foreign)
            yield chain_rule(RETURN, InSet(trusted, "dst"), IsOwn("dst", inverted=True, broadcast=self.family == 4))

    def _spare_needed(self, table: Table, needed: Match, foreign: Match) -> Iterator[ChainRule]:
        """Let pass what comes in for this host from those whom it needs, and what they tell others by ICMP."""
        here: Matches = () if self.facts.vrfs else (IsOwn("dst", broadcast=self.family == 4),)
        yield chain_rule(RETURN, needed, foreign, *here)
        yield chain_rule(RETURN, Has("dst", adverts.MULTICAST[self.family]), needed, foreign)
        if table == "raw":
            yield chain_rule(RETURN, Is(self._icmp), needed, foreign)

    @property
    def _icmp(self) -> str:
        return "icmp" if self.family == 4 else "ipv6-icmp"

    def _is_safe(self, side: Side) -> InSet:
        return InSet(safe_set(self.family, self.facts).name, side)

    def _levels(self, table: Table, blocks: list[VerdictGroup], hook: Hook, shortest: int) -> Iterator[ChainRule]:
        """Allow and block by falling prefix length, allow first; down to the length below which nothing is asked."""
        if not blocks and shortest:
            return
        levels = [verdict for verdict in self._allows_in(table) if verdict.length >= shortest] + blocks
        for verdict in sorted(levels, key=_by_weight):
            for where in self._select(verdict, table, hook):
                effect = RETURN if verdict.action is Action.ALLOW else DROP
                yield chain_rule(effect, *where, InSet(matched_set(verdict, self.facts).name, verdict.side))

    def _select(self, verdict: VerdictGroup, table: Table, hook: Hook) -> Iterator[Matches]:
        """The alternatives of matches for what a verdict speaks of."""
        find = select_all if self._knows_sent_ports(table) else select
        yield from find(verdict.selector, verdict.direction, hook, self.family)

    def _allows_in(self, table: Table) -> list[VerdictGroup]:
        """What is allowed, by key; where connections are counted, what may concern those limits."""
        allows = [verdict for verdict in self.verdicts if verdict.action is Action.ALLOW]
        if table not in _COUNTING:
            return allows
        limited = {(group.selector, group.direction) for group in self._groups.get(table, ())}
        met = [
            each
            for each in (*allows, *self._foreseen)
            if any(may_meet(each.selector, where, each.direction is direction) for where, direction in limited)
        ]
        return sorted(met, key=lambda verdict: verdict.key)

    @cached_property
    def _foreseen(self) -> list[VerdictGroup]:
        """What nothing is allowed by yet, and is asked all the same where connections are counted."""
        if all(group.kind is not Kind.CONCURRENT for group in self.limits):
            return []
        usual = (
            VerdictGroup(self.family, direction, Selector(), Action.ALLOW, length)
            for direction in Direction
            for length in _FORESEEN[self.family]
        )
        return [each for each in usual if each not in self.verdicts]

    def _selectors_in(self, table: Table) -> set[Selector]:
        """What selects packets in a table; in one that others may follow, in any."""
        if table in _COUNTING:
            limited = {group.selector for group in self._groups.get(table, ())}
            return limited | {verdict.selector for verdict in self._allows_in(table)}
        found = {group.selector for group in self.limits} | {verdict.selector for verdict in self.verdicts}
        return found | {each.lane.selector for each in self.lanes}

    def _blocks(self, table: Table, hook: Hook) -> list[VerdictGroup]:
        """Which blocks stand here.

        `from` belongs into raw, so that a flood dies before it is tracked. But there nobody can know yet whether an
        `allow to` that is as specific will apply, for the address may be translated: such blocks wait until it is. Nor
        whether what is for this host, or for somebody safe, and so is spared, is led to another: all are asked again.
        """
        blocks = [verdict for verdict in self.verdicts if verdict.action is Action.BLOCK]
        waits = self._waits
        if table == "raw" and hook == "PREROUTING":
            early = (block for block in blocks if block.length > waits and not self._is_of_vrf(block))
            return [block for block in early if block.direction is Direction.FROM]
        if table != "mangle" or hook == "PREROUTING":
            return []
        here = []
        for block in blocks:
            if block.direction is Direction.TO and (block.stands_here or hook != "INPUT"):
                here.append(block)
            if block.direction is Direction.FROM and hook == "OUTPUT" and block.stands_here:
                here.append(block)
            if block.direction is Direction.FROM and hook in ("FORWARD", "INPUT"):
                here.append(block)
        return here

    # -- limits

    def _meets(self, group: Group, table: Table, hook: Hook) -> bool:
        """Whether packets of the group's direction pass this hook where they are still, or already, what they are.

        `from` behind routing and translation: only there is it known who the packet is for, and so whether it is spared
        by that, and what the kernel throws away (feigned sources: rp_filter) charges nobody. But peers are asked for
        before they may be translated, and a port of a VRF while packets are there, where nothing else has to wait: an
        `allow to` does, and so do all where one rejects, for what tells filter to do it must not pass a hook in which
        others could write it. Connections are counted behind both anyway, and so is all that goes `to` somewhere. What
        reaches this host itself, or what it sends, is limited at that end only by a rule that names the address.
        """
        if group.direction is Direction.TO:
            return hook != "PREROUTING" and (hook != "INPUT" or group.stands_here)
        if hook == "OUTPUT":
            return group.stands_here
        return (hook == "PREROUTING") == self._sequence.is_early(group)

    @cached_property
    def _sequence(self) -> Sequence:
        """Where limits are asked."""
        rejecting = frozenset(group for group in self.limits if self._rejects([group]))
        return Sequence(self.facts, self._waits >= 0 or self._any_rejects, rejecting)

    def _is_of_vrf(self, block: VerdictGroup) -> bool:
        """Whether it names a VRF, which packets have come in by only once they are routed."""
        return block.selector.interface in self.facts.vrfs

    @cached_property
    def _waits(self) -> int:
        """The longest prefix of an `allow` of which nobody knows before the translation whether it applies; -1 if there
        is none."""
        return find_longest_exemption(self.verdicts, answered=self.family in self.facts.translated)

    def _groups_at(self, table: Table, hook: Hook) -> list[Group]:
        """The groups that packets meet here, in order."""
        return [group for group in self._groups.get(table, ()) if self._meets(group, table, hook)]

    @cached_property
    def _groups(self) -> Mapping[Table, list[Group]]:
        """The groups of each table, in order."""
        found: dict[Table, list[Group]] = {}
        for group in sorted(self.limits, key=precedence):
            found.setdefault(self._sequence.find_table(group), []).append(group)
        return found

    def _ask(self, groups: list[Group], table: Table, hook: Hook) -> Iterator[ChainRule]:
        """Lead packets to the groups that concern them, and leave no mark behind."""
        asks = [ask for group in groups if (ask := _ask_of(group, hook)).rules]
        known = self._knows_sent_ports(table)
        moved = [group for group in groups if known and ask_for_sent_ports(group.selector, group.direction, hook)]
        sent = [_ask_sent(group) if group in moved else _ask_of(group, hook) for group in groups] if moved else []
        yield from self._line_up_led(asks, [ask for ask in sent if ask.rules], table)
        if any(ask.marks for ask in asks):
            yield self._clear

    def _line_up_led(self, asks: list[Ask], sent: list[Ask], table: Table) -> Iterator[ChainRule]:
        """Ask what NAT leads elsewhere for the ports that were `sent`, where there are such asks, and all else, answers
        among it, for those that it has."""
        tree = self._tree(table)
        usual = tree.line_up(asks)
        if not sent:
            yield from usual
            return
        chain = tree.gather(usual)
        answers = chain_rule(Jump(chain, goto=True), Led(answers=True))
        yield chain_rule(Jump(tree.gather([answers, *tree.line_up(sent)])), Led())
        yield chain_rule(Jump(chain), Led(inverted=True))

    def _knows_sent_ports(self, table: Table) -> bool:
        """Whether connections can be asked for what NAT makes of them. Where there is none, to ask would have the
        kernel track all: whatever the table of connections has no room for is dropped. Where we count connections,
        they are tracked."""
        lacking = self.facts.capabilities.get("conntrack" if self.family == 4 else "conntrack6")
        return (self.family in self.facts.translated or table in _COUNTING) and lacking is None

    def _tree(self, table: Table) -> Dispatch:
        if table not in self.trees:
            self.trees[table] = Dispatch(self._clear)
        return self.trees[table]

    @property
    def _clear(self) -> ChainRule:
        return chain_rule(SetMark(0, self.facts.mark_mask | self._former_bits))

    @property
    def _former_bits(self) -> int:
        """Those of the former bits that are not ours now."""
        bits = 0
        for mask in self.former:
            bits |= mask
        return bits & ~self.facts.mark_mask

    @cached_property
    def _hears_ends(self) -> bool:
        """Whether it matters which connections connection tracking takes for over."""
        return any(group.kind is Kind.CONCURRENT for group in self.limits)

    # -- lanes

    def _lanes_at(self, table: Table, hook: Hook) -> list[OpenLane]:
        """The lanes that packets pass here. A class is found on the way out, behind all that may drop the packet; what
        this host itself sends is shaped `to` somewhere, or where a rule names the very address."""
        if table != "mangle" or hook not in ("FORWARD", "OUTPUT"):
            return []
        here = [
            each
            for each in self.lanes
            if hook == "FORWARD" or each.lane.stands_here or each.lane.direction is Direction.TO
        ]
        return sorted(here, key=lambda each: (each.lane.order, each.lane.name))

    def _queue(self, lanes: Iterable[OpenLane]) -> Iterator[ChainRule]:
        asks = [Ask(_way_out(each.lane), False, each.lane.order, _find_way_out(each)) for each in lanes]
        yield from self._tree("mangle").line_up(asks)

    def _lane_chain(self, each: OpenLane) -> Iterator[ChainRule]:
        """Who is new and has no class yet is remembered; the mark tells."""
        mask = self.facts.mark_mask
        yield chain_rule(MapPriority(each.lane.name, each.lane.side))
        if self._former_bits:
            yield chain_rule(SetMark(0, self._former_bits))
        yield chain_rule(RETURN, Marked(0, mask))
        for number, length in each.newcomers:
            here = Marked(number << self.facts.shift, mask)
            yield chain_rule(AddTo(seen_name(each.lane, length), each.lane.side), here)
        yield chain_rule(SetMark(0, mask))

    def _chains(self) -> Iterator[tuple[Table, str, Iterable[ChainRule]]]:
        for group, profiles in self.limits.items():
            table, slots = self._sequence.find_table(group), self._slots_of(group)
            wide = tuple(self.wide.get(group, _NONE).items())
            about = tuple(profiles.items()), slots, wide, self.facts.mark_mask, self.facts.set_size
            for name, found in _chains_of(group, *about):
                yield table, name, (*self._leave_out(group), *found) if name == _group_name(group) else found
        for each in self.lanes:
            if each.newcomers:
                yield "mangle", _lane_name(each.lane), self._lane_chain(each)
        for table, hook in _places():
            exact = [group for group in self._groups_at(table, hook) if group.exact]
            named = [each for each in self._lanes_at(table, hook) if each.lane.exact]
            if exact or named:
                rules = [*self._levels(table, [], hook, 0), *self._ask(exact, table, hook), *self._queue(named)]
                yield table, _exact_name(hook), rules

    def _leave_out(self, group: Group) -> Iterator[ChainRule]:
        """A rule for one address displaces that of its subnet, though what may end here has sets of its own: wherever
        the one is asked, so is the other."""
        own = replace(group, own=True) if group.displaced_by_own else None
        if own is not None and own in self.displacing and own in self.limits:
            names = {matched_set(Limit(own, profile), self.facts).name for profile in self.limits[own]}
            yield from (chain_rule(RETURN, InSet(name, group.side, quiet=True)) for name in sorted(names))

    def group_chains(self, group: Group, profiles: Mapping[Profile, int]) -> Iterator[tuple[str, Iterable[ChainRule]]]:
        if group.watch:
            yield from self._watch_chains(group, profiles)
            return
        if group.kind is Kind.CONCURRENT:
            yield from self._crowd_chains(group, profiles)
            return
        main = matched_set(Limit(group, next(iter(profiles))), self.facts).name
        by_number = {number: profile for profile, number in sorted(profiles.items(), key=lambda item: item[1])}
        chains = dict(self._dispatch(group, _group_name(group), by_number))
        first, rest = chains[_group_name(group)][:_ASKED_FIRST], chains[_group_name(group)][_ASKED_FIRST:]
        unknown = [chain_rule(RETURN, Marked(0, self.facts.mark_mask))]
        if group.gated:
            unknown += self._admit(group)
        if group.gated or len(profiles) <= 2 * _FANOUT:
            first, rest = [], [*first, *rest]
        chains[_group_name(group)] = [chain_rule(MapMark(main, group.side)), *first, *unknown, *rest]
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
        yield chain_rule(Jump(_end_name(group, profile.action), goto=True), here, self.above(group, profile))

    def _end(self, limit: Limit) -> Iterator[ChainRule]:
        """What happens to a packet over its limit: counted by rule, its address remembered, then dropped."""
        yield self._remember(limit)
        if limit.profile.action is Action.REJECT and limit.group.kind is not Kind.CONCURRENT:
            yield chain_rule(SetMark(self.facts.mark_mask, self.facts.mark_mask))
            yield chain_rule(ACCEPT)
        elif limit.profile.action is Action.REJECT:
            yield from self._reject_chain()
        else:
            yield chain_rule(DROP)

    def _remember(self, limit: Limit) -> ChainRule:
        side, known = limit.group.bucket_side, offender_set(self.family).name
        twin = InSet(dropped_set(limit, self.facts).name, limit.group.side)
        return chain_rule(AddTo(known, side), twin, InSet(known, side, inverted=True))

    def _admit(self, group: Group) -> Iterator[ChainRule]:
        """Ask no more of a peer for whom there is no room: a table of buckets that is full would drop him."""
        peers = self._peers_of(group).name
        yield chain_rule(AddTo(peers, group.bucket_side, refresh=True))
        yield chain_rule(RETURN, InSet(peers, group.bucket_side, inverted=True))

    def _watch_chains(self, group: Group, profiles: Mapping[Profile, int]) -> Iterator[tuple[str, Iterable[ChainRule]]]:
        """Each profile where it returns from by itself: what one does not concern, or has counted, others may watch."""
        if len(profiles) == 1:
            yield _group_name(group), list(self._watch(group, next(iter(profiles))))
            return
        leaves = {
            f"{CHAIN_PREFIX}C{digest(f'{group.key} {profile.key}')}": profile
            for profile in sorted(profiles, key=lambda each: (-each.length, each.key))
        }
        yield from ((leaf, list(self._watch(group, profile))) for leaf, profile in leaves.items())
        yield _group_name(group), [chain_rule(Jump(leaf)) for leaf in leaves]

    def _watch(self, group: Group, profile: Profile) -> Iterator[ChainRule]:
        limit = Limit(group, profile)
        main, twin = matched_set(limit, self.facts).name, dropped_set(limit, self.facts).name
        over: Match = (
            Crowded(profile.rate.amount, self._bucket_length(group), group.bucket_side)
            if group.kind is Kind.CONCURRENT
            else self.above(group, profile)
        )
        if group.gated:
            yield chain_rule(RETURN, InSet(main, group.side, inverted=True, quiet=True))
            yield from self._admit(group)
        yield chain_rule(RETURN, InSet(main, group.side), over, InSet(twin, group.side))

    def _crowd_chains(self, group: Group, profiles: Mapping[Profile, int]) -> Iterator[tuple[str, Iterable[ChainRule]]]:
        """Sets from the longest prefix to the shortest; `goto` lets the first that matches be the last."""
        rules = []
        for profile in sorted(profiles, key=lambda each: (-each.length, each.key)):
            limit = Limit(group, profile)
            leaf = f"{CHAIN_PREFIX}C{digest(f'{group.key} {profile.key}')}"
            rules.append(chain_rule(Jump(leaf, goto=True), InSet(matched_set(limit, self.facts).name, group.side)))
            yield from self._crowd_chains_of(leaf, group, profile)
            yield f"{leaf}-over", self._end(limit)
        yield _group_name(group), rules

    def _crowd_chains_of(self, leaf: str, group: Group, profile: Profile) -> Iterator[tuple[str, list[ChainRule]]]:
        """Two counts. The kernel takes in whom it refuses, too, and forgets them only when somebody new comes: by one
        count alone nobody could repeat a SYN whose connection counts already. So the first is asked by who is new, and
        what it lets pass is in the second, which is asked by all that have an entry in the connection table as well."""
        above, length, side = profile.rate.amount, self._bucket_length(group), group.bucket_side
        held, over = _go_on(f"{leaf}-held"), _go_on(f"{leaf}-over")
        entry = [
            # What is over counts no more, until the server has answered a SYN within it: many at once would not count.
            chain_rule(over, Ended()),
            chain_rule(held, Confirmed()),  # not "unless it is new": what is INVALID would be asked by neither
            chain_rule(over, Crowded(above, length, side)),
            chain_rule(held),
        ]
        yield leaf, entry
        yield held.chain, [chain_rule(over, Crowded(above, length, side))]

    def above(self, group: Group, profile: Profile) -> Above:
        if group.scope == PEER:
            bucket, slots = fit_peer_bucket(profile), TABLE_SIZES[-1]
            lengths = {group.side: profile.length, group.bucket_side: block_of(group.family)}
        else:
            bucket, slots = fit_bucket(profile.rate, profile.burst), self._slots_of(group)
            lengths = {group.side: self._bucket_length(group)}
        what = f"{group.key} {profile.key} {bucket} {slots} {Above.COLLECT_MS}{self._tell_holders(group, profile)}"
        return Above(
            name=SET_PREFIX + digest(what),
            above=bucket.above,
            above_shown=bucket.shown,
            burst=bucket.burst,
            sides=tuple((side, lengths[side]) for side in _SIDES if side in lengths),
            expire_ms=bucket.expire_ms,
            per_second=float(bucket.per_second),
            depth=bucket.depth,
            bytes=group.kind is Kind.BYTES,
            longest=group.longest,
            slots=slots,
            most=TABLE_MAX,
        )

    def _tell_holders(self, group: Group, profile: Profile) -> str:
        """Whose buckets a table holds: it must be another one where those of others, which it would keep, could fill
        it."""
        told = f" /{block_of(6)}" if group.scope == PEER and group.family == 6 else ""
        if group.gated:
            told += f" {self._peers_of(group).name}"
        wide = self.wide.get(group, _NONE).get(profile)
        return told if wide is None else f"{told} {wide:x}"

    def _peers_of(self, group: Group) -> IpSet:
        return peer_set(group, self.limits[group], self._slots_of(group))

    def _slots_of(self, group: Group) -> int:
        usual = find_peer_slots(1, self.facts.set_size) if group.scope == PEER else TABLE_SIZES[-1]
        return self.slots.get(group, usual)

    def _bucket_length(self, group: Group) -> int:
        if group.scope == PEER:
            return block_of(group.family)
        return group.longest if group.scope == HOST else group.bucket_length

    # -- reject

    def _rejects(self, groups: Iterable[Group]) -> bool:
        """Whether any of the groups rejects rather than drops."""
        return any(profile.action is Action.REJECT for group in groups for profile in self.limits[group])

    @cached_property
    def _any_rejects(self) -> bool:
        """Whether any of all that are metered rejects."""
        return self._rejects(group for group in self.limits if group.marked)

    def _rejecting_hooks(self) -> list[Hook]:
        """Where a limit in mangle may mark a packet to be rejected; elsewhere such a mark is not ours."""
        hooks: tuple[Hook, ...] = ("INPUT", "FORWARD", "OUTPUT")
        here = {hook: [group for group in self._groups_at("mangle", hook) if group.marked] for hook in hooks}
        return [hook for hook in hooks if self._rejects(here[hook])]

    def _find_rejected(self) -> Iterator[ChainRule]:
        """Whose packets may be rejected: others may write such a mark between mangle and here, or while one of the two
        is switched before the other."""
        for group in sorted(self.limits, key=precedence):  # in whatever order rules came: another is no drift
            if group.marked and self._rejects([group]):
                named = dropped_set(Limit(group, next(iter(self.limits[group]))), self.facts).name
                yield chain_rule(Jump(f"{CHAIN_PREFIX}REFUSE", goto=True), InSet(named, group.side, quiet=True))

    def _reject_chain(self) -> Iterator[ChainRule]:
        yield chain_rule(Reject("tcp-reset"), Is("tcp"))
        yield chain_rule(Reject("icmp-port-unreachable" if self.family == 4 else "icmp6-port-unreachable"))

    @property
    def _longest(self) -> int:
        return 32 if self.family == 4 else 128


@lru_cache(maxsize=16_384)
def _chains_of(
    group: Group,
    profiles: tuple[tuple[Profile, int], ...],
    slots: int,
    wide: tuple[tuple[Profile, int], ...],
    mark_mask: int,
    set_size: int,
) -> tuple[tuple[str, tuple[ChainRule, ...]], ...]:
    """The chains of a group: most stay as they are when something changes."""
    numbers, facts = {group: dict(profiles)}, Facts(mark_mask=mark_mask, set_size=set_size)
    alone = _Family(group.family, numbers, [], [], facts, {}, {group: slots}, {group: dict(wide)})
    return tuple((name, tuple(rules)) for name, rules in alone.group_chains(group, numbers[group]))


@lru_cache(maxsize=16_384)
def _ask_of(group: Group, hook: Hook) -> Ask:
    """To be led to a group, by the ports that packets have here."""
    return _lead(group, select(group.selector, group.direction, hook, group.family, group.kind))


@lru_cache(maxsize=16_384)
def _ask_sent(group: Group) -> Ask:
    """To be led to a group, by the ports to which packets were sent."""
    return replace(_lead(group, select_sent(group.selector, group.direction, group.family, group.kind)), sent=True)


def _lead(group: Group, ways: Iterable[Matches]) -> Ask:
    rank = not group.exact, *precedence(group)[:-1], group.direction is Direction.TO
    rules = tuple(chain_rule(Jump(_group_name(group)), *where) for where in ways)
    return Ask(group.selector, group.direction is Direction.FROM, rank, rules, group.marked)


def _unevenness(numbers: Iterable[int], bit: int) -> int:
    """By how much more of the numbers have the bit than have it not, or the other way round."""
    return abs(sum(1 if number >> bit & 1 else -1 for number in numbers))


def _by_weight(verdict: VerdictGroup) -> tuple[int, bool]:
    """The longest prefix decides; where two are alike, allow does."""
    return -verdict.length, verdict.action is Action.BLOCK


_SIDES: tuple[Side, Side] = ("src", "dst")
_NONE: Mapping[Profile, int] = {}


def _places() -> Iterator[tuple[Table, Hook]]:
    tables: tuple[Table, ...] = ("raw", "mangle", "filter", "security")
    hooks: tuple[Hook, ...] = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT")
    yield from ((table, hook) for table in tables for hook in hooks)


def _close_name(hook: Hook) -> str:
    return f"{CHAIN_PREFIX}{hook}-CLOSE"


def _blocked_name(hook: Hook) -> str:
    """Where nothing is limited: the chain for whom a block may concern."""
    return f"{CHAIN_PREFIX}{hook}-BLOCKED"


def _base_name(hook: Hook) -> str:
    return CHAIN_PREFIX + hook


def _exact_name(hook: Hook) -> str:
    return f"{CHAIN_PREFIX}{hook}-EXACT"


def _told_name(hook: Hook) -> str:
    """The chain for what routers tell of packets of others."""
    return f"{CHAIN_PREFIX}{hook}-TOLD"


def _go_on(chain: str) -> Jump:
    return Jump(chain, goto=True)


def _leads(rules: Iterable[ChainRule], chain: str) -> bool:
    """Whether any of the rules leads to a chain."""
    return any(isinstance(rule.effect, Jump) and rule.effect.chain == chain for rule in rules)


def _group_name(group: Group) -> str:
    return f"{CHAIN_PREFIX}G{group.digest}"


def _lane_name(lane: Lane) -> str:
    return f"{CHAIN_PREFIX}Q{lane.digest}"


def _find_class(each: OpenLane) -> Effect:
    return Jump(_lane_name(each.lane)) if each.newcomers else MapPriority(each.lane.name, each.lane.side)


def _way_out(lane: Lane) -> Selector:
    """What selects the packets of a lane where they leave."""
    return Selector(lane.selector.protocol, lane.selector.ports, lane.selector.source_ports, lane.device)


def _find_way_out(each: OpenLane) -> tuple[ChainRule, ...]:
    ways = select(_way_out(each.lane), Direction.TO, "FORWARD", each.lane.family)
    return tuple(chain_rule(_find_class(each), *where) for where in ways)


def _end_name(group: Group, action: Action) -> str:
    return f"{CHAIN_PREFIX}{'J' if action is Action.REJECT else 'D'}{group.digest}"


def asked_keys(structure: Structure) -> dict[tuple[int, Direction], set[str]]:
    """The addresses and subnets that chains ask for one by one, by family and end."""
    asked: dict[tuple[int, Direction], set[str]] = {(f, direction): set() for f in (4, 6) for direction in Direction}
    for chain, rules in structure.chains.items():
        for rule in rules:
            words = rule.text.split()
            looked_at = [f"{chain.name}-CLOSE"], [f"{chain.name}-BLOCKED"]
            if len(words) == 4 and words[0] in ("-s", "-d") and words[3:] in looked_at:
                key = words[1].removesuffix("/32" if chain.family == 4 else "/128")
                asked[chain.family, Direction.FROM if words[0] == "-s" else Direction.TO].add(key)
    return asked


def find_displacing(structure: Structure, limits: Numbers, facts: Facts) -> set[Group]:
    """Those groups of limits whose sets the chains ask for so that the rule of a subnet is displaced."""
    own = {
        matched_set(Limit(group, each), facts).name: group for group in limits if group.own for each in limits[group]
    }
    if not own:
        return set()
    texts = (rule.text for rules in structure.chains.values() for rule in rules)
    asked = (found[1] for text in texts if (found := _LEFT_OUT.match(text)))
    return {own[name] for name in asked if name in own}


def find_former_bits(structure: Structure, mask: int) -> tuple[int, ...]:
    """The bits of the packet mark, other than those under `mask`, by which chains tell whom to reject or that they
    clear."""
    texts = (rule.text for rules in (*structure.chains.values(), *structure.hooks.values()) for rule in rules)
    found = {int(bits, 16) for text in texts for bits in _BITS.findall(text)}
    return tuple(sorted(found - {mask}))


def keep_rejecting(between: Structure, known: Structure) -> Structure:
    """Let filter still reject by the sets by which it is `known` to: while the bits of the mark change, packets that
    met the old ones come there, too."""
    kept = {}
    for where in (ChainId(family, "filter", f"{CHAIN_PREFIX}REJECT") for family in (4, 6)):
        told = (_TOLD.match(rule.text) for rule in known.chains.get(where, ()))
        # What is read from a kernel is text alone.
        asked = ((found[1], _SIDES[found[2] == "dst"]) for found in told if found and found[1] in known.sets)
        rules = (chain_rule(Jump(f"{CHAIN_PREFIX}REFUSE", goto=True), InSet(*each, quiet=True)) for each in asked)
        kept[where] = tuple(dict.fromkeys((*between.chains.get(where, ()), *rules)))
    return replace(between, chains={**between.chains, **{where: kept[where] for where in kept if kept[where]}})
