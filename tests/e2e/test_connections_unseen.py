"""Connections whose beginning or end connection tracking takes for something else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE

import pytest

from netlimit.records import State
from scripts.testbed.namespaces import (
    CLIENT,
    CLIENT6,
    CLIENT_MAC,
    LAN,
    LAN6,
    LAN_MAC,
    SERVER,
    SERVER6,
    WAN,
    WAN6,
    Lab,
    Namespace,
    close_pipes,
)
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
    with serve(lab.server):
        yield


@contextmanager
def serve(where: Namespace, *address: str) -> Iterator[None]:
    """One that listens at one address, or at all."""
    serving = where.popen(*PROGRAM, "serve", str(PORT), *address, stdout=PIPE, cwd=warm.ROOT)
    assert serving.stdout is not None
    assert serving.stdout.readline() == "ready\n"
    try:
        yield
    finally:
        serving.kill()
        serving.wait(60)
        close_pipes(serving)


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


@contextmanager
def leading(lab: Lab, way: str, own: str, server: str) -> Iterator[None]:
    """A port of the gateway's own address leads to the server, or, by "map", to where nobody can read."""
    six = ":" in own
    place = f"[{server}]:{PORT}" if six else f"{server}:{PORT}"
    if way == "map":
        ip = "ip6" if six else "ip"
        rules = f"""table {ip} leads {{
            chain prerouting {{
                type nat hook prerouting priority dstnat
                fib daddr type local dnat to tcp dport map {{ {PORT} : {server} }}
            }}
        }}"""
        lab.gateway.run("nft", "-f", "-", input=rules)
    else:
        tool = "ip6tables-legacy" if six else "iptables-legacy"
        rule = ("PREROUTING", "-d", own, "-p", "tcp", "--dport", str(PORT), "-j", "DNAT", "--to-destination", place)
        lab.gateway.run(tool, "-w", "-t", "nat", "-A", *rule)
    try:
        yield
    finally:
        if way == "map":
            lab.gateway.run("nft", "delete", "table", ip, "leads")
        else:
            lab.gateway.run(tool, "-w", "-t", "nat", "-D", *rule)


def look_round(gateway: Gateway, own: str) -> None:
    """A controller that starts looks round at once: until it knows that something listens at a port that leads away."""
    gateway.stop()
    gateway.launch()
    name, key = f"nl-led{6 if ':' in own else 4}", f"{own},tcp:{PORT},{own}"
    gateway.wait(lambda: list(gateway.kernel.readings([name]).get(name, {})) == [key], "it to know who listens")


@pytest.mark.parametrize(("client", "server", "own"), [(CLIENT, SERVER, LAN), (CLIENT6, SERVER6, LAN6)])
@pytest.mark.parametrize("way", ["rule", "map"])
def test_nor_does_it_where_a_program_listens_at_a_port_that_leads_to_the_server(
    gateway: Gateway, lab: Lab, client: str, server: str, own: str, way: str
) -> None:
    """As docker-proxy does: a socket that listens says nothing of where the packet goes."""
    with serve(lab.gateway, own), leading(lab, way, own, server):
        (rule,) = gateway.put(limits(client, server, f"{AT_ONCE} connections")["to"])
        look_round(gateway, own)
        for how in ("hide-reset", "hide-close"):
            assert dodge(lab, how, client, own) == AT_ONCE
        gateway.put()
        (rule,) = gateway.put(limits(client, server, f"{AT_ONCE} connections")["from"])
        assert dodge(lab, "hide-reset", client, own) == AT_ONCE, "limits that come later hold as well"
        assert gateway.state(rule) == (State.APPLIED, "")


@pytest.mark.parametrize(("client", "own", "led"), [(CLIENT, LAN, WAN), (CLIENT6, LAN6, WAN6)])
def test_the_gateways_own_programs_hear_it(gateway: Gateway, lab: Lab, client: str, own: str, led: str) -> None:
    """At an address that no DNAT leads away, though one leads away the same port of another."""
    server = SERVER6 if ":" in own else SERVER
    with serve(lab.gateway, own), serve(lab.gateway, led), leading(lab, "rule", led, server):
        gateway.put(limits(client, server, f"{AT_ONCE} connections")["from"])
        look_round(gateway, led)
        assert dodge(lab, "hide-reset", client, own) == 0
    with leading(lab, "rule", own, server):
        assert dodge(lab, "hide-reset", client, own) == AT_ONCE, "where nothing listens it needs no look"


