"""Rules that only observe count whatever others of the same rate count, too."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from netlimit.compile import compile_rules
from netlimit.kernel.fake import FakeKernel
from netlimit.limits import Facts
from netlimit.packet import Packet
from netlimit.plan import diff
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
