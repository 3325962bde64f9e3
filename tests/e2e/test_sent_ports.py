"""`from` with ports speaks of the ports that were sent, wherever NAT leads the packets, and whatever other rules there
are: an `allow to` and a limit that rejects have all others asked behind the translation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, SERVER, WAN, Lab
from tests.e2e import frames
from tests.e2e.gateway import Gateway
from tests.e2e.loads import count_received

TAKEN = "10.2.0.253"
"""Nobody has that address: what is sent there goes to another port, of the server or of the gateway."""
PORT, REAL, SENT = 9000, 3128, 30
NOBODY = "203.0.113.9"
FEW: dict[str, object] = {"rate": "1 packets/h", "burst": 10}
UDP: dict[str, object] = {"target": CLIENT, "protocol": "udp"}
LEADS = {
    "to the server": ("DNAT", "--to-destination", f"{SERVER}:{REAL}"),
    "to the gateway": ("REDIRECT", "--to-ports", str(REAL)),
}
BESIDE: dict[str, dict[str, object]] = {
    "nothing": {},
    "an allow": {"target": NOBODY, "direction": "to", "action": "allow"},
    "a reject": {"target": NOBODY, "rate": "100 packets/s", "action": "reject"},
}
RULES: dict[str, tuple[dict[str, object], int]] = {
    "packets": (FEW, 10),
    "connections at once": ({"rate": "10 connections"}, 10),
    "by a device": ({"interface": "lan", **FEW}, 10),
    "by both ports": ({"source_ports": "20000-60000", **FEW}, 10),
    "refused": ({"action": "reject", **FEW}, 10),
    "blocked": ({"target": "10.1.0.0/24", "action": "block"}, 0),
}
SOURCE_PORTS = count(20000)


@pytest.fixture(params=LEADS)
def led(request: pytest.FixtureRequest, lab: Lab) -> Iterator[str]:
    rule = ("PREROUTING", "-i", "lan", "-p", "udp", "-d", TAKEN, "--dport", str(PORT), "-j", *LEADS[request.param])
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-A", *rule)
    assert count_arriving(lab, request.param) == SENT
    yield request.param
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-D", *rule)


def count_arriving(lab: Lab, led: str, destination: str = TAKEN, port: int = PORT, real: int = REAL) -> int:
    """Of packets that are sent to a port and arrive at another, each a flow of its own."""
    flows = [frames.udp(CLIENT, destination, port, next(SOURCE_PORTS), b"x" * 20) for _ in range(SENT)]
    with streams.receive(lab.server if led == "to the server" else lab.gateway, real) as receiver:
        frames.send(lab.client, [frames.frame(frames.ip(CLIENT, destination, frames.UDP, each)) for each in flows])
    return receiver.report().packets


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("kind", RULES)
def test_the_port_that_was_sent_is_held(gateway: Gateway, lab: Lab, led: str, kind: str, beside: str) -> None:
    fields, passing = RULES[kind]
    gateway.put(*filter(None, (UDP | {"ports": f"443,{PORT - 5}-{PORT}"} | fields, BESIDE[beside])))
    assert count_arriving(lab, led) == passing


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("kind", RULES)
def test_the_port_to_which_it_is_led_is_another_matter(
    gateway: Gateway, lab: Lab, led: str, kind: str, beside: str
) -> None:
    fields, _ = RULES[kind]
    gateway.put(*filter(None, (UDP | {"ports": REAL} | fields, BESIDE[beside])))
    assert count_arriving(lab, led) == SENT


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("kind", RULES)
def test_what_nobody_translates_is_held_by_its_port(gateway: Gateway, lab: Lab, kind: str, beside: str) -> None:
    fields, passing = RULES[kind]
    gateway.put(*filter(None, (UDP | {"ports": PORT} | fields, BESIDE[beside])))
    assert count_arriving(lab, "to the server", SERVER, PORT, PORT) == passing
    assert count_arriving(lab, "to the server", SERVER, REAL, REAL) == SENT


@pytest.mark.parametrize("ports", [f"443,{PORT}", str(REAL)])
def test_who_may_send_anything_to_a_port_may_if_it_was_sent_there(
    gateway: Gateway, lab: Lab, led: str, ports: str
) -> None:
    """An `allow from` with ports, in a subnet that is blocked."""
    gateway.put(
        {"target": "10.1.0.0/16", "action": "block"},
        UDP | {"ports": ports, "action": "allow"},
        BESIDE["an allow"],
    )
    assert count_arriving(lab, led) == (0 if ports == str(REAL) else SENT)


def test_one_flooder_is_stopped_before_he_eats_what_is_for_all(gateway: Gateway, lab: Lab, led: str) -> None:
    """Limits of hosts come before budgets, wherever NAT leads a packet."""
    _, budget = gateway.put(
        {"target": "10.1.0.0/16", "per": "host", **FEW},
        {"target": "10.1.0.0/16", "per": "target", "protocol": "udp", "ports": f"443,{PORT}", **FEW, "burst": 15},
    )
    for _ in range(2):
        assert count_arriving(lab, led) <= 10
    assert gateway.count(budget).dropped_packets == 0


@pytest.mark.parametrize("order", [1, -1])
def test_ports_that_were_sent_and_ports_that_are_led_to_may_be_of_one_packet(
    gateway: Gateway, lab: Lab, led: str, order: int
) -> None:
    """Of two limits with ports that do not meet, each holds its own."""
    first, second = (
        UDP | {"ports": PORT, "rate": "1 packets/h", "burst": 20},
        {"target": "10.2.0.0/16", "direction": "to", "per": "target", "protocol": "udp", "ports": REAL, **FEW},
    )[::order]
    gateway.put(first, second, {"target": "10.9.0.0/16", "per": "target", "protocol": "udp", "ports": PORT, **FEW})
    assert count_arriving(lab, led) == (10 if led == "to the server" else 20)


@pytest.mark.parametrize(
    ("allowed", "limited"),
    [
        (UDP | {"ports": PORT}, {"target": SERVER, "direction": "to", "protocol": "udp", "ports": REAL}),
        ({"target": SERVER, "direction": "to", "protocol": "udp", "ports": REAL}, UDP | {"ports": PORT}),
    ],
)
@pytest.mark.parametrize("rate", ["10 connections", "1 connections/h"])
def test_who_is_allowed_by_one_port_is_limited_by_no_other(
    gateway: Gateway, lab: Lab, allowed: dict[str, object], limited: dict[str, object], rate: str
) -> None:
    lead = ("PREROUTING", "-i", "lan", "-p", "udp", "-d", TAKEN, "-j", *LEADS["to the server"])
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-A", *lead)
    try:
        gateway.put(limited | {"rate": rate})
        assert count_arriving(lab, "to the server") < SENT
        gateway.add(allowed | {"action": "allow"})
        assert count_arriving(lab, "to the server") == SENT
    finally:
        lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-D", *lead)


@pytest.mark.parametrize(("ports", "held"), [(30000, True), (40000, False)])
@pytest.mark.parametrize("beside", BESIDE)
def test_answers_are_held_by_the_port_of_the_host_behind_a_masquerade(
    gateway: Gateway, lab: Lab, beside: str, ports: int, held: bool
) -> None:
    mask = ("POSTROUTING", "-o", "wan", "-p", "udp", "-j", "MASQUERADE", "--to-ports", "40000")
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-A", *mask)
    try:
        gateway.put(*filter(None, ({"target": SERVER, "protocol": "udp", "ports": ports} | FEW, BESIDE[beside])))
        before = count_received(lab.client)
        with streams.receive(lab.server, PORT, answer=True) as receiver:
            streams.send(lab.client, SERVER, PORT, rate=200, count=SENT, source_port=30000)
        assert receiver.report().packets == SENT
        gateway.wait(lambda: count_received(lab.client) - before == (10 if held else SENT), "answers")
    finally:
        lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-D", *mask)


def test_answers_through_a_masquerade_pass_a_block_by_the_port_of_the_host_behind(gateway: Gateway, lab: Lab) -> None:
    mask = ("POSTROUTING", "-o", "wan", "-p", "udp", "-j", "MASQUERADE", "--to-ports", "40000")
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-A", *mask)
    try:
        gateway.put(
            {"target": "10.2.0.0/24", "action": "block"},
            {"target": SERVER, "protocol": "udp", "ports": 30000, "action": "allow"},
        )
        before = count_received(lab.client)
        with streams.receive(lab.server, PORT, answer=True):
            streams.send(lab.client, SERVER, PORT, rate=200, count=SENT, source_port=30000)
        gateway.wait(lambda: count_received(lab.client) - before == SENT, "answers")
    finally:
        lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-D", *mask)


@pytest.mark.parametrize("kind", ["packets", "connections at once"])
def test_what_the_gateway_sends_is_held_by_the_port_that_it_asked_for(gateway: Gateway, lab: Lab, kind: str) -> None:
    lead = ("OUTPUT", "-p", "udp", "-d", SERVER, "--dport", str(PORT), "-j", "DNAT", "--to-destination", f":{REAL}")
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-A", *lead)
    try:
        fields, passing = RULES[kind]
        gateway.put({"target": WAN, "protocol": "udp", "ports": PORT, **fields})
        with streams.receive(lab.server, REAL) as receiver:
            for _ in range(SENT):
                streams.send(lab.gateway, SERVER, PORT, rate=None, count=1, source_port=next(SOURCE_PORTS))
        assert receiver.report().packets == passing
    finally:
        lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-D", *lead)


@pytest.mark.parametrize(("ports", "passing"), [("443,29999-30000", 10), (str(REAL), SENT)])
def test_answers_of_who_is_led_to_are_held_by_the_port_that_they_have(
    gateway: Gateway, lab: Lab, ports: str, passing: int
) -> None:
    lead = ("PREROUTING", "-i", "lan", "-p", "udp", "-d", TAKEN, "-j", *LEADS["to the server"])
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-A", *lead)
    try:
        gateway.put({"target": SERVER, "protocol": "udp", "ports": ports} | FEW)
        before = count_received(lab.client)
        with streams.receive(lab.server, REAL, answer=True) as receiver:
            streams.send(lab.client, TAKEN, PORT, rate=200, count=SENT, source_port=30000)
        assert receiver.report().packets == SENT
        gateway.wait(lambda: count_received(lab.client) - before == passing, "answers")
    finally:
        lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-D", *lead)
