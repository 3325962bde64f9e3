"""What `allow` leaves open of a gateway that rules close to everybody else: the last ways to come and manage it.

A block for a longer prefix comes before an `allow`, so an opening is closed by taking it away, by making it smaller,
and by blocking what is in it. Small openings beside others may go, such as those of single hosts; wide ones may not,
for anybody could have made another one, elsewhere, just before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from netlimit.closure import LONGEST, Area, Part, Site, Way, World, cut, is_on, is_shut, list_shut, select_harsh
from netlimit.rules import Action, Direction, Protocol, Rule
from netlimit.sites import UNKNOWN, Common, Naming, pick

_MAIN = 0.25
"""An opening that is so much of all of them is a main one; so is all that is wide, or as wide as a network nearby."""


class Lost(NamedTuple):
    """An opening that would be lost, and the gateway and its port that it leads to."""

    allow: Rule
    gateway: str
    port: int


def find_lost(
    changing: Iterable[Rule], gone: Collection[Rule], before: Sequence[Rule], after: Sequence[Rule],
    sites: Iterable[Site], now: datetime,
) -> Lost | None:  # fmt: skip
    """The first opening that is lost. `changing` are the openings that may be: those of them in `gone` are taken away
    or made smaller, the others may be blocked by rules after the change; `before` and `after` are all rules that allow,
    block, or can close a gateway."""
    changing, gone = list(dict.fromkeys(changing)), frozenset(gone)
    old, new = Naming(before), Naming(after)
    common = Common(select_harsh(new.everywhere, UNKNOWN, now), tuple(map(Way, UNKNOWN.ports)))
    for site in pick(sites, Naming(changing), old, new):
        if site.heard or not common.stays_open(site, select_harsh(new.by_name(site.name), site, now)):
            lost = _find_lost_at(site, changing, gone, old.at(site.name), new.at(site.name), now)
            if lost is not None:
                return lost
    return None


def _find_lost_at(
    site: Site, changing: Sequence[Rule], gone: Collection[Rule], before: Sequence[Rule], after: Sequence[Rule],
    now: datetime,
) -> Lost | None:  # fmt: skip
    for family in sorted({allow.family for allow in changing}):
        for way in list_shut(after, site, family, now):
            held = [rule for rule in before if _opens(rule, site, family, way, now)]
            stays = [rule for rule in after if _opens(rule, site, family, way, now)]
            sizes = _Sizes(site, held, stays, frozenset(changing) & frozenset(gone))
            old, new = (_Blocks(rules, changing, site, family, way, now) for rules in (before, after))
            known = frozenset(held)
            for allow in changing:
                if allow not in known or not (allow in gone or new.cover(allow)) or old.cover(allow):
                    continue
                if sizes.is_main(allow):
                    assert way.port is not None
                    return Lost(allow, site.name, way.port)
    return None


def find_under(blocks: Iterable[Rule], allows: Iterable[Rule]) -> list[Rule]:
    """Those that allow something of what others block. Both can be many."""
    keyed: dict[tuple[int, int, int], list[Rule]] = {}
    for allow in allows:
        keyed.setdefault(_key(allow, allow.target.prefixlen), []).append(allow)
    lengths = sorted({(family, length) for family, length, _ in keyed})
    found = {
        key: None
        for block in blocks
        for family, length in lengths
        if family == block.family and length < block.target.prefixlen and (key := _key(block, length)) in keyed
    }
    return [allow for key in found for allow in keyed[key]]


def _key(rule: Rule, length: int) -> tuple[int, int, int]:
    """The first bits of a target."""
    return rule.family, length, int(rule.target.network_address) >> rule.target.max_prefixlen - length


def is_over(block: Rule, allow: Rule) -> bool:
    """Whether a rule blocks something of what another allows."""
    return (
        block.action is Action.BLOCK
        and block.family == allow.family
        and block.target.prefixlen > allow.target.prefixlen
        and block.target.subnet_of(allow.target)  # type: ignore[arg-type]  # both are of one family
    )


def _opens(rule: Rule, site: Site, family: int, way: Way, now: datetime) -> bool:
    if rule.action is not Action.ALLOW or rule.family != family or not rule.in_force(now):
        return False
    if (rule.hosts and site.name not in rule.hosts) or rule.selector.protocol in (Protocol.UDP, Protocol.ICMP):
        return False
    mine = rule.selector.ports if rule.direction is Direction.FROM else rule.selector.source_ports
    return not mine or any(low <= (way.port or 0) <= high for low, high in mine)


class _Blocks:
    """What rules block of each of some openings, by longer prefixes."""

    def __init__(
        self, rules: Sequence[Rule], allows: Iterable[Rule], site: Site, family: int, way: Way, now: datetime
    ) -> None:
        wanted = {_key(allow, allow.target.prefixlen) for allow in allows}
        lengths = sorted({length for version, length, _ in wanted if version == family})
        blocks = [rule for rule in rules if rule.action is Action.BLOCK and rule.in_force(now)]
        self._under: dict[tuple[int, int, int], list[Part]] = {}
        for part in cut(blocks, site, family):
            if is_on(part, way):
                for length in lengths:
                    if length < part.rule.target.prefixlen and (key := _key(part.rule, length)) in wanted:
                        self._under.setdefault(key, []).append(part)

    def cover(self, allow: Rule) -> bool:
        """Whether most of what a rule allows is blocked."""
        world = World("", (Area(int(allow.target.network_address), int(allow.target.broadcast_address) + 1),))
        return is_shut(self._under.get(_key(allow, allow.target.prefixlen), []), world)


class _Sizes:
    """How much openings come to: `held` are those before a change, `stays` those after it, but for those that go."""

    def __init__(self, site: Site, held: Iterable[Rule], stays: Iterable[Rule], go: Collection[Rule]) -> None:
        self._site = site
        self._every = sum(each.target.num_addresses for each in held)
        self._stays = [each for each in stays if each not in go]
        self._rest = sum(each.target.num_addresses for each in self._stays)
        self._number = Counter(self._stays)

    def is_main(self, allow: Rule) -> bool:
        """Whether an opening is wide, or much of all, or as good as none stays without it."""
        size = allow.target.num_addresses
        wide = allow.target.prefixlen <= LONGEST[allow.family] or str(allow.target) in self._site.places
        rest = self._rest - self._number[allow] * size
        return wide or size >= _MAIN * self._every or rest < _MAIN * self._every
