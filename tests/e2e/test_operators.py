"""Fifty random rule sets of somebody who forces nothing, with real packets: who is safe gets in all the time."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit.errors import RuleError
from netlimit.rules import Rule, parse_rule
from scripts.testbed.namespaces import CLIENT, CLIENT6, LAN, LAN6, SERVER, WAN, WAN6, Lab, Namespace, close_pipes
from tests.e2e.gateway import Gateway
from tests.unit.operators import ACTIONS, LIMITS, PERS, SELECTORS

ADMIN = "10.1.88.1"
SAFE = (ADMIN, CLIENT6)
SETS, SEED = 50, 20_301
TARGETS = (
    *(LAN, LAN, WAN, ADMIN, "10.1.255.255", "10.1.88.0/24", "10.1.0.0/16", "10.0.0.0/8", "0.0.0.0/0", "128.0.0.0/1"),
    *(LAN6, LAN6, WAN6, CLIENT6, "fd00:1::/64", "fd00::/16", "::/0", CLIENT, SERVER),
)
AT_HOME = [(ADMIN, LAN), (ADMIN, WAN), (CLIENT6, LAN6), (CLIENT6, WAN6)]
"""From whom to where."""


class Helper:
    """See `knocker.py`."""

    def __init__(self, namespace: Namespace, *words: str) -> None:
        script = str(Path(__file__).with_name("knocker.py"))
        pipe = subprocess.PIPE
        self._process = namespace.popen(sys.executable, script, *words, stdin=pipe, stdout=pipe)
        assert self._read() == "ready"

    def knock(self, source: str, host: str, seconds: float = 5) -> bool:
        """Whether a port of the gateway answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{source} {host} 22 {seconds}\n")
        self._process.stdin.flush()
        return self._read() == "open"

    def close(self) -> None:
        self._process.kill()
        self._process.wait(60)
        close_pipes(self._process)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def knocker(lab: Lab) -> Iterator[Helper]:
    """Nobody knows of its port that the gateway is managed by it: no connection passes because it is open."""
    lab.add_client_addresses(ADMIN)
    server, knocker = Helper(lab.gateway, "answer", "22"), Helper(lab.client, "knock")
    yield knocker
    knocker.close()
    server.close()


def make_rule(chance: random.Random, now: datetime) -> Rule:
    fields: dict[str, object] = {"target": chance.choice(TARGETS), "direction": chance.choice(["from", "to"])}
    fields |= chance.choice(SELECTORS) | {"action": chance.choice(ACTIONS)} | chance.choice([{}, {}, {"ttl": "1s"}])
    if fields["action"] in ("allow", "block"):
        return parse_rule(fields, now)
    limit = {"rate": chance.choice(LIMITS)} if fields.get("protocol") != "icmp" else {"rate": "1 packets/day"}
    for per in (*chance.sample(PERS, 2), "target"):
        try:
            return parse_rule({**fields, **limit, "per": per}, now)
        except RuleError:  # more buckets than the kernel holds, or no such block
            continue
    raise AssertionError("`per: target` always works")


def test_no_rule_of_an_operator_takes_the_gateway_from_who_is_safe(gateway: Gateway, lab: Lab, knocker: Helper) -> None:
    chance = random.Random(SEED)
    hits = 0
    for number in range(SETS):
        now = datetime.now(UTC)
        rules = {rule.identity: rule for rule in (make_rule(chance, now) for _ in range(8))}
        if number % 3:
            gateway.store.rollback(0, "test", now)
        known = {kept.rule.identity for kept in gateway.store.select(limit=1000)[0]}
        gateway.store.add([rule for key, rule in rules.items() if key not in known], "test", now)
        if number % 25 == 24:
            gateway.stop()
            gateway.launch()
        gateway.wait_until_taken_in()
        hits += not knocker.knock(CLIENT, LAN, 0.1)  # a stranger uses up what is left
        for source, host in AT_HOME:
            assert knocker.knock(source, host), f"set {number}: {[str(rule) for rule in rules.values()]}"
    assert hits > SETS / 4, "strangers are kept out"
