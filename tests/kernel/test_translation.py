"""Who may translate addresses is known as soon as he may."""

from __future__ import annotations

import pytest

from tests.kernel.worker import RemoteKernel

CHAIN = "type {kind} hook prerouting priority 0"


def test_legacy_tables_are_known_by_their_rules(untouched: RemoteKernel) -> None:
    """A look makes the table, and it stays: nobody translates by that."""
    assert untouched.translating() == frozenset()
    for command in ("iptables-legacy", "ip6tables-legacy"):
        for table in ("filter", "nat"):
            untouched.run(command, "-t", table, "-L")
        untouched.run(command, "-t", "filter", "-A", "INPUT", "-j", "ACCEPT")
    assert untouched.translating() == frozenset()
    for command, found in (("ip6tables-legacy", {6}), ("iptables-legacy", {4, 6})):
        untouched.run(command, "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE")
        assert untouched.translating() == found
    untouched.run("iptables-legacy", "-t", "nat", "-F")
    assert untouched.translating() == {6}


@pytest.mark.parametrize("hook", ["PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"])
def test_a_rule_in_any_chain_may_translate(untouched: RemoteKernel, hook: str) -> None:
    untouched.run("iptables-legacy", "-t", "nat", "-N", "theirs")
    untouched.run("iptables-legacy", "-t", "nat", "-A", hook, "-j", "theirs")
    assert untouched.translating() == {4}


@pytest.mark.parametrize(("family", "found"), [("ip", {4}), ("ip6", {6}), ("inet", {4, 6})])
def test_chains_of_nftables_are_known_while_there(untouched: RemoteKernel, family: str, found: set[int]) -> None:
    untouched.run("nft", "add", "table", family, "theirs")
    untouched.run("nft", f"add chain {family} theirs filters {{ {CHAIN.format(kind='filter')}; }}")
    assert untouched.translating() == frozenset()
    untouched.run("nft", f"add chain {family} theirs leads {{ {CHAIN.format(kind='nat')}; }}")
    assert untouched.translating() == found
    untouched.run("nft", "delete", "table", family, "theirs")
    assert untouched.translating() == frozenset()
