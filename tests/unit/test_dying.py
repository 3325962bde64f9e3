"""What goes no further than the gateway ends no connection where connections at once are limited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from ipaddress import ip_address

import pytest

from netlimit.dying import MOST_LED, list_led
from netlimit.packet import Packet
from netlimit.rules import parse_rule
from tests.unit.shapes import Gateway, gateway_facts
from tests.unit.strategies import NOW

LAST = Packet(
    ip_address("10.1.0.77"),
    ip_address("10.2.0.2"),
    "tcp",
    port=80,
    source_port=20000,
    in_interface="lan",
    out_interface="wan",
    ends=True,
    hop_limit=1,
)
SIX = replace(LAST, src=ip_address("fd00:1::77"), dst=ip_address("fd00:2::2"))
OWN = replace(LAST, dst=ip_address("10.1.0.1"), out_interface=None)
NOBODY: Mapping[str, tuple[str, ...]] = {}
LIMIT = {"rate": "3 connections", "protocol": "tcp"}


def trace(packet: Packet, *targets: str, lacking: str = "", led: Mapping[str, tuple[str, ...]] = NOBODY) -> str:
    """What becomes of a packet where these have a limit."""
    gateway = Gateway(replace(gateway_facts, capabilities={lacking: "it has none"} if lacking else {}))
    gateway.kernel.where = gateway.kernel.where._replace(own=tuple(gateway_facts.own))
    for number, target in enumerate(targets, 1):
        gateway.put(replace(parse_rule({"target": target, **LIMIT}, NOW), id=number))
    gateway.compilation.hold_led(led)
    gateway.sync()
    return gateway.kernel.trace(packet)


@pytest.mark.parametrize("packet", [LAST, replace(LAST, hop_limit=0), OWN, SIX])
def test_it_is_not_heard(packet: Packet) -> None:
    assert trace(packet) == "accept"
    assert trace(packet, "10.1.0.2", "fd00:1::2") == "drop"


@pytest.mark.parametrize(
    "packet",
    [
        replace(LAST, hop_limit=2),
        replace(LAST, ends=False),
        replace(LAST, protocol="udp"),
        replace(LAST, port=179),
        replace(LAST, port=639),
        replace(LAST, port=20000, source_port=646),
        replace(LAST, port=20000, source_port=179),
        replace(OWN, established=True),
        replace(SIX, hop_limit=2),
    ],
)
def test_what_goes_on_or_is_for_this_host_is(packet: Packet) -> None:
    assert trace(packet, "10.1.0.2", "fd00:1::2") == "accept"


def test_nor_where_one_listens_at_what_may_lead_to_others() -> None:
    """A socket is found for it, and proves nothing. What is for another port or address of this host is heard."""
    led = list_led([("10.1.0.1", 80), ("fd00:1::1", 80)])
    six = replace(SIX, dst=ip_address("fd00:1::1"), out_interface=None)
    for packet in (replace(OWN, established=True), replace(six, established=True)):
        assert trace(packet, "10.1.0.2", "fd00:1::2") == "accept"
        assert trace(packet, "10.1.0.2", "fd00:1::2", led=led) == "drop"
        assert trace(packet, "10.1.0.2", "fd00:1::2", led=led, lacking="socket6") == "drop"
        for other in (replace(packet, port=81), replace(packet, port=179), replace(packet, hop_limit=2)):
            assert trace(other, "10.1.0.2", "fd00:1::2", led=led) == "accept"
    assert trace(replace(OWN, dst=ip_address("10.2.0.1"), established=True), "10.1.0.2", led=led) == "accept"


def test_as_many_places_are_listed_as_sets_take() -> None:
    places = [(f"10.1.0.{host}", port) for host in (1, 2) for port in range(1, 40_000)]
    led = list_led([*places, ("fd00::1", 9)])
    assert led["nl-led6"] == ("fd00::1,tcp:9,fd00::1",)
    assert led["nl-led4"][0] == "10.1.0.1,tcp:1,10.1.0.1"
    assert len({*led["nl-led4"]}) == MOST_LED


def test_only_where_connections_at_once_of_that_family_are_limited() -> None:
    assert trace(LAST, "fd00:1::2") == "accept"


def test_who_cannot_tell_sockets_goes_by_addresses_and_who_cannot_tell_hops_leaves_it() -> None:
    assert trace(OWN, "10.1.0.2", lacking="socket") == "accept"
    assert trace(LAST, "10.1.0.2", lacking="socket") == "drop"
    assert trace(LAST, "10.1.0.2", lacking="ttl") == "accept"
