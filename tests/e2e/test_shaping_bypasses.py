"""What comes back to the device that it came in by: told where it is not shaped, and shaped where a rule names it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from netlimit.records import State
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, CLIENT_MAC, SERVER, Lab, Namespace
from tests.e2e.gateway import Gateway
from tests.e2e.loads import Passed, megabits, offer, shape

PEER, SECOND, BEHIND = "10.1.0.9", "10.3.0.9", "10.4.0.1"
"""Addresses of another host behind `lan`: in the client's network, in a second one there, and behind it."""


@pytest.fixture(scope="module", autouse=True)
def other(lab: Lab) -> Iterator[Namespace]:
    """Another host behind `lan`. It and the client reach each other by the gateway alone, as peers of a VPN do."""
    other = Namespace(f"{lab.server.name}x", "other")
    subprocess.run(["ip", "netns", "add", other.name], check=True)
    try:
        lab.client.ip(
            "link add br0 type bridge",
            f"link add port type veth peer name eth0 netns {other.name}",
            "addr flush dev eth0",
            f"link set br0 address {CLIENT_MAC}",
            *(f"link set {port} master br0" for port in ("eth0", "port")),
            *(f"link set {device} up" for device in ("br0", "port")),
            f"addr add {CLIENT}/32 dev br0",
            "route add 10.1.0.1 dev br0",
            "route add default via 10.1.0.1",
        )
        other.ip(
            *("link set lo up", "link set eth0 up"),
            *(f"addr add {address}/32 dev eth0" for address in (PEER, SECOND, BEHIND)),
            *("route add 10.1.0.1 dev eth0", "route add default via 10.1.0.1"),
        )
        lab.gateway.run("sysctl", "-qw", *(f"net.ipv4.conf.{each}.send_redirects=0" for each in ("all", "lan")))
        yield other
    finally:
        other.end_processes()
        subprocess.run(["ip", "netns", "del", other.name], check=True)


@pytest.fixture
def second(lab: Lab) -> Iterator[None]:
    """A second network behind `lan`, with a router in it."""
    lab.gateway.ip("addr add 10.3.0.1/16 dev lan", f"route add 10.4.0.0/16 via {SECOND}")
    yield
    lab.gateway.ip("route del 10.4.0.0/16", "addr del 10.3.0.1/16 dev lan")


def deliver(lab: Lab, receiver: Namespace, destination: str) -> Passed:
    """Megabits a second that pass from the client."""
    with streams.receive(receiver) as received, offer(lab.client, destination, CLIENT, megabits=3, seconds=2) as sent:
        sent.report()
    return megabits(received.report(), CLIENT, after=0.4, during=1.5)


def test_what_comes_back_to_other_networks_is_told_until_it_is_shaped(
    gateway: Gateway, lab: Lab, other: Namespace, second: None
) -> None:
    (rule,) = gateway.add(shape(CLIENT))
    assert gateway.state(rule) == (
        State.DEGRADED,
        "What it sends to 10.3.0.0/16 and 10.4.0.0/16 by lan is not shaped. A rule with `interface: lan` shapes it.",
    )
    assert deliver(lab, lab.server, SERVER).is_about(1)
    assert deliver(lab, other, SECOND).is_about(3)
    assert deliver(lab, other, BEHIND).is_about(3)
    gateway.put(shape(CLIENT, interface="lan"))
    assert gateway.state(rule) == (State.APPLIED, "")
    assert deliver(lab, other, SECOND).is_about(1)
    assert deliver(lab, other, BEHIND).is_about(1)


def test_it_is_told_when_the_other_network_comes(gateway: Gateway, lab: Lab) -> None:
    (rule,) = gateway.put(shape(CLIENT))
    lab.gateway.ip("addr add 10.3.0.1/16 dev lan")
    assert "to 10.3.0.0/16 by lan is not shaped" in gateway.wait_for_state(rule, State.DEGRADED)
    lab.gateway.ip("addr del 10.3.0.1/16 dev lan")
    gateway.wait_for_state(rule, State.APPLIED)


def test_what_passes_between_parts_of_the_target_is_told(gateway: Gateway, lab: Lab) -> None:
    (rule,) = gateway.add(shape("10.0.0.0/8", per="host"))
    assert gateway.state(rule) == (
        State.DEGRADED,
        "What it sends to 10.1.0.0/16 by lan, and to 10.2.0.0/16 by wan is not shaped. Rules with `interface: lan` and "
        "`interface: wan` shape it.",
    )
    assert deliver(lab, lab.server, SERVER).is_about(3)
    gateway.put(*(shape("10.0.0.0/8", per="host", interface=device) for device in ("lan", "wan")))
    assert gateway.state(rule) == (State.APPLIED, "")
    gateway.wait(lambda: bool(deliver(lab, lab.server, SERVER).megabits < 2), "its queue")
    assert deliver(lab, lab.server, SERVER).is_about(1)


@pytest.mark.parametrize("rates", [(1, 2), (2, 1)], ids=["sender", "receiver"])
def test_what_peers_send_each_other_waits_in_the_queue_of_the_receiver(
    gateway: Gateway, lab: Lab, other: Namespace, rates: tuple[int, int]
) -> None:
    sender, receiver = (f"{rate} Mbit/s" for rate in rates)
    gateway.put(shape(CLIENT, sender, interface="lan"))
    assert deliver(lab, other, PEER).is_about(rates[0])
    gateway.put(shape(PEER, receiver, direction="to"))
    assert deliver(lab, other, PEER).is_about(rates[1])


TUNNEL = """
import fcntl, struct
with open("/dev/net/tun", "r+b", 0) as tunnel:
    fcntl.ioctl(tunnel, 0x400454CA, struct.pack("16sH22x", b"vpn", 0x1001))  # TUNSETIFF, IFF_TUN | IFF_NO_PI
    print("made", flush=True)
    input()
"""


@pytest.fixture
def tunnel(lab: Lab) -> Iterator[None]:
    """A device as VPN programs have it; nobody is behind it. It goes with the program."""
    if not Path("/dev/net/tun").exists():
        pytest.skip("This kernel has no tun.")
    program = lab.gateway.popen(sys.executable, "-c", TUNNEL, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stdout.readline() == "made\n"
    lab.gateway.ip("link set vpn up", "addr add 10.8.0.1/24 dev vpn")
    yield
    program.communicate("\n")


def test_peers_behind_a_tunnel_are_known_by_its_device(gateway: Gateway, tunnel: None) -> None:
    (up,) = gateway.add(shape("10.8.0.2"))
    assert "What it sends to 10.8.0.0/24 by vpn is not shaped." in gateway.wait_for_state(up, State.DEGRADED)
    there, _ = gateway.add(shape("10.8.0.2", interface="vpn"), shape("10.8.0.3", direction="to"))
    assert "is not shaped" not in gateway.state(up)[1]
    state, sentence = gateway.state(there)
    assert state is State.APPLIED
    assert sentence.startswith("What it sends to another in 10.8.0.0/24 by vpn waits in that one's queue")
