"""New and concurrent connections, and what a rejected client is told."""

from __future__ import annotations

import pytest

from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, CLIENT6, SERVER, SERVER6, Lab
from tests.e2e.gateway import Gateway

PORT = 8080
BOTH = pytest.mark.parametrize(("client", "server"), [(CLIENT, SERVER), (CLIENT6, SERVER6)])


def connect(lab: Lab, server: str, port: int = PORT, **options: object) -> streams.Stream:
    return streams.connect(lab.client, server, port, **{"wait": 0.4, **options})


@BOTH
def test_new_connections_a_second(gateway: Gateway, lab: Lab, client: str, server: str) -> None:
    (rule,) = gateway.put({"target": client, "protocol": "tcp", "rate": "10 connections/s"})
    with streams.listen(lab.server, PORT), connect(lab, server, count=60, rate=40) as tried:
        report = tried.report()
    # A burst of 5, then 10 a second for a second and a half.
    assert report.established == pytest.approx(5 + 15, abs=2)
    assert report.established + report.timed_out == 60
    counts = gateway.count(rule)
    assert (counts.matched_packets, counts.dropped_packets) == (60, report.timed_out)


@BOTH
@pytest.mark.parametrize(("action", "end"), [("drop", "timed_out"), ("reject", "refused")])
def test_concurrent_connections(gateway: Gateway, lab: Lab, client: str, server: str, action: str, end: str) -> None:
    (rule,) = gateway.put({"target": client, "rate": "5 connections", "action": action})
    with streams.listen(lab.server, PORT):
        with connect(lab, server, count=8) as first:
            assert first.report().established == 5
            assert getattr(first.report(), end) == 3
            with connect(lab, server, count=1) as more:
                assert more.report().established == 0
        with connect(lab, server, count=3) as again:
            assert again.report().established == 3, "those that have ended do not count"
    counts = gateway.count(rule)
    assert (counts.matched_packets, counts.dropped_packets) == (12, 4)


def test_connections_of_each_host_of_a_subnet(gateway: Gateway, lab: Lab) -> None:
    sources = ["10.1.50.1", "10.1.50.2", "10.1.50.3"]
    lab.add_client_addresses(*sources)
    gateway.put(
        {"target": "10.1.50.0/24", "rate": "2 connections", "per": "host"},
        {"target": "10.1.50.3", "rate": "4 connections"},
    )
    with streams.listen(lab.server, PORT), connect(lab, SERVER, count=15, sources=sources) as tried:
        assert tried.report().established == 2 + 2 + 4


def test_connections_of_a_subnet_together_and_of_each_peer(gateway: Gateway, lab: Lab) -> None:
    sources = ["10.1.51.1", "10.1.51.2"]
    lab.add_client_addresses(*sources)
    shared, _ = gateway.put(
        {"target": "10.1.51.0/24", "rate": "6 connections", "per": "target"},
        {"target": SERVER, "direction": "to", "rate": "4 connections", "per": "peer", "ports": 81, "protocol": "tcp"},
    )
    with streams.listen(lab.server, 80), streams.listen(lab.server, 81):
        with connect(lab, SERVER, 80, count=10, sources=sources) as tried:
            assert tried.report().established == 6
        gateway.remove(shared)
        with connect(lab, SERVER, 81, count=12, sources=sources) as tried:
            assert tried.report().established == 8


@BOTH
def test_a_rejected_syn_is_answered(gateway: Gateway, lab: Lab, client: str, server: str) -> None:
    gateway.put(
        {"target": client, "protocol": "tcp", "ports": PORT, "rate": "2 packets/h", "burst": 2, "action": "reject"}
    )
    with streams.listen(lab.server, PORT):
        with connect(lab, server, count=1) as one:
            assert one.report().established == 1, "SYN and ACK pass; what follows may not"
        with connect(lab, server, count=3) as more:
            assert more.report().refused == 3
    with streams.listen(lab.server, 81), connect(lab, server, 81, count=2) as other:
        assert other.report().established == 2


def test_what_is_blocked_is_silent(gateway: Gateway, lab: Lab) -> None:
    gateway.put({"target": CLIENT, "action": "block"})
    with streams.listen(lab.server, PORT):
        with connect(lab, SERVER, count=2) as tried:
            assert tried.report().timed_out == 2
        gateway.clear()
        with connect(lab, SERVER, count=2) as tried:
            assert tried.report().established == 2, "deleted, all passes again"


def test_observed_connections_pass(gateway: Gateway, lab: Lab) -> None:
    (rule,) = gateway.put({"target": CLIENT, "rate": "2 connections", "action": "observe"})
    with streams.listen(lab.server, PORT), connect(lab, SERVER, count=6) as tried:
        assert tried.report().established == 6
    counts = gateway.count(rule)
    assert (counts.matched_packets, counts.dropped_packets) == (6, 4)


def test_udp_flows_are_connections_too(gateway: Gateway, lab: Lab) -> None:
    (rule,) = gateway.put({"target": CLIENT, "protocol": "udp", "rate": "3 connections/h", "burst": 3})
    arrived = 0
    with streams.receive(lab.server) as receiver:
        for port in range(20001, 20007):
            streams.send(lab.client, SERVER, rate=None, count=20, source_port=port)
    arrived = receiver.report().packets
    assert arrived == 3 * 20
    counts = gateway.count(rule)
    assert counts.matched_packets - counts.dropped_packets == 3
    assert counts.dropped_packets == 3 * 20, "each packet of a flow that was refused asks again"


def test_what_does_not_concern_them_leaves_the_count_of_connections_alone(gateway: Gateway, lab: Lab) -> None:
    (limit,) = gateway.put({"target": CLIENT, "rate": "3 connections", "protocol": "tcp"})
    with streams.listen(lab.server, PORT), connect(lab, SERVER, count=5) as first:
        assert first.report().established == 3
        gateway.put({"target": "10.1.0.77", "action": "allow"})
        gateway.put({"target": "10.7.0.0/24", "action": "allow", "direction": "to"})
        gateway.put({"target": "10.7.0.0/20", "action": "allow", "protocol": "udp", "ports": 53})
        gateway.put({"target": "10.1.0.78", "rate": "9 packets/s", "protocol": "udp", "ports": 53})
        gateway.put({"target": "10.1.0.79", "action": "block", "protocol": "tcp", "ports": 25})
        gateway.put({"target": "10.1.0.80", "rate": "3 connections", "protocol": "tcp"})
        gateway.erase(*(kept.rule for kept in gateway.store.select(limit=1000)[0] if kept.rule.id != limit.id))
        gateway.wait_until_applied()
        with connect(lab, SERVER, count=5) as more:
            assert more.report().established == 0
