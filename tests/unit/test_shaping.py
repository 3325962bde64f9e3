"""Shaping rules case by case: who waits where, who is in whose way, and what becomes of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from ipaddress import ip_address

import pytest

from netlimit.compile import Compilation
from netlimit.htb import MTU
from netlimit.limits import Facts
from netlimit.packet import Packet
from netlimit.plan import WriteIngress, WriteTree, diff
from netlimit.routing import find_way
from netlimit.rules import Rule, parse_rule
from netlimit.several import name_some
from netlimit.shaping import MOST_BUDGETS, MOST_HOSTS, MOST_KINDS, Note
from netlimit.state import Entry, State
from netlimit.traffic import SHARD_HOSTS
from netlimit.tree import (
    FIRST_CHILD,
    INGRESS_DEVICE,
    LAST_CHILD,
    REST,
    ROUTERS,
    SERVICES,
    Device,
    QueueClass,
    Route,
    Topology,
    classid,
    is_ours,
)
from tests.unit.shapes import HOME, NEAR, UPLINKS, WITHOUT_WAN, Gateway, gateway_facts, is_host, shape
from tests.unit.strategies import NOW


def gateway(*rules: Rule, facts: Facts = gateway_facts) -> Gateway:
    made = Gateway(facts)
    for rule in rules:
        made.put(rule)
    made.sync()
    return made


def allow(rule_id: int, **fields: object) -> Rule:
    return replace(parse_rule(fields, NOW), id=rule_id)


def change(made: Gateway, *rules: Rule, drop: Iterable[int] = ()) -> Gateway:
    """One pass."""
    for number in drop:
        made.drop(number)
    for rule in rules:
        made.put(rule)
    made.retry()
    made.sync()
    made.check()
    return made


def packet(dst: str, src: str = "192.0.2.7", **fields: object) -> Packet:
    """Towards a client or from one."""
    near = dst.startswith("10.1.")
    ways = {"in_interface": "wan", "out_interface": "lan"} if near else {"in_interface": "lan", "out_interface": "wan"}
    return Packet(ip_address(src), ip_address(dst), **{**ways, **fields})  # type: ignore[arg-type]


def number(made: Gateway, dst: str, src: str = "192.0.2.7", **fields: object) -> int:
    found = made.kernel.find_class(packet(dst, src, **fields))
    assert found is not None, f"{dst} waits nowhere"
    return found


def waits(made: Gateway, dst: str, src: str = "192.0.2.7", **fields: object) -> int | None:
    """The rule in whose class a packet waits."""
    return made.owners().get(made.kernel.find_class(packet(dst, src, **fields)) or 0)


def queue(made: Gateway, dst: str, **fields: object) -> QueueClass:
    """The class in which a packet waits."""
    return made.kernel.trees[str(packet(dst, **fields).out_interface)].classes[number(made, dst, **fields)]


def above(made: Gateway, dst: str) -> list[int]:
    """The rates of the budgets around a packet's class, from the smallest, as they are given to it."""
    tree = made.kernel.trees[str(packet(dst).out_interface)]
    rates, here = [], number(made, dst)
    while here:
        parent = tree.classes[here].parent
        here = parent if parent & 0xFFFF else tree.children.get(parent >> 16, 0)
        if here >> 16 == tree.handle and 0x1000 <= here & 0xFFFF < REST:
            rates.append(tree.classes[here].rate)
    return rates


# -- who waits where ------------------------------------------------------------------------------------------------


def test_a_host_has_a_class_of_its_own_and_nobody_else_waits() -> None:
    made = gateway(shape(1, "10.1.0.2"))
    assert waits(made, "10.1.0.2") == 1
    assert is_host(number(made, "10.1.0.2"))
    assert (queue(made, "10.1.0.2").rate, queue(made, "10.1.0.2").ceil) == (125_000, 125_000)
    assert made.kernel.find_class(packet("10.1.0.3")) is None
    assert made.kernel.find_class(packet("192.0.2.7", "10.1.0.2")) is None


def test_a_ceiling_is_what_it_may_borrow() -> None:
    made = gateway(shape(1, "10.1.0.2", ceil="3 Mbit/s", burst="60 kB"))
    found = queue(made, "10.1.0.2")
    assert (found.rate, found.ceil, found.burst, found.cburst) == (125_000, 375_000, 60_000, 60_000)


def test_hosts_lie_in_the_smallest_budget_around_them() -> None:
    made = gateway(
        shape(1, "10.1.0.0/16", "20 Mbit/s", per="target"),
        shape(2, "10.1.0.0/24", "10 Mbit/s", per="target"),
        *(shape(3 + n, f"10.1.{n}.2", "1 Mbit/s") for n in (0, 1)),
    )
    assert above(made, "10.1.0.2") == [1_250_000, 2_500_000]
    assert above(made, "10.1.1.2") == [2_500_000]
    assert [waits(made, dst) for dst in ("10.1.0.2", "10.1.0.3", "10.1.1.2", "10.1.1.3")] == [3, 2, 4, 1]


def test_a_budget_is_around_others_while_there_are_any() -> None:
    budget = shape(1, "10.1.0.0/24", "10 Mbit/s", per="target")
    made = gateway(budget)
    assert is_host(number(made, "10.1.0.3"))
    for _ in range(2):
        change(made, shape(2, "10.1.0.2"))
        assert (above(made, "10.1.0.2"), above(made, "10.1.0.3")) == ([1_250_000], [1_250_000])
        assert (waits(made, "10.1.0.2"), waits(made, "10.1.0.3")) == (2, 1)
        change(made, drop=[2])
        assert (waits(made, "10.1.0.2"), waits(made, "10.1.0.3")) == (1, 1)
        assert is_host(number(made, "10.1.0.3"))
        assert above(made, "10.1.0.3") == []


def test_a_budget_that_comes_between_two_others_takes_the_smaller_in() -> None:
    outer = shape(1, "10.1.0.0/16", "20 Mbit/s", per="target")
    inner, host = shape(2, "10.1.0.0/28", "2 Mbit/s", per="target"), shape(3, "10.1.0.2")
    made = gateway(outer, inner, host)
    assert above(made, "10.1.0.2") == [250_000, 2_500_000]
    change(made, shape(4, "10.1.0.0/24", "10 Mbit/s", per="target"))
    assert above(made, "10.1.0.2") == [250_000, 1_250_000, 2_500_000]
    change(made, drop=[1])
    assert above(made, "10.1.0.2") == [250_000, 1_250_000]
    change(made, outer, drop=[4])
    assert above(made, "10.1.0.2") == [250_000, 2_500_000]


