"""Two gateways with keepalived fail over while one host floods both, whatever the rules; one is MASTER at a time."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit.rules import parse_rule
from scripts.testbed import streams
from tests.databases import Postgres
from tests.e2e.pair import VIRTUAL, Pair, open_pair

LIMITS: list[dict[str, object]] = [
    {"target": "10.0.0.0/8", "rate": "20 packets/s", "per": "target"},
    {"target": "10.5.0.1", "direction": "from", "rate": "1 packets/min"},
    {"target": "10.5.0.2", "direction": "to", "rate": "1 packets/min"},
    {"target": "224.0.0.0/4", "direction": "to", "rate": "1 packets/min", "per": "target"},
    {"target": "0.0.0.0/0", "direction": "to", "interface": "lan", "action": "shape", "rate": "8 kbit/s",
     "per": "target"},
]  # fmt: skip
BLOCKS: list[dict[str, object]] = [
    {"target": "10.5.0.0/16", "action": "block"},
    {"target": "10.5.0.0/16", "direction": "to", "action": "block"},
    {"target": "224.0.0.0/8", "direction": "to", "action": "block"},
]


@pytest.fixture(scope="module")
def pair(root: None, postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    name = postgres.make_database()
    directory: Path = tmp_path_factory.mktemp("pair")
    with open_pair(directory, postgres.url(name)) as pair:
        pair.store.upgrade()
        for node in pair.nodes:
            node.start_controller()
        pair.wait_until_applied()
        yield pair
    postgres.drop_database(name)


@pytest.mark.parametrize(
    ("rules", "unicast"),
    [(LIMITS, False), (BLOCKS, False), (BLOCKS, True)],
    ids=["limits", "blocks", "blocks, and adverts to one address"],
)
def test_one_is_master_and_the_other_takes_over(pair: Pair, rules: list[dict[str, object]], unicast: bool) -> None:
    now = datetime.now(UTC)
    kept = pair.store.add([parse_rule(fields, now) for fields in rules], "test", now)
    pair.wait_until_applied()
    try:
        for node in pair.nodes:
            node.start_keepalived(unicast)
        with streams.sending(pair.host, VIRTUAL, rate=1500, seconds=40, size=400):
            pair.wait(lambda: pair.masters == ["one"], "the first to be MASTER")
            seen = []
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                seen.append(pair.masters)
                time.sleep(0.05)
            assert seen == [["one"]] * len(seen)
            pair.one.stop_keepalived()
            pair.wait(lambda: pair.masters == ["two"], "the second to take over", seconds=10)
            pair.one.start_keepalived(unicast)
            pair.wait(lambda: pair.masters == ["one"], "the first to come back", seconds=10)
    finally:
        for node in pair.nodes:
            node.stop_keepalived(signal.SIGTERM)
        for rule in kept:
            pair.store.remove(rule.id, "test", datetime.now(UTC))
        pair.wait_until_applied()
