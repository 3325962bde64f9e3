"""Whole states as texts: what the kernel is given for a rule set, to be read by people.

NETLIMIT_GOLDEN=write writes the files anew; what changed in them then belongs into the commit, with the reason.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from netlimit.compile import compile_rules
from netlimit.limits import Facts
from netlimit.rules import parse_rule
from tests.unit.strategies import NOW, facts

GOLDEN = Path(__file__).parent / "golden"
STATES: dict[str, tuple[Facts, list[dict[str, object]]]] = {
    "one_host": (Facts(), [{"target": "10.1.2.3", "rate": "200 packets/s"}]),
    "hosts_with_an_exception_and_shared_budgets": (
        Facts(),
        [
            {"target": "10.1.0.0/16", "rate": "200 packets/s", "per": "host"},
            {"target": "10.1.2.3", "rate": "1000 packets/s", "action": "reject"},
            {"target": "10.1.0.0/16", "rate": "50 Mbit/s", "per": "target"},
            {"target": "10.1.0.0/16", "rate": "10 Mbit/s", "per": "/24"},
            {"target": "10.1.0.0/16", "direction": "to", "rate": "5 MB/s", "per": "host", "action": "observe"},
        ],
    ),
    "verdicts_and_protected_addresses": (
        facts,
        [
            {"target": "10.0.0.0/8", "action": "block"},
            {"target": "10.1.0.0/24", "action": "allow", "protocol": "udp", "ports": 53},
            {"target": "10.2.0.2", "direction": "to", "action": "block"},
            {"target": "10.1.0.1", "direction": "to", "rate": "100 packets/s"},
            {"target": "10.1.9.9", "action": "block"},
        ],
    ),
    "connections": (
        Facts(),
        [
            {
                "target": "2001:db8::/64",
                "protocol": "tcp",
                "ports": [80, 443],
                "rate": "10 connections/s",
                "per": "/72",
            },
            {"target": "2001:db8::/64", "rate": "50 connections", "per": "/80"},
            {"target": "2001:db8::1", "direction": "to", "rate": "20 connections", "per": "peer"},
            {
                "target": "2001:db8::2",
                "direction": "to",
                "rate": "5 connections/min",
                "per": "peer",
                "interface": "lan",
            },
        ],
    ),
    "more_limits_than_one_chain_takes": (
        Facts(),
        [{"target": f"10.1.0.{n}", "rate": f"{100 * n} packets/s"} for n in range(1, 21)],
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_is_as_it_was_read_last(name: str) -> None:
    host, wanted = STATES[name]
    rules = [replace(parse_rule(fields, NOW), id=number) for number, fields in enumerate(wanted, start=1)]
    state, _, problems = compile_rules(rules, host)
    assert not problems
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("NETLIMIT_GOLDEN") == "write":
        path.write_text(f"{state}\n")
    assert f"{state}\n" == path.read_text()


def test_every_golden_text_is_of_a_state() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(STATES)
