"""Whom a rule names does not pass, whatever he makes his packets look like."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest

from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, CLIENT6, LAN, LAN6, SERVER, SERVER6, WAN, Lab
from tests.e2e import frames
from tests.e2e.gateway import HOST, Gateway
from tests.e2e.visitors import Sshd, Visitor

MANY = 200
NOISE = 12
"""Packets that hosts send each other by themselves meanwhile."""
PORT = 5353
OTHER_PORT = 5999
STRANGER, STRANGER6 = "10.1.66.6", "fd00:1::666"
SAFE = ("10.2.0.0/31", "10.1.0.0/31", "10.2.0.64/28")
"""Networks that hold the gateway's own addresses, now or later."""


@pytest.fixture(scope="module", autouse=True)
def surroundings(lab: Lab) -> Iterator[None]:
    """An sshd that is bound to one address."""
    lab.add_client_addresses(STRANGER, STRANGER6)
    with Sshd(lab.gateway, address=LAN):
        yield


def forwarded(lab: Lab, made: list[bytes]) -> int:
    """How many packets reach the server when frames are sent to the gateway."""
    before = lab.server.received_packets("eth0")
    frames.send(lab.client, made)
    time.sleep(0.1)
    return lab.server.received_packets("eth0") - before


def counted(lab: Lab, name: str) -> int:
    """A counter of the gateway's kernel."""
    files = [lab.gateway.run("cat", f"/proc/net/{each}").stdout for each in ("snmp", "snmp6", "netstat")]
    for line in files[1].splitlines():
        if line.split()[0] == name:
            return int(line.split()[1])
    for text in (files[0], files[2]):
        lines = text.splitlines()
        for head, values in zip(lines[::2], lines[1::2], strict=True):
            kind = head.split(":")[0]
            for each, value in zip(head.split()[1:], values.split()[1:], strict=True):
                if kind + each == name:
                    return int(value)
    return 0


def arrived(lab: Lab, name: str, made: list[bytes]) -> int:
    """By how much a counter of the gateway's grows when frames are sent to it."""
    before = counted(lab, name)
    frames.send(lab.client, made)
    time.sleep(0.1)
    return counted(lab, name) - before


# -- neighbour discovery


RULES: dict[str, dict[str, object]] = {
    "block": {"target": f"{STRANGER6}", "action": "block"},
    "limit": {"target": f"{STRANGER6}", "rate": "1 packets/h"},
    "block to": {"target": SERVER6, "direction": "to", "action": "block"},
    "limit to": {"target": SERVER6, "direction": "to", "rate": "1 packets/h"},
}


@pytest.mark.parametrize("hops", [64, 255])
@pytest.mark.parametrize("kind", [133, 134, 135, 136, 137])
def test_what_is_forwarded_is_no_neighbour_discovery(gateway: Gateway, lab: Lab, kind: int, hops: int) -> None:
    message = frames.icmp6(STRANGER6, SERVER6, kind, bytes(64))
    packet = frames.ip(STRANGER6, SERVER6, frames.ICMP6, message, hops=hops)
    pieces = frames.fragments(STRANGER6, SERVER6, frames.ICMP6, message, [32], number=7)
    made = [frames.frame(each) for each in (packet, *pieces)] * MANY
    assert forwarded(lab, made[:30]) >= 10, "without a rule they pass"
    for name in RULES if kind == 135 else ("block",):
        gateway.put(RULES[name])
        assert forwarded(lab, made) <= NOISE, name
        gateway.clear()


def test_what_has_been_forwarded_is_no_neighbour_discovery_of_the_gateway(gateway: Gateway, lab: Lab) -> None:
    message = frames.solicitation(STRANGER6, LAN6, LAN6)
    true, false = (frames.frame(frames.ip(STRANGER6, LAN6, frames.ICMP6, message, hops=hops)) for hops in (255, 64))
    gateway.put({"target": STRANGER6, "action": "block"})
    assert arrived(lab, "Icmp6InMsgs", [false] * MANY) <= NOISE
    assert arrived(lab, "Icmp6InNeighborSolicits", [true] * 20) >= 20


def test_who_is_blocked_still_finds_his_neighbour(gateway: Gateway, lab: Lab) -> None:
    gateway.put({"target": CLIENT6, "action": "block"}, {"target": "::/0", "direction": "to", "action": "block"})
    for namespace, device in ((lab.client, "eth0"), (lab.gateway, "lan")):
        namespace.run("ip", "-6", "neigh", "flush", "dev", device)
    assert streams.ping(lab.client, LAN6, count=1) == 0
    assert "02:00:00:01:00:01" in lab.client.run("ip", "-6", "neigh", "show", LAN6).stdout


# -- fragments


