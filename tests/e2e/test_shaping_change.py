"""Shaping that changes under load: nobody else loses anything, and no limit is lifted meanwhile."""

from __future__ import annotations

import time
from itertools import cycle, islice

import pytest

from netlimit.htb import MTU
from scripts.testbed import streams
from scripts.testbed.namespaces import SERVER, Lab
from scripts.testbed.reports import ETHERNET, ReceiveReport
from scripts.testbed.stalls import share
from scripts.testbed.transfers import transferring
from tests.e2e.gateway import Gateway
from tests.e2e.loads import MEGABIT, SIZE, Passed, megabits, offer, shape

FULL, MODEST, FREE = "10.1.100.1", "10.1.100.2", "10.1.102.1"
BURST = 8 * (MTU * 2 + SIZE + ETHERNET) / MEGABIT
"""Megabits that a bucket of a low rate holds, and a packet that is late."""


@pytest.fixture(autouse=True)
def addresses(lab: Lab) -> None:
    lab.add_client_addresses(FULL, MODEST, FREE)


def most(report: ReceiveReport, host: str, *, every: float) -> float:
    """The most megabits that came from a host in any stretch of so many seconds."""
    begin = report.began(host)
    rates = report.rates(host, every=every, begin=begin, end=report.last or begin)
    return max(rates) * every / MEGABIT


def test_the_rate_of_one_changes_and_the_others_lose_nothing(gateway: Gateway, lab: Lab) -> None:
    rule, _ = gateway.put(shape(FULL), shape(MODEST))
    seconds = {1.0: 0.0, 1.5: 0.0}
    with (
        streams.receive(lab.server) as receiver,
        offer(lab.client, "", FULL, megabits=6, seconds=20) as full,
        offer(lab.client, "", MODEST, megabits=0.9, seconds=20) as modest,
        offer(lab.client, "", FREE, megabits=3, seconds=20) as free,
    ):
        for rate in islice(cycle((1.5, 1.0)), 8):
            rule = gateway.replace(rule, **shape(FULL, f"{rate * 1000:g} kbit/s"))
            since = time.monotonic()
            time.sleep(0.4)
            seconds[rate] += time.monotonic() - since
        full.stop()
        sent = {MODEST: modest.stop().packets, FREE: free.stop().packets}
        time.sleep(0.3)
    report = receiver.report()
    assert {host: report.by_source[host] for host in sent} == sent
    # What has waited since before a change still comes, at the new rate.
    assert most(report, FULL, every=0.2) <= 1.5 * 0.2 + 2 * BURST
    assert report.by_source[FULL] * (SIZE + ETHERNET) * 8 / MEGABIT >= 0.95 * (seconds[1.0] + 1.5 * seconds[1.5])


def test_hosts_that_are_added_do_not_disturb_who_is_there(gateway: Gateway, lab: Lab) -> None:
    gateway.put(shape(FULL, "6 Mbit/s"), shape(MODEST))
    with (
        streams.receive(lab.server) as receiver,
        transferring(lab.client, lab.server, SERVER, seconds=3, source=FULL) as transfer,
        offer(lab.client, "", MODEST, megabits=0.9, seconds=20) as modest,
    ):
        time.sleep(1)
        began = time.time()
        for part in range(10):
            gateway.put(*(shape(f"10.1.101.{5 * part + number}") for number in range(5)))
        rate = transfer.report().bits_per_second / MEGABIT
        ended = time.time()
        sent = modest.stop().packets
        time.sleep(0.3)
    report = receiver.report()
    assert Passed(rate, share(report.stalls, began, ended)).is_about(6 * 1448 / MTU)
    assert report.by_source[MODEST] == sent


def test_a_budget_around_hosts_that_are_there_lifts_no_limit_as_they_move(gateway: Gateway, lab: Lab) -> None:
    gateway.put(shape(FULL), shape(MODEST))
    hosts = FULL, MODEST
    with (
        streams.receive(lab.server) as receiver,
        offer(lab.client, "", *hosts, megabits=6, seconds=20) as full,
        offer(lab.client, "", FREE, megabits=3, seconds=20) as free,
    ):
        for _ in range(3):
            time.sleep(0.5)
            (budget,) = gateway.add(shape("10.1.100.0/30", "1500 kbit/s", per="target"))
            began = time.time()
            time.sleep(0.7)
            ended = time.time()
            gateway.remove(budget)
        full.stop()
        sent = free.stop().packets
        time.sleep(0.3)
    report = receiver.report()
    assert report.by_source[FREE] == sent
    for host in hosts:
        assert most(report, host, every=0.2) <= 0.2 + 2 * BURST
    together = sum(report.rates(host, every=ended - began, begin=began, end=ended)[0] for host in hosts)
    assert together / MEGABIT <= 1.5 + 4 * BURST / (ended - began)
    assert megabits(report, *hosts, after=0, during=0.4).is_about(2, rel=2 * BURST / 0.4)


def test_a_rule_that_ends_gives_its_class_back(gateway: Gateway, lab: Lab) -> None:
    gateway.put(shape(FULL, ttl="2s"), shape(MODEST))
    number = gateway.class_of(FULL)
    assert number in gateway.classes("wan")
    gateway.wait(lambda: number not in gateway.classes("wan"), "the rule to end")
    assert gateway.class_of(FULL) == 0
    with streams.receive(lab.server) as receiver, offer(lab.client, "", FULL, megabits=3, seconds=1) as sender:
        sent = sender.report().packets
    assert receiver.report().by_source[FULL] == sent


def test_a_rule_counts_what_passes_it_however_much_passed_another_with_its_class(gateway: Gateway, lab: Lab) -> None:
    numbers = set()
    for host, rate in ((FULL, 1), (MODEST, 2), (FULL, 3)):
        (rule,) = gateway.put(shape(host, "50 Mbit/s"))
        numbers.add(gateway.class_of(host))
        with streams.receive(lab.server) as receiver, offer(lab.client, "", host, megabits=rate, seconds=0.5) as sender:
            sent = sender.report().packets
        assert receiver.report().by_source[host] == sent
        assert gateway.count(rule).matched_packets == sent
        gateway.clear()
        gateway.wait_until_applied()
    assert len(numbers) == 1
