"""Ways of packets that are not from one side of the gateway to the other as they were sent."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from subprocess import PIPE

import pytest

from netlimit.records import State
from scripts.testbed.namespaces import CLIENT, CLIENT_MAC, LAN6, LAN_MAC, SERVER, SERVER6, Lab, Namespace
from tests import warm
from tests.e2e.evasion import wire
from tests.e2e.evasion.headers import FRAGMENT, TCP, UDP, UDPLITE, Ends, fragment_header, ip4, ip6, tcp, udp
from tests.e2e.evasion.kinds4 import ACK, FIN, PSH, RST, SYN
from tests.e2e.frames import send
from tests.e2e.gateway import Gateway

SENT, BURST = 30, 5
FREE, BLOCKED, LIMITED, BACK, BACK_BLOCKED = "10.3.0.1", "10.3.0.2", "10.3.0.3", "10.3.1.1", "10.3.1.2"
SEGMENT, SEGMENTS = 500, 20
SMALLEST, MOST = 1, 64
"""Bytes of the smallest segments, and how many of them UDP_SEGMENT takes at once."""
HEADERS = 28
"""Bytes of IPv4 and UDP."""
SEGMENTED = f"""
import socket, sys
source, segment, segments, times = sys.argv[1], *map(int, sys.argv[2:])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.bind((source, 0))
    sock.setsockopt(socket.IPPROTO_UDP, 103, segment)  # UDP_SEGMENT (linux/udp.h)
    for _ in range(times):
        sock.sendto(b"x" * segment * segments, ("{SERVER}", 9000))
"""
TALLY = """
import collections, json, select, socket, struct, sys
passed = collections.Counter()
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as sock:
    sock.setsockopt(socket.SOL_SOCKET, 33, 1 << 28)  # SO_RCVBUFFORCE
    sock.bind(("eth0", 0x0800))
    print("ready", flush=True)
    while sock in (readable := select.select([sock, sys.stdin], [], [])[0]) or sys.stdin.read():
        frame, (_, _, way, *_) = sock.recvfrom(65536)
        if way != 4:  # PACKET_OUTGOING
            passed[socket.inet_ntoa(frame[26:30])] += struct.unpack_from("!H", frame, 16)[0]
print(json.dumps(passed))
"""

DATAGRAMS = """
import collections, json, select, socket, sys
heard = collections.Counter()
with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
    sock.bind((sys.argv[1], 9000))
    print("ready", flush=True)
    while sock in (readable := select.select([sock, sys.stdin], [], [])[0]) or sys.stdin.read():
        heard[sock.recvfrom(2048)[1][0]] += 1