def test_a_budget_for_all_and_a_rate_for_each_may_have_the_same_target() -> None:
    made = gateway(shape(1, "10.1.0.0/24", "10 Mbit/s", per="target"), shape(2, "10.1.0.0/24", per="host"))
    made.see(["10.1.0.2"])
    change(made)
    assert (waits(made, "10.1.0.2"), waits(made, "10.1.0.3")) == (2, 2)
    assert (above(made, "10.1.0.2"), above(made, "10.1.0.3")) == ([1_250_000], [1_250_000])


def test_of_rules_for_hosts_the_most_specific_counts() -> None:
    made = gateway(shape(1, "10.1.0.0/16", per="host"), shape(2, "10.1.0.0/24", "2 Mbit/s", per="host"))
    made.see(["10.1.0.2", "10.1.1.2"])
    change(made)
    assert [waits(made, dst) for dst in ("10.1.0.2", "10.1.0.3", "10.1.1.2", "10.1.1.3")] == [2, 2, 1, 1]
    change(made, shape(3, "10.1.0.2", "3 Mbit/s"), drop=[2])
    assert [waits(made, dst) for dst in ("10.1.0.2", "10.1.0.3")] == [3, 1]
    assert queue(made, "10.1.0.2").rate == 375_000


def test_newcomers_share_a_class_until_they_have_their_own() -> None:
    made = gateway(shape(1, "10.1.0.0/24", per="host"))
    shared = number(made, "10.1.0.2")
    assert number(made, "10.1.0.3") == shared
    assert not is_host(shared)
    seen = {name: list(held) for name, held in made.kernel.readings(made.compilation.shaping.seen_sets).items()}
    assert list(seen.values()) == [["10.1.0.2", "10.1.0.3"]]
    made.compilation.shaping.welcome(seen)
    change(made)
    numbers = {number(made, f"10.1.0.{host}") for host in (2, 3, 4)}
    assert len(numbers) == 3
    assert shared in numbers, "10.1.0.4 is new"
    made.compilation.shaping.dismiss("lan", {number(made, "10.1.0.2")})
    change(made)
    assert number(made, "10.1.0.2") == shared
    assert is_host(number(made, "10.1.0.3"))


def test_a_flood_of_newcomers_gets_classes_bit_by_bit() -> None:
    made = gateway(shape(1, "10.1.0.0/16", per="host"))
    flood = [f"10.1.{high}.{low}" for high in range(20, 30) for low in range(250)]
    for known in (1000, 2000, 2500, 2500):
        made.see(flood)
        change(made)
        assert len({made.kernel.find_class(packet(address)) for address in flood}) == min(known + 1, 2500)


def test_a_block_of_addresses_shares_one_class() -> None:
    made = gateway(shape(1, "10.1.0.0/16", per="/24"))
    made.see(["10.1.0.2", "10.1.0.3", "10.1.1.2"])
    change(made)
    assert number(made, "10.1.0.2") == number(made, "10.1.0.9") != number(made, "10.1.1.2")


def test_everything_is_kept_as_two_halves() -> None:
    made = gateway(shape(1, "0.0.0.0/0", per="target", protocol="udp"))
    assert waits(made, "10.1.0.2") == waits(made, "10.1.0.3", "10.2.0.2") == 1
    change(made, shape(2, "0.0.0.0/1", "500 kbit/s", per="target", protocol="udp"))
    assert (waits(made, "10.1.0.2"), waits(made, "192.0.2.8", "10.1.0.2")) == (2, 1)
    change(made, drop=[2])
    assert (waits(made, "10.1.0.2"), waits(made, "192.0.2.8", "10.1.0.2")) == (1, 1)


def test_what_a_selector_leaves_out_waits_nowhere() -> None:
    made = gateway(shape(1, "10.1.0.2", protocol="udp", ports=53), shape(2, "10.1.0.2", protocol="tcp"))
    assert waits(made, "10.1.0.2", protocol="udp", port=53) == 1
    assert waits(made, "10.1.0.2", protocol="tcp", port=53) == 2
    assert made.kernel.find_class(packet("10.1.0.2", protocol="udp", port=54)) is None


def test_what_ends_on_the_host_waits_on_the_way_in() -> None:
    made = gateway(shape(1, "10.1.0.1", protocol="tcp"), shape(2, "10.1.0.2", direction="from", protocol="udp"))
    to_host = {"in_interface": "lan", "out_interface": None}
    assert waits(made, "10.1.0.1", "10.1.0.3", protocol="tcp", **to_host) == 1
    assert waits(made, "10.2.0.1", "10.1.0.2", **to_host) == 2
    assert waits(made, "192.0.2.7", "10.1.0.2") == 2
    assert waits(made, "10.2.0.1", "10.1.0.3", **to_host) is None


@pytest.mark.parametrize(
    ("interface", "way", "spared"),
    [
        (None, "lan", True),
        ("lan", "lan", True),
        ("wan", "lan", False),
        ("lan", "wan", False),
        ("wan", "wan", True),
        ("none", "lan", False),
    ],
)
def test_who_is_allowed_by_one_device_waits_on_the_way_in_by_others(
    interface: str | None, way: str, spared: bool
) -> None:
    allowed = {"target": "10.1.0.2", "action": "allow", "interface": interface}
    made = gateway(shape(1, "10.1.0.0/16", direction="from", per="host"), allow(2, **allowed))
    for protocol in ("udp", "icmp"):
        found = waits(made, "10.1.0.1", "10.1.0.2", in_interface=way, out_interface=None, protocol=protocol)
        assert found == (None if spared else 1)


@pytest.mark.parametrize("interface", [None, "lan", "wan"])
def test_whom_something_may_be_sent_to_by_a_device_says_nothing_of_what_ends_here(interface: str | None) -> None:
    allowed = allow(2, target="10.1.0.1", action="allow", direction="to", interface=interface)
    made = gateway(shape(1, "10.1.0.0/16", direction="from", per="host"), allowed)
    found = waits(made, "10.1.0.1", "10.1.0.2", in_interface="lan", out_interface=None)
    assert found == (1 if interface else None)