def cut(payload: bytes, *, tiny: bool) -> list[int]:
    return list(range(8, 41, 8)) if tiny else [len(payload) // 16 * 8]


def in_order(pieces: list[bytes]) -> list[bytes]:
    return pieces


def last_first(pieces: list[bytes]) -> list[bytes]:
    return pieces[::-1]


def shuffled(pieces: list[bytes]) -> list[bytes]:
    return random.Random(len(pieces)).sample(pieces, len(pieces))


def twice(pieces: list[bytes]) -> list[bytes]:
    """They overlap, wholly."""
    return [piece for piece in pieces[:-1] for _ in range(2)] + pieces[-1:]


@pytest.mark.parametrize("order", [in_order, last_first, shuffled, twice], ids=lambda each: each.__name__)
@pytest.mark.parametrize("tiny", [False, True], ids=["halves", "tiny"])
@pytest.mark.parametrize(("src", "dst"), [(STRANGER, SERVER), (STRANGER6, SERVER6)], ids=["IPv4", "IPv6"])
def test_fragments_do_not_pass_rules_with_ports(
    gateway: Gateway,
    lab: Lab,
    src: str,
    dst: str,
    tiny: bool,
    order: Callable[[list[bytes]], list[bytes]],
) -> None:
    def make(port: int, count: int = MANY) -> list[bytes]:
        data = frames.udp(src, dst, port, 4000, bytes(1200))
        numbers = range(count)
        return [
            frames.frame(piece)
            for number in numbers
            for piece in order(frames.fragments(src, dst, frames.UDP, data, cut(data, tiny=tiny), number + port))
        ]

    for rule in (
        {"target": src, "protocol": "udp", "ports": PORT, "action": "block"},
        {"target": dst, "direction": "to", "protocol": "udp", "ports": PORT, "rate": "1 packets/h"},
    ):
        gateway.put(rule)
        assert forwarded(lab, make(PORT)) <= NOISE, rule
        if order is not twice:
            assert forwarded(lab, make(OTHER_PORT, 5)) >= 5, "those of another port are put together, and pass"
        gateway.clear()


def test_nothing_is_put_together_without_a_rule_that_asks_for_it(gateway: Gateway, lab: Lab) -> None:
    """Nor any longer than that."""
    data = frames.udp(STRANGER, SERVER, PORT, 4000, bytes(1200))
    first, _ = (frames.frame(each) for each in frames.fragments(STRANGER, SERVER, frames.UDP, data, [600], 9))
    gateway.put({"target": STRANGER, "rate": "10000 packets/s"})
    assert forwarded(lab, [first] * 50) >= 50
    gateway.put({"target": "192.0.2.1", "protocol": "udp", "ports": 9, "action": "block"})
    assert forwarded(lab, [first] * 50) <= NOISE
    gateway.clear()
    assert forwarded(lab, [first] * 50) >= 50


@pytest.mark.parametrize(("src", "dst"), [(STRANGER, SERVER), (STRANGER6, SERVER6)], ids=["IPv4", "IPv6"])
def test_who_fills_the_queue_of_fragments_takes_down_no_whole_packet(
    gateway: Gateway, lab: Lab, src: str, dst: str
) -> None:
    gateway.put({"target": "10.1.250.1", "protocol": "udp", "ports": 9, "action": "block"})
    gateway.put({"target": "fd00:1::250", "protocol": "udp", "ports": 9, "action": "block"})
    data = frames.udp(src, dst, OTHER_PORT, 4000, bytes(1000))
    lone = [frames.fragments(src, dst, frames.UDP, data, [904], number)[0] for number in range(1, 9000)]
    frames.send(lab.client, map(frames.frame, lone))
    whole = frames.udp(src, dst, OTHER_PORT, 4000, bytes(1000))
    sent = [frames.frame(frames.ip(src, dst, frames.UDP, whole))] * MANY
    assert forwarded(lab, sent) >= MANY
    assert streams.ping(lab.client, SERVER, count=2) == 2


@pytest.mark.parametrize(("src", "dst"), [(STRANGER, LAN), (STRANGER6, LAN6)], ids=["IPv4", "IPv6"])
def test_later_fragments_for_the_gateway_are_shaped_with_their_target(
    gateway: Gateway, lab: Lab, src: str, dst: str
) -> None:
    (rule,) = gateway.put({"target": src, "protocol": "udp", "ports": PORT, "action": "shape", "rate": "100 Mbit/s"})
    data = frames.udp(src, dst, PORT, 4000, bytes(1200))
    later = [frames.fragments(src, dst, frames.UDP, data, [600], number)[1] for number in range(MANY)]
    before = gateway.count(rule).matched_packets
    frames.send(lab.client, map(frames.frame, later))
    assert gateway.count(rule).matched_packets - before >= MANY
    other = frames.udp(src, dst, OTHER_PORT, 4000, bytes(100))
    frames.send(lab.client, [frames.frame(frames.ip(src, dst, frames.UDP, other))] * MANY)
    assert gateway.count(rule).matched_packets - before <= MANY + NOISE, "of a whole packet the port is known"


# -- the gateway's own address


def test_the_own_address_is_never_safe(gateway: Gateway, lab: Lab) -> None:
    """A network that is may hold it: who talks with it, or through a forwarded port, is spared by that no more than
    others."""
    gateway.put({"target": STRANGER, "action": "block"})
    for goal in (WAN, LAN):
        data = frames.udp(STRANGER, goal, PORT, 4000, b"hello")
        made = [frames.frame(frames.ip(STRANGER, goal, frames.UDP, data))] * MANY
        assert arrived(lab, "UdpNoPorts", made) <= NOISE, goal


def test_who_uses_the_api_by_the_own_address_does_not_make_it_safe(gateway: Gateway, lab: Lab) -> None:
    gateway.store.saw_client(HOST, WAN)
    gateway.store.saw_client(HOST, CLIENT)
    gateway.put({"target": STRANGER, "action": "block"})

    def said() -> tuple[str, ...]:
        (status,) = gateway.store.hosts()
        return status.safe

    gateway.wait(lambda: CLIENT in said(), f"{CLIENT} to be safe")
    assert WAN not in said()
    expected = {each for each in said() if ":" not in each}
    gateway.wait(lambda: set(gateway.kernel.readings(["nl-safe4"])["nl-safe4"]) == expected, "the set to hold them")


def test_an_own_address_that_becomes_another_hosts_and_back(gateway: Gateway, lab: Lab) -> None:
    """The kernel itself tells which addresses are its own, at any moment."""
    gateway.put({"target": STRANGER, "action": "block"})
    moving = "10.2.0.77"  # in a network that is safe
    data = frames.udp(STRANGER, moving, PORT, 4000, b"hello")
    made = [frames.frame(frames.ip(STRANGER, moving, frames.UDP, data))] * MANY
    lab.gateway.ip(f"neigh replace {moving} lladdr 02:00:00:02:00:02 nud permanent dev wan")
    assert forwarded(lab, made) >= MANY
    lab.gateway.ip(f"addr add {moving}/32 dev wan")
    assert arrived(lab, "UdpNoPorts", made) <= NOISE
    lab.gateway.ip(f"addr del {moving}/32 dev wan")
    assert forwarded(lab, made) >= MANY


# -- connections by which the gateway is managed


@pytest.mark.parametrize(
    "flags", [0, 1, 4, 16, 17, 20, 41], ids=["none", "FIN", "RST", "ACK", "FIN+ACK", "RST+ACK", "Xmas"]
)
def test_no_socket_is_found_for_who_is_blocked(gateway: Gateway, lab: Lab, flags: int) -> None:
    with Visitor(lab.client, LAN) as visitor:
        assert visitor.say("hello")
        gateway.put({"target": STRANGER, "action": "block"})
        made = [frames.frame(frames.ip(STRANGER, LAN, frames.TCP, frames.tcp(STRANGER, LAN, 22, port, flags)))
                for port in range(20000, 20000 + MANY)]  # fmt: skip
        assert arrived(lab, "TcpInSegs", made) <= NOISE
        assert visitor.say("still here")


def test_an_open_connection_is_told_by_both_its_ends(gateway: Gateway, lab: Lab) -> None:
    with Visitor(lab.client, LAN, source=STRANGER) as visitor:
        assert visitor.say("hello")
        gateway.put({"target": STRANGER, "action": "block"})
        held = gateway.kernel.readings(["nl-open4"])["nl-open4"]
        (key,) = (each for each in held if each.startswith(f"{STRANGER},"))
        assert key.endswith(f",{LAN}")
        port = int(key.split(",")[1].removeprefix("tcp:"))
        others = [frames.frame(frames.ip(STRANGER, LAN, frames.TCP, frames.tcp(STRANGER, LAN, 22, other, 16)))
                  for other in range(port + 1, port + 1 + MANY)]  # fmt: skip
        assert arrived(lab, "TcpInSegs", others) <= NOISE
        assert visitor.say("still here")
    gateway.wait(lambda: key not in gateway.kernel.readings(["nl-open4"])["nl-open4"], "the connection to be forgotten")


def test_who_comes_while_a_rule_is_there_is_followed_and_his_entries_are_no_drift(gateway: Gateway, lab: Lab) -> None:
    gateway.put({"target": "10.1.250.1", "action": "block"})
    before = gateway.store.revision()
    with Visitor(lab.client, LAN, source=STRANGER) as visitor:
        assert visitor.say("hello")

        def followed() -> bool:
            return any(each.startswith(f"{STRANGER},") for each in gateway.kernel.readings(["nl-open4"])["nl-open4"])

        gateway.wait(followed, "the connection to be followed")
    assert not gateway.drift()
    (status,) = gateway.store.hosts()
    assert (status.drift, gateway.store.revision()) == (0, before)
