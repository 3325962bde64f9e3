"""What is shaped once some of its rules have ended in the kernel, and no controller has arranged anything anew."""

from __future__ import annotations

from datetime import timedelta
from ipaddress import ip_address

import pytest

from netlimit.packet import Packet
from netlimit.rules import Rule
from tests.unit.shapes import Gateway, shape
from tests.unit.strategies import NOW

KNOWN, NEW, ELSEWHERE = "10.1.0.2", "10.1.0.77", "10.1.200.1"
MEGABIT = 125_000


def allowance(gateway: Gateway, address: str) -> float | None:
    """The most (Mbit/s) that what is sent to an address may take: the least of its class and those above it."""
    where = {"in_interface": "wan", "out_interface": "lan"}
    number = gateway.kernel.find_class(Packet(ip_address("192.0.2.7"), ip_address(address), "tcp", 80, **where))  # type: ignore[arg-type]
    if number is None:
        return None
    tree = gateway.compilation.state.trees["lan"]
    ceils = []
    while number & 0xFFFF or number >> 16 in tree.children:
        if number & 0xFFFF:
            ceils.append(tree.classes[number].ceil)
            number = tree.classes[number].parent
        else:
            number = tree.children[number >> 16]
    return min(ceils) / MEGABIT


def wait(gateway: Gateway, **time: float) -> None:
    moment = (NOW + timedelta(**time)).timestamp()
    gateway.kernel.now = lambda: moment
    gateway.kernel._expire()


def make(*rules: Rule) -> Gateway:
    gateway = Gateway()
    wait(gateway)
    for rule in rules:
        gateway.put(rule)
    gateway.sync()
    gateway.see([KNOWN, ELSEWHERE])
    gateway.sync()
    gateway.check()
    return gateway


EACH, ALL, SMALL = "10.1.0.0/16", "10.1.0.0/16", "10.1.0.0/24"
EACH_WITH_CEILING = shape(1, EACH, "0.5 Mbit/s", ceil="4 Mbit/s", per="host", ttl="1h")
EACH_BELOW = shape(1, EACH, "0.5 Mbit/s", per="host", ttl="1h")


@pytest.mark.parametrize("each", [EACH_WITH_CEILING, EACH_BELOW], ids=["with a ceiling", "below"])
def test_a_budget_goes_on_when_the_rule_of_the_hosts_in_it_ends(each: Rule) -> None:
    gateway = make(each, shape(2, ALL, "1 Mbit/s", per="target"))
    before = 1 if each is EACH_WITH_CEILING else 0.5
    assert [allowance(gateway, address) for address in (KNOWN, NEW, ELSEWHERE)] == [before] * 3
    wait(gateway, hours=1.01)
    assert [allowance(gateway, address) for address in (KNOWN, NEW, ELSEWHERE)] == [1, 1, 1]


@pytest.mark.parametrize("each", [EACH_WITH_CEILING, EACH_BELOW], ids=["with a ceiling", "below"])
def test_budgets_within_and_around_go_on(each: Rule) -> None:
    small, large = shape(2, SMALL, "1 Mbit/s", per="target"), shape(3, ALL, "3 Mbit/s", per="target")
    gateway = make(each, small)
    wait(gateway, hours=1.01)
    assert [allowance(gateway, address) for address in (KNOWN, NEW, ELSEWHERE)] == [1, 1, None]
    gateway = make(each, small, large)
    wait(gateway, hours=1.01)
    assert [allowance(gateway, address) for address in (KNOWN, NEW, ELSEWHERE)] == [1, 1, 3]


def test_a_budget_that_ends_later_does_so() -> None:
    gateway = make(EACH_BELOW, shape(2, ALL, "1 Mbit/s", per="target", ttl="2h"))
    wait(gateway, hours=1.5)
    assert [allowance(gateway, address) for address in (KNOWN, NEW)] == [1, 1]
    wait(gateway, hours=2.01)
    assert [allowance(gateway, address) for address in (KNOWN, NEW)] == [None, None]


