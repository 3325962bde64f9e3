"""What routers say to each other passes rules where it ends on the gateway and is what it seems; nothing else does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

from netlimit.records import HostStatus
from scripts.testbed.namespaces import CLIENT, CLIENT6, LAN, LAN6, SERVER, SERVER6, Lab, Namespace
from tests.e2e import frames
from tests.e2e.gateway import Gateway

EVERYTHING = [
    {"target": net, "direction": direction, "action": "block"}
    for net in ("0.0.0.0/0", "::/0")
    for direction in ("from", "to")
]
COUNT = 20
VRRP, OSPF, IGMP, PIM, EIGRP, UDP, ICMPV6, AH, ESP = 112, 89, 2, 103, 88, 17, 58, 51, 50
SEND = f"""
import json, socket, struct, sys
for destination, protocol, port, hops in json.loads(sys.argv[1]):
    six = ":" in destination
    sock = socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_RAW, protocol)
    for option in (16, 18) if six else (socket.IP_TTL, socket.IP_MULTICAST_TTL):  # IPV6_UNICAST_HOPS, _MULTICAST_HOPS
        sock.setsockopt(41 if six else 0, option, hops)
    if six:
        sock.setsockopt(41, 17, socket.if_nametoindex("eth0"))  # IPV6_MULTICAST_IF
    else:
        sock.setsockopt(0, 32, socket.inet_aton("{CLIENT}"))  # IP_MULTICAST_IF
    body = bytes(24)
    if protocol == 17:
        body = struct.pack("!HHHH", 49152, port, 16, 0) + bytes(8)
    if protocol == 58:
        body = struct.pack("!BBHI", 130, 0, 0, 0) + bytes(16)
    for _ in range({COUNT}):
        sock.sendto(body, (destination, 0))
