"""What `explain` says of queues is where the kernel puts the packet."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlimit.explain import Explanation, explain
from netlimit.packet import Packet
from netlimit.routing import find_way
from netlimit.rules import Action, Rule, parse_rule
from netlimit.tree import INGRESS_DEVICE, MANAGEMENT, NEIGHBOURS, REST, ROUTERS, SERVICES, VISITORS, Tree
from tests.unit.shapes import HOME, INSIDE, OUTSIDE, Gateway, gateway_facts, packets, shape, shaping_rules
from tests.unit.strategies import NOW, keep
from tests.unit.strategies import rules as limiting_rules

LIMITING = limiting_rules(("10.1.0.2", "10.1.0.0/24", "10.2.0.2")).filter(
    lambda rule: rule.action is not Action.ALLOW or rule.selector.interface is None
)
"""Without `allow` on an interface: what ends on the host is let pass by it wherever it enters."""


def ask(rules: list[Rule], packet: Packet) -> Explanation:
    return explain(rules, packet, gateway_facts.own, dict.fromkeys(map(str, gateway_facts.safe), "settings"))


def climb(tree: Tree, number: int) -> list[int]:
    """A class, and all that are around it."""
    found = [number]
    while number in tree.classes:
        parent = tree.classes[number].parent
        number = parent if parent & 0xFFFF else tree.children.get(parent >> 16, 0)
        found.append(number)
    return found


def hit(explanation: Explanation) -> set[int]:
    """The shaping rules that hit."""
    rules = [step.rule for step in explanation.steps if step.hits and step.rule is not None]
    return {rule.id for rule in rules if rule.action is Action.SHAPE}


def wait(gateway: Gateway) -> None:
    """Until every bucket is full again."""
    then = gateway.kernel.now() + 10**6
    gateway.kernel.now = lambda: then


def trace(gateway: Gateway, packet: Packet) -> str:
    wait(gateway)
    return gateway.kernel.trace(packet)


def check(gateway: Gateway, packet: Packet) -> None:
    device = packet.out_interface or INGRESS_DEVICE
    shaping, facts = gateway.compilation.shaping, gateway.compilation.facts
    held = [rule for rule in gateway.rules.values() if rule.id not in gateway.compilation.problems]
    # Routes are not looked at: that a rule is about this device is for it to know.
    here = [rule for rule in held if rule.action is not Action.SHAPE or device in find_way(rule, facts).devices]
    if trace(gateway, packet) != "accept":
        return
    wait(gateway)
    number = gateway.kernel.find_class(packet)
    passed = climb(gateway.kernel.trees[device], number) if number is not None else []
    around = {i for i, classes in shaping.classes().items() if any((device, each) in classes for each in passed)}
    assert hit(ask(here, packet)) == around, f"{packet}\n{ask(here, packet).text}"


@settings(max_examples=60)
@given(st.lists(shaping_rules(), max_size=6), st.lists(LIMITING, max_size=2))
def test_the_rules_that_hit_are_those_whose_classes_are_passed(shaped: list[Rule], limited: list[Rule]) -> None:
    gateway = Gateway()
    for rule in keep([*shaped, *limited]):
        gateway.put(rule)
    gateway.retry()
    gateway.sync()
    for packet in packets(HOME):
        check(gateway, packet)
    gateway.see([*INSIDE, *OUTSIDE])
    gateway.sync()
    for packet in packets(HOME):
        check(gateway, packet)


@pytest.mark.parametrize("received", [{}, {"protocol": "tcp"}, {"protocol": "tcp", "ports": "1-99"}], ids=str)
@pytest.mark.parametrize("sent", [{}, {"protocol": "tcp"}, {"protocol": "tcp", "ports": "1-99"}], ids=str)
def test_of_what_peers_send_each_other_it_names_the_queue_of_the_receiver(
    sent: dict[str, object], received: dict[str, object]
) -> None:
    crossing = Packet(
        ip_address("10.1.0.2"), ip_address("10.1.0.3"), "tcp", 80, in_interface="lan", out_interface="lan"
    )
    gateway = Gateway()
    gateway.put(shape(1, "10.1.0.2", direction="from", interface="lan", **sent))
    gateway.put(shape(2, "10.1.0.3", **received))
    gateway.sync()
    check(gateway, crossing)
    assert hit(ask([*gateway.rules.values()], crossing)) == {2}


DOWN = Packet(ip_address("192.0.2.7"), ip_address("10.1.0.2"), "tcp", 80, in_interface="wan", out_interface="lan")
EACH = shape(1, "10.1.0.0/16", "5 Mbit/s", per="host", ceil="20 Mbit/s")
ALL = shape(2, "10.1.0.0/16", "300 Mbit/s", per="target")
SOME = shape(3, "10.1.0.0/24", "50 Mbit/s", per="target")
DEAR = shape(4, "10.1.0.2", "9 Mbit/s")
CAP = shape(5, "0.0.0.0/0", "500 Mbit/s", per="target", interface="lan")


def test_a_host_waits_in_its_class_and_all_that_is_around() -> None:
    explanation = ask([CAP, ALL, EACH, SOME], DOWN)
    assert explanation.verdict == "shaped"
    assert explanation.text.splitlines() == [
        "The packet is shaped.",
        f"hits rule 1 ({EACH}): queued: 5 Mbit/s, up to 20 Mbit/s while there is room, for each address in 10.1.0.0/16",
        f"hits rule 3 ({SOME}): queued within 50 Mbit/s for all of 10.1.0.0/24 together",
        f"hits rule 2 ({ALL}): queued within 300 Mbit/s for all of 10.1.0.0/16 together",
        f"hits rule 5 ({CAP}): queued on lan, with all that leaves there: 500 Mbit/s",
    ]


def test_the_most_specific_rule_has_the_class() -> None:
    steps = {step.rule.id: step for step in ask([EACH, DEAR, ALL], DOWN).steps if step.rule}
    assert [steps[number].hits for number in (1, 2, 4)] == [False, True, True]
    assert steps[1].reason == "rule 4 of the same kind is more specific (10.1.0.2)"


def test_limits_come_before_queues() -> None:
    limit = replace(parse_rule({"target": "192.0.2.7", "rate": "200 packets/s"}, NOW), id=9)
    explanation = ask([EACH, CAP, limit], DOWN)
    assert explanation.verdict == "limited"
    assert [step.rule.id for step in explanation.steps if step.rule] == [9, 1, 5]


def test_nothing_but_being_dropped_exempts_from_the_cap_of_a_device() -> None:
    allow, block = (
        replace(parse_rule({"target": "192.0.2.0/24", "action": action}, NOW), id=9) for action in ("allow", "block")
    )
    allowed = ask([EACH, CAP, allow], DOWN)
    assert (allowed.verdict, hit(allowed)) == ("allowed", {5})
    blocked = ask([EACH, CAP, block], DOWN)
    assert (blocked.verdict, hit(blocked)) == ("blocked", set())
    safe = replace(DOWN, dst=ip_address("10.1.9.9"))
    assert (ask([EACH, CAP], safe).verdict, hit(ask([EACH, CAP], safe))) == ("shaped", {5})
    other = replace(DOWN, src=ip_address("fd00:2::2"), dst=ip_address("fd00:1::2"))
    assert hit(ask([EACH, CAP], other)) == {5}, "the cap is of either family"
    assert hit(ask([CAP, shape(6, "::/0", per="target")], DOWN)) == {5}
    home = replace(DOWN, out_interface="lo")
    assert (ask([CAP], home).verdict, hit(ask([CAP], home))) == ("passes", set())


def test_what_the_gateway_itself_sends_to_be_managed_stands_beside_the_cap() -> None:
    sent = replace(DOWN, src=ip_address("10.1.0.1"), dst=ip_address("10.1.9.9"), in_interface=None)
    managed = replace(gateway_facts, management=(22,))
    gateway = Gateway(managed)
    gateway.put(CAP)
    gateway.sync()
    for packet, minor, words in (
        (replace(sent, protocol="udp", source_port=53), SERVICES, ""),
        (replace(sent, protocol="udp", source_port=1023), SERVICES, ""),
        (replace(sent, protocol="icmp"), SERVICES, ""),
        (replace(sent, protocol="tcp", source_port=23), SERVICES, ""),
        (replace(sent, protocol="udp", source_port=1024), REST, ""),
        (replace(sent, protocol="udp", source_port=51820), REST, ""),
        (replace(sent, protocol="gre"), REST, ""),
        (replace(sent, dst=DOWN.dst, protocol="tcp", source_port=23), REST, ""),
        (replace(sent, dst=DOWN.dst, protocol="udp", source_port=53), REST, ""),
        (
            replace(sent, protocol="tcp", source_port=22),
            MANAGEMENT,
            "from port 22, by which it is managed, to who is safe",
        ),
        (replace(sent, protocol="tcp", source_port=22, port=179), MANAGEMENT, "from port 22, by which it is managed"),
        (replace(sent, protocol="tcp", source_port=179), ROUTERS, "this host sends it to other routers"),
        (
            replace(sent, dst=DOWN.dst, protocol="tcp", source_port=22, port=179),
            VISITORS,
            "this host sends it from port 22",
        ),
        (replace(sent, dst=DOWN.dst, protocol="tcp", port=179, opens=True), VISITORS, "it to other routers"),
        (replace(sent, dst=DOWN.dst, protocol="tcp", port=179), ROUTERS, "this host sends it to other routers"),
        (replace(sent, dst=DOWN.dst, protocol="udp", port=3784), ROUTERS, "this host sends it to other routers"),
        (replace(sent, dst=DOWN.dst, protocol="vrrp"), ROUTERS, "this host sends it to other routers"),
        (replace(sent, dst=DOWN.dst, protocol="tcp", source_port=22), VISITORS, "this host sends it from port 22"),
        (replace(sent, dst=DOWN.dst, protocol="udp", source_port=22), REST, ""),
        (replace(sent, in_interface="wan"), REST, ""),
        (
            replace(sent, src=ip_address("fd00:1::1"), dst=ip_address("fd00:1::9"), protocol="icmp", icmp_type=135),
            *(NEIGHBOURS, "this host sends it to find neighbours"),
        ),
    ):
        found = gateway.kernel.find_class(packet)
        assert found is not None
        assert found & 0xFFFF == minor
        explained = explain([CAP], packet, managed.own, dict.fromkeys(map(str, managed.safe), "settings"), (22,))
        assert hit(explained) == ({CAP.id} if minor in (REST, SERVICES) else set())
        assert words in explained.text


def test_where_nobody_knows_the_management_ports_all_of_tcp_may_be_theirs() -> None:
    sent = replace(DOWN, src=ip_address("10.1.0.1"), dst=ip_address("10.1.9.9"), in_interface=None)
    gateway = Gateway(replace(gateway_facts, management=()))
    gateway.put(CAP)
    gateway.sync()
    for packet, minor in (
        (replace(sent, protocol="tcp", source_port=22), MANAGEMENT),
        (replace(sent, dst=DOWN.dst, protocol="tcp", source_port=22), REST),
        (replace(sent, protocol="icmp"), SERVICES),
        (replace(sent, protocol="udp", source_port=53), SERVICES),
        (replace(sent, protocol="udp", source_port=4789), REST),
        (replace(sent, protocol="gre"), REST),
    ):
        found = gateway.kernel.find_class(packet)
        assert found is not None
        assert found & 0xFFFF == minor
        explained = explain([CAP], packet, gateway_facts.own, dict.fromkeys(map(str, gateway_facts.safe), "settings"))
        assert hit(explained) == (set() if minor == MANAGEMENT else {CAP.id})
        assert ("this host itself sends it to who is safe" in explained.text) == (minor == MANAGEMENT)


def test_other_devices_and_those_not_given() -> None:
    (step,) = ask([shape(1, "10.1.0.2", interface="wan")], DOWN).steps
    assert (step.hits, step.reason) == (False, "it leaves by lan, not wan")
    nowhere = Packet(DOWN.src, DOWN.dst, in_interface="wan")
    (step,) = ask([shape(1, "10.1.0.2", interface="lan")], nowhere).steps
    assert (step.hits, step.reason) == (False, "it leaves by an interface not given, not lan")
    assert hit(ask([EACH], nowhere)) == {1}
    here = Packet(ip_address("10.1.0.2"), ip_address("10.1.0.1"), in_interface="lan")
    (step,) = ask([shape(1, "10.1.0.2", direction="from", interface="wan")], here).steps
    assert (step.hits, step.reason) == (False, "it ends on this host, and does not leave by wan")
