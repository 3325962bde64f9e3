"""Rules speak of internal addresses, also where the gateway translates them."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, SERVER, WAN, Lab
from tests.e2e.gateway import Gateway
from tests.e2e.loads import count_received, megabits, offer, shape

NAT = True
COUNT = 200


@pytest.fixture(scope="module", autouse=True)
def forwarded(lab: Lab) -> None:
    lab.forward_port(8080, 80)
    lab.forward_port(9000, 9000, protocol="udp")


def ask_and_answer(lab: Lab) -> tuple[int, int]:
    """Packets to the server, each answered; how many arrived there, and how many answers came back."""
    before = count_received(lab.client)
    with streams.receive(lab.server, answer=True) as receiver:
        streams.send(lab.client, SERVER, rate=400, count=COUNT)
    return receiver.report().packets, count_received(lab.client) - before


def test_nothing_is_limited_without_rules(gateway: Gateway, lab: Lab) -> None:
    there, back = ask_and_answer(lab)
    assert (there, back) == (COUNT, COUNT)


def test_from_a_host_behind_masquerade(gateway: Gateway, lab: Lab) -> None:
    (rule,) = gateway.put({"target": CLIENT, "rate": "100 packets/s"})
    there, _ = ask_and_answer(lab)
    assert there == pytest.approx(10 + 50, abs=5)
    counts = gateway.count(rule)
    assert (counts.matched_packets, counts.dropped_packets) == (COUNT, COUNT - there)


def test_to_a_host_behind_masquerade(gateway: Gateway, lab: Lab) -> None:
    """Answers come for the gateway's address; it is the host behind it that is limited."""
    (rule,) = gateway.put({"target": CLIENT, "direction": "to", "rate": "100 packets/s"})
    there, back = ask_and_answer(lab)
    assert there == COUNT
    assert back == pytest.approx(10 + 50, abs=5)
    counts = gateway.count(rule)
    assert (counts.matched_packets, counts.dropped_packets) == (COUNT, COUNT - back)


def test_a_block_of_a_host_behind_masquerade(gateway: Gateway, lab: Lab) -> None:
    gateway.put({"target": CLIENT, "direction": "to", "action": "block"})
    there, back = ask_and_answer(lab)
    assert (there, back) == (COUNT, 0)


def test_an_exempt_host_gets_its_answers(gateway: Gateway, lab: Lab) -> None:
    """What the server sends is limited, but not what is for this host, though it bears the gateway's address."""
    gateway.put(
        {"target": SERVER, "rate": "1 packets/min"},
        {"target": CLIENT, "direction": "to", "action": "allow"},
    )
    assert ask_and_answer(lab) == (COUNT, COUNT)


def test_a_blocked_sender_does_not_reach_an_exempt_host_unless_it_is_as_specific(gateway: Gateway, lab: Lab) -> None:
    gateway.put({"target": "10.2.0.0/16", "action": "block"}, {"target": CLIENT, "direction": "to", "action": "allow"})
    assert ask_and_answer(lab) == (COUNT, COUNT)
    gateway.put({"target": SERVER, "action": "block", "protocol": "udp"})
    assert ask_and_answer(lab) == (COUNT, COUNT), "the allow is as specific, and wins"


def test_ports_are_those_behind_the_translation(gateway: Gateway, lab: Lab) -> None:
    fields = {"target": CLIENT, "direction": "to", "protocol": "tcp", "rate": "3 connections"}
    other, rule = gateway.put({**fields, "ports": 8080}, {**fields, "ports": 80})
    with streams.listen(lab.client, 80), streams.connect(lab.server, WAN, 8080, count=5, wait=0.4) as held:
        assert held.report().established == 3
    assert gateway.count(other).matched_packets == 0
    assert gateway.count(rule).dropped_packets == 2


def test_packets_to_a_forwarded_port(gateway: Gateway, lab: Lab) -> None:
    (rule,) = gateway.put({"target": CLIENT, "direction": "to", "per": "peer", "rate": "100 packets/s"})
    with streams.receive(lab.client) as receiver:
        streams.send(lab.server, WAN, rate=400, count=COUNT)
    report = receiver.report()
    assert report.by_source.keys() == {SERVER}
    assert report.packets == pytest.approx(10 + 50, abs=5)
    assert gateway.count(rule).dropped_packets == COUNT - report.packets


def test_hosts_behind_masquerade_are_shaped_each_by_itself_up_and_down(gateway: Gateway, lab: Lab) -> None:
    hosts = CLIENT, "10.1.0.9"
    lab.add_client_addresses(*hosts)
    gateway.put(
        shape(hosts[0]),
        shape(hosts[1], "500 kbit/s"),
        shape(hosts[0], "2 Mbit/s", direction="to"),
    )
    ports = {hosts[0]: 9100, hosts[1]: 9101}
    with ExitStack() as stack:
        receivers = {host: stack.enter_context(streams.receive(lab.server, port)) for host, port in ports.items()}
        down = stack.enter_context(streams.receive(lab.client))
        senders = [
            *(offer(lab.client, SERVER, host, megabits=2, seconds=2.7, port=port) for host, port in ports.items()),
            offer(lab.server, WAN, SERVER, megabits=4, seconds=2.7),
        ]
        for sender in senders:
            stack.enter_context(sender).report()
    for host, rate in zip(hosts, (1, 0.5), strict=True):
        assert megabits(receivers[host].report(), WAN, after=0.6, during=2).is_about(rate)
    assert megabits(down.report(), SERVER, after=0.6, during=2).is_about(2)
