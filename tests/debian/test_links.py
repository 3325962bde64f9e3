"""However packets come to the gateway, a limit holds whom it names, and charges each packet once."""

from __future__ import annotations

import json
import sys
from subprocess import PIPE

import pytest

from scripts.testbed.namespaces import SERVER, Lab
from tests import warm
from tests.debian.links import LINKS
from tests.e2e.evasion import wire
from tests.e2e.evasion.headers import UDP, Ends, ip4, udp
from tests.e2e.gateway import Gateway

SENT = 40
BURST = 10
SIZE = 100
FREE, BLOCKED, PACKETS, BITS, CONNECTIONS = (f"10.5.1.{n}" for n in range(1, 6))
TO_BLOCKED, TO_PACKETS = "10.4.1.1", "10.4.1.2"
LIMIT: dict[str, object] = {"rate": "6 packets/min", "burst": BURST}
RULES: dict[str, dict[str, object]] = {
    BLOCKED: {"action": "block"},
    PACKETS: LIMIT,
    BITS: {"rate": "12 kbit/s"},
    CONNECTIONS: {"rate": "6 connections/min", "burst": BURST},
    TO_BLOCKED: {"action": "block", "direction": "to"},
    TO_PACKETS: {**LIMIT, "direction": "to"},
}


def _send(lab: Lab, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Send datagrams for each pair of sender and receiver; how many of each arrived."""
    program = (sys.executable, "-m", "tests.e2e.evasion.wire")
    counter = lab.server.popen(*program, "count", "eth0", stdin=PIPE, stdout=PIPE, cwd=warm.ROOT)
    assert counter.stdout is not None
    assert counter.stdout.readline() == "ready\n"
    every = [Ends(source, target, number) for number in range(SENT) for source, target in pairs]
    packets = [ip4(ends, UDP, udp(ends, b"x" * (SIZE - 28))) for ends in every]
    lab.client.run(*program, "raw", "4", input=wire.pack(packets), cwd=warm.ROOT, timeout=120)
    out, _ = counter.communicate(timeout=120)
    return {(source, target): number for source, target, number in json.loads(out)}


@pytest.mark.parametrize("link", LINKS)
def test_each_packet_is_charged_once(gateway: Gateway, link: str) -> None:
    lab = gateway.lab
    lab.gateway.ip(f"route replace 10.4.0.0/16 via {SERVER}")
    LINKS[link](lab)
    gateway.start()
    kept = gateway.put(*({"target": target, **fields} for target, fields in RULES.items()))
    rules = dict(zip(RULES, kept, strict=True))
    sources, targets = (FREE, BLOCKED, PACKETS, BITS, CONNECTIONS), (TO_BLOCKED, TO_PACKETS)
    pairs = [(source, SERVER) for source in sources] + [(FREE, target) for target in targets]
    arrived = _send(lab, pairs)
    passed = {source if target == SERVER else target: arrived.get((source, target), 0) for source, target in pairs}
    assert passed[FREE] == SENT
    assert passed[BLOCKED] == passed[TO_BLOCKED] == 0
    # A bucket of 10, and what comes back while an emulated machine sends; charged twice, 5 would pass.
    assert BURST <= passed[PACKETS] <= BURST + 2
    assert BURST <= passed[CONNECTIONS] <= BURST + 2
    assert BURST <= passed[TO_PACKETS] <= BURST + 2
    # 1,500 bytes, and a second or so of refill; charged twice, 6 or 7 would pass.
    assert 13 <= passed[BITS] < SENT
    for target in (PACKETS, TO_PACKETS, BITS):
        counts = gateway.count(rules[target])
        assert counts.matched_packets == SENT
        assert counts.dropped_packets == SENT - passed[target]