def test_who_is_allowed_by_a_device_is_so_however_often_that_is_made_anew() -> None:
    made = gateway(
        shape(1, "10.1.0.0/16", direction="from", per="host"),
        allow(2, target="10.1.0.2", action="allow", interface="lan"),
    )
    for index in (9, 3):
        devices = {"lan": Device(index, True), "wan": Device(12 - index, True)}
        made.route(replace(HOME, devices=devices))
        change(made)
        assert waits(made, "10.1.0.1", "10.1.0.2", in_interface="lan", out_interface=None) is None
        assert waits(made, "10.1.0.1", "10.1.0.2", in_interface="wan", out_interface=None) == 1


def test_what_comes_in_by_a_device_without_routes_waits_too() -> None:
    more = {"bare": Device(7, True), "down": Device(8, False), "port": Device(9, True, "veth", "lan")}
    vrf = {"red": Device(10, True, "vrf"), "member": Device(11, True, "veth", "red")}
    facts = replace(gateway_facts, topology=replace(HOME, devices={**HOME.devices, **more, **vrf}))
    made = gateway(shape(1, "10.1.0.0/16", direction="from", per="host"), facts=facts)
    assert waits(made, "10.1.0.1", "10.1.0.2", in_interface="bare", out_interface=None) == 1
    assert made.kernel.program is not None
    assert made.kernel.program.devices == ("bare", "lan", "member", "red", "wan")


def test_who_is_allowed_by_a_vrf_is_so_by_its_ports() -> None:
    devices = {**HOME.devices, "red": Device(10, True, "vrf"), "member": Device(11, True, "veth", "red")}
    facts = replace(gateway_facts, topology=replace(HOME, devices=devices))
    shaped = shape(1, "10.1.0.0/16", direction="from", per="host")
    made = gateway(shaped, allow(2, target="10.1.0.2", action="allow", interface="red"), facts=facts)
    assert waits(made, "10.1.0.1", "10.1.0.2", in_interface="member", out_interface=None) is None
    assert waits(made, "10.1.0.1", "10.1.0.2", in_interface="lan", out_interface=None) == 1


def test_entries_on_the_way_in_have_no_end_for_nobody_would_see_it() -> None:
    made = gateway(shape(1, "10.1.0.1", ttl="1h"), shape(2, "10.1.0.2", ttl="1h"))
    assert not made.plan_all()
    incoming = next(lane for lane in made.compilation.shaping.lanes if lane.incoming)
    assert made.compilation.entries[incoming.name]["10.1.0.1"].expires == 0


def test_a_lane_of_the_ingress_that_comes_back_knows_nobody_from_before() -> None:
    made = gateway(shape(1, "10.1.0.1", protocol="tcp"), shape(2, "10.1.0.1", protocol="udp"))
    change(made, drop=[1])
    change(made, shape(3, "10.2.0.1", protocol="tcp"))
    to_host = {"in_interface": "lan", "out_interface": None, "protocol": "tcp", "port": 80}
    assert waits(made, "10.2.0.1", "10.1.0.3", **to_host) == 3
    assert made.kernel.find_class(packet("10.1.0.1", "10.1.0.3", **to_host)) is None  # type: ignore[arg-type]


def test_what_is_safe_waits_only_where_a_rule_was_forced() -> None:
    made = gateway(shape(1, "10.1.0.0/16", per="target"))
    assert made.kernel.find_class(packet("10.1.9.9")) is None
    change(made, shape(2, "10.1.9.9"))
    assert made.kernel.find_class(packet("10.1.9.9")) is None
    change(made, replace(shape(2, "10.1.9.9"), forced_by="root"))
    assert waits(made, "10.1.9.9") == 2


# -- caps -----------------------------------------------------------------------------------------------------------


def cap(rule_id: int, rate: str = "10 Mbit/s", **fields: object) -> Rule:
    return shape(rule_id, "0.0.0.0/0", rate, per="target", interface="lan", **fields)


def test_a_cap_holds_what_nobody_claims_whether_hosts_have_classes_or_not() -> None:
    made = gateway(cap(1))
    handle = made.kernel.trees["lan"].handle
    assert number(made, "10.1.0.2") == classid(handle, REST)
    for _ in range(2):
        change(made, shape(2, "10.1.0.2"))
        assert made.kernel.trees["lan"].handle == handle
        assert waits(made, "10.1.0.2") == 2
        rest = number(made, "10.1.0.3")
        assert rest & 0xFFFF == REST
        assert made.kernel.trees["lan"].classes[rest].ceil == 1_250_000
        assert made.compilation.shaping.classes()[1] == [("lan", made.kernel.trees["lan"].classes[rest].parent)]
        change(made, drop=[2])
        assert number(made, "10.1.0.2") == rest


@pytest.mark.parametrize("minor", [ROUTERS, SERVICES])
def test_a_cap_of_an_earlier_version_gets_the_class_that_it_lacks_and_keeps_its_root(minor: int) -> None:
    wanted = gateway(cap(1), shape(2, "10.1.0.2")).kernel.trees
    lacking = classid(wanted["lan"].handle, minor)
    classes = {number: each for number, each in wanted["lan"].classes.items() if number != lacking}
    steps = diff(State(trees=wanted), State(trees={**wanted, "lan": replace(wanted["lan"], classes=classes)})).steps
    assert steps == (WriteTree("lan", wanted["lan"].handle, classes={lacking: wanted["lan"].classes[lacking]}),)


def test_a_cap_that_goes_leaves_the_hosts() -> None:
    made = change(gateway(cap(1), shape(2, "10.1.0.2")), drop=[1])
    assert waits(made, "10.1.0.2") == 2
    assert made.kernel.find_class(packet("10.1.0.3")) is None
    change(made, cap(1, "5 Mbit/s"))
    assert number(made, "10.1.0.3") & 0xFFFF == REST


def test_a_budget_that_has_gone_counts_no_more_before_the_kernel_hears_of_it() -> None:
    """As in the pass in which another rule ends. The hosts' rule counts on."""
    made = gateway(shape(1, "10.1.0.0/29", per="target"), shape(2, "10.1.0.0/30", per="host"))
    made.see(["10.1.0.2"])
    made.sync()
    before = made.compilation.shaping.classes()
    assert before.keys() == {1, 2}
    made.compilation.drop(1)
    assert made.compilation.shaping.classes() == {2: before[2]}


def test_a_device_has_one_cap_of_either_family_and_direction() -> None:
    made = gateway(cap(3), shape(2, "::/0", "5 Mbit/s", per="target", interface="lan"))
    assert made.compilation.shaping.classes().keys() == {2}
    assert made.compilation.problems.keys() == {3}
    change(made, cap(1, direction="from"))
    assert made.compilation.problems.keys() == {2, 3}
    change(made, drop=[1, 2])
    assert (made.compilation.shaping.classes().keys(), made.compilation.problems) == ({3}, {})


