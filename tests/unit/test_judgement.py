"""What a change needs force for: no sequence of changes without it comes to what one of them could not do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlimit.closure import may_close
from netlimit.judgement import Change, NeedsForce, find_harm, force, refuse
from netlimit.lockout import Havens
from netlimit.records import HostStatus, SafeReason
from netlimit.rules import Action, Rule
from tests.forcing import make_rule

NOW = datetime(2030, 1, 1, tzinfo=UTC)
ADMIN, OWN = "198.51.100.7", "10.1.0.1"
GATEWAY = HostStatus(
    "gw1", "iptables", own=(OWN,), safe=(ADMIN,), safe_reasons={ADMIN: SafeReason("SSH session", NOW.timestamp())},
    management=(22, 8750), silence=timedelta(0),
)  # fmt: skip
HAVENS = Havens([GATEWAY], NOW)


@dataclass
class Kept:
    """Rules as a store keeps them, which asks before each change."""

    rules: dict[int, Rule]
    havens: Havens = HAVENS

    def forced(self) -> list[Rule]:
        return [rule for rule in self.rules.values() if rule.forced_by]

    def allowing(self) -> list[Rule]:
        return [rule for rule in self.rules.values() if rule.action is Action.ALLOW]

    def blocking(self) -> list[Rule]:
        return [rule for rule in self.rules.values() if rule.action is Action.BLOCK]

    def closing(self, places: Collection[str]) -> list[Rule]:
        return [rule for rule in self.rules.values() if may_close(rule, places)]

    def change(self, wanted: dict[int, Rule | None]) -> bool:
        """Make a change of somebody who forces nothing; whether it was made."""
        changes = [Change(self.rules.get(number), rule) for number, rule in wanted.items()]
        rest = Kept({number: rule for number, rule in self.rules.items() if number not in wanted})
        try:
            refuse(self.havens, NOW)(changes, rest)
        except NeedsForce:
            return False
        self.rules = rest.rules | {number: rule for number, rule in wanted.items() if rule is not None}
        return True


def rule(number: int = 1, **fields: Any) -> Rule:
    return replace(make_rule(fields, NOW), id=number)


def harms(changes: Sequence[Change], *stays: Rule) -> list[str]:
    kept = Kept({each.id: each for each in stays})
    return [harm.sentence for harm in find_harm(changes, kept, HAVENS, NOW)]


FORCED = rule(50, target=OWN, direction="to", rate="1 packets/day", forced_by="root")
POOL = [
    *({"target": target, "action": "block"} for target in (ADMIN, OWN, "198.51.100.0/24", "0.0.0.0/0", "0.0.0.0/1")),
    *({"target": target, "action": "block", "direction": "to"} for target in (OWN, "128.0.0.0/1", "128.0.0.0/2")),
    *({"target": target, "action": "allow"} for target in (ADMIN, "198.51.100.0/24", OWN)),
    {"target": OWN, "direction": "to", "rate": "1 packets/day"},
    {"target": "0.0.0.0/2", "rate": "1 connections/day", "per": "target", "action": "reject"},
    {"target": "64.0.0.0/2", "action": "block", "protocol": "tcp", "ports": [22]},
    *(
        {"target": OWN, "action": "block", "direction": "to", "protocol": "tcp", "ports": [22], "source_ports": sources}
        for sources in ("0-32767", "32768-65535", "1024-40000", "40001-60000", "50000-65535")
    ),
]
_PUTS = st.builds(
    lambda fields, number, ttl, enabled: (number, rule(number, **fields, ttl=ttl, enabled=enabled)),
    st.sampled_from(POOL), st.integers(1, 5), st.sampled_from([None, "1h"]), st.booleans(),
)  # fmt: skip
_CHANGES = st.dictionaries(st.integers(1, 5), st.none(), max_size=1) | st.lists(_PUTS, min_size=1, max_size=3).map(dict)


@settings(max_examples=300, deadline=None)
@given(st.lists(_CHANGES, max_size=8))
def test_no_sequence_of_changes_comes_to_what_one_could_not_do(changes: list[dict[int, Rule | None]]) -> None:
    kept = Kept({})
    for change in changes:
        before = dict(kept.rules)
        kept.change(change)
        every = [Change(None, each) for each in kept.rules.values()]
        assert harms(every) == [], "the same rules, all at once"
        # Whatever was there once may come back, as a whole.
        assert Kept(dict(kept.rules)).change({number: before.get(number) for number in {*before, *kept.rules}})


@pytest.mark.parametrize(
    "changes",
    [
        {"rate": "2 packets/day"}, {"target": "10.1.0.9"}, {"protocol": "tcp"}, {"action": "block"},
        {"interface": "lan"}, {"direction": "from"}, {"ttl": None}, {"hosts": None},
        {"source_ports": [1], "protocol": "tcp"},
    ],
    ids=str,
)  # fmt: skip
def test_a_forced_rule_that_does_something_else_needs_force_again(changes: dict[str, Any]) -> None:
    fields = {
        "target": OWN,
        "direction": "to",
        "rate": "1 packets/day",
        "forced_by": "root",
        "ttl": "1h",
        "hosts": ["gw1"],
    }
    before = rule(**fields)
    after = rule(**{**fields, **changes, **({"rate": None} if changes.get("action") else {})})
    assert "was forced by root" in harms([Change(before, after)])[0] or changes.get("action")
    assert harms([Change(before, after)])
    for harmless in ({"enabled": False}, {"ttl": "30m"}, {"comment": "why"}, {"labels": {"a": "b"}}, {"name": "n"}):
        assert not harms([Change(before, rule(**{**fields, **harmless}))])
    assert not harms([Change(before, None)])


def test_what_comes_back_is_judged_like_a_new_rule() -> None:
    assert "was forced by root" in harms([Change(None, FORCED)])[0]
    assert harms([Change(replace(FORCED, enabled=False), FORCED)])
    assert harms([Change(replace(FORCED, expires_at=NOW - timedelta(1)), FORCED)])
    assert not harms([Change(FORCED, FORCED)])


def test_closing_by_two_who_know_nothing_of_each_other_is_noticed() -> None:
    one, two = (rule(number, target=f"{128 * number}.0.0.0/1", action="block") for number in (0, 1))
    assert not harms([Change(None, two)])
    assert "would close gw1" in harms([Change(None, two)], one)[0]
    for_an_hour = replace(
        rule(3, target="0.0.0.0/0", action="block", forced_by="root"), expires_at=NOW + timedelta(hours=1)
    )
    assert harms([Change(None, two)], one, for_an_hour), "it would be closed still when that has ended"
    assert not harms([Change(None, two)], one, replace(for_an_hour, expires_at=None)), "it is closed already"
    elsewhere = replace(one, hosts=("gw2",))
    assert not harms([Change(None, two)], elsewhere) or "gw2" in harms([Change(None, two)], elsewhere)[0]


def test_who_forces_a_change_is_named_in_what_it_takes_force_for_and_in_nothing_else() -> None:
    changes = [
        Change(None, rule(number, target=each, action="block")) for number, each in enumerate((ADMIN, "10.9.9.9"))
    ]
    forced = force(HAVENS, NOW, "alice")(changes, Kept({}))
    assert {which: each.forced_by for which, each in forced.items()} == {0: "alice"}


DENY = rule(90, target="0.0.0.0/0", action="block", forced_by="root")
DOOR = {"target": "10.2.0.0/16", "action": "allow"}
DOORS = [DOOR, {**DOOR, "target": "203.0.113.7"}, {**DOOR, "protocol": "tcp", "ports": [22]}]


@pytest.mark.parametrize("door", DOORS, ids=str)
def test_the_last_opening_of_a_gateway_that_is_closed_by_force_needs_force_to_go(door: dict[str, Any]) -> None:
    allow = rule(1, **door)
    smaller = rule(1, **{**door, "target": "10.2.0.0/17" if "/" in door["target"] else "203.0.113.8"})
    others = [replace(allow, enabled=False), replace(allow, expires_at=NOW + timedelta(minutes=1)), smaller]
    others += [rule(1, **{**door, "protocol": "tcp", "ports": [80]}), rule(1, **door, hosts=["gw2"])]
    for after in (None, *others):
        kept = Kept({1: allow, 90: DENY})
        assert not kept.change({1: after}), after
        assert Kept({1: allow}).change({1: after}), "nothing else is closed"
        assert kept.change({90: None, 1: after}), "nor is it then"
    kept = Kept({1: allow, 90: DENY})
    assert kept.change({1: replace(allow, comment="why")})
    assert kept.change({2: replace(kept.rules[1], id=2)})
    assert kept.change({1: None}), "another allows as much"
    assert not kept.change({2: None})


def test_nor_is_it_blocked_by_longer_prefixes_without_force() -> None:
    for parts in (["10.2.0.0/17", "10.2.128.0/17"], [f"10.2.{64 * n}.0/18" for n in range(3)]):
        kept = Kept({1: rule(1, **DOOR), 90: DENY})
        for number, part in enumerate(parts[:-1], 2):
            assert kept.change({number: rule(number, target=part, action="block")})
        assert not kept.change({9: rule(9, target=parts[-1], action="block")})
        assert kept.change({9: rule(9, target="10.2.255.7", action="block")}), "a host may be"
        assert not Kept({1: rule(1, **DOOR), 90: DENY}).change(
            {number: rule(number, target=part, action="block") for number, part in enumerate(parts, 2)}
        )
        without = Kept({1: rule(1, **DOOR)})
        assert without.change(
            {number: rule(number, target=part, action="block") for number, part in enumerate(parts, 2)}
        )


def test_an_opening_elsewhere_does_not_stand_for_a_wide_one_and_small_ones_come_and_go() -> None:
    kept = Kept({1: rule(1, **DOOR), 90: DENY})
    assert kept.change({2: rule(2, target="198.18.0.0/15", action="allow")})
    assert not kept.change({1: None})
    for number in range(10, 20):
        assert kept.change({number: rule(number, target=f"10.3.0.{number}", action="allow")})
    for number in range(10, 20):
        assert kept.change({number: None})


CLIENTS = (1024, 32767), (32768, 49151), (49152, 60999), (61000, 65535)


def cut_ports(number: int, parts: int) -> list[str]:
    """One part of the ports that clients take: as much of each range as of the others."""
    found = []
    for low, high in CLIENTS:
        width = (high - low + 1) // parts
        begin = low + number * width
        found.append(f"{begin}-{high if number == parts - 1 else begin + width - 1}")
    return found


@pytest.mark.parametrize("parts", [3, 4, 8])
@pytest.mark.parametrize("way", ["to", "from"])
def test_the_opening_of_a_closed_gateway_is_not_closed_by_parts_at_its_own_address(way: str, parts: int) -> None:
    """Those have longer prefixes than the `allow` that an admin has left, and are not inside it."""
    kept = Kept({
        1: rule(1, target="0.0.0.0/0", action="block", forced_by="root"),
        2: rule(2, target="10.1.0.0/16", action="allow"),
    })  # fmt: skip
    here, there = ("ports", "source_ports") if way == "to" else ("source_ports", "ports")
    made = [
        kept.change({10 + number: rule(
            10 + number, target=OWN, direction=way, action="block", protocol="tcp",
            **{here: [22], there: cut_ports(number, parts)},
        )})
        for number in range(parts)
    ]  # fmt: skip
    assert made[0]
    assert not all(made)


def test_where_a_silent_gateway_is_stays_known() -> None:
    """It comes back as it was, with a safe set that has forgotten all."""
    silent = replace(GATEWAY, networks={"10.1.0.0/16": ("lan",)}, silence=timedelta(hours=2))
    kept = Kept({}, Havens([silent], NOW))
    assert not kept.change({1: rule(1, target="10.0.0.0/8", action="block")})
    assert not kept.change({1: rule(1, target=OWN, direction="to", action="block")})
    assert kept.change({1: rule(1, target=ADMIN, action="block")})
    gone = Kept({}, Havens([replace(silent, silence=timedelta(days=31))], NOW))
    assert gone.change({1: rule(1, target="10.0.0.0/8", action="block")})


class Large(Kept):
    """Has more blocks than anybody would read for a single change."""

    def blocking(self) -> list[Rule]:
        raise AssertionError("nothing depends on them")


def test_a_block_in_what_is_allowed_reads_no_others_where_nothing_is_closed() -> None:
    known = {1: rule(1, target="100.64.0.0/10", action="allow"), 2: rule(2, target="100.64.0.1", action="block")}
    more = [Change(None, rule(3, target="100.64.0.0/11", action="block"))]
    assert find_harm(more, Large(known), HAVENS, NOW) == []
    closed = Large(known | {9: rule(9, target="0.0.0.0/0", action="block", forced_by="root")})
    with pytest.raises(AssertionError, match="nothing depends"):  # there they matter
        find_harm(more, closed, HAVENS, NOW)


PAST = NOW - timedelta(minutes=10)


@pytest.mark.parametrize(
    "fields",
    [
        {"target": ADMIN, "action": "block"},
        {"target": "0.0.0.0/0", "action": "block"},
        {"target": "10.9.0.1", "action": "block", "forced_by": "root"},
    ],
    ids=["who is safe", "a gateway", "forced"],
)
def test_what_is_over_by_one_clock_is_judged_as_though_it_were_not(fields: dict[str, Any]) -> None:
    """It is not by that of a gateway which is behind, nor by the same one once it is put back."""
    over = replace(rule(**fields), expires_at=PAST)
    other = replace(rule(target="10.9.0.9", action="block"), expires_at=PAST)
    assert harms([Change(None, over)])
    assert harms([Change(other, over)])
    assert harms([Change(replace(over, enabled=False), over)])
    assert harms([Change(replace(over, expires_at=PAST - timedelta(minutes=1)), over)])
    assert not harms([Change(over, replace(over, name="other", expires_at=PAST - timedelta(minutes=1)))])
    assert not harms([Change(replace(over, expires_at=None), over)])
    assert not harms([Change(over, replace(over, enabled=False)), Change(over, None)])


def test_an_exception_that_is_over_spares_nobody() -> None:
    over = replace(rule(2, target="198.51.100.0/24", action="allow"), expires_at=PAST)
    assert harms([Change(None, over), Change(None, rule(target="0.0.0.0/0", action="block"))])
