"""Rules that end, that change under load, and whose budgets nest."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, SERVER, SERVER6, Lab
from tests.e2e.gateway import Gateway


def test_a_ban_ends_even_if_netlimit_is_dead(controller: Gateway, lab: Lab) -> None:
    six = "fd00:1::2"
    controller.put(
        {"target": CLIENT, "action": "block", "ttl": "6s"}, {"target": six, "rate": "1 packets/h", "ttl": "6s"}
    )
    begin = time.monotonic()
    controller.stop(signal.SIGKILL)
    with streams.receive(lab.server) as receiver:
        streams.send(lab.client, SERVER, rate=None, count=20)
        streams.send(lab.client, SERVER6, rate=None, count=20)
    assert receiver.report().packets == 1
    time.sleep(max(0, begin + 7.2 - time.monotonic()))
    with streams.receive(lab.server) as receiver:
        streams.send(lab.client, SERVER, rate=None, count=20)
        streams.send(lab.client, SERVER6, rate=None, count=20)
    assert receiver.report().packets == 40
    controller.start()
    controller.clear()
    assert not controller.drift()


def test_a_rule_that_ends_leaves_nothing_behind(gateway: Gateway, lab: Lab) -> None:
    gateway.put({"target": CLIENT, "rate": "1 packets/h", "ttl": "5s"})
    assert "nl-" in lab.gateway.run("ipset", "list", "-n").stdout
    gateway.wait(lambda: "nl-" not in lab.gateway.run("ipset", "list", "-n").stdout, "the rule to end")
    assert "NL-" not in lab.gateway.run("iptables-legacy-save").stdout


def test_rules_that_end_keep_what_they_have_counted(gateway: Gateway, lab: Lab) -> None:
    """Beside 60 kinds of others, whose counters are read in turns; many at once, and one that is soon over."""
    busy, hosts = "10.1.68.1", [f"10.1.69.{number}" for number in range(1, 21)]
    lab.add_client_addresses(busy, *hosts)
    others = [
        {"target": f"10.9.{n}.1", "protocol": "udp", "ports": str(10_000 + 3 * n), "rate": f"{100 + n} packets/s"}
        for n in range(60)
    ]
    gateway.put(*others)
    (short,) = gateway.put({"target": busy, "action": "block", "ttl": "2s"})
    streams.send(lab.client, SERVER, rate=None, count=30, sources=[busy])
    kinds = ({"rate": "5 packets/s"}, {"action": "block"}, {"rate": "7 packets/s", "action": "observe"})
    rules = gateway.put(*({"target": host, "ttl": "5s", **kinds[n % 3]} for n, host in enumerate(hosts)))
    more = [{"target": f"10.8.{n}.1", "action": "block", "ttl": "5s"} for n in range(200)]
    gateway.add(*more)
    streams.send(lab.client, SERVER, rate=2000, count=400, sources=hosts)
    gateway.wait(lambda: not any(f"{busy} " in line for line in _blocked(lab)), "the first rule to end")
    assert gateway.count(short).matched_packets == 30
    gateway.wait(lambda: not any("10.8.199.1 " in line for line in _blocked(lab)), "the others to end")
    counted = [gateway.count(rule).matched_packets for rule in rules]
    assert counted == [20] * len(rules)


def test_a_queue_that_ends_keeps_what_it_has_counted(gateway: Gateway, lab: Lab) -> None:
    (rule,) = gateway.put({"target": CLIENT, "rate": "5 Mbit/s", "action": "shape", "interface": "wan", "ttl": "4s"})
    streams.send(lab.client, SERVER, rate=None, count=50)
    gateway.wait(lambda: not gateway.class_of(CLIENT) and not gateway.classes("wan"), "the rule to end")
    assert gateway.count(rule).matched_packets == 50


def _blocked(lab: Lab) -> list[str]:
    return lab.gateway.run("ipset", "save").stdout.splitlines()


def test_one_flooder_does_not_eat_the_budget_of_all(gateway: Gateway, lab: Lab) -> None:
    """Hosts are asked first: what is over a host's limit takes nothing from the shared one."""
    flooder, modest = "10.1.60.1", "10.1.60.2"
    lab.add_client_addresses(flooder, modest)
    host, shared = gateway.put(
        {"target": "10.1.60.0/24", "rate": "100 packets/s", "per": "host"},
        {"target": "10.1.60.0/24", "rate": "200 packets/s", "per": "target"},
    )
    with (
        streams.receive(lab.server) as receiver,
        streams.sending(lab.client, SERVER, rate=5000, seconds=1.5, sources=[flooder]) as flood,
        streams.sending(lab.client, SERVER, rate=60, seconds=1.5, sources=[modest]) as little,
    ):
        assert flood.report().packets == 7500
        assert little.report().packets == 90
    arrived = receiver.report().by_source
    assert arrived[modest] == 90
    assert arrived[flooder] == pytest.approx(10 + 150, rel=0.05)
    assert gateway.count(shared).matched_packets == arrived[flooder] + arrived[modest]
    assert gateway.count(host).matched_packets == 7590


