"""Connections are asked for ports that were sent where somebody translates, and from the boot on if somebody did."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from netlimit.controller import Controller, Setup
from netlimit.kernel.fake import FakeKernel
from netlimit.store import open_replica
from tests.controller.conftest import Site

RULES: tuple[dict[str, object], ...] = (
    {"target": "10.1.0.2", "protocol": "udp", "ports": [53], "rate": "5 packets/s"},
    {"target": "fd00:1::2", "protocol": "udp", "ports": [53], "rate": "5 packets/s"},
)


def asking(kernel: FakeKernel) -> set[int]:
    """The families in which rules ask for them."""
    return {
        chain.family for chain, rules in kernel.chains.items() if any("--ctorigdstport" in rule.text for rule in rules)
    }


def test_rules_follow_who_translates(site: Site) -> None:
    for fields in RULES:
        site.add(**fields)
    site.controller.tick()
    assert asking(site.kernel) == set()
    for translated in ({4}, {4, 6}, {6}, set[int]()):
        site.kernel.translated = frozenset(translated)
        site.controller.tick()
        assert asking(site.kernel) == translated


def test_a_boot_before_anybody_translates_goes_by_what_was(site: Site, tmp_path: Path) -> None:
    for fields in RULES:
        site.add(**fields)
    site.kernel.translated = frozenset({4})
    site.controller.tick()
    with closing(open_replica(tmp_path / "copy", "gw")) as replica:
        replica.follow(site.store)
        kernel = FakeKernel(now=lambda: site.clock().timestamp())
        again = Controller(replica, kernel, Setup("gw", "fake"), site.clock)
        again.sync()
        assert asking(kernel) == {4}
        again.tick()
        assert asking(kernel) == set(), "a controller that runs follows what is"
