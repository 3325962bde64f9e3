"""What others have the kernel do keeps rules from holding as they say: the rules concerned tell it, until it goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from netlimit.records import State
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, LAN, SERVER, Lab
from tests.e2e.gateway import Gateway
from tests.e2e.loads import MEASURED, megabits, offer, shape

TEE = ("-i", "wan", "-j", "TEE", "--gateway", "10.66.0.9")
PROXY = ("-i", "wan", "-p", "tcp", "-m", "conntrack", "--ctstate", "UNTRACKED", "-j", "SYNPROXY", "--mss", "1460")
TWICE = {
    "TEE": (("-t", "mangle", "-A", "PREROUTING", *TEE), ("-t", "mangle", "-D", "PREROUTING", *TEE)),
    "SYNPROXY": (("-A", "FORWARD", *PROXY), ("-D", "FORWARD", *PROXY)),
}
FILTER = ("filter", "add", "dev", "lan", "ingress", "protocol", "all", "pref", "10", "u32", "match", "u32", "0", "0")


@pytest.mark.parametrize("name", TWICE)
def test_rates_that_count_packets_twice_say_so(gateway: Gateway, lab: Lab, name: str) -> None:
    sent, other = gateway.put(
        {"target": CLIENT, "direction": "to", "rate": "200 packets/s"}, {"target": CLIENT, "rate": "200 packets/s"}
    )
    begin, end = TWICE[name]
    lab.gateway.run("iptables-legacy", *begin)
    try:
        with looked_again(gateway):
            assert name in gateway.wait_for_state(sent, State.DEGRADED)
        assert gateway.state(other) == (State.APPLIED, "")
        assert name in gateway.attempt("doctor").stdout
    finally:
        lab.gateway.run("iptables-legacy", *end)
    with looked_again(gateway):
        gateway.wait_for_state(sent, State.APPLIED)


def test_a_filter_before_ours_on_the_ingress_is_told(gateway: Gateway, lab: Lab) -> None:
    client, server = gateway.put(shape(CLIENT), shape(SERVER))
    assert deliver(lab) == pytest.approx(1, rel=MEASURED)
    lab.gateway.run("tc", *FILTER, "flowid", "1:1")
    try:
        with looked_again(gateway):
            assert "lan (u32, pref 10)" in gateway.wait_for_state(client, State.DEGRADED)
        assert gateway.state(server) == (State.APPLIED, ""), "it comes in by another device"
        assert "lan (u32, pref 10)" in gateway.attempt("doctor").stdout
        assert deliver(lab) > 2
    finally:
        lab.gateway.run("tc", "filter", "del", "dev", "lan", "ingress", "pref", "10")
    with looked_again(gateway):
        gateway.wait_for_state(client, State.APPLIED)
    assert deliver(lab) == pytest.approx(1, rel=MEASURED)


@contextmanager
def looked_again(gateway: Gateway) -> Iterator[None]:
    """A controller that starts looks round at once."""
    gateway.stop()
    gateway.launch()
    yield


def deliver(lab: Lab) -> float:
    """Megabits a second that pass from the client to the gateway itself."""
    with streams.receive(lab.gateway) as receiver, offer(lab.client, LAN, CLIENT, megabits=3, seconds=2) as sender:
        sender.report()
    return megabits(receiver.report(), CLIENT, after=0.4, during=1.5)