# -- guarantees -----------------------------------------------------------------------------------------------------


def test_who_is_promised_too_much_gets_a_part_in_proportion_down_to_the_smallest() -> None:
    """HTB lets a class send at its own rate, whatever those above it have left."""
    made = gateway(
        cap(1, "10 Mbit/s"),
        shape(2, "10.1.0.0/24", "20 Mbit/s", per="target"),
        *(shape(host, f"10.1.0.{host}", "10 Mbit/s") for host in (3, 4)),
    )
    tree = made.kernel.trees["lan"]
    assert above(made, "10.1.0.3") == [1_206_563], "a fortieth is for this host's services, a hundredth for the rest"
    hosts = tree.classes[tree.children[number(made, "10.1.0.3") >> 16]]
    assert hosts.rate == 1_206_563 - 1_206_563 // 100
    notes = made.compilation.shaping.notes
    assert "adds up to 20 Mbit/s, more than the 10 Mbit/s that it has" in notes[1].text
    assert not notes[1].degraded
    assert 2 not in notes
    change(made, cap(1, "100 Mbit/s"))
    assert above(made, "10.1.0.3") == [2_500_000]
    assert 1 not in made.compilation.shaping.notes


def test_who_is_promised_all_of_a_cap_is_told_nothing_of_what_this_host_itself_sends() -> None:
    made = gateway(cap(1, "10 Mbit/s"), shape(2, "10.1.0.2", "10 Mbit/s"))
    assert made.compilation.shaping.notes == {}


def test_a_burst_is_bounded_where_less_is_given_than_was_asked_for() -> None:
    made = gateway(
        cap(1, "8 kbit/s"), shape(2, "10.1.0.0/24", "20 Mbit/s", per="target", burst="20 MB"), shape(3, "10.1.0.2")
    )
    tree = made.kernel.trees["lan"]
    for each in tree.classes.values():
        assert each.burst <= 60 * each.rate + 2 * MTU


# -- changes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"rate": "5 Mbit/s"},
        {"target": "10.1.0.3"},
        {"target": "10.1.0.0/24", "per": "target"},
        {"target": "10.1.0.0/24", "per": "host"},
        {"target": "10.1.0.0/24", "per": "/28"},
        {"direction": "from"},
        {"protocol": "tcp"},
        {"interface": "wan"},
        {"target": "10.1.0.1"},
        {"target": "fd00:1::2"},
        {"target": "0.0.0.0/0", "per": "target"},
    ],
)
def test_a_rule_becomes_another_and_becomes_itself_again(fields: dict[str, object]) -> None:
    others = [shape(2, "10.1.0.0/16", "20 Mbit/s", per="target"), shape(3, "10.1.1.2")]
    rule = shape(1, "10.1.0.2")
    made, fresh = gateway(rule, *others), gateway(shape(1, **{"target": "10.1.0.2", **fields}), *others)  # type: ignore[arg-type]
    before = made.describe()
    change(made, shape(1, **{"target": "10.1.0.2", **fields}))  # type: ignore[arg-type]
    assert made.describe() == fresh.describe()
    change(made, rule)
    assert made.describe() == before


def test_a_lane_and_a_device_that_go_and_come_back_within_a_pass() -> None:
    """Somebody asked for the plan in between."""
    made = gateway(shape(1, "10.1.0.2"), shape(2, "10.1.0.3"))
    for rule_id in (1, 2):
        made.drop(rule_id)
    assert made.plan()
    assert made.compilation.state.trees == {}
    change(made, shape(3, "10.1.0.9"))
    assert waits(made, "10.1.0.9") == 3


def test_nobody_gets_a_class_that_the_kernel_still_leads_others_to() -> None:
    made = gateway(shape(1, "10.1.0.2"), shape(2, "10.1.0.3"))
    left = number(made, "10.1.0.2")
    change(made, shape(3, "10.1.0.5", interface="lan"), shape(4, "10.1.1.1"), drop=[1])
    assert left not in {number(made, dst) for dst in ("10.1.0.5", "10.1.0.3", "10.1.1.1")}
    change(made, shape(5, "10.1.1.2"))
    assert number(made, "10.1.1.2") == left, "now it is free"


def test_at_a_start_nobody_takes_the_class_of_a_host_that_has_one() -> None:
    made = gateway(shape(1, "10.1.0.9"))
    held = number(made, "10.1.0.9")
    made.rules[2] = shape(2, "10.1.0.2")
    made.restart()
    made.apply(made.plan_all())
    made.compilation.settle()
    assert number(made, "10.1.0.9") == held != number(made, "10.1.0.2")


def test_no_class_is_a_rank_to_queues_of_lower_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """pfifo_fast, prio, mqprio and taprio go by the low four bits of the priority, which stays with the packet."""
    monkeypatch.setattr("netlimit.branches.SHARD_HOSTS", 8)
    made = gateway(
        shape(1, "10.1.0.0/16", per="host"),
        shape(2, "10.1.0.0/24", "5 Mbit/s", per="target"),
        *(shape(3 + number, f"10.1.0.{10 + number}") for number in range(20)),
    )
    made.see(f"10.1.1.{number}" for number in range(40))
    change(made, drop=range(5, 12))
    change(made, *(shape(30 + number, f"10.1.2.{10 + number}") for number in range(20)))
    numbers = {entry.prio for name, held in made.compilation.entries.items() for entry in held.values() if entry.prio}
    assert len(numbers) > 70
    assert not any(number % 16 for number in numbers)


def test_who_has_a_class_that_is_a_rank_moves_once() -> None:
    """Former versions have given out such."""
    made = gateway(shape(1, "10.1.0.0/16", per="host"), *(shape(2 + n, f"10.1.0.{10 + n}") for n in range(3)))
    (lane,) = made.compilation.shaping.lanes
    handle = FIRST_CHILD
    held = {"10.1.0.10": 1, "10.1.0.11": 16, "10.1.0.12": 32}
    fresh = Compilation(gateway_facts, made.compilation.numbers.kept)
    for rule in made.rules.values():
        fresh.put(rule)
    fresh.shaping.adopt({lane.name: {key: Entry(prio=classid(handle, minor)) for key, minor in held.items()}})
    found = {key: fresh.state.entries[lane.name][key].prio for key in held}
    assert found == {key: classid(handle, minor) for key, minor in {**held, "10.1.0.10": 48}.items()}


