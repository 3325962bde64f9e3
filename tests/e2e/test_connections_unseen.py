"""Connections whose beginning or end connection tracking takes for something else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from subprocess import PIPE

import pytest

from scripts.testbed.namespaces import CLIENT, CLIENT6, CLIENT_MAC, LAN, LAN_MAC, SERVER, SERVER6, Lab
from tests import warm
from tests.e2e.evasion import wire
from tests.e2e.evasion.headers import Ends, ip4, tcp
from tests.e2e.evasion.kinds4 import SYN
from tests.e2e.gateway import Gateway

PORT, TRIED, BURST, AT_ONCE = 8080, 12, 2, 3
PROGRAM = (sys.executable, "-m", "tests.e2e.dodger")
BOTH = pytest.mark.parametrize(("client", "server"), [(CLIENT, SERVER), (CLIENT6, SERVER6)])


@pytest.fixture(scope="module", autouse=True)
def listening(lab: Lab) -> Iterator[None]:
    """A server that resets those who ask for it."""
    serving = lab.server.popen(*PROGRAM, "serve", str(PORT), stdout=PIPE, cwd=warm.ROOT)
    assert serving.stdout is not None
    assert serving.stdout.readline() == "ready\n"
    yield
    serving.kill()
    serving.wait(60)


def dodge(lab: Lab, how: str, client: str, server: str) -> int:
    """How many connections a client gets or holds."""
    done = lab.client.run(*PROGRAM, how, client, server, str(PORT), str(TRIED), cwd=warm.ROOT, timeout=120)
    return int(done.stdout)


def limits(client: str, server: str, rate: str, **fields: object) -> dict[str, dict[str, object]]:
    """The same limit, by the one end and by the other."""
    return {
        "from": {"target": client, "rate": rate, "protocol": "tcp", **fields},
        "to": {"target": server, "rate": rate, "protocol": "tcp", "direction": "to", "per": "peer", **fields}
        | {"ports": [PORT]},
    }


@BOTH
@pytest.mark.parametrize("direction", ["from", "to"])
def test_each_connection_counts_also_one_after_the_other_from_the_same_port(
    gateway: Gateway, lab: Lab, client: str, server: str, direction: str
) -> None:
    """Who is reset by the server and asks anew is no new flow for connection tracking."""
    (rule,) = gateway.put(limits(client, server, "6 connections/min", burst=BURST)[direction])
    assert BURST <= dodge(lab, "reopen", client, server) <= BURST + 1
    assert gateway.count(rule).dropped_packets >= TRIED - BURST - 1


def test_a_syn_counts_also_where_its_connection_is_open(gateway: Gateway, lab: Lab) -> None:
    """Its sender may have ended it by what connection tracking did not take for an end."""
    source = "10.1.90.1"
    lab.add_client_addresses(source)
    gateway.put(limits(source, SERVER, "6 connections/min", burst=BURST)["from"])
    ends = Ends(source, SERVER, 0)
    open_it = f"""
import socket, sys
sock = socket.create_connection(("{SERVER}", {PORT}), 2, ("{source}", 20000))
print("open", flush=True)
sys.stdin.readline()
"""
    holding = lab.client.popen(sys.executable, "-c", open_it, stdin=PIPE, stdout=PIPE)
    assert holding.stdout is not None
    assert holding.stdout.readline() == "open\n"
    frames = [
        wire.frame(ip4(Ends(source, SERVER, number), 6, tcp(ends, SYN, to=PORT)), LAN_MAC, CLIENT_MAC)
        for number in range(100, 100 + TRIED)
    ]
    before = lab.server.received_packets("eth0")
    sender = (sys.executable, "-m", "tests.e2e.evasion.wire", "send", "eth0")
    lab.client.run(*sender, input=wire.pack(frames), cwd=warm.ROOT, timeout=120)
    arrived = lab.server.received_packets("eth0") - before
    holding.communicate("\n", timeout=60)
    assert arrived <= BURST + 2


@BOTH
def test_connections_that_are_reset_and_come_back_together_are_counted(
    gateway: Gateway, lab: Lab, client: str, server: str
) -> None:
    """Connection tracking forgets none of them for ten seconds, and counts none of them until it is answered."""
    gateway.put(limits(client, server, f"{AT_ONCE} connections")["from"])
    tool = "ip6tables-legacy" if ":" in server else "iptables-legacy"
    silent = ("OUTPUT", "-p", "tcp", "--sport", str(PORT), "-j", "DROP")
    words = ("revive", client, server, str(PORT), str(TRIED))
    trying = lab.client.popen(*PROGRAM, *words, stdin=PIPE, stdout=PIPE, cwd=warm.ROOT)
    assert trying.stdin is not None
    assert trying.stdout is not None
    for told, change in (("now\n", "-I"), ("answers\n", "-D")):
        assert trying.stdout.readline() == told
        lab.server.run(tool, "-w", change, *silent)
        trying.stdin.write("\n")
        trying.stdin.flush()
    assert int(trying.communicate(timeout=60)[0]) <= AT_ONCE


@BOTH
@pytest.mark.parametrize("how", ["hide-reset", "hide-close"])
@pytest.mark.parametrize("direction", ["from", "to"])
def test_what_dies_at_the_gateway_ends_no_connection(
    gateway: Gateway, lab: Lab, client: str, server: str, how: str, direction: str
) -> None:
    """What has a time to live of 1 goes no further: whoever it is for has never heard it."""
    gateway.put(limits(client, server, f"{AT_ONCE} connections")[direction])
    assert dodge(lab, how, client, server) == AT_ONCE


@pytest.fixture
def translating(lab: Lab) -> Iterator[None]:
    """The gateway's own address leads to the server."""
    rule = ("PREROUTING", "-i", "lan", "-d", LAN, "-p", "tcp", "-j", "DNAT", "--to-destination", SERVER)
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-A", *rule)
    yield
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-D", *rule)


@pytest.mark.parametrize("how", ["hide-reset", "hide-close"])
def test_nor_does_it_where_the_gateways_address_leads_to_the_server(
    gateway: Gateway, lab: Lab, translating: None, how: str
) -> None:
    gateway.put(limits(CLIENT, SERVER, f"{AT_ONCE} connections")["from"])
    assert dodge(lab, how, CLIENT, LAN) == AT_ONCE
