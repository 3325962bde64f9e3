"""An exception for one address displaces the limit of its subnet, also where packets for it may end on the gateway: a
transparent proxy takes some of them, and the others are forwarded. While routes and rules change, too."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from netlimit.rules import Rule
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, SERVER, Lab
from tests.e2e.gateway import Gateway
from tests.e2e.test_safe_here import LISTEN
from tests.forcing import make_rule

CLIENTS, SERVERS, OTHER = "10.1.0.0/16", "10.2.0.0/16", "10.1.77.7"
PORT, TAKEN, PROXY = 9000, 9001, 3128
SEVERAL, MORE, SENT = 5, 20, 30
SECONDS, RATE = 5, 2000
TABLE = 77
KINDS: dict[str, dict[str, object]] = {
    "hosts": {"per": "host"},
    "peers": {"per": "peer"},
    "udp": {"per": "host", "protocol": "udp"},
    "by its port": {"per": "host", "protocol": "udp", "ports": PORT},
}


@pytest.fixture(scope="module", autouse=True)
def surroundings(lab: Lab) -> Iterator[None]:
    """What is for one port a proxy takes, wherever it is sent."""
    lab.add_client_addresses(OTHER)
    taken = ("PREROUTING", "-i", "lan", "-p", "udp", "--dport", str(TAKEN), "-j", "TPROXY")
    lead = (*taken, "--on-port", str(PROXY), "--tproxy-mark", "1/1")
    lab.gateway.run("iptables-legacy", "-w", "-t", "mangle", "-A", *lead)
    lab.gateway.ip(f"rule add fwmark 1/1 lookup {TABLE}", f"route add local default dev lo table {TABLE}")
    yield
    lab.gateway.ip(f"rule del fwmark 1/1 lookup {TABLE}", f"route flush table {TABLE}")
    lab.gateway.run("iptables-legacy", "-w", "-t", "mangle", "-D", *lead)


@contextmanager
def routed(gateway: Gateway, lab: Lab, network: str) -> Iterator[None]:
    """A table that only marked packets are led to has a network end here."""
    lead(gateway, lab, network)
    try:
        yield
    finally:
        leave(gateway, lab, network)


def lead(gateway: Gateway, lab: Lab, network: str) -> None:
    lab.gateway.ip(f"route add local {network} dev lo table {TABLE}")
    gateway.wait(lambda: network in gateway.store.hosts()[0].local, "the route to be seen")


def leave(gateway: Gateway, lab: Lab, network: str) -> None:
    lab.gateway.ip(f"route del local {network} dev lo table {TABLE}")
    gateway.wait(lambda: network not in gateway.store.hosts()[0].local, "the route to be missed")


def limit(target: str, burst: int, **fields: object) -> dict[str, object]:
    return {"target": target, "rate": "1 packets/h", "burst": burst, **fields}


def forward(lab: Lab, source: str = CLIENT, sent: int = SENT) -> int:
    """How many packets the server gets."""
    with streams.receive(lab.server, PORT) as receiver:
        streams.send(lab.client, SERVER, PORT, rate=1000, count=sent, sources=[source])
    return receiver.report().packets


def take(lab: Lab) -> int:
    """How many the proxy gets."""
    listening = lab.gateway.popen(sys.executable, "-c", LISTEN, str(PROXY), stdin=-1, stdout=-1)
    with listening:
        assert listening.stdout is not None
        listening.stdout.readline()
        streams.send(lab.client, SERVER, TAKEN, rate=1000, count=SENT)
        found, _ = listening.communicate("\n", timeout=30)
    return int(found)


@pytest.mark.parametrize("kind", ["hosts", "peers", "udp"])
@pytest.mark.parametrize("direction", ["from", "to"])
def test_only_the_exception_counts_wherever_it_ends(gateway: Gateway, lab: Lab, direction: str, kind: str) -> None:
    network, one = (CLIENTS, CLIENT) if direction == "from" else (SERVERS, SERVER)
    about = {"direction": direction, **KINDS[kind]}
    with routed(gateway, lab, network):
        subnet, exception = gateway.put(limit(network, SEVERAL, **about), limit(one, MORE, **about))
        assert forward(lab, sent=MORE // 2) == MORE // 2
        assert take(lab) == MORE // 2, "it has one bucket for both, and for one peer"
        assert forward(lab) == 0
        assert gateway.count(exception).dropped_packets == SENT - MORE // 2 + SENT
        assert gateway.count(subnet).matched_packets == 0, "nobody is counted twice"
        if direction == "from":
            assert forward(lab, OTHER) == SEVERAL, "for all others the limit of the subnet holds"


class Edits:
    """Changes that a gateway takes in, each as one, again and again under traffic."""

    def __init__(self, gateway: Gateway, lab: Lab) -> None:
        self._gateway, self._lab = gateway, lab
        self.made = 0

    def move(self, rules: list[Rule], *wanted: dict[str, object]) -> None:
        """Both rules become others in one pass."""
        now = datetime.now(UTC)
        with self._gateway.frozen():
            for rule, fields in zip(rules, wanted, strict=True):
                self._gateway.store.replace(rule.id, replace(make_rule(fields, now), id=rule.id), "test", now)
        self._gateway.wait_until_applied()
        self.made += 1

    def reroute(self, network: str) -> None:
        """A route comes, and goes again."""
        lead(self._gateway, self._lab, network)
        leave(self._gateway, self._lab, network)
        self.made += 2


def keep_on(change: Callable[[], None]) -> None:
    """Change over and over while packets flow, but for the end."""
    end = time.monotonic() + SECONDS - 1.5
    while time.monotonic() < end:
        change()


def pair(kind: str, subnet: dict[str, object], exception: dict[str, object]) -> list[dict[str, object]]:
    return [{"target": CLIENTS, **subnet, **KINDS[kind]}, {"target": CLIENT, **exception, **KINDS[kind]}]


FAST: dict[str, object] = {"rate": "500000 packets/s"}
SLOW: dict[str, object] = {"rate": "1 packets/h", "burst": SEVERAL}


def send_meanwhile(lab: Lab, change: Callable[[], None], *sources: str) -> tuple[int, int]:
    """How many packets were sent while it was changed over and over, and how many arrived."""
    about = {"rate": RATE, "seconds": SECONDS, "sources": sources}
    with streams.receive(lab.server, PORT) as receiver, streams.sending(lab.client, SERVER, PORT, **about) as sender:
        keep_on(change)
        sent = sender.report().packets
    return sent, receiver.report().packets


@pytest.mark.parametrize("kind", KINDS)
def test_a_route_that_comes_and_goes_under_traffic_drops_nothing(gateway: Gateway, lab: Lab, kind: str) -> None:
    gateway.put(*pair(kind, SLOW, FAST))
    edits = Edits(gateway, lab)
    sent, arrived = send_meanwhile(lab, lambda: edits.reroute(CLIENTS), CLIENT)
    assert edits.made >= 4
    assert arrived == sent


@pytest.mark.parametrize("others", [True, False], ids=["beside others", "alone"])
@pytest.mark.parametrize(("one", "two"), [("hosts", "peers"), ("hosts", "udp"), ("udp", "by its port")])
def test_rules_that_move_together_under_traffic_drop_nothing(
    gateway: Gateway, lab: Lab, one: str, two: str, others: bool
) -> None:
    """Others: rules of both kinds are there already, and stay."""
    with routed(gateway, lab, CLIENTS):
        for subnet, exception in (pair(kind, SLOW, FAST) for kind in (one, two) if others):
            gateway.put({**subnet, "target": "10.3.0.0/16"}, {**exception, "target": OTHER})
        rules = gateway.put(*pair(one, SLOW, FAST))
        edits = Edits(gateway, lab)

        def move_there_and_back() -> None:
            edits.move(rules, *pair(two, SLOW, FAST))
            edits.move(rules, *pair(one, SLOW, FAST))

        sent, arrived = send_meanwhile(lab, move_there_and_back, CLIENT)
    assert edits.made >= 4
    assert arrived == sent


@pytest.mark.parametrize("kind", ["hosts", "peers", "udp"])
def test_nobody_has_more_than_his_limits_meanwhile(gateway: Gateway, lab: Lab, kind: str) -> None:
    """An exception with less than its subnet; in another place it has a bucket anew. Buckets of peers are in a table
    whose size goes by the number of targets: all of them have one anew, those of another host as well."""
    gateway.put(*pair(kind, {"rate": "1 packets/h", "burst": MORE}, SLOW))
    edits = Edits(gateway, lab)
    _, arrived = send_meanwhile(lab, lambda: edits.reroute(CLIENTS), CLIENT, OTHER)
    assert edits.made >= 4
    assert arrived <= MORE * (1 + edits.made * (kind == "peers")) + SEVERAL * (1 + edits.made)