def test_who_was_held_at_a_start_is_not_welcomed_again_later() -> None:
    made = gateway(shape(1, "10.1.0.0/24", per="host"))
    made.see(["10.1.0.2"])
    made.sync()
    made.restart()
    assert not made.plan_all()
    made.compilation.settle()
    assert is_host(number(made, "10.1.0.2"))
    made.compilation.shaping.dismiss("lan", {number(made, "10.1.0.2")})
    change(made, shape(2, "10.1.1.0/24", per="target"))
    assert not is_host(number(made, "10.1.0.2"))


# -- who is in whose way --------------------------------------------------------------------------------------------


def problem(made: Gateway, rule_id: int) -> str:
    return made.compilation.problems[rule_id]


def test_two_that_would_claim_one_packet_name_each_other_and_the_older_stays() -> None:
    made = gateway(shape(1, "10.1.0.2"), shape(2, "10.1.0.0/24", per="target", protocol="tcp"))
    assert problem(made, 2).startswith(
        "On lan a packet would belong to this rule and to rule 1, `shape to 10.1.0.2 any"
    )
    assert waits(made, "10.1.0.2", protocol="tcp", port=80) == 1
    change(made, drop=[1])
    assert (waits(made, "10.1.0.2", protocol="tcp", port=80), made.compilation.problems) == (2, {})
    change(made, shape(1, "10.1.0.2"))
    assert made.compilation.problems.keys() == {2}
    assert waits(made, "10.1.0.2", protocol="tcp", port=80) == 1


def test_blocks_of_different_sizes_do_not_mix_and_ports_that_do_not_meet_do() -> None:
    made = gateway(shape(1, "10.1.0.0/16", per="host"), shape(2, "10.1.0.0/24", per="/28"))
    assert made.compilation.problems.keys() == {2}
    change(
        made, *(shape(1 + n, "10.1.0.0/16", per=per, protocol="udp", ports=n) for n, per in enumerate(("host", "/28")))
    )
    assert made.compilation.problems == {}


def test_from_and_to_meet_unless_both_ends_lie_behind_the_device_together() -> None:
    made = gateway(shape(1, "10.1.0.2", direction="from"), shape(2, "192.0.2.7"))
    assert made.compilation.problems.keys() == {2}
    assert "On wan" in problem(made, 2)
    assert "`interface`" in problem(made, 2)
    apart = gateway(
        shape(1, "10.1.0.2", direction="from", interface="lan"),
        shape(2, "10.1.0.3", interface="lan"),
        shape(3, "10.2.0.2"),
    )
    assert apart.compilation.problems == {}, "what the two send each other does not come by"


def test_a_rule_that_finds_no_place_on_one_of_its_devices_drives_nobody_from_the_other() -> None:
    rules = [
        shape(1, "10.2.0.0/16", per="target", interface="wan", protocol="udp"),
        shape(5, "10.0.0.0/8", per="target"),
        shape(9, "10.1.0.2", protocol="udp"),
    ]
    made = Gateway()
    for rule in (rules[0], rules[2], rules[1]):
        made.put(rule)
    assert made.compilation.problems.keys() == {5}
    made.retry()
    assert made.compilation.problems.keys() == {5}
    change(made, drop=[1])
    assert made.compilation.problems.keys() == {9}
    change(made, rules[0])
    assert made.compilation.problems.keys() == {5}


def test_where_one_network_may_be_led_by_two_ways_both_directions_are_held() -> None:
    """By the table for guests, what is sent to it leaves by `wan`, too, where all leaves that it sends."""
    behind, guests = Route("10.4.0.0/16", ("lan",)), Route("0.0.0.0/0", ("wan",), table=100)
    topology = replace(HOME, routes=(*HOME.routes, behind, guests))
    pair = shape(1, "10.4.0.0/16", per="host"), shape(2, "10.4.0.0/16", per="host", direction="from")
    made = gateway(*pair, facts=replace(gateway_facts, topology=topology))
    assert made.compilation.problems == {}
    assert find_way(pair[0], made.compilation.facts).devices == ("lan", "wan")


SOME = ({}, {"protocol": "udp"}, {"protocol": "udp", "ports": 53}, {"protocol": "udp", "ports": "50-60"})


@pytest.mark.parametrize("ports", [(), range(1000, 1020)], ids=["in a row", "by trees"])
@pytest.mark.parametrize("received", SOME, ids=str)
@pytest.mark.parametrize("sent", SOME, ids=str)
def test_what_peers_send_each_other_waits_in_the_queue_of_the_receiver(
    sent: dict[str, object], received: dict[str, object], ports: range
) -> None:
    """Whatever the order in which the rules came."""
    for sender, receiver in ((1, 2), (2, 1)):
        made = gateway(
            shape(sender, "10.1.0.2", direction="from", interface="lan", **sent),
            shape(receiver, "10.1.0.3", **received),
            *(shape(n, "10.1.0.3", protocol="udp", ports=n) for n in ports),
            *(shape(1000 + n, "10.1.0.2", direction="from", interface="lan", protocol="udp", ports=n) for n in ports),
        )
        crossing = {"in_interface": "lan", "protocol": "udp", "port": 53}
        assert waits(made, "10.1.0.3", "10.1.0.2", **crossing) == receiver
        assert waits(made, "10.1.0.4", "10.1.0.2", **crossing) == sender


PEERS = Route("10.1.0.0/16", ("lan",), True, attached=True)


@pytest.mark.parametrize("kind", ["wireguard", "tun", "gre"])
def test_who_shapes_what_peers_send_hears_that_the_queue_of_the_receiver_comes_first(kind: str) -> None:
    devices = {**HOME.devices, "lan": Device(2, True, kind)}
    facts = replace(gateway_facts, topology=Topology(devices, (PEERS, *HOME.routes[1:])))
    sender = shape(1, "10.1.0.2", direction="from", interface="lan")
    made = gateway(sender, shape(2, "10.1.0.3"), facts=facts)
    assert made.compilation.problems == {}
    assert made.compilation.shaping.notes == {
        1: Note(
            "What it sends to another in 10.1.0.0/16 by lan waits in that one's queue, where a rule `to` gives it one, "
            "and not in a queue of this rule: a packet waits in one only."
        )
    }
    for other in (
        shape(2, "10.1.0.3", protocol="udp"),
        shape(2, "10.1.0.0/16", per="host"),
    ):
        assert change(made, other).compilation.shaping.notes.keys() == {1}
    change(
        made,
        shape(1, "10.1.0.2", direction="from", interface="lan", protocol="tcp"),
        shape(2, "10.1.0.3", protocol="udp"),
    )
    assert made.compilation.shaping.notes == {}
    change(made, sender, drop=[2])
    assert made.compilation.shaping.notes == {}
    assert gateway(sender, shape(2, "10.1.0.3")).compilation.shaping.notes == {}, "neighbours do not come by"


