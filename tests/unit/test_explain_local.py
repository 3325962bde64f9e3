"""What `explain` says of packets that end on the host by its routes, and not by an address of its own."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from netlimit.explain import Explanation, explain
from netlimit.packet import Packet
from netlimit.rules import parse_rule
from tests.unit.strategies import NOW, keep

LOCAL = ("10.3.0.0/24", "10.1.255.255/32", "fd03::/48")


def ask(target: str, dst: str, leaves_by: str | None = None) -> Explanation:
    rule = parse_rule({"target": target, "direction": "to", "action": "block"}, NOW)
    source = ip_address("fd01::2" if ":" in dst else "10.1.0.2")
    packet = Packet(source, ip_address(dst), in_interface="lan", out_interface=leaves_by)
    return explain(keep([rule]), packet, local=LOCAL)


def queue(target: str, direction: str, dst: str) -> Explanation:
    fields = {"target": target, "direction": direction, "action": "shape", "rate": "1 Mbit/s"}
    source = ip_address("fd01::2" if ":" in dst else "10.1.0.2")
    packet = Packet(source, ip_address(dst), in_interface="lan")
    return explain(keep([parse_rule(fields, NOW)]), packet, local=(*LOCAL, "fd01::/128"))


@pytest.mark.parametrize(
    ("around", "address"), [("10.3.0.0/24", "10.3.0.5"), ("10.1.0.0/16", "10.1.255.255"), ("fd00::/8", "fd03::5")]
)
def test_only_a_rule_that_names_the_address_hits(around: str, address: str) -> None:
    spared = ask(around, address)
    assert spared.verdict == "passes"
    assert f"{address} ends on this host, and the rule does not name it" in spared.text
    assert ask(address, address).verdict == "blocked"


def test_what_is_forwarded_is_hit() -> None:
    assert ask("10.1.0.0/16", "10.1.255.254").verdict == "blocked"
    assert ask("10.1.0.0/16", "10.1.255.255", leaves_by="wan").verdict == "blocked", "whoever asks knows better"


@pytest.mark.parametrize("address", ["10.1.255.255", "255.255.255.255", "fd01::"])
def test_what_is_for_a_single_address_is_shaped(address: str) -> None:
    target = "fd01::2" if ":" in address else "10.1.0.2"
    assert queue(target, "from", address).verdict == "shaped"
    assert queue(address, "to", address).verdict == "shaped"


@pytest.mark.parametrize("address", ["10.3.0.5", "fd03::5", "239.1.2.3"])
def test_what_is_for_a_network_or_a_group_is_not(address: str) -> None:
    found = queue("fd01::2" if ":" in address else "10.1.0.2", "from", address)
    assert found.verdict == "passes"
    assert f"{address} ends on this host, where nothing is shaped" in found.text


@pytest.mark.parametrize(("address", "leaves_by", "verdict"), [
    ("10.1.255.255", None, "blocked"),
    ("10.3.0.5", None, "blocked"),
    ("10.3.0.5", "wan", "passes"),
    ("10.3.1.5", None, "passes"),
])  # fmt: skip
def test_nobody_is_safe_to_others_by_an_address_that_ends_here(
    address: str, leaves_by: str | None, verdict: str
) -> None:
    """A network that is safe may hold it."""
    rule = parse_rule({"target": "192.0.2.7", "action": "block"}, NOW)
    packet = Packet(ip_address("192.0.2.7"), ip_address(address), in_interface="lan", out_interface=leaves_by)
    safe = {"10.1.0.0/16": "NETLIMIT_SAFE", "10.3.0.0/16": "NETLIMIT_SAFE"}
    assert explain(keep([rule]), packet, safe=safe, local=LOCAL).verdict == verdict