"""
COUNT_ARRIVED = """
import collections, json, select, socket, struct, sys
device, arrived, sockets = sys.argv[1], collections.Counter(), {}
index = socket.if_nametoindex(device)
protocols = {4: (112, 89, 2, 103, 88, 17, 51, 50), 6: (112, 89, 17, 58, 50)}
for family, protocol in [(family, each) for family, several in protocols.items() for each in several]:
    sock = socket.socket(socket.AF_INET6 if family == 6 else socket.AF_INET, socket.SOCK_RAW, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    if family == 6:
        sock.setsockopt(41, 49, 1)  # IPV6_RECVPKTINFO
        sock.setsockopt(41, 51, 1)  # IPV6_RECVHOPLIMIT
        for group in ("ff02::12", "ff02::5", "ff02::9", "ff02::fb", "ff05::1:3"):
            sock.setsockopt(41, 20, socket.inet_pton(socket.AF_INET6, group) + struct.pack("=I", index))
    else:
        for group in ("224.0.0.18", "224.0.0.5", "224.0.0.13", "224.0.0.9", "224.0.0.251", "239.1.2.3"):
            sock.setsockopt(0, 35, socket.inet_aton(group) + bytes(4) + struct.pack("=i", index))  # IP_ADD_MEMBERSHIP
    sockets[sock] = family, protocol
print("ready", flush=True)
while ready := select.select([*sockets, sys.stdin], [], [])[0]:
    for sock in (each for each in ready if each is not sys.stdin):
        family, protocol = sockets[sock]
        data, told, *_ = sock.recvmsg(2000, 200)
        if family == 4:
            destination, hops, body = socket.inet_ntoa(data[16:20]), data[8], data[4 * (data[0] & 15):]
        else:
            said = {kind: value for _, kind, value in told}
            destination, body = socket.inet_ntop(socket.AF_INET6, said[50][:16]), data
            hops = struct.unpack("=i", said[52])[0]
        port = struct.unpack("!H", body[2:4])[0] if protocol == 17 else 0
        arrived[destination, protocol, port, hops] += 1
    if ready == [sys.stdin]:
        break
print(json.dumps([[*key, count] for key, count in arrived.items()]), flush=True)
"""
Case = tuple[str, int, int, int]
"""Destination, protocol, destination port, and the hop limit that the client gives it."""


@pytest.fixture(scope="module", autouse=True)
def routes(lab: Lab) -> None:
    lab.client.ip("route add 224.0.0.0/4 dev eth0")


def arrive(
    lab: Lab, at: Namespace, *cases: Case, watched: Sequence[Case] = (), device: str = "lan", bridged: bool = False
) -> dict[Case, int]:
    """How many of COUNT packets from the client come to sockets of a namespace, of each case, or of each that is
    `watched` for. A router between has lowered the hop limit, a bridge has not."""
    passed = 0 if bridged or at is lab.gateway else 1
    counting = at.popen(*(sys.executable, "-c", COUNT_ARRIVED, device), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert counting.stdin is not None
    assert counting.stdout is not None
    assert counting.stdout.readline() == "ready\n"
    lab.client.run(sys.executable, "-c", SEND, json.dumps(cases))
    time.sleep(0.1)
    printed = counting.communicate("\n", timeout=60)[0]
    found = {tuple(key): count for *key, count in json.loads(printed)}
    return {case: found.get((*case[:3], case[3] - passed), 0) for case in watched or cases}


SPARED = [
    ("224.0.0.18", VRRP, 0, 255),
    ("ff02::12", VRRP, 0, 255),
    (LAN, VRRP, 0, 255),
    (LAN6, VRRP, 0, 255),
    ("224.0.0.5", OSPF, 0, 1),
    ("ff02::5", OSPF, 0, 1),
    (LAN, OSPF, 0, 1),
    (LAN, UDP, 3784, 255),
    (LAN6, UDP, 3784, 255),
    ("224.0.0.1", IGMP, 0, 1),
    ("ff02::1", ICMPV6, 0, 1),
    ("224.0.0.18", AH, 0, 255),
    ("224.0.0.5", ESP, 0, 1),
    ("ff02::5", ESP, 0, 1),
]
BLOCKED = [
    ("224.0.0.18", VRRP, 0, 254),
    (LAN, VRRP, 0, 64),
    (LAN6, VRRP, 0, 254),
    (LAN, UDP, 3784, 254),
    (LAN, UDP, 4784, 255),
    (LAN, UDP, 9, 255),
    ("224.0.0.1", UDP, 9, 1),
    ("224.0.0.1", IGMP, 0, 2),
    (LAN, PIM, 0, 255),
    (LAN, AH, 0, 255),
    (LAN, ESP, 0, 255),
    (LAN6, ESP, 0, 255),
    (LAN, IGMP, 0, 1),
    (LAN6, ICMPV6, 0, 64),
]


def test_what_is_what_it_seems_is_spared_and_what_only_looks_like_it_is_not(gateway: Gateway, lab: Lab) -> None:
    gateway.put(*EVERYTHING)
    arrived = arrive(lab, lab.gateway, *SPARED, *BLOCKED)
    assert {each: arrived[each] for each in SPARED} == dict.fromkeys(SPARED, COUNT)
    assert {each: arrived[each] for each in BLOCKED} == dict.fromkeys(BLOCKED, 0)


def test_nothing_that_is_forwarded_is_spared(gateway: Gateway, lab: Lab) -> None:
    forwarded = [
        (SERVER, VRRP, 0, 255),
        (SERVER6, VRRP, 0, 255),
        (SERVER, OSPF, 0, 255),
        (SERVER, UDP, 3784, 255),
        (SERVER, UDP, 3785, 254),
    ]
    everything = dict.fromkeys(forwarded, COUNT)
    assert arrive(lab, lab.server, *forwarded, device="eth0") == everything
    gateway.put(*EVERYTHING)
    assert arrive(lab, lab.server, *forwarded, device="eth0") == dict.fromkeys(forwarded, 0)


@pytest.fixture
def translating(lab: Lab) -> Iterator[None]:
    """All that comes for the gateway's address is led on to a host behind it."""
    rule = ("PREROUTING", "-i", "lan", "-d", LAN, "-j", "DNAT", "--to-destination", SERVER)
    moved = ("PREROUTING", "-i", "lan", "-d", LAN, "-p", "udp", "--dport", "3785", "-j", "DNAT")
    for words in (("-I", *rule), ("-I", *moved, "--to-destination", f"{SERVER}:5000")):
        lab.gateway.run("iptables-legacy", "-w", "-t", "nat", *words)
    yield
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-F", "PREROUTING")


def test_nor_is_what_looks_as_if_it_were_for_the_gateway_and_is_led_on(
    gateway: Gateway, lab: Lab, translating: None
) -> None:
    """Before its destination is translated it is told from nothing that is spared."""
    kinds = [(VRRP, 0, 255), (OSPF, 0, 64), (UDP, 3784, 255), (UDP, 5000, 254)]
    sent = [(LAN, protocol, 3785 if port == 5000 else port, hops) for protocol, port, hops in kinds]
    arrived = [(SERVER, protocol, port, hops) for protocol, port, hops in kinds]

    def pass_through() -> list[int]:
        found = arrive(lab, lab.server, *sent, watched=arrived, device="eth0")
        return [found[each] for each in arrived]

    assert pass_through() == [COUNT] * len(kinds)
    (block,) = gateway.put({"target": CLIENT, "action": "block"})
    assert pass_through() == [0] * len(kinds)
    assert gateway.count(block).matched_packets == COUNT * len(kinds)
    gateway.clear()
    gateway.put({"target": CLIENT, "rate": "1 packets/min", "burst": 1, "protocol": "any"})
    assert sum(pass_through()[:3]) <= 1


@pytest.fixture(params=["nobody translates", "masquerade", "another's port is forwarded"])
def forwarding(lab: Lab, request: pytest.FixtureRequest) -> Iterator[None]:
    """Nobody leads elsewhere what comes for the server."""
    chain, words = {
        "nobody translates": ("", ""),
        "masquerade": ("POSTROUTING", "-o wan -j MASQUERADE"),
        "another's port is forwarded": ("PREROUTING", "-p tcp --dport 81 -j REDIRECT --to-ports 80"),
    }[request.param]
    if chain:
        lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-I", chain, *words.split())
    yield
    if chain:
        lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-D", chain, *words.split())


def test_what_is_forwarded_is_charged_once_by_peer(gateway: Gateway, lab: Lab, forwarding: None) -> None:
    """PREROUTING has charged what it has not spared."""
    kinds = [(ESP, 0), (AH, 0), (VRRP, 0), (OSPF, 0), (PIM, 0), (EIGRP, 0), (UDP, 520), (UDP, 3784)]
    sent = [(SERVER, protocol, port, 64) for protocol, port in kinds]
    for each in sent:
        gateway.clear()
        (rule,) = gateway.put({"target": CLIENT, "rate": "1 packets/h", "burst": COUNT, "per": "peer"})
        lab.gateway.run("conntrack", "-F")
        assert arrive(lab, lab.server, each, device="eth0")[each] == COUNT, each
        assert arrive(lab, lab.server, each, device="eth0")[each] <= 1, each
        assert gateway.count(rule).matched_packets == 2 * COUNT


@pytest.fixture
def exposed(lab: Lab) -> Iterator[None]:
    """All that comes is led on to a host behind the gateway, whoever it is for; what is for others of the link comes to
    the gateway alone."""
    rule = ("PREROUTING", "-i", "lan", "-j", "DNAT", "--to-destination")
    for tool, to in (("iptables-legacy", SERVER), ("ip6tables-legacy", SERVER6)):
        lab.gateway.run(tool, "-w", "-t", "nat", "-A", *rule, to)
    yield
    for tool, to in (("iptables-legacy", SERVER), ("ip6tables-legacy", SERVER6)):
        lab.gateway.run(tool, "-w", "-t", "nat", "-D", *rule, to)


ON_LINK = {
    **{f"protocol {number} to {goal}": (goal, number, 0) for goal, number in
       [("224.0.0.18", VRRP), ("224.0.0.5", OSPF), ("224.0.0.13", PIM), ("224.0.0.10", EIGRP),
        ("ff02::12", VRRP), ("ff02::5", OSPF), ("ff02::d", PIM), ("ff02::a", EIGRP)]},
    **{f"UDP {port} to {goal}": (goal, UDP, port) for goal, port in
       [("224.0.0.9", 520), ("224.0.0.2", 646), ("224.0.0.2", 1985), ("ff02::9", 521), ("ff02::2", 646),
        ("ff02::66", 2029)]},
}  # fmt: skip


FEIGNING = ("10.1.91.1", "fd00:1::91")
"""Who sends it: connection tracking must not know these flows from before the address was translated."""


def _seen(lab: Lab, goal: str, protocol: int, port: int) -> int:
    """How many of COUNT packets that seem to be for all routers of the link arrive at the server, sent to the
    gateway's own MAC address."""
    source = FEIGNING[":" in goal]
    body = frames.udp(source, goal, port, 49152, bytes(8)) if protocol == UDP else bytes(24)
    before = lab.server.received_packets("eth0")
    hops = 255 if protocol == VRRP else 64
    frames.send(lab.client, [frames.frame(frames.ip(source, goal, protocol, body, hops)) for _ in range(COUNT)])
    time.sleep(0.1)
    return lab.server.received_packets("eth0") - before


@pytest.mark.parametrize("name", ON_LINK)
def test_nor_is_what_looks_as_if_it_were_for_the_link_and_is_led_on(
    gateway: Gateway, lab: Lab, exposed: None, name: str
) -> None:
    goal, protocol, port = ON_LINK[name]
    client = FEIGNING[":" in goal]
    assert _seen(lab, goal, protocol, port) >= COUNT
    (block,) = gateway.put({"target": client, "action": "block"})
    assert _seen(lab, goal, protocol, port) < COUNT / 4
    gateway.remove(block)
    gateway.put({"target": client, "rate": "1 packets/min", "burst": 1})
    assert _seen(lab, goal, protocol, port) < COUNT / 4


@pytest.fixture
def bridge(lab: Lab) -> Iterator[None]:
    """Client and server are on one link: a bridge of the gateway, which hands to iptables what it passes on."""
    tables = "iptables", "ip6tables"
    lab.gateway.ip("link add br0 type bridge mcast_snooping 0", "link set br0 up")
    lab.gateway.ip("link set lan master br0", "link set wan master br0")
    lab.gateway.run("sysctl", "-qw", *(f"net.bridge.bridge-nf-call-{table}=1" for table in tables))
    yield
    lab.gateway.run("sysctl", "-qw", *(f"net.bridge.bridge-nf-call-{table}=0" for table in tables))
    lab.gateway.ip("link del br0")


BRIDGED = [
    *(each for each in SPARED if each[0] not in (LAN, LAN6)),
    ("224.0.0.13", PIM, 0, 1),
    ("224.0.0.5", EIGRP, 0, 1),
    ("224.0.0.9", UDP, 520, 1),
    ("224.0.0.9", UDP, 1985, 1),
    ("ff02::9", UDP, 521, 255),
]
NOT_BRIDGED = [
    ("224.0.0.18", VRRP, 0, 254),
    ("ff02::12", VRRP, 0, 254),
    ("224.0.0.251", UDP, 5353, 255),
    ("ff02::fb", UDP, 5353, 255),
    ("224.0.0.9", UDP, 3784, 255),
    ("224.0.0.1", IGMP, 0, 2),
    ("ff02::1", ICMPV6, 0, 2),
    ("239.1.2.3", IGMP, 0, 1),
    ("239.1.2.3", OSPF, 0, 1),
    ("ff05::1:3", OSPF, 0, 1),
    ("ff05::1:3", ICMPV6, 0, 1),
]
ANYBODY = ("0.0.0.0/0", "::/0")
CLIENTS6 = CLIENT6, "fe80::ff:fe01:2"
"""To the link it sends from the latter, by CLIENT_MAC."""
LITTLE: dict[str, object] = {"rate": "1 packets/h", "burst": 1, "per": "target"}
HELD: dict[str, list[dict[str, object]]] = {
    "blocks": EVERYTHING,
    "limits": [{"target": net, **LITTLE} for net in ANYBODY],
    "limits of the groups": [{"target": net, "direction": "to", **LITTLE} for net in ("224.0.0.0/4", "ff00::/8")],
    "limits by peer": [{"target": net, **LITTLE, "per": "peer"} for net in (CLIENT, *CLIENTS6)],
    "connections at once": [{"target": net, "rate": "1 connections", "per": "target"} for net in ANYBODY],
}


@pytest.mark.usefixtures("bridge")
@pytest.mark.parametrize("name", HELD)
def test_what_routers_tell_each_other_over_a_bridge_is_spared(gateway: Gateway, lab: Lab, name: str) -> None:
    """And nothing else: who is blocked reaches nobody by what merely looks like it."""
    everything = {**dict.fromkeys(BRIDGED, COUNT), **dict.fromkeys(NOT_BRIDGED, COUNT)}
    assert arrive(lab, lab.server, *everything, device="eth0", bridged=True) == everything
    gateway.put(*HELD[name])
    for _ in range(2):  # by the second time all is used up
        lab.gateway.run("conntrack", "-F")  # no flow is open yet
        arrived = arrive(lab, lab.server, *everything, device="eth0", bridged=True)
        assert {each: arrived[each] for each in BRIDGED} == dict.fromkeys(BRIDGED, COUNT)
    if name != "connections at once":  # the copy that is for the bridge itself has opened the flow of the next
        assert {each: arrived[each] for each in NOT_BRIDGED} == dict.fromkeys(NOT_BRIDGED, 0)


@pytest.mark.usefixtures("bridge")
def test_who_is_blocked_reaches_nobody_on_a_bridge_in_the_name_of_the_gateway(gateway: Gateway, lab: Lab) -> None:
    """The address is the gateway's, the frame another's: a bridge goes by the frame."""
    cases = [(LAN, VRRP, 0, 255), (LAN, OSPF, 0, 1), (LAN, UDP, 3784, 255), (LAN, UDP, 3785, 254), (LAN, UDP, 9, 255)]
    gateway.store.report(HostStatus("gw2", "iptables", own=("10.9.9.9",)))
    feigned = [(LAN, AH, 0, 255), (LAN, ESP, 0, 255), (LAN, UDP, 4784, 255)]
    mac = lab.server.run("cat", "/sys/class/net/eth0/address").stdout.strip()
    lab.client.ip(f"neigh replace {LAN} lladdr {mac} dev eth0 nud permanent")
    lab.server.ip(f"addr add {LAN}/32 dev lo")
    try:
        everything = dict.fromkeys([*cases, *feigned], COUNT)
        assert arrive(lab, lab.server, *everything, device="eth0", bridged=True) == everything
        gateway.put({"target": CLIENT, "action": "block"})
        assert arrive(lab, lab.server, *everything, device="eth0", bridged=True) == dict.fromkeys(everything, 0)
    finally:
        lab.server.ip(f"addr del {LAN}/32 dev lo")
        lab.client.ip(f"neigh del {LAN} dev eth0")
        gateway.store.report(HostStatus("gw2", "iptables"))


def test_who_is_another_gateway_of_the_database_is_believed(gateway: Gateway, lab: Lab) -> None:
    """As long as it has that address, and for these protocols alone."""
    gateway.put(*EVERYTHING)
    far, other = (LAN, UDP, 4784, 64), (LAN, UDP, 9, 64)
    assert arrive(lab, lab.gateway, far, other) == {far: 0, other: 0}
    gateway.store.report(HostStatus("gw2", "iptables", own=(CLIENT,)))
    gateway.wait(lambda: f"-s {CLIENT}/32" in lab.gateway.run("iptables-legacy-save").stdout, "the other to be known")
    assert arrive(lab, lab.gateway, far, other) == {far: COUNT, other: 0}
    gateway.store.report(HostStatus("gw2", "iptables"))
    gateway.wait(lambda: f"-s {CLIENT}/32" not in lab.gateway.run("iptables-legacy-save").stdout, "it to be forgotten")
