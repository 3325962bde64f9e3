"""What the buckets of limits may come to is bounded, and told before it hurts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from netlimit.compile import Compilation
from netlimit.hashlimit import TABLE_MAX
from netlimit.limits import Facts
from netlimit.memory import BUCKET, FEW, MOST_MEMORY, MUCH_MEMORY, PEER_ENTRY, Demand, TooMuchMemory, weigh
from netlimit.rules import Rule, parse_rule
from tests.unit.strategies import NOW

FULL = BUCKET * TABLE_MAX
WIDE = {"target": "172.16.0.0/12", "rate": "10 packets/day", "per": "host"}
SEVERAL: list[dict[str, object]] = [
    {"rate": rate, **fields}
    for rate in ("10 packets/day", "10 connections/day")
    for fields in (
        {},
        {"protocol": "udp"},
        {"interface": "lan"},
        {"protocol": "udp", "interface": "lan"},
        {"protocol": "udp", "ports": "1-65535"},
        {"protocol": "udp", "source_ports": "1000"},
        {"protocol": "udp", "ports": "5000"},
    )
]


def make(*several: dict[str, object], first: int = 1) -> list[Rule]:
    return [replace(parse_rule({**WIDE, **fields}, NOW), id=n) for n, fields in enumerate(several, first)]


def estimate(*several: dict[str, object], host: str = "gw1") -> int:
    return Demand((rule, 1) for rule in make(*several)).estimate(host)


def add(new: Sequence[Rule], stays: Sequence[Rule] = ()) -> str | None:
    return weigh([(None, rule) for rule in new], lambda now: [(rule, 1) for rule in stays], NOW)


@pytest.mark.parametrize(
    ("several", "tables"),
    [
        ([{}], 1),
        ([{}, {}, {"target": "10.0.0.0/12"}], 1),
        (SEVERAL, 14),
        ([{"rate": f"{n} packets/day"} for n in range(10, 14)], 4),
        ([{"target": "2001:db8::/108"}, {"target": "2001:db8:10::/44", "per": "/64"}, {"action": "observe"}], 3),
        ([{"target": f"10.{n}.0.0/16"} for n in range(4)], 0.25),
        ([{"target": "10.0.0.0/8", "per": "/24"}], 2**-4),
        ([{"per": "target"}, {"target": "10.1.2.3"}, {"rate": "20 connections"}], 0),
        ([{"action": "shape", "rate": "1 Mbit/s"}], 0),
    ],
)
def test_each_table_holds_what_its_targets_can_have(several: list[dict[str, object]], tables: float) -> None:
    assert estimate(*several) == tables * FULL


def test_peers_have_as_many_buckets_as_their_set_has_room() -> None:
    one = estimate({"per": "peer"})
    room = 16384 * 12
    assert one == room * (BUCKET + PEER_ENTRY)
    assert estimate({"per": "peer"}, {"per": "peer", "rate": "20 packets/day"}) == room * (2 * BUCKET + PEER_ENTRY)
    many = [{"per": "peer", "target": f"10.1.0.{n}"} for n in range(200)]
    assert FULL / 2 < estimate(*many) < FULL * 1.1, "the set is smaller then, and the table holds no more"


def test_gateways_have_what_names_them_and_what_names_none() -> None:
    several = [{"hosts": ["gw1"]}, {"hosts": ["gw2"], "ports": "53", "protocol": "udp"}, {"rate": "20 packets/h"}]
    assert [estimate(*several, host=host) for host in ("gw1", "gw2", "gw3")] == [2 * FULL, 2 * FULL, FULL]
    shared = [{"target": "10.0.0.0/14"}, {"target": "11.0.0.0/14", "hosts": ["gw1"]}, {"hosts": ["gw2"]}]
    assert [estimate(*shared, host=host) for host in ("gw1", "gw2", "gw3")] == [FULL / 2, FULL, FULL / 4]


def test_peers_of_what_names_a_gateway_share_the_set_with_those_of_what_names_none() -> None:
    several = [{"per": "peer", "target": f"10.1.0.{n}", "hosts": ["gw1"] * (n % 2)} for n in range(16)]
    alike = [{"per": "peer", "target": f"10.1.0.{n}"} for n in range(16)]
    assert estimate(*several, host="gw1") == estimate(*alike)
    assert estimate(*several, host="gw2") == estimate(*alike[::2])


def test_a_compilation_has_no_more_buckets_than_that() -> None:
    rules = make(*SEVERAL, {"target": "10.0.0.0/16", "rate": "9 packets/day"}, {"target": "10.1.0.0/24", "per": "/28"})
    compilation = Compilation(Facts())
    assert [compilation.put(rule) for rule in rules] == [None] * len(rules)
    held = sum(slot.buckets for slot in compilation._slots.values())
    assert held * BUCKET == 14 * FULL + (2**16 + 16) * BUCKET
    assert Demand((rule, 1) for rule in rules).estimate("") == held * BUCKET


def test_a_few_wide_rules_are_taken_without_a_word() -> None:
    assert add(make(*SEVERAL[:3])) is None
    assert add(make({}), make(*SEVERAL[:3])) is None


def test_it_is_told_from_four_full_tables_on() -> None:
    told = add(make(SEVERAL[3]), make(*SEVERAL[:3]))
    assert 4 * FULL == MUCH_MEMORY
    assert told is not None
    assert "512 MB of kernel memory" in told
    assert "`per: /n`" in told
    assert "1.8 GB" in str(add(make(*SEVERAL)))


def rates(count: int, first: int = 1) -> list[Rule]:
    return make(*({"rate": f"{n + 10} packets/day"} for n in range(count)), first=first)


def test_beyond_the_most_nothing_is_taken_that_adds_to_it() -> None:
    held = rates(32)
    assert Demand((rule, 1) for rule in held).estimate("gw1") == MOST_MEMORY
    with pytest.raises(TooMuchMemory, match=r"on a gateway could come to 4\.1 GB.* 4 GB at most.* smaller targets"):
        add(make({"protocol": "tcp"}), held)
    with pytest.raises(TooMuchMemory, match="on gw7 could"):
        add(make({"protocol": "tcp", "hosts": ["gw7"]}), held)
    assert add(make({"protocol": "tcp", "per": "target"}), held) is None
    assert add(make({"protocol": "tcp", "enabled": False}), held) is None


def test_what_is_kept_already_may_stay_and_become_less() -> None:
    """Rules that a former version has taken are changed as any others are."""
    *held, one = rates(40)
    stays = [(rule, 1) for rule in held]
    for fields in (
        {"per": "/24"},
        {"rate": "7 packets/h"},
    ):
        (after,) = make(fields)
        assert "GB" in str(weigh([(one, after)], lambda now: stays, NOW))
    assert weigh([(one, None)], lambda now: stays, NOW) is None
    with pytest.raises(TooMuchMemory):
        weigh([(replace(one, enabled=False), one)], lambda now: stays, NOW)
    with pytest.raises(TooMuchMemory):
        weigh([(replace(one, expires_at=NOW - timedelta(seconds=1)), one)], lambda now: stays, NOW)


def test_each_gateway_is_looked_at() -> None:
    """One that is beyond the bound already, and gets no more, does not hide another that would be."""
    here, there = ([replace(rule, hosts=(host,)) for rule in rates(number)] for host, number in (("a", 40), ("b", 32)))
    (one,) = make({"protocol": "udp", "hosts": ["a"]})
    with pytest.raises(TooMuchMemory, match="on b could"):
        weigh([(one, replace(one, hosts=("a", "b")))], lambda now: [(rule, 1) for rule in (*here, *there)], NOW)


def test_what_adds_nothing_costs_no_look_at_all_rules() -> None:
    before, *others = make(
        {"hosts": ["a", "b"], "rate": "10 packets/day"},
        {"hosts": ["b"], "comment": "new"},
        {"hosts": ["a", "b"], "target": "172.16.0.0/13", "name": "smaller"},
        {"hosts": ["a"], "target": "10.0.0.0/12", "labels": {"a": "b"}},
        {"hosts": ["a", "b"], "enabled": False, "rate": "20 packets/day"},
        {"hosts": ["a", "b"], "per": "target"},
    )
    for after in others:
        assert weigh([(before, after)], lambda now: pytest.fail("they are looked at"), NOW) is None
    for fields in (
        {"hosts": ["a", "c"]},
        {},
        {"hosts": ["a"], "rate": "11 packets/day"},
        {"hosts": ["a"], "target": "172.16.0.0/12", "burst": 7},
        {"hosts": ["a"], "protocol": "udp"},
    ):
        (after,) = make(fields)
        asked: list[object] = []
        weigh([(before, after)], lambda now, asked=asked: asked.append(now) or (), NOW)  # type: ignore[misc]
        assert asked, fields


def test_gateways_that_the_same_rules_name_are_added_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand rules of a rate of their own, each for 256 gateways, are not 256,000."""
    measured: list[object] = []
    measure = Demand._measure
    monkeypatch.setattr(Demand, "_measure", lambda self, rooms: (measured.append(rooms), measure(self, rooms))[1])
    everywhere = [f"gw{n}" for n in range(256)]
    stays = make(*({"rate": f"{n + 10} packets/day", "target": "10.1.0.0/24", "hosts": everywhere} for n in range(999)))
    new = make({"rate": "5 packets/day", "target": "10.1.0.0/22", "hosts": everywhere})
    assert add(new, stays) is None
    assert len(measured) == 1000


def test_what_is_taken_out_counts_no_more() -> None:
    one, other = make({"target": "10.0.0.0/16"}, {"target": "10.1.0.0/16", "hosts": ["gw1"]})
    demand = Demand([(one, 3), (other, 1), (one, -1)])
    assert [demand.estimate(host) for host in ("", "gw1")] == [2 * 2**16 * BUCKET, 3 * 2**16 * BUCKET]
    demand.add(one, -3)
    demand.add(other, -1)
    assert [demand.estimate(host) for host in ("", "gw1")] == [0, 0]


def test_what_adds_little_costs_no_look_at_all_rules() -> None:
    (small,) = make({"target": "10.1.2.0/25"})
    assert FEW > 2**7
    assert weigh([(None, small)], lambda now: pytest.fail("they are looked at"), NOW) is None
    asked = []
    weigh([(None, small)] * 2, lambda now: asked.append(now) or (), NOW)
    assert asked == [NOW]
