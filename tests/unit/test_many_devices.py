"""Rules that hold on many devices: a device that comes or goes concerns no other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from ipaddress import ip_address

import pytest

from netlimit.packet import Packet
from netlimit.plan import Plan, WriteTree
from netlimit.rules import Rule
from netlimit.several import name_some
from netlimit.traffic import Traffic
from netlimit.tree import INGRESS_DEVICE, Device, Route, Topology
from tests.forcing import make_rule
from tests.unit.shapes import Gateway, gateway_facts, is_host, shape
from tests.unit.strategies import NOW

DEVICES, RULES = 12, 9


def make_topology(names: list[str], default: str = "d0") -> Topology:
    """Devices with a network each, and a default route by one of them."""
    devices = {name: Device(2 + number, True) for number, name in enumerate(sorted(names))}
    near = (Route(f"10.100.{int(name[1:])}.0/24", (name,), True) for name in names)
    return Topology(devices, (*near, Route("0.0.0.0/0", (default,))))


def name(count: int) -> list[str]:
    return [f"d{number}" for number in range(count)]


def make_gateway(*rules: Rule, topology: Topology) -> Gateway:
    made = Gateway(replace(gateway_facts, topology=topology))
    made.route(topology)
    for rule in rules:
        made.put(rule)
    made.sync()
    made.check()
    return made


def hosts(count: int = RULES) -> list[Rule]:
    return [shape(number, f"10.1.5.{number}", direction="from") for number in range(1, count + 1)]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often rules have come to a device, by its name, or left it."""
    counted: Counter[str] = Counter()
    enter, leave = Traffic.enter, Traffic.leave

    def count_coming(self: Traffic, rule: Rule) -> None:
        counted[self.lane.device] += 1
        enter(self, rule)

    def count_going(self: Traffic, rule: Rule) -> None:
        counted[self.lane.device] += 1
        leave(self, rule)

    monkeypatch.setattr(Traffic, "enter", count_coming)
    monkeypatch.setattr(Traffic, "leave", count_going)
    return counted


def test_a_device_that_comes_or_goes_has_rules_move_there_alone(moves: Counter[str]) -> None:
    made = make_gateway(*hosts(), topology=make_topology(name(DEVICES)))
    for names in (name(DEVICES + 1), name(DEVICES), [*name(DEVICES - 1), "d40"]):
        before = made.compilation.shaping.trees.keys()
        moves.clear()
        made.route(make_topology(names))
        differ = before ^ {*names, INGRESS_DEVICE}
        assert moves == dict.fromkeys(differ, RULES)
        assert {step.device for step in made.plan().steps if isinstance(step, WriteTree)} == differ
        made.sync()
        made.check()
        assert made.compilation.shaping.trees.keys() == {*names, INGRESS_DEVICE}
        assert not made.plan_all()


def test_what_is_told_of_a_rule_goes_with_its_devices() -> None:
    made = make_gateway(*hosts(1), topology=make_topology(name(2)))
    assert "leave by d0 and d1" in made.compilation.shaping.notes[1].text
    made.route(make_topology(name(3)))
    assert "leave by d0, d1 and d2" in made.compilation.shaping.notes[1].text
    foreign = replace(made.compilation.facts, foreign={"d2": "htb 1:"})
    made.compilation.protect(foreign)
    assert "What leaves by d2 is not shaped" in made.compilation.shaping.notes[1].text
    made.route(make_topology(name(1)))
    assert 1 not in made.compilation.shaping.notes


def test_who_comes_to_a_device_where_another_is_in_the_way_gives_way_or_is_given_way() -> None:
    """A rule without a device follows to one where an older rule, or a newer, would claim the same packets."""
    for number, refused in ((1, 5), (9, 9)):
        made = make_gateway(*hosts(1), topology=make_topology(name(2)))
        made.drop(1)
        made.put(replace(shape(5, "10.1.5.1", direction="from"), id=5))
        topology = make_topology(name(3))
        made.compilation.protect(replace(made.compilation.facts, topology=topology))
        made.kernel.routes = topology
        made.put(shape(number, "10.1.5.1", direction="from", interface="d2"))
        assert made.compilation.problems.keys() == {refused}
        made.route(make_topology(name(4)))
        assert made.compilation.problems.keys() == {refused}
        made.sync()
        made.check()


