"""A packet can wait in one queue only: what is said of rules that would claim another's, or promise too much."""

from __future__ import annotations

import pytest

from netlimit.records import State
from scripts.testbed import streams
from scripts.testbed.namespaces import LAN, Lab
from tests.e2e.gateway import Gateway
from tests.e2e.loads import Passed, add_server_addresses, megabits, offer, shape

HOST, SERVICE = "10.1.90.1", "10.2.90.1"


@pytest.fixture(autouse=True)
def addresses(lab: Lab) -> None:
    lab.add_client_addresses(HOST, "10.1.91.1", "10.1.91.2")
    add_server_addresses(lab, SERVICE)


def deliver(lab: Lab, destination: str = SERVICE) -> Passed:
    """Megabits a second that pass from the host to the service, or to the gateway itself."""
    there = lab.gateway if destination == LAN else lab.server
    with streams.receive(there) as receiver, offer(lab.client, destination, HOST, megabits=3, seconds=2) as sender:
        sender.report()
    return megabits(receiver.report(), HOST, after=0.4, during=1.5)


def test_the_later_of_two_that_claim_a_packet_names_the_other(gateway: Gateway, lab: Lab) -> None:
    first, second = gateway.add(shape(HOST, name="office"), shape(SERVICE, "500 kbit/s", direction="to"))
    assert gateway.state(first) == (State.APPLIED, "")
    state, sentence = gateway.state(second)
    assert state is State.ERROR
    assert sentence.startswith(f"On wan a packet would belong to this rule and to office (rule {first.id}), `")
    assert deliver(lab).is_about(1)
    gateway.remove(first)
    assert gateway.state(second) == (State.APPLIED, "")
    assert deliver(lab).is_about(0.5)


def test_they_live_beside_each_other_on_different_devices(gateway: Gateway, lab: Lab) -> None:
    gateway.put(shape(HOST), shape(HOST, "2 Mbit/s", direction="to", interface="lan"))
    first, second = gateway.add(
        shape("10.1.91.0/24", "2 Mbit/s", per="target", interface="lan", direction="to"),
        shape(SERVICE, "500 kbit/s", interface="lan"),
    )
    assert gateway.state(first)[0] is State.APPLIED
    state, sentence = gateway.state(second)
    assert state is State.ERROR
    assert "On lan" in sentence
    gateway.replace(second, **shape(SERVICE, "500 kbit/s", interface="wan", direction="from"))
    assert deliver(lab).is_about(1)


def test_ports_that_do_not_meet_keep_them_apart(gateway: Gateway, lab: Lab) -> None:
    gateway.put(
        shape(HOST, protocol="udp", ports="9000-9099"),
        shape(SERVICE, "500 kbit/s", direction="to", protocol="udp", ports="53"),
    )
    assert deliver(lab).is_about(1)


def test_a_budget_that_promised_too_much_says_so_and_holds(gateway: Gateway, lab: Lab) -> None:
    hosts = "10.1.91.1", "10.1.91.2"
    budget, *_ = gateway.add(
        shape("10.1.91.0/24", "2 Mbit/s", per="target"), shape(hosts[0], "3 Mbit/s"), shape(hosts[1], "1 Mbit/s")
    )
    state, sentence = gateway.state(budget)
    assert state is State.APPLIED
    assert sentence.startswith("What lies in it adds up to 4 Mbit/s, more than the 2 Mbit/s that it has")
    with streams.receive(lab.server) as receiver, offer(lab.client, "", *hosts, megabits=4, seconds=3.7) as sender:
        sender.report()
    report = receiver.report()
    assert megabits(report, *hosts, after=0.6, during=3).is_about(2)


def test_a_class_that_somebody_else_gives_its_packets_is_told(gateway: Gateway, lab: Lab) -> None:
    """What is written behind us holds, whoever wrote it: the rule says so, until that is gone."""
    rule = ("POSTROUTING", "-o", "wan", "-j", "CLASSIFY", "--set-class", "0:6")
    lab.gateway.run("iptables-legacy", "-t", "mangle", "-A", *rule)
    try:
        gateway.stop()
        gateway.start()
        (shaped,) = gateway.add(shape(HOST))
        assert "CLASSIFY" in gateway.wait_for_state(shaped, State.DEGRADED)
        gateway.wait(lambda: deliver(lab).megabits > 2, "more than the rule allows")  # a stall makes it less
    finally:
        lab.gateway.run("iptables-legacy", "-t", "mangle", "-D", *rule)
    gateway.stop()
    gateway.launch()
    gateway.wait_for_state(shaped, State.APPLIED)
    assert deliver(lab).is_about(1)


def test_a_filter_before_ours_on_the_ingress_is_told(gateway: Gateway, lab: Lab) -> None:
    client, server = gateway.put(shape(HOST), shape(SERVICE))
    assert deliver(lab, LAN).is_about(1)
    ingress = ("dev", "lan", "ingress", "pref", "10")
    match = ("protocol", "all", "u32", "match", "u32", "0", "0", "flowid", "1:1")
    lab.gateway.run("tc", "filter", "add", *ingress, *match)
    try:
        gateway.stop()
        gateway.launch()  # it looks round at once
        assert "lan (u32, pref 10)" in gateway.wait_for_state(client, State.DEGRADED)
        assert gateway.state(server) == (State.APPLIED, ""), "it comes in by another device"
        assert "lan (u32, pref 10)" in gateway.attempt("doctor").stdout
        assert deliver(lab, LAN).megabits > 2
    finally:
        lab.gateway.run("tc", "filter", "del", *ingress)
    gateway.stop()
    gateway.launch()
    gateway.wait_for_state(client, State.APPLIED)
    assert deliver(lab, LAN).is_about(1)
