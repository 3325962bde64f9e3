"""Neighbours with whom rules do something else than they say, and cannot be asked otherwise: what happens is shown, and
that it is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from subprocess import PIPE

import pytest

from netlimit.records import State
from scripts.testbed.namespaces import CLIENT, LAN, SERVER, Lab
from tests import warm
from tests.e2e.frames import frame, ip, send, udp
from tests.e2e.gateway import Gateway
from tests.e2e.loads import shape
from tests.e2e.test_told_of_others import looked_again

FAR, SENT = "10.9.9.9", 30
WRITTEN = "meta mark set meta mark & 0xffffff00 | 0x1"
RATE = {"rate": f"{SENT} packets/day", "burst": SENT}
SEND = f"""
import contextlib, socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    for _ in range({SENT}):
        with contextlib.suppress(PermissionError):
            sock.sendto(b"x", ("{FAR}", 9))
"""


@pytest.fixture
def uplink(lab: Lab) -> Iterator[None]:
    """A second way to the server, for packets with a mark."""
    gateway, server = lab.gateway, lab.server
    gateway.ip(f"link add wan2 type veth peer name eth1 netns {server.name}", "link set wan2 up")
    gateway.ip("addr add 10.3.0.1/24 dev wan2")
    server.ip("link set eth1 up", "addr add 10.3.0.2/24 dev eth1", f"addr add {FAR}/32 dev lo")
    gateway.ip(f"route add {FAR}/32 via {SERVER} dev wan", f"route add {FAR}/32 via 10.3.0.2 dev wan2 table 100")
    gateway.ip("rule add fwmark 0x1/0xff lookup 100")
    yield
    gateway.ip("rule del fwmark 0x1/0xff lookup 100", "link del wan2", f"route del {FAR}/32 via {SERVER} dev wan")
    server.ip(f"addr del {FAR}/32 dev lo")


def nft(kind: str, statement: str) -> str:
    """A chain where packets of the gateway's own meet a statement."""
    return f"""table inet m {{
	chain o {{
		type {kind} hook output priority mangle
		udp dport 9 jump led
	}}
	chain led {{
		{statement}
	}}
}}
"""


def mark(lab: Lab, program: str, *words: str) -> None:
    """The same by iptables."""
    for each in (("-N", "led"), ("-A", "OUTPUT", "-p", "udp", "-j", "led"), ("-A", "led", *words)):
        lab.gateway.run(program, "-t", "mangle", *each)


def unmark(lab: Lab) -> None:
    """What `mark` and nft have made goes."""
    for words in (("-D", "OUTPUT", "-p", "udp", "-j", "led"), ("-F", "led"), ("-X", "led")):
        lab.gateway.run("iptables-legacy", "-t", "mangle", *words, check=False)
    lab.gateway.run("nft", "flush", "ruleset")


def reach(lab: Lab, gateway: Gateway, device: str) -> None:
    """What the gateway sends to the far address comes in by a device of the server's."""
    before = lab.server.received_packets(device)
    lab.gateway.run(sys.executable, "-S", "-c", SEND)
    gateway.wait(lambda: lab.server.received_packets(device) - before >= SENT, f"{SENT} packets come in by {device}")


@pytest.mark.parametrize("program", ["iptables-legacy", "iptables-nft", "nft"])
def test_what_the_gateway_sends_another_way_once_rules_were_asked_is_told(
    gateway: Gateway, lab: Lab, uplink: None, program: str
) -> None:
    blocked, limited, at_once, anywhere, from_it, queued = gateway.put(
        {"target": FAR, "direction": "to", "action": "block", "interface": "wan2"},
        {"target": "10.9.0.0/16", "direction": "to", "interface": "wan2", "per": "target", **RATE},
        {"target": FAR, "direction": "to", "rate": "2 connections", "interface": "wan2"},
        {"target": FAR, "direction": "to", "rate": "1000 packets/s"},
        {"target": CLIENT, "interface": "lan", "rate": "1000 packets/s"},
        shape("10.8.0.1", direction="to", interface="wan2"),
    )
    reach(lab, gateway, "eth0")
    try:
        if program == "nft":
            lab.gateway.run("nft", "-f", "-", input=nft("route", WRITTEN))
        else:
            mark(lab, program, "-j", "MARK", "--set-mark", "0x1/0xff")
        reach(lab, gateway, "eth1")
        assert gateway.count(blocked).matched_packets == 0
        with looked_again(gateway):
            assert "fwmark" in gateway.wait_for_state(blocked, State.DEGRADED)
        assert gateway.state(limited)[0] is State.DEGRADED
        assert gateway.state(at_once)[0] is State.DEGRADED
        for rule in (anywhere, from_it, queued):
            assert gateway.state(rule)[0] is State.APPLIED
        told = gateway.attempt("doctor")
        assert "WARNING: rerouted packets" in told.stdout
        assert told.returncode == 0, told.stdout
    finally:
        unmark(lab)
    with looked_again(gateway):
        gateway.wait_for_state(blocked, State.APPLIED)