def test_a_device_where_a_rule_waits_for_room_is_no_other_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.shaping.MOST_KINDS", 4)
    made = make_gateway(*hosts(2), topology=make_topology(name(3)))
    assert len(made.compilation.shaping.trees) == 4
    made.route(make_topology(name(5)))
    made.sync()
    assert len(made.compilation.shaping.trees) == 4
    assert "4 kinds of traffic" in made.compilation.shaping.notes[1].text
    made.route(make_topology([*name(2), "d3"]))
    made.sync()
    made.retry()
    made.sync()
    assert made.compilation.shaping.trees.keys() == {"d0", "d1", "d3", INGRESS_DEVICE}
    assert "kinds of traffic" not in made.compilation.shaping.notes[1].text
    made.check()


def block(number: int, target: str) -> Rule:
    return replace(make_rule({"target": target, "action": "block"}, NOW), id=number)


def limit(number: int, target: str) -> Rule:
    return replace(make_rule({"target": target, "rate": "10 packets/s", "action": "drop"}, NOW), id=number)


def drops(made: Gateway, src: str) -> bool:
    packet = Packet(ip_address(src), ip_address("192.0.2.7"), in_interface="d1", out_interface="d0")
    return made.kernel.trace(packet) == "drop"


@pytest.mark.parametrize("known", [False, True])
def test_blocks_are_in_force_before_trees_are_written(known: bool) -> None:
    """Trees of many devices take long."""
    made = make_gateway(*[block(99, "10.1.7.7")] * known, topology=make_topology(name(4)))
    for rule in (*hosts(), block(100, "10.1.7.8"), limit(101, "10.1.7.9")):
        made.put(rule)
    steps = made.plan().steps
    trees = [at for at, step in enumerate(steps) if isinstance(step, WriteTree)]
    assert len(trees) == 5
    made.apply(Plan(steps[: trees[0]]))
    assert drops(made, "10.1.7.8")
    assert [drops(made, "10.1.7.9") for _ in range(1000)][-1]
    made.apply(Plan(steps[trees[0] :]))
    made.compilation.settle()
    made.check()


def test_who_was_limited_and_is_shaped_now_is_limited_until_he_is_shaped() -> None:
    made = make_gateway(limit(1, "10.1.5.1"), topology=make_topology(name(3)))
    assert [drops(made, "10.1.5.1") for _ in range(1000)][-1]
    made.put(shape(1, "10.1.5.1", direction="from"))
    packet = Packet(ip_address("10.1.5.1"), ip_address("192.0.2.7"), in_interface="d1", out_interface="d0")
    for step in made.plan().steps:
        made.kernel.apply(step)
        assert drops(made, "10.1.5.1") or is_host(made.kernel.find_class(packet) or 0)
    assert is_host(made.kernel.find_class(packet) or 0)


# -- more devices than there is room for


@pytest.fixture
def few_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.shaping._ROOTS", range(1, 4))


def uplink(default: str, others: int = 4) -> Topology:
    """Devices, of which more than there are handles lead somewhere, with another one for the default route."""
    return make_topology([*name(others), *[default] * (default not in name(others))], default)


@pytest.mark.usefixtures("few_handles")
def test_the_uplink_has_a_handle_also_when_it_comes_last() -> None:
    made = make_gateway(*hosts(3), topology=uplink("d0"))
    assert {"d0", INGRESS_DEVICE} <= made.kernel.trees.keys()
    for default in ("d9", "d3", "d8"):
        made.route(uplink(default))
        made.sync()
        made.check()
        assert {default, INGRESS_DEVICE} <= made.kernel.trees.keys()
        assert len(made.kernel.trees) == 3
        assert len({tree.handle for tree in made.kernel.trees.values()}) == 3
        for number in (1, 2, 3):
            note = made.compilation.shaping.notes[number]
            left = sorted(made.kernel.routes.devices.keys() - made.kernel.trees.keys())
            assert note.degraded
            assert f"What leaves by {name_some(left, 4)} is not shaped: netlimit shapes on 3 devices" in note.text
        assert is_host(made.kernel.find_class(sent("10.1.5.1", default)) or 0)
        made.retry()
        assert not made.plan()
        assert not made.plan_all()


