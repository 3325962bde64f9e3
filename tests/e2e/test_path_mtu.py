"""What is allowed of a blocked host: its connections come to a smaller MTU, and what tells the sender so is ICMP."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from subprocess import PIPE

import pytest

from scripts.testbed.namespaces import CLIENT, CLIENT6, SERVER, SERVER6, Lab
from tests.e2e.gateway import Gateway

PORT = 4430
SIZE = 200_000
SERVE = f"""
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listening = socket.create_server((sys.argv[1], {PORT}), family=family)
print("ready", flush=True)
listening.settimeout(8)
connection, _ = listening.accept()
connection.settimeout(4)
try:
    connection.sendall(bytes({SIZE}))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
except OSError:
    pass
"""
FETCH = f"""
import socket, sys
connection = socket.create_connection((sys.argv[2], {PORT}), 4, (sys.argv[1], 0))
connection.settimeout(2)
got = 0
try:
    while got < {SIZE} and (data := connection.recv(65536)):
        got += len(data)
except OSError:
    pass
print(got)
"""


@pytest.fixture
def narrow(lab: Lab) -> Iterator[None]:
    """The link to the clients is narrower than theirs to it, and nobody but the gateway knows."""
    lab.gateway.ip("link set lan mtu 1300")
    yield
    lab.gateway.ip("link set lan mtu 1500")
    for command in (("route", "flush", "cache"), ("-6", "route", "flush", "cache")):
        lab.server.run("ip", *command)


def fetch(lab: Lab, server: str, client: str) -> int:
    """How many bytes come."""
    serving = lab.server.popen(sys.executable, "-S", "-c", SERVE, server, stdout=PIPE)
    try:
        assert serving.stdout is not None
        assert serving.stdout.readline() == "ready\n"
        return int(lab.client.run(sys.executable, "-S", "-c", FETCH, client, server).stdout)
    finally:
        serving.kill()
        serving.communicate()


@pytest.mark.parametrize(("server", "client"), [(SERVER, CLIENT), (SERVER6, CLIENT6)], ids=["IPv4", "IPv6"])
def test_beside_a_block_icmp_is_to_be_allowed_as_well(
    narrow: None, gateway: Gateway, lab: Lab, server: str, client: str
) -> None:
    """docs/rules.md says so."""
    tcp = {"protocol": "tcp", "action": "allow"}
    gateway.put(
        {"target": server, "direction": "to", "action": "block"},
        {"target": server, "direction": "from", "action": "block"},
        {"target": server, "direction": "to", **tcp, "ports": [PORT]},
        {"target": server, "direction": "from", **tcp, "source_ports": [PORT]},
    )
    assert fetch(lab, server, client) == 0, "then docs/rules.md need not tell of it"
    gateway.put(
        *({"target": server, "direction": way, "protocol": "icmp", "action": "allow"} for way in ("to", "from"))
    )
    assert fetch(lab, server, client) == SIZE
