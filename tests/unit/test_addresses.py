"""An IPv4 address is one however it is written, wherever it is read."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_network

import pytest

from netlimit.addresses import read_address, read_network
from netlimit.compile import Compilation
from netlimit.errors import RuleError
from netlimit.limits import Facts, own_addresses, parse_safe
from netlimit.rules import parse_rule, parse_target
from netlimit.settings import parse_safe as parse_setting
from tests.unit.strategies import NOW

SPELLINGS = {
    "::ffff:10.1.0.9": "10.1.0.9/32",
    "::FFFF:a01:9": "10.1.0.9/32",
    "0:0:0:0:0:ffff:10.1.0.9": "10.1.0.9/32",
    "0000:0000:0000:0000:0000:ffff:0a01:0009/128": "10.1.0.9/32",
    "::ffff:10.1.0.0/112": "10.1.0.0/16",
    "::ffff:0:0/96": "0.0.0.0/0",
    " ::ffff:10.1.0.9 ": "10.1.0.9/32",
}
NO_IPV4 = ["64:ff9b::a01:9", "2002:a01:9::/48", "::1", "::/0", "::/1", "::ffff:0:a01:9", "fe80::1", "2001:db8::/32"]
NOBODY = ["::fffe:0:0/95", "::/80", "::/64", "::/10", "::10.1.0.9", "::a01:0/112"]


@pytest.mark.parametrize("text", SPELLINGS)
def test_a_mapped_address_is_one_of_ipv4(text: str) -> None:
    plain = ip_network(SPELLINGS[text])
    assert parse_target(text) == plain
    assert parse_setting([text]) == (plain,)
    assert parse_safe((text.strip(),)) == (plain,)
    assert read_network(text) == plain
    if plain.prefixlen == 32:
        address = text.strip().partition("/")[0]
        assert read_address(address) == plain.network_address
        assert own_addresses((address,)) == {str(plain.network_address)}
        assert parse_rule({"target": text, "rate": "5 packets/s", "per": "/32"}, NOW).family == 4


@pytest.mark.parametrize("text", NO_IPV4)
def test_what_is_really_of_ipv6_stays_so(text: str) -> None:
    assert parse_target(text) == ip_network(text)
    assert parse_setting([text]) == (ip_network(text),)


@pytest.mark.parametrize("text", NOBODY)
def test_a_network_in_which_no_packet_can_be_is_refused(text: str) -> None:
    with pytest.raises(RuleError, match="IPv4"):
        parse_target(text)
    with pytest.raises(ValueError, match="IPv4"):
        parse_setting([text])


@pytest.mark.parametrize(
    "text", ["010.1.0.9", "10.1.0.09", "10.1.9", "0x0a010009", "167837705", "10.1.0.9/255.255.0.0"]
)
def test_spellings_that_programs_read_in_different_ways_are_refused(text: str) -> None:
    with pytest.raises(RuleError):
        parse_target(text)


def test_a_zone_is_no_part_of_an_address() -> None:
    assert read_address("fe80::1%eth0") == ip_address("fe80::1")
    with pytest.raises(ValueError, match="zone"):
        parse_setting(["fe80::1%eth0"])
    with pytest.raises(RuleError, match="interface"):
        parse_target("fe80::1%eth0")


def test_a_rule_that_a_former_version_took_for_one_of_ipv6_is_told_how_to_write_it() -> None:
    kept = replace(parse_rule({"target": "10.1.0.9", "rate": "5 packets/s"}, NOW), id=1)
    compilation = Compilation(Facts())
    problem = compilation.put(replace(kept, target=ip_network("::ffff:10.1.0.9/128")))
    assert problem is not None
    assert "10.1.0.9" in problem
    assert compilation.put(kept) is None
    assert compilation.problems == {}