print(json.dumps(heard))
"""
OSPF, VRRP = 89, 112


def _tally(lab: Lab, *sources: str, segment: int, segments: int, times: int) -> tuple[dict[str, int], float]:
    """Have hosts send merged packets to the server: the bytes of IP packets that come there of each, and the longest
    time, in seconds, that one has sent."""
    words = (sys.executable, "-S", "-c", TALLY)
    tally = lab.server.popen(*words, stdin=PIPE, stdout=PIPE)
    assert tally.stdout is not None
    assert tally.stdout.readline() == "ready\n"
    longest = 0.0
    for source in sources:
        began = time.monotonic()
        lab.client.run(sys.executable, "-c", SEGMENTED, source, str(segment), str(segments), str(times))
        longest = max(longest, time.monotonic() - began)
    time.sleep(0.3)
    out, _ = tally.communicate(timeout=30)
    return dict.fromkeys(sources, 0) | json.loads(out), longest


def _count(lab: Lab, where: Namespace, send: object) -> dict[tuple[str, str], int]:
    program = (sys.executable, "-m", "tests.e2e.evasion.wire", "count", "eth0")
    counter = where.popen(*program, stdin=PIPE, stdout=PIPE, cwd=warm.ROOT)
    assert counter.stdout is not None
    assert counter.stdout.readline() == "ready\n"
    assert callable(send)
    send()
    out, _ = counter.communicate(timeout=60)
    return {(source, target): number for source, target, number in json.loads(out)}


def test_what_leaves_where_it_came_in_is_held(gateway: Gateway) -> None:
    lab = gateway.lab
    lab.gateway.ip(f"route replace 10.3.0.0/16 via {CLIENT}")
    gateway.put(
        {"target": BLOCKED, "action": "block"},
        {"target": LIMITED, "rate": "6 packets/min", "burst": BURST},
        {"target": BACK_BLOCKED, "action": "block", "direction": "to"},
    )
    pairs = [(FREE, BACK), (BLOCKED, BACK), (LIMITED, BACK), (FREE, BACK_BLOCKED)]
    ends = [Ends(source, target, number) for source, target in pairs for number in range(SENT)]
    frames = [wire.frame(ip4(each, UDP, udp(each)), LAN_MAC, CLIENT_MAC) for each in ends]
    program = (sys.executable, "-m", "tests.e2e.evasion.wire", "send", "eth0")
    arrived = _count(
        lab, lab.client, lambda: lab.client.run(*program, input=wire.pack(frames), cwd=warm.ROOT, timeout=120)
    )
    assert arrived[FREE, BACK] == SENT
    assert (BLOCKED, BACK) not in arrived
    assert BURST <= arrived[LIMITED, BACK] <= BURST + 1
    assert (FREE, BACK_BLOCKED) not in arrived


@pytest.fixture
def segmenting(lab: Lab) -> Iterator[None]:
    """Packets travel as one that is cut where they leave (GSO), as with cards of today."""
    ends = ((lab.client, "eth0"), (lab.gateway, "lan"))
    for namespace, device in ends:
        namespace.run("ethtool", "-K", device, "gso", "on", "tx", "on", "tx-udp-segmentation", "on", "gro", "on")
    yield
    for namespace, device in ends:
        namespace.run("ethtool", "-K", device, "gso", "off", "tx", "off", "gro", "off")


def test_packets_that_travel_as_one_are_charged_all_their_data(gateway: Gateway, segmenting: None) -> None:
    """A rate in packets counts one of them (docs/evasion.md says so); a block is not evaded, and a rate in bits not by
    large ones."""
    free, blocked, bits = "10.1.77.1", "10.1.77.2", "10.1.77.3"
    gateway.lab.add_client_addresses(free, blocked, bits)
    gateway.put({"target": blocked, "action": "block"}, {"target": bits, "rate": "80 kbit/s"})

    passed, _ = _tally(gateway.lab, free, blocked, bits, segment=SEGMENT, segments=SEGMENTS, times=SENT)
    assert passed[free] == SENT * SEGMENTS * (HEADERS + SEGMENT)
    assert passed[blocked] == 0
    # Ten thousand bytes at once, and as many a second: one of the large ones, or a few of its parts.
    assert passed[bits] <= 3 * SEGMENTS * (HEADERS + SEGMENT)


def test_small_packets_that_travel_as_one_are_charged_one_header(gateway: Gateway, segmenting: None) -> None:
    """So a rate in bits lets more pass the smaller they are, up to what docs/evasion.md says; HTB, which shapes,
    charges the headers of each."""
    bits, shaped = "10.1.77.4", "10.1.77.5"
    gateway.lab.add_client_addresses(bits, shaped)
    gateway.put(
        {"target": bits, "rate": "80 kbit/s"},
        {"target": shaped, "rate": "80 kbit/s", "action": "shape", "interface": "wan"},
    )

    passed, seconds = _tally(gateway.lab, bits, shaped, segment=SMALLEST, segments=MOST, times=400)
    allowed = 10_000 * (1 + seconds)
    headers_of_one = MOST * (HEADERS + SMALLEST) / (HEADERS + MOST * SMALLEST)
    assert 10 < passed[bits] / allowed < headers_of_one
    assert passed[shaped] < 2 * allowed


@pytest.mark.parametrize("first", [ACK, PSH | ACK, FIN | ACK, RST, SYN | ACK])
def test_a_connection_counts_whatever_its_sender_has_sent_before(gateway: Gateway, first: int) -> None:
    """Connection tracking takes a packet in mid-stream for a connection that it has missed. The server says nothing, as
    behind a firewall: an RST would end it."""
    silent = ("INPUT", "-p", "tcp", "-j", "DROP")
    if gateway.lab.server.run("iptables-legacy", "-w", "-C", *silent, check=False).returncode:
        gateway.lab.server.run("iptables-legacy", "-w", "-A", *silent)
    source = f"10.1.78.{1 + first}"
    gateway.lab.add_client_addresses(source)
    gateway.put({"target": source, "rate": "6 connections/min", "burst": BURST})
    frames = []
    for number in range(SENT):
        ends = Ends(source, SERVER, number)
        before = ip4(Ends(source, SERVER, 1000), TCP, tcp(ends, first))  # all with one identification
        frames += [wire.frame(packet, LAN_MAC, CLIENT_MAC) for packet in (before, ip4(ends, TCP, tcp(ends, SYN)))]
    program = (sys.executable, "-m", "tests.e2e.evasion.wire", "send", "eth0")
    arrived = _count(
        gateway.lab,
        gateway.lab.server,
        lambda: gateway.lab.client.run(*program, input=wire.pack(frames), cwd=warm.ROOT, timeout=120),
    )
    assert 1 <= arrived[source, SERVER] <= 1 + BURST + 1


UNTRACKED: dict[str, tuple[str, ...]] = {
    "NOTRACK": ("iptables-legacy", "-t", "raw", "-A", "PREROUTING", "-j", "NOTRACK"),
    "CT --notrack": ("iptables-legacy", "-t", "raw", "-A", "PREROUTING", "-p", "tcp", "-j", "CT", "--notrack"),
    "nft": ("nft", "add table ip untrack; add chain ip untrack c { type filter hook prerouting priority -300; }; "
            "add rule ip untrack c notrack"),
}  # fmt: skip


@pytest.fixture(params=UNTRACKED)
def untracked(lab: Lab, request: pytest.FixtureRequest) -> Iterator[str]:
    """Somebody keeps packets from being tracked."""
    lab.gateway.run(*UNTRACKED[request.param])
    yield request.param
    lab.gateway.run("iptables-legacy", "-t", "raw", "-F", "PREROUTING")
    lab.gateway.run("nft", "flush", "ruleset")


def test_connections_that_nobody_tracks_count_too(gateway: Gateway, untracked: str) -> None:
    """A SYN opens one, and no other packet of TCP does; each datagram of anything else may be the first of its flow."""
    number = list(UNTRACKED).index(untracked)
    syns, acks, datagrams = (f"10.1.{79 + number}.{last}" for last in (1, 2, 3))
    gateway.lab.add_client_addresses(syns, acks, datagrams)
    rules = gateway.put(
        *({"target": each, "rate": "6 connections/min", "burst": BURST} for each in (syns, acks, datagrams))
    )
    frames = []
    for count in range(SENT):
        frames.append(ip4(Ends(syns, SERVER, count), TCP, tcp(Ends(syns, SERVER, count), SYN)))
        frames.append(ip4(Ends(acks, SERVER, count), TCP, tcp(Ends(acks, SERVER, count), ACK)))
        frames.append(ip4(Ends(datagrams, SERVER, count), UDP, udp(Ends(datagrams, SERVER, count))))
    program = (sys.executable, "-m", "tests.e2e.evasion.wire", "send", "eth0")
    packed = wire.pack([wire.frame(packet, LAN_MAC, CLIENT_MAC) for packet in frames])
    lab = gateway.lab
    arrived = _count(lab, lab.server, lambda: lab.client.run(*program, input=packed, cwd=warm.ROOT, timeout=120))
    assert BURST <= arrived[syns, SERVER] <= BURST + 1
    assert BURST <= arrived[datagrams, SERVER] <= BURST + 1
    assert arrived[acks, SERVER] == SENT
    assert gateway.count(rules[0]).dropped_packets >= SENT - BURST - 1


@pytest.mark.parametrize("family", [4, 6])
def test_connections_of_udplite_count(gateway: Gateway, family: int) -> None:
    """Connection tracking (Linux 6.18) takes each datagram with a right checksum for invalid, for it reckons UDP's."""
    lab, target = gateway.lab, SERVER if family == 4 else SERVER6
    source = "10.1.82.1" if family == 4 else "fd00:1::8201"
    lab.add_client_addresses(source)
    (rule,) = gateway.put({"target": source, "rate": "6 connections/min", "burst": BURST})
    build = ip4 if family == 4 else ip6
    packets = [
        build(ends, UDPLITE, udp(ends, protocol=UDPLITE)) for ends in (Ends(source, target, n) for n in range(SENT))
    ]
    program = (sys.executable, "-m", "tests.e2e.evasion.wire", "send", "eth0")
    packed = wire.pack([wire.frame(packet, LAN_MAC, CLIENT_MAC) for packet in packets])
    arrived = _count(lab, lab.server, lambda: lab.client.run(*program, input=packed, cwd=warm.ROOT, timeout=120))
    assert BURST <= arrived[source, target] <= BURST + 1
    assert gateway.count(rule).dropped_packets >= SENT - BURST - 1


