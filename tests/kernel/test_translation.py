"""Who may translate addresses is known as soon as he may."""

from __future__ import annotations

import pytest

from tests.kernel.worker import RemoteKernel

CHAIN = "type {kind} hook prerouting priority 0"


def test_legacy_tables_are_known_by_their_family(untouched: RemoteKernel) -> None:
    untouched.run("iptables-legacy", "-t", "filter", "-L")
    assert untouched.translating() == frozenset()
    untouched.run("ip6tables-legacy", "-t", "nat", "-L")
    assert untouched.translating() == {6}
    untouched.run("iptables-legacy", "-t", "nat", "-A", "PREROUTING", "-j", "ACCEPT")
    assert untouched.translating() == {4, 6}


@pytest.mark.parametrize(("family", "found"), [("ip", {4}), ("ip6", {6}), ("inet", {4, 6})])
def test_chains_of_nftables_are_known_while_there(untouched: RemoteKernel, family: str, found: set[int]) -> None:
    untouched.run("nft", "add", "table", family, "theirs")
    untouched.run("nft", f"add chain {family} theirs filters {{ {CHAIN.format(kind='filter')}; }}")
    assert untouched.translating() == frozenset()
    untouched.run("nft", f"add chain {family} theirs leads {{ {CHAIN.format(kind='nat')}; }}")
    assert untouched.translating() == found
    untouched.run("nft", "delete", "table", family, "theirs")
    assert untouched.translating() == frozenset()
