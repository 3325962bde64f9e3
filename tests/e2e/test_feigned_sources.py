"""Who feigns the address of another where no route leads back to it uses up no bucket of his (rp_filter)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import pytest

from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, SERVER, WAN, WAN_MAC, Lab
from tests.e2e import frames
from tests.e2e.gateway import Gateway

OFF, STRICT, LOOSE = 0, 1, 2
BURST, FEIGNED = 20, 100
SOURCE_PORTS = count(3000)
FEW = {"rate": "1 packets/h", "burst": BURST}
RULES: dict[str, dict[str, object]] = {
    "an address": {"target": CLIENT, **FEW},
    "a budget": {"target": "10.1.0.0/16", "per": "target", **FEW},
    "hosts": {"target": "10.1.0.0/16", "per": "host", **FEW},
    "connections": {"target": CLIENT, "rate": "1 connections/h", "burst": BURST, "protocol": "udp"},
}


def set_filter(lab: Lab, value: int, device: str = "wan") -> None:
    lab.gateway.run("sysctl", "-qw", f"net.ipv4.conf.{device}.rp_filter={value}")


@pytest.fixture(autouse=True)
def as_it_was(lab: Lab) -> Iterator[None]:
    yield
    set_filter(lab, OFF)
    set_filter(lab, OFF, "all")


def feign(lab: Lab, to: str) -> None:
    """The server sends as if it were the client, each packet a flow of its own."""
    packets = (frames.ip(CLIENT, to, frames.UDP, frames.udp(CLIENT, to, 9, 2000 + n, b"x")) for n in range(FEIGNED))
    frames.send(lab.server, [frames.frame(packet, WAN_MAC) for packet in packets])


def count_passing(lab: Lab) -> int:
    """Of as many packets as the burst holds, each a flow of its own."""
    ports = islice(SOURCE_PORTS, BURST)
    packets = (frames.ip(CLIENT, SERVER, frames.UDP, frames.udp(CLIENT, SERVER, 9000, each, b"x")) for each in ports)
    with streams.receive(lab.server) as receiver:
        frames.send(lab.client, [frames.frame(packet) for packet in packets])
    return receiver.report().packets


@pytest.mark.parametrize("device", ["wan", "all"])
@pytest.mark.parametrize("kind", RULES)
def test_what_the_kernel_throws_away_is_charged_to_nobody(gateway: Gateway, lab: Lab, kind: str, device: str) -> None:
    set_filter(lab, STRICT, device)
    (rule,) = gateway.put(RULES[kind])
    feign(lab, WAN)
    feign(lab, SERVER)
    assert gateway.count(rule).matched_packets == 0
    assert count_passing(lab) == BURST
    assert count_passing(lab) == 0, "the limit is there"


@pytest.mark.parametrize("value", [OFF, LOOSE])
def test_what_the_kernel_leads_on_is_charged(gateway: Gateway, lab: Lab, value: int) -> None:
    set_filter(lab, value)
    gateway.put(RULES["an address"])
    feign(lab, WAN)
    assert count_passing(lab) == 0


def test_a_rule_for_a_device_counts_only_what_comes_in_there(gateway: Gateway, lab: Lab) -> None:
    (rule,) = gateway.put({**RULES["an address"], "interface": "lan"})
    feign(lab, WAN)
    assert gateway.count(rule).matched_packets == 0
    assert count_passing(lab) == BURST


def test_ports_are_asked_before_they_are_translated(gateway: Gateway, lab: Lab) -> None:
    """Also where the kernel filters sources: a rule for port 9000 holds what is sent there, wherever it is led."""
    set_filter(lab, STRICT)
    nat = ("-t", "nat", "PREROUTING", "-p", "udp", "--dport", "9000", "-j", "REDIRECT", "--to-ports", "9001")
    lab.gateway.run("iptables-legacy", "-w", *nat[:2], "-A", *nat[2:])
    try:
        (rule,) = gateway.put({**RULES["an address"], "protocol": "udp", "ports": [9000]})
        count_passing(lab)
        assert gateway.count(rule).matched_packets == BURST
    finally:
        lab.gateway.run("iptables-legacy", "-w", *nat[:2], "-D", *nat[2:])
