"""Whoever writes to a table begins its counts of connections anew: the controller does so only where it must."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from netlimit.compile import compile_rules
from netlimit.limits import Facts
from tests.controller.conftest import Site
from tests.forcing import make_rule

LIMIT = {"target": "10.1.0.2", "rate": "3 connections", "protocol": "tcp"}
UNCONCERNED: list[dict[str, object]] = [
    {"target": "10.1.0.77", "action": "allow"},
    {"target": "10.7.0.0/24", "action": "allow", "direction": "to"},
    {"target": "10.7.0.0/20", "action": "allow", "protocol": "udp", "ports": 53},
    {"target": "10.1.0.78", "rate": "9 packets/s", "protocol": "udp", "ports": 53},
    {"target": "10.1.0.79", "action": "block", "protocol": "tcp", "ports": 25},
    {"target": "10.1.0.80", "rate": "3 connections", "protocol": "tcp"},
]


@pytest.mark.parametrize("rule", UNCONCERNED, ids=str)
def test_what_does_not_concern_connections_leaves_their_count_alone(site: Site, rule: dict[str, object]) -> None:
    assert open_four(site, LIMIT) == ["accept"] * 3 + ["drop"]
    added = site.add(**rule)
    site.controller.tick()
    assert open_connection(site) == "drop"
    site.store.remove(added.id, "test", site.clock())
    site.controller.tick()
    assert open_connection(site) == "drop"


def test_ports_of_management_leave_their_count_alone() -> None:
    rule = make_rule(LIMIT, datetime(2030, 1, 1, tzinfo=UTC))
    chains = [compile_rules([rule], Facts(management=ports))[0].structure.chains for ports in ((22,), (22, 8443))]
    before, after = ({w: rules for w, rules in each.items() if w.table == "security"} for each in chains)
    assert before == after


def test_another_number_begins_their_count_anew(site: Site) -> None:
    assert open_four(site, LIMIT) == ["accept"] * 3 + ["drop"]
    site.add(**{**LIMIT, "target": "10.1.0.80", "rate": "7 connections"})
    site.controller.tick()
    assert open_connection(site) == "accept"


def test_who_is_allowed_later_is_not_counted(site: Site) -> None:
    assert open_four(site, LIMIT) == ["accept"] * 3 + ["drop"]
    site.add(target="10.1.0.0/24", action="allow")
    site.controller.tick()
    assert open_connection(site) == "accept"


def open_four(site: Site, rule: dict[str, object]) -> list[str]:
    site.add(**rule)
    site.controller.tick()
    return [open_connection(site) for _ in range(4)]


def open_connection(site: Site) -> str:
    (verdict,) = site.send("10.1.0.2", protocol="tcp", port=80, opens=True)
    return verdict
