"""Spans are read by hand as the library reads them."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from netlimit.spans import name, read_addresses, read_ipv4


@pytest.mark.parametrize(
    "text", ["10.1.0.2", "10.1.0.2/32", "10.1.0.0/16", "10.1.2.3/16", "0.0.0.0/0", "255.255.255.255", "128.0.0.0/1"]
)
def test_ipv4_is_read_as_the_library_does(text: str) -> None:
    network = ip_network(text, strict=False)
    assert read_ipv4(text) == read_addresses(text) == (int(network[0]), int(network[-1]))
    assert name(int(network[0])) == str(network[0])


@pytest.mark.parametrize(
    "text", ["", "10.1.0", "10.1.0.256", "010.1.0.2", "10.1.0.2/33", "10.1.0.2/", "10.1.0.2-10.1.0.3", "fd00::1"]
)
def test_all_else_is_not(text: str) -> None:
    assert read_ipv4(text) is None


@pytest.mark.parametrize("text", ["10.1.0.0/255.255.0.0", "10.1.0.2-10.1.0.9", "fd00::/64", "::ffff:10.1.0.2"])
def test_what_is_odd_is_read_all_the_same(text: str) -> None:
    first, last = read_addresses(text)
    assert first <= last
    assert ip_address(name(first))