@pytest.mark.usefixtures("few_handles")
@pytest.mark.parametrize("rules", [1, 2])
def test_the_uplink_gets_a_handle_when_it_comes_while_no_controller_runs(rules: int) -> None:
    made = make_gateway(*hosts(rules), topology=uplink("d0"))
    topology = uplink("d9")
    made.kernel.routes = topology
    made.compilation.facts = replace(made.compilation.facts, topology=topology)
    made.restart()
    made.apply(made.plan_all())
    made.compilation.settle()
    made.check()
    assert {"d9", INGRESS_DEVICE} <= made.kernel.trees.keys()


@pytest.mark.usefixtures("few_handles")
def test_a_rule_that_names_its_device_has_a_handle_where_others_need_not() -> None:
    """That is the advice."""
    made = make_gateway(*hosts(2), topology=uplink("d0"))
    (lesser,) = made.kernel.trees.keys() - {"d0", INGRESS_DEVICE}
    named = next(each for each in name(4)[1:] if each != lesser)
    made.put(shape(9, "10.2.0.0/16", per="target", interface=named))
    made.sync()
    made.check()
    assert made.compilation.problems == {}
    assert made.kernel.trees.keys() == {"d0", INGRESS_DEVICE, named}
    third = next(each for each in name(4)[1:] if each not in (lesser, named))
    made.put(shape(10, "10.2.0.0/16", per="target", interface=third))
    assert "shapes on 3 devices already" in made.compilation.problems[10]
    assert "Name in `interface`" not in made.compilation.problems[10], "it does"


@pytest.mark.usefixtures("few_handles")
def test_nobody_loses_the_only_device_that_he_has() -> None:
    only = [shape(number, f"10.100.{number}.5", protocol="udp") for number in (1, 2, 3)]
    made = make_gateway(*only, topology=uplink("d0"))
    assert made.kernel.trees.keys() == {"d1", "d2", "d3"}
    made.put(shape(4, "10.1.5.1", direction="from", protocol="tcp"))
    made.sync()
    made.check()
    assert made.kernel.trees.keys() == {"d1", "d2", "d3"}
    told = made.compilation.shaping.notes[4].text
    assert told.startswith("What leaves by d0 or ends on this host is not shaped: netlimit shapes on 3 devices already")


@pytest.mark.usefixtures("few_handles")
def test_what_is_told_names_the_uplink_first_where_it_is_left_out() -> None:
    only = [shape(number, f"10.100.{number}.5", protocol="udp") for number in (1, 2, 3)]
    made = make_gateway(*only, topology=make_topology(name(5), "d4"))
    made.put(shape(4, "10.1.5.1", direction="from", protocol="tcp"))
    assert made.compilation.shaping.notes[4].text.startswith("What leaves by d4, d0 or ends on this host is not shaped")


def test_the_uplink_has_a_kind_of_traffic_also_when_it_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.shaping.MOST_KINDS", 9)
    rules = [replace(each, selector=shape(0, "10.1.0.2", protocol="udp", ports=each.id).selector) for each in hosts(3)]
    made = make_gateway(*rules, topology=uplink("d0", 3))
    for default in ("d9", "d1", "d8"):
        made.route(uplink(default, 3))
        made.sync()
        made.check()
        for rule in rules:
            lanes = [traffic.lane for traffic in made.traffics if rule in traffic.rules]
            assert {default, INGRESS_DEVICE} <= {lane.device for lane in lanes}
        assert sum(traffic.has_rules for traffic in made.traffics) == 9
        made.retry()
        assert not made.plan()
    made.put(replace(rules[0], id=9, selector=shape(0, "10.1.0.2", protocol="udp", ports=9).selector))
    assert made.compilation.problems == {}, "others leave a device for it"
    made.sync()
    made.check()


def sent(src: str, device: str) -> Packet:
    return Packet(ip_address(src), ip_address("192.0.2.7"), in_interface="d1", out_interface=device)
