"""An exception for one address displaces the rule of its subnet, though packets for it may end on the host as well: it
is a group's, or an address within a network that some routing table leads to the host itself (a transparent proxy)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address
from itertools import permutations

import pytest

from netlimit.compile import Compilation
from netlimit.explain import explain
from netlimit.kernel.fake import FakeKernel
from netlimit.limits import Facts
from netlimit.packet import Packet
from netlimit.plan import diff
from netlimit.precedence import compare
from netlimit.rules import Rule, parse_rule
from netlimit.state import State, Structure
from netlimit.tree import Topology
from tests.unit.strategies import NOW
from tests.unit.test_make_before_break import single_lines

PROXY = Topology(local=("10.1.0.0/16",))
SENT = Packet(ip_address("10.1.0.2"), ip_address("172.16.0.1"), "udp", 5000, in_interface="lan", out_interface="wan")
GROUP = replace(SENT, src=ip_address("172.16.0.1"), dst=ip_address("239.1.0.2"))
COMING = replace(SENT, src=ip_address("172.16.0.1"), dst=ip_address("10.1.0.2"))


def limit(number: int, **fields: object) -> Rule:
    return replace(parse_rule({"rate": "20 packets/s", **fields}, NOW), id=number)


class Host:
    """A compilation, and a kernel that holds what it has come to."""

    def __init__(self, facts: Facts, *rules: Rule) -> None:
        self.made, self.kernel = Compilation(facts), FakeKernel(now=lambda: self.now)
        self.now = 0.0
        for rule in rules:
            assert self.made.put(rule) is None
        self.take(State(Structure(), {}))

    def take(self, known: State) -> None:
        transition = self.made.transition(known.structure)
        touched = self.made.touched if known.structure.sets else None
        for step in diff(self.made.state, known, transition, touched, self.made.touched_classes).steps:
            self.kernel.apply(step)
        self.made.settle()

    def follow(self, facts: Facts, *rules: Rule) -> None:
        """Routes, or the host's addresses, are others; rules are put again, or come."""
        known, before = self.made.settled, self.made.facts
        self.made.protect(facts)
        for rule in rules:
            assert rule.id not in self.made or before != facts
            self.made.put(rule)
        self.take(known)

    def send(self, packet: Packet, number: int = 100) -> Counter[str]:
        """All at once, when nothing has come for long."""
        self.now += 1000
        return Counter(self.kernel.trace(packet) for _ in range(number))

    def matched(self, rule_id: int, key: str) -> int:
        name = self.made.sets_of(rule_id)[0]
        return self.kernel.readings([name])[name][key].packets


WAYS = [
    pytest.param("from", "10.1.0.0/16", "10.1.0.2", SENT, PROXY, id="proxy"),
    pytest.param("to", "10.1.0.0/16", "10.1.0.2", COMING, PROXY, id="proxied"),
    pytest.param("to", "239.1.0.0/16", "239.1.0.2", GROUP, Topology(), id="multicast"),
]


@pytest.mark.parametrize("per", ["host", "peer"])
@pytest.mark.parametrize(("direction", "subnet", "one", "packet", "topology"), WAYS)
def test_only_the_exception_counts(
    direction: str, subnet: str, one: str, packet: Packet, topology: Topology, per: str
) -> None:
    rules = (
        limit(1, target=subnet, direction=direction, per=per),
        limit(2, target=one, direction=direction, per=per, rate="1000 packets/s"),
    )
    host = Host(Facts(topology=topology), *rules)
    assert host.send(packet) == {"accept": 100}
    assert host.matched(2, one) == 100
    assert host.matched(1, subnet) == 0, "nobody is counted twice"
    told = explain(rules, packet, local=topology.local)
    assert [step.rule.id for step in told.steps if step.hits and step.rule] == [2]
    assert "more specific" in told.text
    assert "takes the place" in " ".join(compare(rules[1], rules[:1], host.made.facts))
    if topology == PROXY:
        others = replace(packet, **{"src" if direction == "from" else "dst": ip_address("10.1.0.3")})
        assert host.send(others)["accept"] < 10, "for all others the rule of the subnet holds"


@pytest.mark.parametrize("action", ["drop", "reject", "observe"])
def test_connections_at_once_and_what_is_observed(action: str) -> None:
    several = {"per": "host", "action": action}
    rules = (
        limit(1, target="10.1.0.0/16", rate="2 connections", **several),
        limit(2, target="10.1.0.2", rate="9 connections", **several),
    )
    host = Host(Facts(topology=PROXY), *rules)
    asked = {step.rule.id for step in explain(rules, SENT, local=PROXY.local).steps if step.hits and step.rule}
    assert asked == ({2} if action != "observe" else {1, 2}), "what observes at another rate displaces nothing"
    host.send(replace(SENT, opens=True), 1)
    counted = host.matched(1, "10.1.0.0/16")
    assert (counted > 0) is (action == "observe")


