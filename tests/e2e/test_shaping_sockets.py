"""Services of the gateway with one socket for all: who is shaped, and asks much, keeps nobody else from his answers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from netlimit.records import State
from scripts.testbed.namespaces import LAN, LAN6, Lab, Namespace, close_pipes
from tests.e2e.gateway import Gateway
from tests.e2e.loads import shape

HOST, OTHER, HOST6, OTHER6 = "10.1.115.1", "10.1.115.2", "fd00:1::115:1", "fd00:1::115:2"
PORT, ANSWER = 5300, 64
SERVE = f"""
import socket
server = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
server.bind(("::", {PORT}))
print("ready", flush=True)
while True:
    question, who = server.recvfrom(2000)
    server.sendto(question[:16].ljust({ANSWER}), who)
"""
ASK = f"""
import json, socket, sys, threading, time
source, server, rate, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
asking = socket.socket(socket.AF_INET6 if ":" in source else socket.AF_INET, socket.SOCK_DGRAM)
asking.bind((source, 0))
asked, answered = {{}}, {{}}
def listen():
    while True:
        number = int(asking.recv(2000))
        answered[number] = time.time()
threading.Thread(target=listen, daemon=True).start()
begin, count = time.monotonic(), 0
while time.monotonic() - begin < seconds:
    asked[count] = time.time()
    asking.sendto(str(count).rjust(16).encode(), (server, {PORT}))
    count += 1
    time.sleep(max(0, begin + count / rate - time.monotonic()))
time.sleep(1)
within = sum(answered.get(number, 1e12) - then < 1 for number, then in asked.items())
print(json.dumps({{"asked": len(asked), "within": within, "times": sorted(answered.values())}}))
"""


@pytest.fixture(autouse=True)
def addresses(lab: Lab) -> None:
    lab.add_client_addresses(HOST, OTHER, HOST6, OTHER6)


@pytest.fixture
def service(lab: Lab) -> Iterator[None]:
    """A service of the gateway that answers by one socket."""
    with running(lab.gateway, SERVE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield


@contextmanager
def running(namespace: Namespace, program: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = namespace.popen(sys.executable, "-c", program, *words, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        close_pipes(process)


def ask_beside(lab: Lab, host: str, other: str, server: str, rate: float = 300) -> tuple[dict, dict]:
    """What the host got, who asks so often, and what another one, who asks ten times a second from a second later."""
    with running(lab.client, ASK, host, server, str(rate), "6") as asking:
        time.sleep(1.5)
        with running(lab.client, ASK, other, server, "10", "3") as beside:
            got = [json.loads(each.communicate(timeout=20)[0]) for each in (beside, asking)]
    return got[1], got[0]


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize(("host", "other", "server"), [(HOST, OTHER, LAN), (HOST6, OTHER6, LAN6)])
def test_who_is_shaped_fills_no_socket_of_the_gateway(
    gateway: Gateway, lab: Lab, host: str, other: str, server: str
) -> None:
    (rule,) = gateway.add(shape(host, "64 kbit/s", direction="to"))
    assert gateway.state(rule) == (State.APPLIED, "")
    his, others = ask_beside(lab, host, other, server)
    assert others["within"] >= 0.9 * others["asked"]
    frame = ANSWER + 8 + (40 if ":" in host else 20) + 14
    begin = his["times"][0] + 1
    answers = sum(begin <= each < begin + 4 for each in his["times"])
    assert 8 * frame * answers / 4 == pytest.approx(64_000, rel=0.05)


@pytest.mark.usefixtures("service")
def test_what_nothing_claims_under_a_cap_fills_none_either(gateway: Gateway, lab: Lab) -> None:
    """Who has a class of his own gets his answers, though those of all others wait in one, and come by his socket."""
    gateway.put(
        shape("0.0.0.0/0", "256 kbit/s", direction="to", per="target", interface="lan"),
        shape(OTHER, "64 kbit/s", direction="to"),
    )
    _, others = ask_beside(lab, HOST, OTHER, LAN, rate=1500)
    assert others["within"] >= 0.9 * others["asked"]


@pytest.mark.parametrize(("host", "other", "server"), [(HOST, OTHER, LAN), (HOST6, OTHER6, LAN6)])
def test_echo_replies_fill_no_socket_of_the_kernel(
    gateway: Gateway, lab: Lab, host: str, other: str, server: str
) -> None:
    gateway.put(shape(host, "64 kbit/s", direction="to"))
    flood = ("ping", "-q", "-I", host, "-i", "0.001", "-w", "5", "-s", "100", server)
    with lab.client.popen(*flood, stdout=subprocess.PIPE) as flooding:
        time.sleep(1.5)
        said = lab.client.run("ping", "-q", "-I", other, "-c", "20", "-i", "0.1", "-W", "1", server, check=False).stdout
        flooding.wait()
    assert "20 packets transmitted, 20 received" in said


def test_tcp_stays_with_its_socket(gateway: Gateway, lab: Lab) -> None:
    """It sends as much as leaves, and what waits is its own."""
    gateway.put(shape(HOST, "2 Mbit/s", direction="to"))
    send = f"""
import socket, time
server = socket.create_server(("{LAN}", {PORT}))
print("ready", flush=True)
there, _ = server.accept()
there.settimeout(0.1)
sent, begin = 0, time.monotonic()
while time.monotonic() - begin < 4:
    try:
        sent += there.send(bytes(65536))
    except TimeoutError:
        pass
"""
    take = f"""
import socket, time
taken, begin = 0, time.monotonic()
with socket.create_connection(("{LAN}", {PORT}), source_address=("{HOST}", 0)) as there:
    while piece := there.recv(65536):
        if time.monotonic() - begin > 1:
            taken += len(piece)
        if time.monotonic() - begin > 4:
            break
print(taken)
"""
    with running(lab.gateway, send) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline() == "ready\n"
        with running(lab.client, take) as taker:
            taken = int(taker.communicate(timeout=20)[0])
    assert 8 * taken / 3 == pytest.approx(2e6 * 1448 / 1514, rel=0.1)
