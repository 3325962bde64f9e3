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
from tests.forcing import make_rule
from tests.unit.shapes import gateway_facts
from tests.unit.strategies import NOW, facts

SHAPE = {"action": "shape", "direction": "to"}
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
    "rules_that_were_forced": (
        facts,
        [
            {"target": "10.1.0.0/24", "action": "allow", "protocol": "udp", "ports": 53},
            {"target": "10.1.0.1", "direction": "to", "rate": "100 packets/s", "forced_by": "root"},
            {"target": "10.1.9.9", "action": "block", "forced_by": "root"},
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
    "one_shaped_host": (gateway_facts, [{**SHAPE, "target": "10.1.0.2", "rate": "2 Mbit/s"}]),
    "shaped_hosts_in_a_budget": (
        gateway_facts,
        [
            {**SHAPE, "target": "10.1.0.0/24", "rate": "20 Mbit/s", "per": "target"},
            {**SHAPE, "target": "10.1.0.0/24", "rate": "1 Mbit/s", "ceil": "10 Mbit/s", "per": "host"},
            {**SHAPE, "target": "10.1.0.2", "rate": "5 Mbit/s", "burst": "1 MB"},
        ],
    ),
    "shaped_budgets_that_nest_and_promise_too_much": (
        gateway_facts,
        [
            {**SHAPE, "target": "10.1.0.0/16", "rate": "20 Mbit/s", "per": "target"},
            {**SHAPE, "target": "10.1.0.0/24", "rate": "20 Mbit/s", "per": "target"},
            {**SHAPE, "target": "10.1.0.0/31", "rate": "15 Mbit/s", "ceil": "18 Mbit/s", "per": "target"},
            {**SHAPE, "target": "10.1.1.0/24", "rate": "5 Mbit/s", "per": "target"},
        ],
    ),
    "the_cap_of_a_device": (
        gateway_facts,
        [{**SHAPE, "target": "0.0.0.0/0", "rate": "100 Mbit/s", "per": "target", "interface": "wan"}],
    ),
    "the_cap_of_a_device_with_hosts": (
        gateway_facts,
        [
            {**SHAPE, "target": "0.0.0.0/0", "rate": "100 Mbit/s", "per": "target", "interface": "lan"},
            {**SHAPE, "target": "10.1.0.2", "rate": "2 Mbit/s"},
            {**SHAPE, "target": "fd00:1::/64", "rate": "3 Mbit/s", "per": "target"},
        ],
    ),
    "shaped_blocks_of_addresses": (
        gateway_facts,
        [
            {**SHAPE, "target": "fd00:1::/32", "rate": "10 Mbit/s", "per": "/64"},
            {**SHAPE, "target": "10.1.0.0/16", "rate": "10 Mbit/s", "per": "/24", "interface": "lan"},
        ],
    ),
    "shaped_at_either_end_and_on_the_ingress": (
        gateway_facts,
        [
            {
                **SHAPE,
                "direction": "from",
                "target": "10.1.0.0/24",
                "rate": "1 Mbit/s",
                "per": "host",
                "protocol": "udp",
            },
            {**SHAPE, "target": "10.1.0.1", "rate": "2 Mbit/s", "protocol": "tcp", "ttl": "1h"},
        ],
    ),
    "shaped_ports": (
        gateway_facts,
        [
            {**SHAPE, "target": "10.1.0.2", "protocol": "udp", "ports": [53, "5000-5100"], "rate": "1 Mbit/s"},
            {**SHAPE, "target": "10.1.0.2", "protocol": "tcp", "source_ports": 443, "rate": "2 Mbit/s"},
        ],
    ),
    "shaped_beside_verdicts_limits_and_protected_addresses": (
        gateway_facts,
        [
            {**SHAPE, "target": "10.1.0.0/16", "rate": "1 Mbit/s", "per": "host"},
            {**SHAPE, "target": "10.1.9.9", "rate": "2 Mbit/s"},
            {**SHAPE, "direction": "from", "target": "10.1.0.1", "rate": "3 Mbit/s", "interface": "wan"},
            {"target": "10.1.0.3", "direction": "to", "action": "allow"},
            {"target": "10.1.0.0/16", "direction": "to", "rate": "500 packets/s", "per": "host"},
        ],
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_is_as_it_was_read_last(name: str) -> None:
    host, wanted = STATES[name]
    rules = [replace(make_rule(fields, NOW), id=number) for number, fields in enumerate(wanted, start=1)]
    state, _, problems = compile_rules(rules, host)
    assert not problems
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("NETLIMIT_GOLDEN") == "write":
        path.write_text(f"{state}\n")
    assert f"{state}\n" == path.read_text()


def test_every_golden_text_is_of_a_state() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(STATES)