def test_a_route_that_comes_and_goes_and_addresses_that_do() -> None:
    rules = limit(1, target="10.1.0.0/16", per="host"), limit(2, target="10.1.0.2", rate="1000 packets/s")
    host = Host(Facts(), *rules)
    assert host.send(SENT) == {"accept": 100}
    for topology in (PROXY, Topology(), PROXY):
        host.follow(Facts(topology=topology), rules[1])
        assert host.send(SENT) == {"accept": 100}
    host.follow(Facts(topology=PROXY, own=frozenset({"10.1.0.2"})))
    assert host.made.structure == Host(host.made.facts, *rules).made.structure
    host.follow(Facts(topology=PROXY))
    assert host.send(SENT) == {"accept": 100}
    host.follow(Facts(topology=PROXY), limit(3, target="10.1.0.3", rate="1000 packets/s"))
    assert host.send(replace(SENT, src=ip_address("10.1.0.3"))) == {"accept": 100}


def test_a_rule_for_an_address_of_the_host_itself_costs_others_no_look() -> None:
    rules = limit(1, target="10.1.0.0/16", per="host"), limit(2, target="10.1.0.1", rate="1000 packets/s")
    made = Host(Facts(topology=Topology(local=("10.1.0.1/32",)), own=frozenset({"10.1.0.1"})), *rules).made
    others = made.sets_of(2)[0]
    asked = [rule.text for rules in made.structure.chains.values() for rule in rules if others in rule.text]
    assert all("-j RETURN" not in text for text in asked)


KINDS: dict[str, dict[str, object]] = {
    "hosts": {"per": "host"},
    "peers": {"per": "peer"},
    "udp": {"per": "host", "protocol": "udp"},
    "connections at once": {"per": "host", "rate": "20 connections"},
}


def pair(kind: str, subnet: str = "10.1.0.0/16", one: str = "10.1.0.2", first: int = 1) -> tuple[Rule, Rule]:
    """A subnet's rule of a kind, and an exception from it."""
    unit = "connections" if "rate" in KINDS[kind] else "packets/s"
    exception = {**KINDS[kind], "target": one, "rate": f"1000 {unit}"}
    return limit(first, target=subnet, **KINDS[kind]), limit(first + 1, **exception)


def follow_closely(host: Host, known: State, packets: Callable[[], Counter[str]]) -> set[str]:
    """The lines of a plan after which not all packets pass, as they do before and afterwards."""
    assert packets() == {"accept": 100}
    broken = set()
    wanted, touched = host.made.transition(known.structure), host.made.touched
    for step in single_lines(diff(host.made.state, known, wanted, touched, host.made.touched_classes)):
        host.kernel.apply(step)
        broken |= {str(step)} if packets() != {"accept": 100} else set()
    host.made.settle()
    assert packets() == {"accept": 100}
    return broken


def send_to(host: Host, kind: str) -> Callable[[], Counter[str]]:
    """Datagrams of one flow, or a connection each."""
    if "rate" not in KINDS[kind]:
        return lambda: host.send(SENT)

    def open_connections() -> Counter[str]:
        host.kernel._flows.clear()
        flows = (replace(SENT, source_port=number, opens=True) for number in range(1, 101))
        return Counter(host.kernel.trace(each) for each in flows)

    return open_connections


@pytest.mark.parametrize("comes", [True, False], ids=["comes", "goes"])
@pytest.mark.parametrize("others", [True, False], ids=["beside others", "alone"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_route_that_comes_or_goes_drops_nothing_in_between(kind: str, others: bool, comes: bool) -> None:
    """Others: the address of another exception ends here all along."""
    also = pair(kind, "10.3.0.0/16", "10.3.0.2", 3) if others else ()
    before, after = Topology(local=("10.3.0.0/16",)), Topology(local=("10.1.0.0/16", "10.3.0.0/16"))
    if not comes:
        before, after = after, before
    host = Host(Facts(topology=before), *pair(kind), *also)
    known = host.made.settled
    host.made.protect(Facts(topology=after))
    host.made.put(pair(kind)[1])
    assert follow_closely(host, known, send_to(host, kind)) == set()


@pytest.mark.parametrize("others", [True, False], ids=["beside others", "alone"])
@pytest.mark.parametrize(("before", "after"), [*permutations(("hosts", "peers", "udp"), 2)])
def test_rules_that_move_together_drop_nothing_in_between(before: str, after: str, others: bool) -> None:
    """Both change their kind in one revision: the exception displaces its subnet's rule all along."""
    also = (*pair(before, "10.3.0.0/16", "10.3.0.2", 3), *pair(after, "10.3.0.0/16", "10.3.0.2", 5)) if others else ()
    for turned in (1, -1):  # whichever comes first
        host = Host(Facts(topology=Topology(local=("10.1.0.0/16", "10.3.0.0/16"))), *pair(before), *also)
        known = host.made.settled
        for each in pair(after)[::turned]:
            host.made.put(each)
        assert follow_closely(host, known, send_to(host, after)) == set()
