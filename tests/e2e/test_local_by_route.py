"""What ends on the gateway without being an address of its own: only a rule that names the address limits it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from netlimit.records import State
from scripts.testbed import streams
from scripts.testbed.namespaces import LAN, SERVER, Lab
from tests.e2e.gateway import Gateway

COUNT, BURST, PORT = 20, 5, 5300
ROUTED, ROUTED6 = "192.0.2.5", "2001:db8:99::5"
HERE = (ROUTED, "10.1.255.255", "255.255.255.255", "239.1.2.3", ROUTED6, "fd00:1::", "ff05::123")
AROUND = ("192.0.2.0/24", "10.1.255.0/24", "255.255.255.0/24", "239.0.0.0/8", "2001:db8:99::/64", "ff05::/16")
JOINING = f"""
import socket, struct, time
one, six = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
one.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton("239.1.2.3") + socket.inet_aton("{LAN}"))
group = socket.inet_pton(socket.AF_INET6, "ff05::123") + struct.pack("@I", socket.if_nametoindex("lan"))
six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
print("ready", flush=True)
time.sleep(600)
"""
SEND = f"""
import socket, sys
for text in sys.argv[1:]:
    sock = socket.socket(socket.AF_INET6 if ":" in text else socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    if ":" in text:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, socket.if_nametoindex("eth0"))
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 5)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 5)
    for _ in range({COUNT}):
        sock.sendto(b"x", (text, {PORT}))
"""


@pytest.fixture(scope="module", autouse=True)
def surroundings(lab: Lab) -> Iterator[None]:
    """The gateway takes what is for these addresses, and counts it behind all of netlimit's chains that drop."""
    lab.gateway.ip("route add local 192.0.2.0/24 dev lo", "route add local 2001:db8:99::/64 dev lo")
    lab.client.ip("route add 192.0.2.0/24 via 10.1.0.1", "route add 2001:db8:99::/64 via fd00:1::1")
    lab.client.ip("route add 224.0.0.0/4 dev eth0", "route add 255.255.255.255 dev eth0")
    lab.client.run("ping", "-c", "1", "-W", "3", "fd00:1::")  # an anycast address is told after a while
    joined = lab.gateway.popen(sys.executable, "-c", JOINING)
    for address in HERE:
        lab.gateway.run(tool(address), "-w", "-A", "INPUT", "-d", address, "-p", "udp", "--dport", str(PORT))
    yield
    joined.kill()
    joined.wait(60)


def tool(address: str) -> str:
    return "ip6tables-legacy" if ":" in address else "iptables-legacy"


def block(target: str) -> dict[str, object]:
    return {"target": target, "direction": "to", "action": "block"}


def arrive(lab: Lab) -> dict[str, int]:
    """How many of COUNT packets to each address get there."""
    for name in ("iptables-legacy", "ip6tables-legacy"):
        lab.gateway.run(name, "-w", "-Z", "INPUT")
    lab.client.run(sys.executable, "-c", SEND, *HERE)
    lines = [
        line for each in ("1.1.1.1", "::") for line in lab.gateway.run(f"{tool(each)}-save", "-c").stdout.split("\n")
    ]
    found = {
        match[2]: int(match[1]) for line in lines if (match := re.match(r"\[(\d+):\d+\] -A INPUT -d (\S+)/\d+ ", line))
    }
    return {address: found[address] for address in HERE}


def test_a_rule_that_names_the_address_holds(gateway: Gateway, lab: Lab) -> None:
    assert arrive(lab) == dict.fromkeys(HERE, COUNT)
    gateway.put(*map(block, HERE))
    assert arrive(lab) == dict.fromkeys(HERE, 0)
    gateway.clear()
    few: dict[str, object] = {"rate": "1 packets/min", "burst": BURST}
    rules = gateway.put(*({"target": each, "direction": "to", "protocol": "udp", **few} for each in HERE))
    assert arrive(lab) == dict.fromkeys(HERE, BURST)
    assert [gateway.count(each).dropped_packets for each in rules] == [COUNT - BURST] * len(HERE)


def test_one_for_the_network_around_it_concerns_only_what_is_forwarded(gateway: Gateway, lab: Lab) -> None:
    gateway.add(*map(block, AROUND))
    assert arrive(lab) == dict.fromkeys(HERE, COUNT)


def test_a_network_that_ends_here_as_a_whole_is_told(gateway: Gateway, lab: Lab) -> None:
    """A table that only marked packets are led to says nothing."""
    lab.gateway.ip("route add local 10.2.0.0/24 dev lo table 100")
    lost, partly, marked = gateway.add(block("192.0.2.0/25"), block("192.0.0.0/16"), block("10.2.0.0/24"))
    assert "All of 192.0.2.0/25 ends on this host by a route" in gateway.wait_for_state(lost, State.ERROR)
    gateway.wait_for_state(partly, State.APPLIED)
    gateway.wait_for_state(marked, State.APPLIED)
    lab.gateway.ip("route del local 10.2.0.0/24 dev lo table 100")
    (status,) = gateway.store.hosts()
    assert {"192.0.2.0/24", "10.1.255.255/32", "2001:db8:99::/64"} <= {*status.local}
    assert LAN not in " ".join(status.local)


def test_what_it_sends_from_such_an_address_is_limited_where_it_is_named(gateway: Gateway, lab: Lab) -> None:
    gateway.put({"target": ROUTED, "action": "block"})
    with streams.receive(lab.server) as receiver:
        streams.send(lab.gateway, SERVER, rate=1000, count=COUNT, sources=[ROUTED])
    assert receiver.report().packets == 0


def test_a_route_that_comes_after_the_rule_brings_it_here(gateway: Gateway, lab: Lab) -> None:
    lab.gateway.ip("route del local 192.0.2.0/24 dev lo")
    gateway.put(block(ROUTED))
    assert not blocks_here(lab)
    lab.gateway.ip("route add local 192.0.2.0/24 dev lo")
    gateway.wait(lambda: blocks_here(lab), "the rule to stand in INPUT")
    assert arrive(lab)[ROUTED] == 0


def blocks_here(lab: Lab) -> bool:
    return "NL-INPUT" in lab.gateway.run("iptables-legacy-save", "-t", "mangle").stdout