OTHERWISE = {
    "another mark": ("iptables-legacy", ("-j", "MARK", "--set-mark", "0x200/0xff00")),
    "kept for the connection": ("iptables-nft", ("-j", "CONNMARK", "--save-mark")),
    "no route again": ("nft", ("filter", WRITTEN)),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_marks_that_lead_nothing_another_way_are_not_told(gateway: Gateway, lab: Lab, uplink: None, name: str) -> None:
    """Such as Tailscale sets beside another's routing rules."""
    (rule,) = gateway.put({"target": FAR, "direction": "to", "action": "block", "interface": "wan2"})
    program, words = OTHERWISE[name]
    try:
        if program == "nft":
            lab.gateway.run("nft", "-f", "-", input=nft(*words))
        else:
            mark(lab, program, *words)
        reach(lab, gateway, "eth0")
        with looked_again(gateway):
            assert gateway.wait_for_state(rule, State.APPLIED) == ""
        assert "rerouted packets" not in gateway.attempt("doctor").stdout
    finally:
        unmark(lab)


QUEUED = ("FORWARD", "-m", "mark", "!", "--mark", "0x1/0x1", "-j", "NFQUEUE", "--queue-num", "0")
QUEUES = {
    "mangle": (("iptables-legacy", "-t", "mangle"), True),
    "filter": (("iptables-legacy", "-t", "filter"), False),
    "iptables-nft": (("iptables-nft", "-t", "mangle"), False),
}


@pytest.mark.parametrize("name", QUEUES)
def test_packets_that_a_program_repeats_in_mangle_are_counted_twice_and_told(
    gateway: Gateway, lab: Lab, name: str
) -> None:
    """The kernel asks again only the table, or the chain of nftables, in which the packet has waited."""
    command, twice = QUEUES[name]
    (rule,) = gateway.put({"target": CLIENT, **RATE})
    program = (sys.executable, "-m", "tests.e2e.repeater")
    answering = lab.gateway.popen(*program, stdout=PIPE, cwd=warm.ROOT)
    assert answering.stdout is not None
    assert answering.stdout.readline() == "ready\n"
    lab.gateway.run(*command, "-A", *QUEUED)
    try:
        send(lab.client, [frame(ip(CLIENT, SERVER, 17, udp(CLIENT, SERVER, 9, 1000, b"x")))] * SENT)
        asked = SENT + 1 if twice else SENT
        gateway.wait(lambda: gateway.count(rule).matched_packets >= asked, "all packets are answered")
        assert (gateway.count(rule).dropped_packets > 0) is twice
        assert ("WARNING: queued packets" in gateway.attempt("doctor").stdout) is twice
    finally:
        lab.gateway.run(*command, "-D", *QUEUED)
        answering.kill()
        answering.wait(60)
        lab.gateway.run("nft", "flush", "ruleset")
    assert "queued packets" not in gateway.attempt("doctor").stdout


HANDED = {
    word: [f"net.bridge.bridge-nf-call-{table}={value}" for table in ("iptables", "ip6tables")]
    for word, value in (("on", 1), ("off", 0))
}


@pytest.fixture
def bridges(lab: Lab) -> Iterator[None]:
    """The client's device stands on a bridge that is joined to another, which has the address (as Proxmox has it)."""
    gateway = lab.gateway
    old = gateway.run("cat", "/sys/class/net/lan/address").stdout.strip()
    gateway.ip("link add br0 type bridge", "link add br1 type bridge", "link add v0 type veth peer name v1")
    gateway.ip(*(f"link set {port} master {bridge}" for port, bridge in (("lan", "br0"), ("v0", "br0"), ("v1", "br1"))))
    gateway.ip("link set lan address 02:00:00:01:00:99", f"link set br1 address {old}", f"addr del {LAN}/16 dev lan")
    gateway.ip(*(f"link set {device} up" for device in ("br0", "br1", "v0", "v1")), f"addr add {LAN}/16 dev br1")
    gateway.run("sysctl", "-qw", *HANDED["on"])
    yield
    gateway.run("sysctl", "-qw", *HANDED["off"])
    gateway.ip("link del br0", "link del br1", "link del v0")
    gateway.ip(f"link set lan address {old}", f"addr add {LAN}/16 dev lan")


def test_each_bridge_that_a_packet_crosses_counts_it_and_that_is_told(
    bridges: None, gateway: Gateway, lab: Lab
) -> None:
    """Also a limit that stands where packets are forwarded alone."""
    came, went = gateway.put({"target": CLIENT, **RATE}, {"target": SERVER, "direction": "to", **RATE})
    lab.client.run("ping", "-c1", "-W5", LAN)
    before = gateway.count(went).matched_packets
    send(lab.client, [frame(ip(CLIENT, SERVER, 17, udp(CLIENT, SERVER, 9, 1000, b"x")))] * (SENT // 3))
    gateway.wait(lambda: gateway.count(went).matched_packets - before >= SENT // 3 * 2, "they are counted twice")
    assert gateway.count(came).matched_packets >= SENT // 3 * 2
    told = gateway.attempt("doctor").stdout
    assert "WARNING: several bridges. Each of the bridges br0, br1 hands" in told
    lab.gateway.run("sysctl", "-qw", *HANDED["off"])
    assert "several bridges" not in gateway.attempt("doctor").stdout


def test_reset_connections_that_are_remembered_for_longer_are_told(gateway: Gateway, lab: Lab) -> None:
    """The kernel says of a connection how long it lives yet, and not that it was reset."""
    at_once, rate = gateway.put({"target": CLIENT, "rate": "2 connections"}, {"target": CLIENT, **RATE})
    timeout = "net.netfilter.nf_conntrack_tcp_timeout_close"
    lab.gateway.run("sysctl", "-qw", f"{timeout}=11")
    try:
        with looked_again(gateway):
            assert timeout in gateway.wait_for_state(at_once, State.DEGRADED)
        assert gateway.state(rate)[0] is State.APPLIED
        told = gateway.attempt("doctor")
        assert "WARNING: reset connections" in told.stdout
        assert told.returncode == 0, told.stdout
    finally:
        lab.gateway.run("sysctl", "-qw", f"{timeout}=10")
    with looked_again(gateway):
        gateway.wait_for_state(at_once, State.APPLIED)
    assert "reset connections" not in gateway.attempt("doctor").stdout