ASIDE, FORGOTTEN_SECONDS = "10.1.91.1", 6
"""Who is answered by another way, and how long connection tracking remembers a connection that it sees unanswered."""
HOLD = f"""
import socket, sys
held = []
for line in sys.stdin:
    opened = 0
    for _ in range({AT_ONCE} + 1 if line == "open\\n" else 0):
        try:
            held.append(socket.create_connection(("{SERVER}", {PORT}), 0.5, ("{ASIDE}", 0)))
            opened += 1
        except TimeoutError:
            pass
    if line == "count\\n":
        for sock in held:
            sock.settimeout(5)
            sock.send(b"x")
            opened += sock.recv(1) != b""
    print(opened, flush=True)
"""


@pytest.fixture
def answered_aside(lab: Lab) -> Iterator[None]:
    """The server's answers to one address of the client's do not pass the gateway, which forgets soon what it sees
    unanswered."""
    lab.add_client_addresses(ASIDE)
    timeout = "net.netfilter.nf_conntrack_tcp_timeout_syn_sent"
    usual = lab.gateway.run("sysctl", "-n", timeout).stdout.strip()
    lab.server.ip(f"link add aside type veth peer name aside netns {lab.client.name}")
    lab.server.ip("link set aside up")
    lab.client.ip("link set aside up")
    lab.server.ip("addr add 10.66.0.1/24 dev aside")
    lab.client.ip("addr add 10.66.0.2/24 dev aside")
    lab.server.ip(f"route add {ASIDE} via 10.66.0.2 dev aside")
    lab.gateway.run("sysctl", "-qw", f"{timeout}={FORGOTTEN_SECONDS}")
    yield
    lab.gateway.run("sysctl", "-qw", f"{timeout}={usual}")
    lab.server.ip("link del aside")


@pytest.mark.parametrize(
    ("rate", "more", "alive"),
    [(f"{AT_ONCE} connections", AT_ONCE, 2 * AT_ONCE), (f"{AT_ONCE} connections/h", 0, AT_ONCE)],
)
def test_where_answers_go_by_another_way_only_a_rate_of_new_connections_holds_for_long(
    gateway: Gateway, lab: Lab, answered_aside: None, rate: str, more: int, alive: int
) -> None:
    """What is silent for as long as a connection may stay unanswered is forgotten, and goes on."""
    (rule,) = gateway.put({"target": ASIDE, "protocol": "tcp", "rate": rate})
    client = lab.client.popen(sys.executable, "-c", HOLD, stdin=PIPE, stdout=PIPE)

    def tell(what: str) -> int:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(f"{what}\n")
        client.stdin.flush()
        return int(client.stdout.readline())

    assert tell("open") == AT_ONCE
    time.sleep(FORGOTTEN_SECONDS + 3)
    assert (tell("open"), tell("count")) == (more, alive)
    client.communicate(timeout=60)
    assert gateway.state(rule) == (State.APPLIED, ""), "it does not see that"


@pytest.fixture
def asking_aside(lab: Lab, answered_aside: None) -> Iterator[None]:
    """The other way round: the gateway sees nothing but answers."""
    lab.server.ip(f"route del {ASIDE} via 10.66.0.2 dev aside")
    lab.client.ip(f"route add {SERVER} via 10.66.0.1 dev aside")
    yield
    lab.client.ip(f"route del {SERVER} via 10.66.0.1 dev aside")
    lab.server.ip(f"route add {ASIDE} via 10.66.0.2 dev aside")


@pytest.mark.parametrize("rate", ["1 connections", "1 connections/h"])
def test_where_only_answers_pass_no_limit_of_connections_holds(
    gateway: Gateway, lab: Lab, asking_aside: None, rate: str
) -> None:
    gateway.put(*({"target": ASIDE, "protocol": "tcp", "rate": rate, "direction": way} for way in ("from", "to")))
    before = lab.gateway.received_packets("wan")
    assert lab.client.run(sys.executable, "-c", HOLD, input="open\n", timeout=60).stdout == f"{AT_ONCE + 1}\n"
    assert lab.gateway.received_packets("wan") > before, "they come by the gateway"
