"""Rules that only observe count whatever others of the same rate count, too."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from netlimit.compile import compile_rules
from netlimit.explain import explain
from netlimit.kernel.fake import FakeKernel
from netlimit.limits import Facts
from netlimit.packet import Packet
from netlimit.plan import diff
from netlimit.precedence import compare
from netlimit.state import State, Structure
from tests.unit.test_make_before_break import rules

OBSERVED = {"action": "observe", "direction": "to"}
WATCHED = [
    ({"target": "10.1.0.0/24"}, {"target": "10.2.0.0/16"}),
    ({"target": "10.2.0.0/24"}, {"target": "10.2.0.0/16"}),
]
"""Targets that lie apart, and that lie in each other."""


@pytest.mark.parametrize("targets", WATCHED, ids=["apart", "nested"])
@pytest.mark.parametrize(
    "what", [{"rate": "20 packets/min", "per": "peer"}, {"rate": "5 connections", "per": "host"}], ids=["peers", "open"]
)
@pytest.mark.parametrize("backwards", [False, True])
def test_each_counts_for_itself(
    targets: tuple[dict[str, object], ...], what: dict[str, object], backwards: bool
) -> None:
    every = rules(*({"id": i, **OBSERVED, **what, **target} for i, target in enumerate(targets, 1)))
    state, _, problems = compile_rules(every[::-1] if backwards else every, Facts())
    assert problems == {}
    kernel = FakeKernel()
    for step in diff(state, State(Structure(), {})).steps:
        kernel.apply(step)
    source, target = ip_address("172.16.0.1"), ip_address("10.2.0.9")
    for port in range(100):
        packet = Packet(source, target, "tcp", 80, 2000 + port, "lan", "wan", 60, opens=True)
        assert kernel.trace(packet) == "accept"
    counted = {
        key: (reading.packets, name)
        for name, held in kernel.readings([each for each in state.structure.sets if each.startswith("nl-l")]).items()
        for key, reading in held.items()
    }
    concerned = {rule["target"] for rule in targets if rule["target"] != "10.1.0.0/24"}
    assert {key for key, (packets, _) in counted.items() if packets == 100} == concerned
    over = kernel.readings([each for each in state.structure.sets if each.startswith("nl-d")])
    assert {key for held in over.values() for key, reading in held.items() if reading.packets > 50} == concerned


NESTED = [
    pytest.param("10.2.0.0/16", "10.2.0.9", "10.2.0.9", id="forwarded"),
    pytest.param("239.1.0.0/16", "239.1.1.1", "239.1.1.1", id="multicast"),  # what names one is asked on the host, too
]


@pytest.mark.parametrize(("subnet", "one", "to"), NESTED)
@pytest.mark.parametrize(
    ("what", "alone"),
    [
        ({"rate": "20 packets/min", "per": "peer"}, False),
        ({"rate": "5 connections", "per": "host"}, False),
        ({"rate": "20 packets/min", "per": "host"}, True),
    ],
    ids=["peers", "open", "hosts"],
)
def test_what_is_explained_is_what_counts(subnet: str, one: str, to: str, what: dict[str, object], alone: bool) -> None:
    """Alone the more specific one counts where both have their buckets in one table."""
    every = rules(*({"id": i, **OBSERVED, **what, "target": target} for i, target in enumerate((subnet, one), 1)))
    state, _, problems = compile_rules(every, Facts())
    assert problems == {}
    kernel = FakeKernel()
    for step in diff(state, State(Structure(), {})).steps:
        kernel.apply(step)
    packet = Packet(ip_address("172.16.0.1"), ip_address(to), "tcp", 80, 2000, "lan", "wan", 60, opens=True)
    assert kernel.trace(packet) == "accept"
    sets = [name for name in state.structure.sets if name.startswith("nl-l")]
    counted = {key for held in kernel.readings(sets).values() for key, reading in held.items() if reading.packets}
    assert counted == ({one} if alone else {subnet, one})
    told = {step.rule.id for step in explain(every, packet).steps if step.rule is not None and step.hits}
    assert told == ({2} if alone else {1, 2})
    assert bool(compare(every[1], every[:1], Facts())) is alone