UNCOUNTED = {
    "untracked packets": ("iptables-legacy", "-t", "raw", "-A", "PREROUTING", "-p", "udp", "-j", "CT", "--notrack"),
    "connection zones": ("nft", "add table ip untrack; add chain ip untrack c { type filter hook prerouting priority "
                                "-300; }; add rule ip untrack c tcp sport 20000-20009 ct zone set 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCOUNTED)
def test_limits_of_connections_at_once_say_who_keeps_them_from_being_counted(gateway: Gateway, name: str) -> None:
    lab = gateway.lab
    before, rate = gateway.add(*({"target": "10.1.77.9", "rate": each} for each in ("5 connections", "5 packets/s")))
    assert gateway.state(before)[0] is State.APPLIED
    lab.gateway.run(*UNCOUNTED[name])
    try:
        gateway.stop()
        gateway.launch()
        assert "connections at once" in gateway.wait_for_state(before, State.DEGRADED)
        assert gateway.state(rate)[0] is State.APPLIED
        told = gateway.attempt("doctor")
        assert (told.returncode, f"SERIOUS: {name}" in told.stdout) == (1, True)
    finally:
        lab.gateway.run("iptables-legacy", "-t", "raw", "-F", "PREROUTING")
        lab.gateway.run("nft", "flush", "ruleset")
        gateway.stop()
        gateway.start()


def test_what_later_fragments_claim_to_be_spares_nobody(gateway: Gateway, lab: Lab) -> None:
    """Only the first fragment of an IPv6 packet tells what it is. OSPF and VRRP for this host are spared."""
    sources = {claim: f"fd00:1::{number}" for number, claim in enumerate((UDP, OSPF, VRRP), 0x31)}
    lab.add_client_addresses(*sources.values())
    gateway.put(*({"target": source, "rate": f"{BURST} packets/h", "burst": BURST} for source in sources.values()))
    receiver = lab.gateway.popen(sys.executable, "-S", "-c", DATAGRAMS, LAN6, stdin=PIPE, stdout=PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    frames: list[bytes] = []
    for claim, source in sources.items():
        for number in range(SENT):
            ends = Ends(source, LAN6, number)
            whole = udp(ends, bytes(100), to=9000)
            first = ip6(ends, FRAGMENT, fragment_header(UDP, number, 0, True) + whole[:8])
            second = ip6(ends, FRAGMENT, fragment_header(claim, number, 1, False) + whole[8:], hops=255)
            frames += [wire.frame(each, LAN_MAC, CLIENT_MAC) for each in (first, second)]
    send(lab.client, frames)
    time.sleep(0.5)
    told, _ = receiver.communicate(timeout=60)
    assert json.loads(told) == dict.fromkeys(sources.values(), BURST)
