"""Whatever an operator does, who is safe reaches SSH and the API of the gateway, and gets its answers."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from ipaddress import ip_address

import pytest
from hypothesis import given, settings

from netlimit.lockout import Havens
from netlimit.packet import Packet
from netlimit.records import HostStatus
from netlimit.rules import Rule
from tests.size import choose
from tests.unit.operators import MANAGEMENT, Gateway, Step, closures, histories, make_rule
from tests.unit.strategies import NOW
from tests.unit.strategies import OWN as OWN_ADDRESSES
from tests.unit.test_judgement import Kept

OWN, SAFE, STRANGER = "10.1.0.1", "10.1.9.1", "10.1.0.2"


def bring(gateway: Gateway, *steps: Step) -> None:
    for _ in gateway.take(steps):
        pass


@settings(max_examples=choose(350, 1400), deadline=None)  # some 500 or 2,000 rule sets: every history has one or two
@given(histories())
def test_no_rule_of_an_operator_takes_the_gateway_from_who_is_safe(history: list[list[Step]]) -> None:
    gateway = Gateway()
    for steps in history:
        bring(gateway, *steps)
        gateway.exhaust()
        assert gateway.find_lost() == []


@settings(max_examples=60, deadline=None)
@given(histories(passes=4))
def test_nor_does_anything_on_the_way_from_one_rule_set_to_the_next(history: list[list[Step]]) -> None:
    gateway = Gateway()
    for steps in history:
        for step in gateway.take(steps):
            assert gateway.find_lost(("10.1.9.1", "fd00:1::9")) == [], step


STATUS = HostStatus(
    "gw1", "iptables", own=OWN_ADDRESSES[4], management=MANAGEMENT, silence=timedelta(0),
    networks={"10.1.0.0/16": ("lan",), "10.2.0.0/16": ("wan",), "0.0.0.0/0": ("wan",)},
)  # fmt: skip
EVERYWHERE = [f"{16 * part + 9}.8.7.6" for part in range(14)]
NEIGHBOURS = [f"10.{network}.{32 * part + 16}.9" for network in (1, 2) for part in range(8)]
CLIENTS = (range(32800, 61000, 4700), range(49200, 65536, 2700))


@settings(max_examples=150, deadline=None)
@given(closures())
def test_what_needs_no_force_leaves_a_way_to_manage_a_gateway(rules: list[Rule]) -> None:
    """For who is not safe yet: everywhere, and among the neighbours, somebody reaches each port at each address."""
    kept, gateway = Kept({}, Havens([STATUS], NOW)), Gateway()
    for number, rule in enumerate(rules, 1):
        kept.change({number: replace(rule, id=number)})
    bring(gateway, *(Step("put", (rule,)) for rule in kept.rules.values()))
    for own in OWN_ADDRESSES[4]:
        for port in MANAGEMENT:
            for world in (EVERYWHERE, NEIGHBOURS):
                for sources in CLIENTS:
                    ways = (opens(gateway, far, source, own, port) for source in sources for far in world)
                    assert any(ways), f"nobody of {world[0]}… reaches port {port} of {own} from {sources}"


def opens(gateway: Gateway, far: str, source: int, own: str, port: int) -> bool:
    """Whether a connection can be opened: what asks for it comes in, and the answer goes out."""
    there, here = ip_address(far), ip_address(own)
    device = "lan" if far.startswith("10.1.") else "wan"
    ask = Packet(there, here, "tcp", port, source, device, None, 60, opens=True)
    answer = Packet(here, there, "tcp", source, port, None, device, 60)
    return gateway.kernel.trace(ask) == "accept" and gateway.kernel.trace(answer) == "accept"


@pytest.mark.parametrize("rate", ["1 packets/day", "1 connections/day", "1 connections", "12 kbit/s"])
@pytest.mark.parametrize("direction", ["from", "to"])
@pytest.mark.parametrize("action", ["drop", "reject"])
def test_a_limit_on_the_gateway_s_own_address_holds_for_all_but_who_is_safe(
    rate: str, direction: str, action: str
) -> None:
    gateway = Gateway()
    rule = replace(make_rule(OWN, direction, 0, action, rate, ("target",)), id=1)
    bring(gateway, Step("put", (rule,)))

    assert gateway.find_lost() == []
    verdicts = [gateway.kernel.trace(between(direction, STRANGER)) for _ in range(2)]
    assert verdicts == ["accept", action]
    assert gateway.find_lost() == [], "nor does it when a stranger has used it up"

    bring(gateway, Step("put", (replace(rule, forced_by="root"),)))
    verdicts = [gateway.kernel.trace(between(direction, SAFE)) for _ in range(2)]
    assert verdicts == ["accept", action], "unless it was forced"


@pytest.mark.parametrize("target", [OWN, SAFE])
@pytest.mark.parametrize("direction", ["from", "to"])
def test_a_block_of_one_protected_address_hits_who_is_safe_only_if_it_was_forced(target: str, direction: str) -> None:
    gateway = Gateway()
    block = replace(make_rule(target, direction, 0, "block", "", ()), id=1)
    bring(gateway, Step("put", (block,)))
    assert gateway.find_lost() == []
    bring(gateway, Step("put", (replace(block, forced_by="root"),)))
    assert gateway.find_lost() != []


def between(direction: str, other: str) -> Packet:
    """A packet that opens a connection with the gateway: to it, or from it."""
    here, there = ip_address(OWN), ip_address(other)
    packet = Packet(there, here, "tcp", 80, 40000, "lan", None, 1500, opens=True)
    if direction == "to":
        return packet
    return replace(packet, src=here, dst=there, in_interface=None, out_interface="lan")
