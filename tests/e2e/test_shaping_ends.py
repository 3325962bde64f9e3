"""Rules that shape end in the kernel while netlimit is dead: each at its own end, and none with another."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from scripts.testbed import streams
from scripts.testbed.namespaces import Lab
from tests.e2e.gateway import Gateway
from tests.e2e.loads import megabits, offer, shape

NETWORK, HALF = "10.1.72.0/24", "10.1.72.0/25"
KNOWN, NEW, OTHER = "10.1.72.1", "10.1.72.2", "10.1.72.201"
TTL = 5


@pytest.fixture(autouse=True)
def addresses(lab: Lab) -> None:
    lab.add_client_addresses(KNOWN, NEW, OTHER)


@pytest.fixture
def mortal(gateway: Gateway) -> Iterator[Gateway]:
    """It is dead at the end of the test, and lives again after it."""
    yield gateway
    gateway.start()


def _end(gateway: Gateway, lab: Lab, *rules: dict[str, object]) -> None:
    """Have rules in force until those with a `ttl` have ended, without anybody to see it. One host has its class."""
    began = time.monotonic()
    gateway.put(*rules)
    with offer(lab.client, "", KNOWN, OTHER, megabits=0.1, seconds=1):
        gateway.wait(lambda: gateway.class_of(KNOWN) != 0 and gateway.class_of(OTHER) != 0, "the classes of hosts")
    gateway.stop(signal.SIGKILL)
    time.sleep(max(0.0, began + TTL + 2.2 - time.monotonic()))


@pytest.mark.parametrize("ceil", ["4 Mbit/s", "500 kbit/s"])
def test_a_budget_does_not_end_with_the_rule_of_its_hosts(mortal: Gateway, lab: Lab, ceil: str) -> None:
    each = shape(NETWORK, "500 kbit/s", per="host", ceil=ceil, ttl=TTL)
    _end(mortal, lab, each, shape(NETWORK, "1 Mbit/s", per="target"))
    with streams.receive(lab.server) as receiver, offer(lab.client, "", KNOWN, NEW, megabits=2, seconds=2.7) as sender:
        sender.report()
    assert megabits(receiver.report(), KNOWN, NEW, after=0.5, during=2).is_about(1)


def test_nor_does_one_within_it_and_what_is_beside_is_free(mortal: Gateway, lab: Lab) -> None:
    each = shape(NETWORK, "500 kbit/s", per="host", ttl=TTL)
    _end(mortal, lab, each, shape(HALF, "1 Mbit/s", per="target"))
    hosts = KNOWN, NEW, OTHER
    with streams.receive(lab.server) as receiver, offer(lab.client, "", *hosts, megabits=2, seconds=2.7) as sender:
        sent = sender.report().packets
    report = receiver.report()
    assert megabits(report, KNOWN, NEW, after=0.5, during=2).is_about(1)
    assert report.by_source[OTHER] == sent // len(hosts)
