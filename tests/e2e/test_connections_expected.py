"""Flows that a helper of connection tracking expects: they are new connections like others, and errors are none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from subprocess import PIPE

import pytest

from scripts.testbed.namespaces import CLIENT, CLIENT6, SERVER, SERVER6, Lab
from tests.e2e.gateway import Gateway

TRIED, MOST = 12, 3
RATES = {"new": {"rate": f"{MOST} connections/h", "burst": MOST}, "at once": {"rate": f"{MOST} connections"}}
BOTH = pytest.mark.parametrize(("client", "server"), [(CLIENT, SERVER), (CLIENT6, SERVER6)])
ANSWER = """
import socket, sys
address, tried = sys.argv[1], int(sys.argv[2])
family = socket.AF_INET6 if ":" in address else socket.AF_INET
with socket.socket(family, socket.SOCK_DGRAM) as asked:
    asked.bind((address, 69))
    print("ready", flush=True)
    clients = [asked.recvfrom(100)[1] for _ in range(tried)]
    for client in clients:
        with socket.socket(family, socket.SOCK_DGRAM) as other:
            other.bind((address, 0))
            other.sendto(b"data", client)
    for client in clients:
        asked.sendto(b"end", client)
"""
"""A server that answers each request from a port of its own, as TFTP has it, and says at the end that it has."""
ASK = r"""
import socket, sys
address, tried = sys.argv[1], int(sys.argv[2])
family = socket.AF_INET6 if ":" in address else socket.AF_INET
asking = [socket.socket(family, socket.SOCK_DGRAM) for _ in range(tried)]
for sock in asking:
    sock.sendto(b"\0\1file\0octet\0", (address, 69))
print(sum(heard == b"data" for sock in asking for heard in iter(lambda: sock.recv(100), b"end")))
"""
REFUSED = """
import socket, sys
address, tried = sys.argv[1], int(sys.argv[2])
refused = 0
for _ in range(tried):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 70))
        sock.settimeout(10)
        sock.send(b"x")
        try:
            sock.recv(100)
        except ConnectionRefusedError:
            refused += 1
        except TimeoutError:
            pass
print(refused)
"""


@pytest.fixture
def helped(lab: Lab) -> Iterator[None]:
    """Connection tracking reads what TFTP says."""
    rule = ("-t", "raw", "PREROUTING", "-p", "udp", "--dport", "69", "-j", "CT", "--helper", "tftp")
    for tool in ("iptables-legacy", "ip6tables-legacy"):
        lab.gateway.run(tool, "-w", *rule[:2], "-A", *rule[2:])
    yield
    for tool in ("iptables-legacy", "ip6tables-legacy"):
        lab.gateway.run(tool, "-w", *rule[:2], "-D", *rule[2:])


@BOTH
@pytest.mark.parametrize("direction", ["from", "to"])
@pytest.mark.parametrize("kind", RATES)
def test_what_a_helper_expects_is_a_new_connection(
    gateway: Gateway, lab: Lab, helped: None, client: str, server: str, direction: str, kind: str
) -> None:
    target = server if direction == "from" else client
    (rule,) = gateway.put({"target": target, "direction": direction, "protocol": "udp", **RATES[kind]})
    answering = lab.server.popen(sys.executable, "-S", "-c", ANSWER, server, str(TRIED), stdout=PIPE)
    assert answering.stdout is not None
    assert answering.stdout.readline() == "ready\n"
    heard = int(lab.client.run(sys.executable, "-S", "-c", ASK, server, str(TRIED)).stdout)
    answering.wait(60)
    assert heard == MOST
    counts = gateway.count(rule)
    assert (counts.matched_packets, counts.dropped_packets) == (TRIED, TRIED - MOST)


@BOTH
def test_errors_are_related_and_open_nothing(gateway: Gateway, lab: Lab, client: str, server: str) -> None:
    """More at a time than three the kernel of the server would not send."""
    (rule,) = gateway.put({"target": server, "rate": "1 connections/h", "burst": 1})
    assert int(lab.client.run(sys.executable, "-S", "-c", REFUSED, server, "3", timeout=60).stdout) == 3
    assert gateway.count(rule).dropped_packets == 0