def test_a_budget_for_everything_goes_on() -> None:
    each = shape(1, "0.0.0.0/0", "0.5 Mbit/s", per="host", protocol="tcp", ttl="1h")
    gateway = make(each, shape(2, "0.0.0.0/0", "1 Mbit/s", per="target", protocol="tcp"))
    assert [allowance(gateway, address) for address in (KNOWN, NEW)] == [0.5, 0.5]
    wait(gateway, hours=1.01)
    assert [allowance(gateway, address) for address in (KNOWN, NEW)] == [1, 1]


@pytest.mark.parametrize("stays", [True, False])
def test_half_of_a_target_may_have_a_rule_of_its_own(stays: bool) -> None:
    gateway = make(EACH_BELOW, shape(2, ALL, "1 Mbit/s", per="target"))
    change(gateway, shape(3, "10.1.128.0/17", "0.3 Mbit/s", per="target"))
    change(gateway, gone=1)
    change(gateway, EACH_BELOW)
    if not stays:
        change(gateway, gone=3)
    wait(gateway, hours=1.01)
    assert [allowance(gateway, address) for address in (KNOWN, ELSEWHERE)] == [1, pytest.approx(0.3 if stays else 1)]


def test_what_comes_afterwards_goes_with_its_rules() -> None:
    gateway = make(EACH_BELOW, shape(2, ALL, "1 Mbit/s", per="target"))
    classes = len(gateway.kernel.trees["lan"].classes)
    change(gateway, shape(1, EACH, "0.5 Mbit/s", per="host"))
    assert len(gateway.kernel.trees["lan"].classes) == classes - 1
    change(gateway, EACH_BELOW)
    change(gateway, gone=2)
    change(gateway, gone=1)
    assert not gateway.kernel.trees


def change(gateway: Gateway, *rules: Rule, gone: int = 0) -> None:
    for rule in rules:
        gateway.put(rule)
    gateway.drop(gone)
    gateway.sync()
    gateway.check()
    assert not gateway.plan_all()


@pytest.mark.parametrize("ceil", ["0.5 Mbit/s", "4 Mbit/s"])
def test_the_rule_for_hosts_around_the_one_that_has_ended_takes_its_place(ceil: str) -> None:
    """Hosts share what one of them has there, as all do who are new."""
    each = shape(1, SMALL, "0.5 Mbit/s", ceil=ceil, per="host", ttl="1h")
    gateway = make(each, shape(2, SMALL, "1 Mbit/s", per="target"), shape(3, EACH, "0.2 Mbit/s", per="host"))
    wait(gateway, hours=1.01)
    assert [allowance(gateway, address) for address in (KNOWN, NEW, ELSEWHERE)] == [pytest.approx(0.2)] * 3
    around = shape(3, EACH, "0.2 Mbit/s", per="host", ttl="2h")
    gateway = make(each, shape(2, SMALL, "1 Mbit/s", per="target"), around)
    wait(gateway, hours=1.01)
    assert [allowance(gateway, address) for address in (KNOWN, NEW, ELSEWHERE)] == [1, 1, pytest.approx(0.2)]
    wait(gateway, hours=2.01)
    assert [allowance(gateway, address) for address in (KNOWN, NEW, ELSEWHERE)] == [1, 1, None]


def test_the_budget_of_one_host_goes_on_where_the_other_rule_lets_it_have_as_much() -> None:
    """One address has no halves: where the rule that ends holds it further down, its budget ends with it."""
    gateway = make(EACH_WITH_CEILING, shape(2, KNOWN, "1 Mbit/s", per="target"))
    wait(gateway, hours=1.01)
    assert [allowance(gateway, address) for address in (KNOWN, NEW)] == [1, None]


def test_hosts_go_on_when_a_budget_around_them_has_ended() -> None:
    each = shape(1, EACH, "0.5 Mbit/s", ceil="4 Mbit/s", per="host")
    gateway = make(each, shape(2, ALL, "1 Mbit/s", per="target", ttl="1h"))
    wait(gateway, hours=1.01)
    assert [allowance(gateway, address) for address in (KNOWN, NEW)] == [1, 1], "until a controller is there"
