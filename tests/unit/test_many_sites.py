"""Judging a change costs about as much as its rules are many, whatever gateways they name. It says what it would say if
each rule were looked at for each gateway."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlimit import effort, judgement
from netlimit.closure import Area, Closed, Site, World, cut, is_closed, is_on, is_shut, list_shut, list_ways, may_close
from netlimit.judgement import Change, NeedsForce, find_harm, force, refuse
from netlimit.lockout import Havens
from netlimit.openings import Lost, find_lost, find_under, is_over
from netlimit.records import HostStatus
from netlimit.rules import Action, Direction, Protocol, Rule, parse_rule
from netlimit.sites import find_closed
from tests.size import choose
from tests.unit.test_judgement import Kept

NOW = datetime(2030, 1, 1, tzinfo=UTC)
GATEWAY = HostStatus(
    "gw1", "iptables", own=("10.1.0.1",), management=(22, 8750), silence=timedelta(0),
    networks={"10.1.0.0/16": ("lan",), "10.2.0.0/24": ("wan",), "0.0.0.0/0": ("wan",)},
)  # fmt: skip
HAVENS = Havens([GATEWAY], NOW)
SITES = HAVENS._list_sites([])


def rule(number: int, **fields: Any) -> Rule:
    return replace(parse_rule({"action": "block", **fields}, NOW), id=number)


# The model: what decides, in the plainest way, each rule for each gateway at each moment.


def find_closed_plainly(before: Iterable[Rule], after: Iterable[Rule], sites: Iterable[Site]) -> Closed | None:
    sites = list(sites)
    places = frozenset[str]().union(*(site.places for site in sites))
    old, new = ([rule for rule in rules if may_close(rule, places)] for rules in (before, after))
    changed = set(new) - set(old)
    moments = sorted({NOW, *(rule.expires_at for rule in old if rule.expires_at and rule.expires_at > NOW)})
    for site in sites:
        for family in (4, 6):
            were, are = (cut(rules, site, family) for rules in (old, new))
            for way in list_ways(site, are):
                mine = [part.rule for part in are if part.rule in changed and is_on(part, way)]
                for world in site.worlds[family]:

                    def shut(parts: Any, at: datetime, way: Any = way, world: Any = world) -> bool:
                        left = [part for part in parts if is_on(part, way) and not part.rule.expired(at)]
                        return is_closed(left, way, world)

                    if mine and any(shut(are, at) and not shut(were, at) for at in moments):
                        first = min(mine, key=lambda rule: rule.target.prefixlen)
                        return Closed(site.name, world.name, way.port, way.address, first)
    return None


def find_lost_plainly(
    changing: Sequence[Rule], gone: Collection[Rule], before: Sequence[Rule], after: Sequence[Rule],
    sites: Iterable[Site],
) -> Lost | None:  # fmt: skip
    def opens(rule: Rule, site: Site, family: int, port: int) -> bool:
        mine = rule.selector.ports if rule.direction is Direction.FROM else rule.selector.source_ports
        return (
            rule.action is Action.ALLOW and rule.family == family and rule.in_force(NOW, site.name)
            and rule.selector.protocol not in (Protocol.UDP, Protocol.ICMP)
            and (not mine or any(low <= port <= high for low, high in mine))
        )  # fmt: skip

    def blocked(allow: Rule, parts: Iterable[Any]) -> bool:
        world = World("", (Area(int(allow.target.network_address), int(allow.target.broadcast_address) + 1),))
        return is_shut([part for part in parts if is_over(part.rule, allow)], world)

    for site in sites:
        for family in sorted({allow.family for allow in changing}):
            for way in list_shut(after, site, family, NOW):
                assert way.port is not None
                held, stays = ([r for r in rules if opens(r, site, family, way.port)] for rules in (before, after))
                blocks = [[r for r in rules if r.action is Action.BLOCK and r.in_force(NOW)]
                          for rules in (before, after)]  # fmt: skip
                old, new = ([part for part in cut(each, site, family) if is_on(part, way)] for each in blocks)
                for allow in changing:
                    lost = allow in gone or (blocked(allow, new) and not blocked(allow, old))
                    if not lost or allow not in held or blocked(allow, old):
                        continue
                    rest = [r for r in stays if r not in changing or r not in (allow, *gone)]
                    every, left = (sum(r.target.num_addresses for r in rules) for rules in (held, rest))
                    size = allow.target.num_addresses
                    wide = allow.target.prefixlen <= 20 or str(allow.target) in site.places
                    if wide or size >= 0.25 * every or left < 0.25 * every:
                        return Lost(allow, site.name, way.port)
    return None


_TARGETS = [
    "0.0.0.0/0", "0.0.0.0/1", "64.0.0.0/2", "128.0.0.0/2", "192.0.0.0/3", "160.0.0.0/3", "10.0.0.0/8", "10.1.0.0/16",
    "10.2.0.0/24", "10.1.0.1", "2000::/3", "2000::/4", "198.51.100.0/24", "198.51.100.128/25", "32.0.0.0/20",
]  # fmt: skip
_WAYS: list[dict[str, Any]] = [
    {}, {}, {}, {"protocol": "tcp", "ports": [22]}, {"protocol": "tcp", "ports": "0-40000"},
    {"protocol": "tcp", "ports": "30000-65535"}, {"direction": "to"}, {"interface": "wan"},
    {"protocol": "tcp", "source_ports": "0-50000"}, {"protocol": "tcp", "source_ports": "40000-65535"},
    {"action": "allow"}, {"action": "allow", "protocol": "tcp", "ports": [22]},
]  # fmt: skip
_NAMES = st.sampled_from([None, None, ["gw1"], ["x"], ["y"], ["x", "y"], ["gw1", "z"], ["z"]])
_ENDS = st.sampled_from([None, None, "1h", "2h", "3h"])
_RULES = st.lists(st.tuples(st.sampled_from(_TARGETS), st.sampled_from(_WAYS), _NAMES, _ENDS), max_size=7)


def make_all(drawn: Iterable[tuple[str, dict[str, Any], list[str] | None, str | None]]) -> list[Rule]:
    return [
        rule(number, target=target, ttl=ttl, **how, **({"hosts": hosts} if hosts else {}))
        for number, (target, how, hosts, ttl) in enumerate(drawn)
    ]


@settings(max_examples=choose(400, 1500), deadline=None)
@given(_RULES, st.sets(st.integers(0, 6)), st.sets(st.integers(0, 6)))
def test_each_rule_for_each_gateway_would_say_the_same(drawn: Any, lately: set[int], over: set[int]) -> None:
    """Some of the rules are new with the change, some are over with it."""
    rules = make_all(drawn)
    before = [each for each in rules if each.id not in lately]
    after = [each for each in rules if each.id not in over]
    sites = HAVENS._list_sites(rules)
    assert find_closed(before, after, sites, NOW) == find_closed_plainly(before, after, sites)
    went = [each for each in before if each.action is Action.ALLOW and each.id in over]
    blocks = [each for each in after if each.action is Action.BLOCK and each.id in lately]
    changing = list(
        dict.fromkeys([*went, *find_under(blocks, [each for each in rules if each.action is Action.ALLOW])])
    )
    assert find_lost(changing, went, before, after, sites, NOW) == find_lost_plainly(
        changing, went, before, after, sites
    )


def block_many(number: int, names: int = 0, first: int = 1) -> list[Rule]:
    """Blocks of other networks each, each for gateways that nobody knows, which no other rule names."""
    return [
        rule(
            first + place, target=f"{20 + place // 4096}.{place // 16 % 256}.{place % 16 * 16}.0/20",
            hosts=[f"h{place}-{name}" for name in range(names)],
        )
        for place in range(number)
    ]  # fmt: skip


def harms(coming: Iterable[Rule], stays: Iterable[Rule] = ()) -> list[str]:
    kept = Kept({each.id: each for each in stays}, HAVENS)
    return [harm.sentence for harm in find_harm([Change(None, each) for each in coming], kept, HAVENS, NOW)]


LATER = rule(50_000, target="9.0.0.0/16")


def test_rules_that_name_many_gateways_are_judged_in_as_many_looks_as_there_are_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judgement, "MOST_STEPS", 300_000)
    many = block_many(4000, 8)
    assert harms(many) == []
    assert harms([LATER], many) == []
    assert harms([rule(50_000, target="9.0.0.0/16", hosts=["gw1"])], many) == []


def test_what_all_gateways_share_is_looked_at_once_for_those_that_only_rules_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judgement, "MOST_STEPS", 300_000)
    shared = [*block_many(3000), rule(20_000, target="128.0.0.0/1")]
    named = block_many(3000, 2, first=30_000)
    assert harms(named, shared) == []
    assert harms([LATER], [*shared, *named]) == []
    closing = harms([rule(50_000, target="0.0.0.0/1", hosts=["h7-1"])], [*shared, *named])
    assert closing
    assert "would close h7-1 to nearly every IPv4 address" in closing[0]


def test_rules_that_end_at_other_times_each_are_no_reason_to_look_at_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judgement, "MOST_STEPS", 1_000_000)
    ending = [replace(each, expires_at=NOW + timedelta(seconds=1 + each.id)) for each in block_many(3000)]
    assert harms([LATER], [*ending, rule(20_000, target="0.0.0.0/0")]) == []
    lasting = rule(50_000, target="0.0.0.0/1")
    closed = rule(20_000, target="0.0.0.0/0", ttl="1h")
    assert harms([lasting], [*ending, closed, rule(20_001, target="128.0.0.0/1")])


def test_what_was_forced_and_hits_nobody_safe_is_not_looked_at_for_each_opening_that_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    def count(*args: Any, whole: Callable[..., Any] = Havens.find_exposed) -> Any:
        nonlocal looks
        looks += 1
        return whole(*args)

    monkeypatch.setattr(Havens, "find_exposed", count)
    bans = [rule(n, target=f"198.18.{n // 250}.{n % 250}") for n in range(1, 3001)]
    kept = [replace(each, forced_by="root") for each in bans]
    changes = [
        Change(rule(10_000 + n, target=f"9.{n // 250}.{n % 250}.0/24", action="allow"), None) for n in range(4000)
    ]
    stays = {each.id: each for each in kept}
    assert find_harm(changes, Kept(stays, HAVENS), HAVENS, NOW) == []
    assert looks == 0
    safe = Havens([replace(GATEWAY, safe=("10.1.0.7/32",))], NOW)
    stays[9000] = replace(rule(9000, target="10.1.0.7"), forced_by="root")
    monkeypatch.setattr(judgement, "MOST_STEPS", 900)
    found = find_harm(changes, Kept(stays, safe), safe, NOW)
    assert looks == 300
    assert [harm.sentence.startswith("It would take too long") for harm in found] == [True]


def test_openings_that_go_are_looked_for_among_those_that_stay_without_a_look_at_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = 0

    def count(*args: Any, whole: Callable[..., bool] = judgement._allows_as_much) -> bool:
        nonlocal compared
        compared += 1
        return whole(*args)

    monkeypatch.setattr(judgement, "_allows_as_much", count)
    allows = [replace(each, action=Action.ALLOW) for each in block_many(6000)]
    kept = Kept({each.id: each for each in allows[3000:]}, HAVENS)
    assert find_harm([Change(each, None) for each in allows[:3000]], kept, HAVENS, NOW) == []
    assert compared < 10_000


PORTS = [
    rule(number, target="0.0.0.0/0", protocol="tcp", ports=f"{16 * number}-{16 * number + 30000}",
         source_ports=f"{32768 + 5 * number}-60999")
    for number in range(1, 200)
]  # fmt: skip


def test_what_takes_too_long_to_judge_needs_force() -> None:
    changes = [Change(None, each) for each in PORTS]
    with pytest.raises(NeedsForce, match=r"would take too long to find out.*an admin can force it") as refused:
        refuse(HAVENS, NOW)(changes, Kept({}))
    assert [harm.which for harm in refused.value.harms] == [0]
    assert list(force(HAVENS, NOW, "root")(changes, Kept({}))) == [0]
    assert harms(block_many(100)) == [], "the next is judged anew"


def test_effort_is_bounded_only_where_it_is_said() -> None:
    effort.spend(10**12)
    with effort.bounded(5):
        effort.spend(5)
        with pytest.raises(effort.TooMuchToJudge):
            effort.spend(1)
    effort.spend(10**12)


@pytest.mark.parametrize("seed", range(20))
def test_rules_of_which_many_are_alike_are_judged_as_each_by_itself(seed: int) -> None:
    """The same with rules that together nearly close a gateway, so that what names add decides."""
    chance = random.Random(seed)
    shared = [rule(n, target=f"{n * 8}.0.0.0/5") for n in range(28) if n and chance.random() < 0.6]
    named = [
        rule(100 + n, target=chance.choice([f"{chance.randrange(27) * 8}.0.0.0/5", "64.0.0.0/3", "128.0.0.0/2"]),
             hosts=[f"g{chance.randrange(6)}"], **chance.choice(_WAYS[:6]))
        for n in range(25)
    ]  # fmt: skip
    rules = [*shared, *named]
    chance.shuffle(rules)
    sites = HAVENS._list_sites(rules)[1:]
    for start in range(0, len(rules), 8):
        before = rules[:start]
        assert find_closed(before, rules, sites, NOW) == find_closed_plainly(before, rules, sites)
