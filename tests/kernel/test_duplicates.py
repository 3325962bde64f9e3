"""A copy of our chains that somebody has loaded into the tables of iptables-nft is told, with what removes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from netlimit.conflicts import find_conflicts, is_serious, is_told
from netlimit.duplicates import find_duplicates
from tests.kernel.worker import RemoteKernel

COPIED = """*mangle
:PREROUTING ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:NL-FORWARD - [0:0]
:NL-G1 - [0:0]
:NL-DROP - [0:0]
:others - [0:0]
-A FORWARD -s 192.0.2.1/32 -j others
-A FORWARD -j NL-FORWARD
-A NL-FORWARD -j NL-G1
-A NL-G1 -m set --match-set nl-copied src -g NL-DROP
-A NL-DROP -j DROP
-A others -j RETURN
COMMIT
"""


@pytest.fixture(params=["ip", "ip6"])
def copied(linux: RemoteKernel, request: pytest.FixtureRequest) -> Iterator[str]:
    """The family of what somebody has loaded."""
    tool, family, source = {
        "ip": ("iptables", "inet", "192.0.2.1/32"),
        "ip6": ("ip6tables", "inet6", "2001:db8::1/128"),
    }[request.param]
    saved = COPIED.replace("192.0.2.1/32", source)
    linux.run("ipset", "create", "nl-copied", "hash:ip", "family", family)
    try:
        linux.run("sh", "-c", f"echo '{saved}' | {tool}-nft-restore")
        yield request.param
    finally:
        linux.run("nft", "flush", "ruleset")
        linux.run("ipset", "destroy", "nl-copied")


def test_a_copy_is_told_until_its_commands_have_removed_it(linux: RemoteKernel, copied: str) -> None:
    """And nothing of others goes with it."""
    (finding,) = (each for each in find_conflicts(linux.survey()) if each.name == "copied chains")
    assert is_serious(finding)
    assert is_told(finding), "also in the status"
    assert f"{copied} mangle (3 chains)" in finding.what
    (duplicate,) = find_duplicates(linux.survey().nftables)
    assert duplicate.removal in finding.advice
    linux.run("sh", "-c", duplicate.removal)
    report = linux.survey()
    assert not list(find_duplicates(report.nftables))
    assert "NL-" not in report.nftables
    assert "jump others" in report.nftables


def test_chains_of_others_whose_names_begin_as_ours_are_none(linux: RemoteKernel) -> None:
    try:
        linux.run("iptables-nft", "-N", "NL-AMSTERDAM")
        linux.run("iptables-nft", "-A", "FORWARD", "-j", "NL-AMSTERDAM")
        linux.run("nft", "add table inet other; add chain inet other NL-FORWARD")
        assert not list(find_duplicates(linux.survey().nftables))
    finally:
        linux.run("nft", "flush", "ruleset")