def test_a_larger_budget_around_a_smaller_one(gateway: Gateway, lab: Lab) -> None:
    sources = ["10.1.61.1", "10.1.61.2", "10.1.61.130"]
    lab.add_client_addresses(*sources)
    gateway.put(
        {"target": "10.1.61.0/24", "rate": "100 packets/s", "per": "/25"},
        {"target": "10.1.61.0/24", "rate": "150 packets/s", "per": "target"},
    )
    with streams.receive(lab.server) as receiver:
        streams.send(lab.client, SERVER, rate=1200, seconds=1.6, sources=sources)
    report = receiver.report()
    assert report.delivered(after=0.5, during=1).packets_per_second == pytest.approx(150, rel=0.05)
    small = report.delivered(after=0.5, during=1, source=sources[2]).packets_per_second
    assert small == pytest.approx(75, rel=0.34), "neither half is starved"


def test_a_rate_that_changes_under_load_never_lets_go(gateway: Gateway, lab: Lab) -> None:
    hosts = ["10.1.62.1", "10.1.62.2"]
    lab.add_client_addresses(*hosts)
    one, two = gateway.put(*({"target": host, "rate": "100 packets/s"} for host in hosts))
    changes = 0
    with (
        streams.receive(lab.server) as receiver,
        streams.sending(lab.client, SERVER, rate=20_000, seconds=2.5, sources=hosts) as flood,
    ):
        end = time.monotonic() + 2.2
        while time.monotonic() < end:
            changes += 1
            rate = (100, 200)[changes % 2]
            gateway.replace(one, target=hosts[0], rate=f"{rate} packets/s")
            gateway.replace(two, target=hosts[1], rate=f"{300 - rate} packets/s")
        assert flood.report().packets == 50_000
    report = receiver.report()
    assert changes >= 5
    for host in hosts:
        # A new limit begins with a full bucket of a tenth of its rate.
        assert report.by_source[host] <= 200 * 2.6 + 20 * (2 * changes + 1)
        bins = [packets for _, packets, _ in report.series[host]]
        assert max(bins) <= 20 + 20 + 10, "in no hundredth of a second more than two bursts and what flows in it"


def test_rules_that_come_and_go_elsewhere_do_not_disturb(gateway: Gateway, lab: Lab) -> None:
    """A limited flow keeps its rate and its bucket, a free one loses nothing."""
    limited, free = "10.1.63.1", "10.1.63.2"
    lab.add_client_addresses(limited, free)
    (rule,) = gateway.put({"target": limited, "rate": "100 packets/s"})
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            others = gateway.put(
                {"target": "10.1.64.1", "rate": "70 packets/s"},
                {"target": "10.1.65.0/24", "action": "block"},
                {"target": "10.1.66.1", "direction": "to", "action": "allow"},
                {"target": "10.1.67.1", "rate": "5 connections", "action": "reject"},
            )
            for other in others:
                gateway.remove(other)

    thread = threading.Thread(target=disturb)
    with streams.receive(lab.server) as receiver:
        thread.start()
        streams.send(lab.client, SERVER, rate=2000, seconds=2, sources=[limited, free])
        stop.set()
        thread.join()
    report = receiver.report()
    assert report.by_source[free] == 2000
    assert report.by_source[limited] == pytest.approx(10 + 200, rel=0.05)
    counts = gateway.count(rule)
    assert (counts.matched_packets, counts.dropped_packets) == (2000, 2000 - report.by_source[limited])