# -- the host -------------------------------------------------------------------------------------------------------


def without(need: str, **facts: object) -> Facts:
    return replace(gateway_facts, capabilities={need: f"there is no {need}."}, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("need", ["iptables", "ipset", "mangle", "marks", "htb", "bpf"])
def test_what_the_host_lacks_is_the_reason(need: str) -> None:
    made = gateway(shape(1, "10.1.0.2"), facts=without(need))
    assert made.compilation.problems == {1: f"there is no {need}."}
    six = {"iptables": "ip6tables", "mangle": "mangle6"}.get(need, need)
    made = gateway(shape(1, "fd00:1::2"), facts=without(six))
    assert made.compilation.problems == {1: f"there is no {six}."}


def test_without_fq_codel_there_is_still_a_queue() -> None:
    made = gateway(shape(1, "10.1.0.2"), facts=without("fq_codel"))
    assert str(queue(made, "10.1.0.2").leaf) == "bfifo limit 80000"


def test_without_an_ifb_device_the_rest_is_shaped_and_the_operator_hears() -> None:
    made = gateway(shape(1, "10.1.0.2", direction="from"), shape(2, "10.2.0.1"), facts=without("ifb"))
    assert waits(made, "192.0.2.7", "10.1.0.2") == 1
    assert made.compilation.shaping.notes[1] == ("What ends on this host is not shaped: there is no ifb.", True)
    assert made.compilation.problems == {2: "What ends on this host is not shaped: there is no ifb."}
    assert INGRESS_DEVICE not in made.kernel.trees


def test_a_qdisc_of_somebody_else_on_one_device_lifts_nothing_on_others() -> None:
    from_here = shape(1, "10.1.0.2", direction="from")
    free = gateway(from_here)
    made = change(gateway(from_here, facts=replace(gateway_facts, foreign={"wan": "pfifo 1:"})))
    assert {*free.kernel.trees} - {*made.kernel.trees} == {"wan"}
    assert INGRESS_DEVICE in made.kernel.trees
    assert made.compilation.problems == {}
    note = made.compilation.shaping.notes[1]
    assert note.degraded
    assert "What leaves by wan is not shaped. wan has a qdisc that is not ours (pfifo 1:)" in note.text


def test_where_somebody_is_in_the_way_on_an_ingress_the_operator_hears() -> None:
    rules = shape(1, "10.1.0.2", direction="from"), shape(2, "10.2.0.1"), shape(3, "10.1.0.3"), shape(4, "8.8.8.8")
    made = gateway(*rules)
    free = made.compilation.shaping.notes
    made.compilation.protect(replace(gateway_facts, barred={"lan": "a filter (u32).", "gone": "another."}))
    told = made.compilation.shaping.notes
    note = Note("What comes in by lan and ends on this host is not shaped: a filter (u32).", degraded=True)
    assert told == free | {number: note.beside(free[number]) if number in free else note for number in (1, 2)}
    made.compilation.protect(replace(gateway_facts, barred={"wan": "a filter (u32)."}))
    told = made.compilation.shaping.notes
    assert [number for number in told if told[number] != free.get(number)] == [2]
    made.compilation.protect(gateway_facts)
    assert made.compilation.shaping.notes == free


def test_where_somebody_is_in_the_way_on_an_ingress_no_program_is_put() -> None:
    made = gateway(shape(1, "10.1.0.2", direction="from"))
    assert made.kernel.ingress().keys() == {"lan", "wan"}
    for barred, left in ((("lan",), {"wan"}), (("lan", "wan"), {INGRESS_DEVICE}), ((), {"lan", "wan"})):
        made.bar(barred)
        assert made.compilation.changed, "the next pass writes it, and calls it no drift"
        assert [type(step) for step in made.plan().steps] == [WriteIngress]
        made.sync()
        made.check()
        assert made.kernel.ingress().keys() == left
        assert (made.compilation.changed, made.plan_all().steps) == (False, ())


def test_a_device_with_the_qdisc_of_somebody_else_is_left_alone() -> None:
    made = gateway(shape(1, "10.1.0.2"), shape(2, "192.0.2.7"), facts=replace(gateway_facts, foreign={"lan": "htb 1:"}))
    assert "lan has a qdisc that is not ours (htb 1:)" in problem(made, 1)
    assert "--take-over lan" in problem(made, 1)
    assert made.kernel.trees.keys() == {"wan"}
    made.compilation.protect(gateway_facts)
    change(made)
    assert waits(made, "10.1.0.2") == 1


def test_what_is_shaped_moves_to_where_it_leaves_now() -> None:
    made = gateway(shape(1, "192.0.2.7"), shape(2, "10.1.0.2"))
    made.route(UPLINKS)
    change(made)
    assert made.kernel.trees.keys() == {"lan", "other", "wan"}
    assert "by other and wan" in made.compilation.shaping.notes[1].text
    made.route(WITHOUT_WAN)
    change(made)
    assert made.kernel.trees.keys() == {"lan"}
    assert "No route leads to 192.0.2.7" in problem(made, 1)
    made.route(HOME)
    change(made)
    assert (waits(made, "192.0.2.7", "10.1.0.2"), made.compilation.shaping.notes) == (1, {})
    made.route(Topology())
    change(made)
    assert made.kernel.trees == {}
    assert made.compilation.problems.keys() == {1, 2}


# -- how many -------------------------------------------------------------------------------------------------------


def many_uplinks(count: int) -> Facts:
    """A gateway with a LAN and so many tunnels; the default route lies by the last of them."""
    tunnels = [f"ppp{number}" for number in range(count)]
    devices = {name: Device(10 + at, True) for at, name in enumerate(tunnels)}
    routes = [Route(f"10.{100 + at // 250}.{at % 250}.0/24", (name,), True) for at, name in enumerate(tunnels)]
    away = (Route("0.0.0.0/0", (tunnels[-1],)), Route("::/0", (tunnels[-1],)))
    return replace(gateway_facts, topology=Topology({"lan": Device(2, True), **devices}, (*NEAR, *routes, *away)))


def test_each_device_that_has_one_of_the_handles_is_shaped() -> None:
    made = gateway(shape(1, "10.1.0.2", direction="from"), facts=many_uplinks(200))
    assert made.compilation.shaping.notes[1].degraded is False
    assert len(made.kernel.trees) == 201, "and what ends here"
    handles = {tree.handle for tree in made.kernel.trees.values()}
    assert len(handles) == 201
    assert all(is_ours(handle) for handle in handles)


def test_a_rule_for_more_devices_than_there_are_handles_holds_where_there_are_and_names_the_rest() -> None:
    made = gateway(shape(1, "10.1.0.2", direction="from"), facts=many_uplinks(300))
    assert made.compilation.problems == {}
    held = made.kernel.trees.keys()
    assert len(held) == 255
    assert {INGRESS_DEVICE, "ppp299"} <= held, "what most leaves by, and what ends here, come first"
    note = made.compilation.shaping.notes[1]
    assert note.degraded
    missed = sorted({f"ppp{number}" for number in range(300)} - held)
    assert f"What leaves by {name_some(missed, 4)} is not shaped: netlimit shapes on 255 devices already" in note.text


def test_a_rule_of_which_some_devices_are_full_is_held_on_them_too_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("netlimit.shaping._ROOTS", range(1, 3))
    first = shape(1, "10.1.0.2", interface="lan"), shape(2, "192.0.2.7", interface="wan")
    made = gateway(first[0], shape(3, "10.1.0.3", direction="from"))
    assert made.kernel.trees.keys() == {"lan", "wan"}
    assert made.compilation.shaping.notes[3].degraded
    assert waits(made, "192.0.2.7", "10.1.0.3") == 3
    change(made, drop=[1])
    assert made.kernel.trees.keys() == {"wan"}, "the kernel held a tree of this handle until now"
    change(made)
    assert made.kernel.trees.keys() == {INGRESS_DEVICE, "wan"}
    assert 3 not in made.compilation.shaping.notes
    change(made, first[0])
    assert made.compilation.problems.keys() == {1}, "it came later"


def test_a_rule_that_is_refused_leaves_its_handles_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.shaping._ROOTS", range(1, 3))
    monkeypatch.setattr("netlimit.shaping.MOST_BUDGETS", 0)
    made = gateway(shape(1, "10.1.0.0/24", per="target", direction="from"))
    assert made.compilation.problems.keys() == {1}
    change(made, shape(2, "10.1.0.2"), shape(3, "192.0.2.7"))
    assert made.compilation.problems.keys() == {1}
    assert made.kernel.trees.keys() == {"lan", "wan"}


def test_no_more_hosts_than_a_device_has_handles_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.shaping.MOST_HOSTS", 3)
    made = gateway(*(shape(host, f"10.1.0.{host}") for host in range(2, 6)))
    assert made.compilation.problems.keys() == {5}
    assert "lan has classes for 3 hosts already" in problem(made, 5)
    change(made, drop=[2])
    assert made.compilation.problems == {}


def test_newcomers_for_whom_there_is_no_room_go_on_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.shaping.MOST_HOSTS", 3)
    made = gateway(shape(1, "10.1.0.0/24", per="host"))
    made.see([f"10.1.0.{host}" for host in (2, 3, 4)])
    change(made)
    assert [is_host(number(made, f"10.1.0.{host}")) for host in (2, 3, 4)] == [True, True, False]
    note = made.compilation.shaping.notes[1]
    assert note.degraded
    assert "More hosts are active on lan than the 3" in note.text
    made.compilation.shaping.dismiss("lan", {number(made, "10.1.0.2")})
    change(made)
    assert made.compilation.shaping.notes == {}
    made.see(["10.1.0.4"])
    change(made)
    assert is_host(number(made, "10.1.0.4"))


def test_rules_come_before_those_that_appeared_of_whom_the_longest_idle_makes_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("netlimit.shaping.MOST_HOSTS", 4)
    made = gateway(shape(1, "10.1.0.0/24", per="host"))
    hosts = [f"10.1.0.{host}" for host in (2, 3, 4)]
    made.see(hosts)
    change(made)
    idlest = [number(made, host) for host in ("10.1.0.3", "10.1.0.2", "10.1.0.4")]
    made.compilation.shaping.dismiss("lan", set(), idlest)
    change(made, shape(2, "10.1.1.1"))
    assert made.compilation.problems == {}
    assert waits(made, "10.1.1.1") == 2
    assert [is_host(number(made, host)) for host in hosts] == [True, False, True]
    change(made, shape(3, "10.1.1.2"), shape(4, "10.1.1.3"))
    assert made.compilation.problems == {}
    assert not any(is_host(number(made, host)) for host in hosts)
    change(made, shape(5, "10.1.1.4"))
    assert made.compilation.problems.keys() == {5}, "those before it are rules"
    made.check()


def test_of_those_that_appeared_since_the_last_reading_somebody_makes_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.shaping.MOST_HOSTS", 4)
    made = gateway(shape(1, "10.1.0.0/24", per="host"))
    made.see(["10.1.0.2"])
    change(made)
    made.compilation.shaping.dismiss("lan", set(), [number(made, "10.1.0.2")])
    made.see(["10.1.0.3", "10.1.0.4"])
    change(made, shape(2, "10.1.1.1"))
    assert not is_host(number(made, "10.1.0.2")), "it has been idle for longer"
    change(made, shape(3, "10.1.1.2"), shape(4, "10.1.1.3"))
    assert made.compilation.problems == {}
    assert len(made.compilation.shaping.trees["lan"].children) == 1
    made.check()


def test_who_keeps_sending_comes_before_who_is_seen_once_when_there_is_room_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("netlimit.shaping.MOST_HOSTS", 3)
    made = gateway(shape(1, "10.1.0.0/24", per="host"))
    shaping = made.compilation.shaping
    made.see(["10.1.0.2", "10.1.0.3"])
    change(made)
    assert shaping.count_waiting("lan") == 0
    for once in ("10.1.0.101", "10.1.0.102"):
        made.see([once, "10.1.0.9"])
        wanted = shaping.count_waiting("lan")
        shaping.dismiss("lan", set())
    assert wanted == 1
    shaping.dismiss("lan", {number(made, "10.1.0.2")})
    made.see(["10.1.0.103", "10.1.0.9"])
    change(made)
    assert [is_host(number(made, f"10.1.0.{host}")) for host in (9, 103)] == [True, False]
    assert shaping.count_waiting("lan") == 0


def test_a_crowd_that_goes_on_is_told_all_the_while_though_places_become_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.shaping.MOST_HOSTS", 3)
    made = gateway(shape(1, "10.1.0.0/24", per="host"))
    shaping, told = made.compilation.shaping, []
    for turn in range(6):
        if turn < 4:
            made.see([f"10.1.0.{10 * turn + host}" for host in range(2, 6)])
        change(made)
        shaping.dismiss("lan", shaping.passing("lan"))
        change(made)
        told.append(1 in shaping.notes)
    assert told == [False, True, True, True, False, False]


def test_no_more_budgets_than_there_are_numbers_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.shaping.MOST_BUDGETS", 2)
    made = gateway(*(shape(n, f"10.1.{n}.0/24", per="target") for n in range(1, 4)))
    assert made.compilation.problems.keys() == {3}
    assert "has 2 budgets for subnets" in problem(made, 3)
    change(made, shape(4, "10.1.0.2", per="target"))
    assert made.compilation.problems.keys() == {3}, "a single address is no subnet"


def test_no_more_kinds_of_traffic_than_there_are_numbers_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.shaping.MOST_KINDS", 2)
    made = gateway(*(shape(n, "10.1.0.2", protocol="udp", ports=n) for n in range(1, 4)))
    assert made.compilation.problems.keys() == {3}
    assert "2 kinds of traffic" in problem(made, 3)
    change(made, drop=[1])
    assert made.compilation.problems == {}


def test_budgets_nest_as_deep_as_htb_does() -> None:
    made = gateway(*(shape(n, f"10.1.0.0/{15 + n}", per="target") for n in range(1, 8)))
    assert made.compilation.problems.keys() == {7}
    assert "7 budgets that lie in one another on lan" in problem(made, 7)
    change(made, drop=[4])
    assert made.compilation.problems == {}


def test_there_are_numbers_for_all_budgets_to_move_into_another_at_once() -> None:
    """Those that come have theirs before those that go give theirs up."""
    children, for_hosts = LAST_CHILD - FIRST_CHILD + 1, MOST_HOSTS // SHARD_HOSTS
    assert 2 * (MOST_BUDGETS + MOST_KINDS + 16 * for_hosts) <= children


def test_hosts_are_dealt_out_to_several_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.traffic.SHARD_HOSTS", 2)
    made = gateway(*(shape(host, f"10.1.0.{host}") for host in range(2, 7)))
    children = [number(made, f"10.1.0.{host}") >> 16 for host in range(2, 7)]
    assert len(made.kernel.trees["lan"].children) == 3
    assert max(map(children.count, children)) == 2
    for host in range(2, 7):
        change(made, drop=[host])
    assert made.kernel.trees == {}


# -- routes that change -----------------------------------------------------------------------------------------------


ROUTED = [
    Topology(
        {"lan": Device(2, up=True), "wan": Device(3, up=True)},
        (
            Route("10.1.0.0/16", (lan,), connected=True),
            Route("0.0.0.0/0", (away,)),
            *((Route("10.1.0.2/32", (host,), connected=True),) if host else ()),
        ),
    )
    for lan, host, away in itertools.product(("lan", "wan"), (None, "lan", "wan"), ("lan", "wan"))
]


@pytest.mark.parametrize("before", range(len(ROUTED)))
def test_routes_that_change_leave_in_force_what_would_be_so_had_they_been_there_from_the_beginning(before: int) -> None:
    """Which rules exclude each other depends on who is whose neighbour."""
    rules = (
        shape(1, target="10.1.0.2", direction="from", interface="wan"),
        shape(2, target="10.1.0.0/16", rate="7 Mbit/s", per="target", interface="wan"),
        shape(3, target="10.1.0.3", direction="from", interface="wan"),
    )
    for topology in ROUTED:
        followed = Compilation(Facts(topology=ROUTED[before]))
        anew = Compilation(Facts(topology=topology))
        for made in (followed, anew):
            for rule in rules:
                made.put(rule)
        followed.settle()
        followed.protect(anew.facts)
        assert followed.problems == anew.problems


# -- few bits of the mark ---------------------------------------------------------------------------------------------


def test_a_size_of_blocks_for_which_there_is_no_number_is_told_and_comes_once_another_has_gone() -> None:
    """With two bits of the packet mark there are two numbers that tell in which set newcomers are remembered."""
    facts = replace(gateway_facts, mark_mask=0xC0000000)
    rules = shape(1, "10.1.0.0/24", per="host"), shape(2, "10.1.1.0/24", per="/28"), shape(3, "10.1.2.0/24", per="/29")
    made = gateway(*rules, facts=facts)
    assert made.compilation.problems.keys() == {3}
    assert made.compilation.problems[3] == (
        "On lan, hosts or blocks of 2 other sizes have a class each already, the most that can be told apart by the "
        "bits of the packet mark that netlimit has (0xc0000000). Use one of those sizes in `per`, or widen "
        "NETLIMIT_MARK_MASK."
    )
    single = shape(4, "10.1.3.7", per="host")
    change(made, single)
    assert made.compilation.problems.keys() == {3}, "who has a class from the beginning need not be remembered"
    change(made, replace(rules[1], per="host"))
    change(made)
    assert made.compilation.problems == {}
    change(made, replace(rules[1], per="/30"))
    assert made.compilation.problems.keys() == {2}
    for length in ("/29", "host"):
        change(made, replace(rules[1], per=length))
        assert made.compilation.problems == {}


# -- what may end here, or go on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [(), ("10.1.0.0/16",)], ids=["forwarded", "by a proxy's route here, too"])
def test_a_rule_for_one_address_that_the_queue_of_its_subnet_outruns_says_so(local: tuple[str, ...]) -> None:
    facts = replace(gateway_facts, topology=replace(HOME, local=local))
    rules = shape(1, "10.1.0.0/24", "5 Mbit/s", per="target"), shape(2, "10.1.0.2", "2 Mbit/s"), shape(3, "10.1.1.2")
    made = gateway(*rules, facts=facts)
    outrun = Note(
        "What leaves by lan waits in the queue of rule 1, `shape to 10.1.0.0/24 any 5 Mbit/s per target`, not of this "
        "one: packets with 10.1.0.2 may end on this host as well, by a route or for it is multicast, and a rule that "
        "names such an address has queues apart. Name other ports in one of them, or limit "
        '(`action: "drop"`).',
        degraded=True,
    )
    assert made.compilation.problems == {}
    assert made.compilation.shaping.notes == ({2: outrun} if local else {})
