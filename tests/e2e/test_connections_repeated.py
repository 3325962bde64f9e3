"""A SYN that is repeated: that of a connection which counts already passes, that of one which was refused does not."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, CLIENT6, SERVER, SERVER6, Lab
from tests.e2e.frames import frame, ip, send, tcp
from tests.e2e.gateway import Gateway

PORT, OTHER, AT_ONCE, TRIED = 8080, 81, 3, 12
SYN, ACK = 2, 16
BOTH = pytest.mark.parametrize(("client", "server"), [(CLIENT, SERVER), (CLIENT6, SERVER6)])


def connect(lab: Lab, server: str, port: int = PORT, **options: object) -> streams.Stream:
    return streams.connect(lab.client, server, port, **{"wait": 0.4, **options})


@contextmanager
def losing(lab: Lab) -> Iterator[None]:
    """What is sent to a port of the server is lost behind the gateway."""
    rule = ("INPUT", "-p", "tcp", "--dport", str(PORT), "-j", "DROP")
    tools = ("iptables-legacy", "ip6tables-legacy")
    for tool in tools:
        lab.server.run(tool, "-I", *rule)
    yield
    for tool in tools:
        lab.server.run(tool, "-D", *rule)


def count_passed(lab: Lab, frames: Iterable[bytes]) -> int:
    """How many of these come to the server."""
    before = lab.server.received_packets("eth0")
    send(lab.client, frames)
    return lab.server.received_packets("eth0") - before


def segments(source: str, flags: int, first: int, count: int = TRIED) -> list[bytes]:
    """One from each of some ports."""
    ports = range(first, first + count)
    return [frame(ip(source, SERVER, 6, tcp(source, SERVER, PORT, port, flags))) for port in ports]


@BOTH
@pytest.mark.parametrize("action", ["drop", "reject"])
def test_a_syn_that_was_lost_behind_the_gateway_may_be_repeated(
    gateway: Gateway, lab: Lab, client: str, server: str, action: str
) -> None:
    """Its connection counts, and others that are refused meanwhile are in nobody's way."""
    (rule,) = gateway.put({"target": client, "rate": f"{AT_ONCE} connections", "action": action})
    with streams.listen(lab.server, PORT), streams.listen(lab.server, OTHER), connect(lab, server, count=2) as two:
        assert two.report().established == 2
        with losing(lab):
            third = connect(lab, server, wait=6)
            time.sleep(0.3)
            with connect(lab, server, OTHER) as fourth:
                assert fourth.report().established == 0
        with third:
            assert third.report().established == 1
            with connect(lab, server, OTHER, wait=2) as fourth:  # so it is repeated once
                assert fourth.report().established == 0
    assert gateway.count(rule).dropped_packets >= 2


def test_one_that_is_refused_is_so_however_often_it_comes(gateway: Gateway, lab: Lab) -> None:
    """And those in between, whose connections count, pass each time."""
    source, times = "10.1.95.1", 20
    lab.add_client_addresses(source)
    (rule,) = gateway.put({"target": source, "rate": f"{AT_ONCE} connections", "protocol": "tcp"})
    with losing(lab):
        passed = sum(count_passed(lab, segments(source, SYN, 30_000)) for _ in range(times))
    assert passed == pytest.approx(AT_ONCE * times, abs=3)  # somebody may ask for an address
    assert gateway.count(rule).dropped_packets == (TRIED - AT_ONCE) * times


def test_one_within_what_was_never_asked_for_counts(gateway: Gateway, lab: Lab) -> None:
    """Connection tracking takes an ACK for part of a connection of which it has not seen the beginning, and has it in
    its table before any SYN: that is no way around the limit, nor beside those that have begun by a SYN."""
    alone, beside = "10.1.95.2", "10.1.95.3"
    lab.add_client_addresses(alone, beside)
    gateway.put(*({"target": source, "rate": f"{AT_ONCE} connections"} for source in (alone, beside)))
    with losing(lab):
        assert count_passed(lab, segments(alone, ACK, 20_000)) >= TRIED
        assert count_passed(lab, segments(alone, SYN, 20_000)) <= AT_ONCE
        assert count_passed(lab, segments(alone, SYN, 21_000)) == 0

        assert count_passed(lab, segments(beside, SYN, 21_000, 2)) == 2
        assert count_passed(lab, segments(beside, ACK, 20_000)) >= TRIED
        assert count_passed(lab, segments(beside, SYN, 20_000)) <= AT_ONCE - 2
        assert count_passed(lab, segments(beside, SYN, 22_000)) == 0
