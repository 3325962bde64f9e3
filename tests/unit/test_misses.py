"""Rules that hit nothing, or not all that they speak of, are told."""

from __future__ import annotations

from typing import Any

import pytest

from netlimit.limits import Facts
from netlimit.misses import find_miss, may_miss
from netlimit.rules import parse_rule
from netlimit.tree import Device, Topology
from tests.unit.strategies import NOW

OWN = frozenset({"10.1.0.1", "fd00:1::1"})
WAN = {"interface": "wan"}


ENDING = ("10.3.0.0/24", "10.4.0.0/16", "fd03::/48")


def facts(ending: tuple[str, ...] = (), **devices: str) -> Facts:
    known = {"wan": Device(1, True), **{name: Device(9, True, kind=kind) for name, kind in devices.items()}}
    return Facts(own=OWN, topology=Topology(known, local=ending, ending=ending))


def told(rule: dict[str, Any], facts: Facts) -> str:
    read = parse_rule({"rate": "9 packets/s", "per": "target", "direction": "to", **rule}, NOW)
    found = find_miss(read, facts)
    assert found is None or may_miss(read, facts)
    return "" if found is None else f"{'partly: ' * found.partly}{found.text}"


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"target": "127.0.0.0/8"}, "partly: What this host sends to itself is never touched"),
        ({"target": "127.1.2.3", "direction": "from"}, "an address of 127.1.2.3,"),
        ({"target": "::1", **WAN}, "partly: What this host sends to itself"),
        ({"target": "10.1.0.1", **WAN}, "10.1.0.1 is this host's own"),
        ({"target": "fd00:1::1", **WAN}, "Leave out `interface`"),
        ({"target": "10.2.0.1", "interface": "lo"}, "Name another interface"),
        ({"target": "10.2.0.1", "interface": "dsl"}, "There is no device dsl on this host"),
    ],
)
def test_what_hits_nothing_is_told(rule: dict[str, Any], words: str) -> None:
    assert words in told(rule, facts())


@pytest.mark.parametrize(
    "rule",
    [
        {"target": "10.1.0.1"},
        {"target": "10.1.0.1", "direction": "from", **WAN},
        {"target": "10.1.0.0/24", **WAN},
        {"target": "10.2.0.1", **WAN},
        {"target": "126.0.0.0/7"},
        {"target": "0.0.0.0/0", **WAN},
    ],
)
def test_of_what_hits_something_nothing_is_told(rule: dict[str, Any]) -> None:
    assert told(rule, facts()) == ""


@pytest.mark.parametrize("target", ["10.3.0.0/24", "10.3.0.128/25", "10.4.7.0/24", "fd03::/48", "fd03:0:0:7::/64"])
def test_a_network_that_ends_here_as_a_whole_is_told(target: str) -> None:
    assert f"All of {target} ends on this host by a route" in told({"target": target}, facts(ENDING))
    assert told({"target": target}, facts()) == ""
    assert told({"target": target}, facts(ENDING, blue="vrf")) == ""


@pytest.mark.parametrize(
    "rule",
    [
        {"target": "10.3.0.5"},
        {"target": "fd03::5"},
        {"target": "10.3.0.0/23"},
        {"target": "0.0.0.0/0"},
        {"target": "10.5.0.0/24"},
        {"target": "10.3.0.0/24", "direction": "from"},
    ],
)
def test_what_is_forwarded_too_or_names_one_address_hits(rule: dict[str, Any]) -> None:
    assert told(rule, facts(ENDING)) == ""


def test_what_goes_to_an_address_that_ends_here_by_a_route_is_hit_in_part() -> None:
    ending = facts(("10.3.0.255/32",))
    assert told({"target": "10.3.0.255", **WAN}, ending).startswith("partly: What comes for 10.3.0.255 ends on this")
    assert told({"target": "10.3.0.255"}, ending) == ""


def test_in_a_vrf_an_address_of_this_host_may_be_another_one() -> None:
    assert told({"target": "10.1.0.1", **WAN}, facts(blue="vrf")) == ""
