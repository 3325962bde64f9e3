"""Killed at any step of a change, netlimit leaves no gap, and sets it right when it starts again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from netlimit.rules import parse_rule
from scripts.testbed import streams
from scripts.testbed.namespaces import SERVER, Lab
from tests.e2e.gateway import Gateway

LIMITED, FREE, ALLOWED, BLOCKED = "10.1.70.1", "10.1.72.1", "10.1.71.1", "10.1.71.9"
ONE = [
    {"target": "10.1.70.0/24", "rate": "100 packets/s", "per": "host"},
    {"target": "10.1.71.0/24", "action": "block"},
    {"target": ALLOWED, "action": "allow"},
    {"target": "10.1.73.0/24", "rate": "20 connections", "per": "host"},
]
OTHER = [
    {"target": LIMITED, "rate": "50 packets/s", "per": "host", "action": "reject"},
    {"target": "10.1.70.0/24", "rate": "100 packets/s", "per": "target"},
    {"target": "10.1.71.0/24", "action": "block", "protocol": "udp"},
    {"target": SERVER, "direction": "to", "action": "allow", "protocol": "udp", "ports": 53},
    {"target": ALLOWED, "action": "allow", "protocol": "udp"},
    {"target": "10.1.73.0/24", "rate": "20 connections", "per": "host", "action": "reject"},
]
MOST_STEPS = 40
FOREIGN = """*raw
-A PREROUTING -p udp -m udp --dport 5 -j DROP
COMMIT
*mangle
:OTHER - [0:0]
-A FORWARD -m set --match-set other src -j OTHER
COMMIT
*filter
-A FORWARD -p tcp -m tcp --dport 6 -j DROP
COMMIT
"""


@pytest.fixture
def alone(controller: Gateway, lab: Lab) -> Iterator[Gateway]:
    """A gateway whose controller does not run, with rules of others in it."""
    controller.stop()
    lab.gateway.run("ipset", "create", "other", "hash:ip")
    lab.gateway.run("ipset", "add", "other", "192.0.2.1")
    lab.gateway.run("iptables-legacy-restore", "--noflush", input=FOREIGN)
    lab.add_client_addresses(LIMITED, FREE, ALLOWED, BLOCKED)
    change(controller, ONE)
    yield controller
    controller.start()
    controller.clear()


def change(gateway: Gateway, wanted: list[dict[str, object]]) -> None:
    """Put these rules in the place of all others; the new ones first."""
    now = datetime.now(UTC)
    old, _ = gateway.store.select(limit=1000)
    parsed = [parse_rule(fields, now) for fields in wanted]
    same = {kept.rule.identity: kept.rule for kept in old}
    gateway.store.add([rule for rule in parsed if rule.identity not in same], "test", now)
    for rule in parsed:
        if rule.identity in same:
            gateway.store.replace(same[rule.identity].id, rule, "test", now)
    for identity, rule in same.items():
        if identity not in {each.identity for each in parsed}:
            gateway.store.remove(rule.id, "test", now)


def dies(gateway: Gateway) -> bool:
    """Wait until the mortal controller is dead, or has applied everything."""
    wanted = gateway.store.revision()
    gateway.wait(lambda: gateway.dead or any(h.applied_revision >= wanted for h in gateway.store.hosts()), "an end")
    return gateway.dead


def test_killed_before_any_step(alone: Gateway, lab: Lab) -> None:
    """As it starts before the even ones, in a change while it runs before the odd ones."""
    alone.start()
    foreign = alone.foreign()
    assert len(foreign) == 5
    deaths = survived = 0
    with (
        streams.receive(lab.server) as receiver,
        streams.sending(lab.client, SERVER, rate=1500, seconds=110, sources=[FREE, ALLOWED, BLOCKED]) as others,
        streams.sending(lab.client, SERVER, rate=5000, seconds=110, sources=[LIMITED]) as flood,
    ):
        for step in range(MOST_STEPS):
            alone.stop(signal.SIGKILL)
            if step % 2 == 0:
                change(alone, OTHER)
                alone.launch("-m", "tests.e2e.mortal", str(step))
            else:
                alone.start("-m", "tests.e2e.mortal", str(step))
                change(alone, OTHER)
            killed = dies(alone)
            assert alone.foreign() == foreign
            survived += not killed
            if survived == 2:
                break
            deaths += killed
            alone.start()
            assert not alone.drift(), f"killed before step {step}"
            assert alone.foreign() == foreign
            change(alone, ONE)
            alone.wait_until_applied()
        sent, flooded = others.stop(), flood.stop()
    report = receiver.report()
    assert deaths >= 8
    assert report.lost == 0
    assert flooded.packets > 20_000
    arrived = report.by_source
    assert arrived[FREE] in (sent.packets // 3, sent.packets // 3 + 1)
    assert arrived[ALLOWED] in (sent.packets // 3, sent.packets // 3 + 1)
    assert BLOCKED not in arrived
    # Fifty packets a hundredth of a second pass when nothing limits; what new buckets hold comes once a change.
    fullest = max(packets for _, packets, _ in report.series[LIMITED])
    assert fullest <= 10 + 10 + 5 + 5
    assert arrived[LIMITED] <= 100 * flooded.seconds + 40 * (2 * deaths + 2)
