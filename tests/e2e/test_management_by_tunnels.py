"""Tunnels that begin on the gateway share the cap of the device below, though who is at their far end is safe."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from netlimit.tree import MANAGEMENT, SERVICES, VISITORS
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, SERVER, WAN, Lab
from scripts.testbed.reports import SendReport
from tests.e2e.gateway import Gateway
from tests.e2e.loads import add_server_addresses, shape
from tests.e2e.visitors import Sshd, Visitor

OTHER_END = "10.2.77.1"
SAFE = (OTHER_END,)
TUNNELS = {"sites": (8, SERVER, "10.8.0"), "others": (9, OTHER_END, "10.9.0")}
"""Number, far end, and network inside. Who is behind the first may log in."""
NEAR, ADMIN = "10.8.0.1", "10.8.0.2"
CAP = shape("0.0.0.0/0", "20 Mbit/s", direction="to", per="target", interface="wan")
SIZE = 1400
FRAME = 8 * (SIZE + 14 + 50)
"""Bits of a frame that carries one of SIZE bytes in a tunnel."""


@pytest.fixture(scope="module", autouse=True)
def surroundings(lab: Lab) -> Iterator[None]:
    """Two tunnels over `wan`, networks behind them, and an sshd."""
    add_server_addresses(lab, OTHER_END)
    for device, (number, far, network) in TUNNELS.items():
        for space, ends, host in ((lab.gateway, (WAN, far), 1), (lab.server, (far, WAN), 2)):
            space.ip(
                f"link add {device} type vxlan id {number} local {ends[0]} remote {ends[1]} dstport 4789",
                f"link set {device} up",
                f"addr add {network}.{host}/24 dev {device}",
            )
        lab.server.ip(f"addr add {network}.3/24 dev {device}")
    with Sshd(lab.gateway):
        yield


@pytest.fixture
def admin(gateway: Gateway, lab: Lab) -> Iterator[Visitor]:
    """Somebody has logged in through a tunnel, the far end of which is safe since."""
    with Visitor(lab.server, NEAR, source=ADMIN) as visitor:
        assert visitor.say("login")
        gateway.wait(lambda: SERVER in {each for host in gateway.store.hosts() for each in host.safe}, "the far end")
        yield visitor


def fill(lab: Lab, network: str, megabits: float, seconds: float = 3) -> streams.Stream[SendReport]:
    """Start to send what the gateway forwards into a tunnel: so much on the line."""
    return streams.sending(lab.client, f"{network}.3", rate=megabits * 1e6 / FRAME, seconds=seconds, size=SIZE)


def sent(gateway: Gateway, minor: int) -> int:
    """The packets that a class of `wan` has sent or dropped."""
    found = [usage for number, usage in gateway.kernel.usages("wan").items() if number & 0xFFFF == minor]
    return sum(usage.packets + usage.dropped for usage in found)


@pytest.mark.parametrize("device", TUNNELS)
def test_what_is_forwarded_into_a_tunnel_has_the_whole_cap(
    gateway: Gateway, lab: Lab, admin: Visitor, device: str
) -> None:
    """Half of it is there for half of it, be the far end safe by a session behind it or by the settings."""
    gateway.put(CAP)
    with streams.receive(lab.server) as receiver, fill(lab, TUNNELS[device][2], 10) as sender:
        offered = sender.report().packets
        receiver.stop()
    assert receiver.report().delivered(source=CLIENT).packets > 0.97 * offered
    assert sent(gateway, VISITORS) + sent(gateway, SERVICES) < 100
    assert admin.works


def test_what_a_session_is_answered_through_a_tunnel_keeps_its_class(
    gateway: Gateway, lab: Lab, admin: Visitor
) -> None:
    """While customers fill that tunnel with twice the cap."""
    gateway.put(CAP)
    with fill(lab, TUNNELS["sites"][2], 40, seconds=60):
        gateway.wait(lambda: _waiting(gateway) > 20, "a queue")
        before = sent(gateway, MANAGEMENT)
        echoed = [number for number in range(20) if admin.works and admin.say(f"key {number}")]
        assert len(echoed) == 20
        assert 20 <= sent(gateway, MANAGEMENT) - before < 100, "the answers, and nothing of the customers"


def _waiting(gateway: Gateway) -> int:
    """The packets that wait on `wan`."""
    return sum(usage.queued_packets for usage in gateway.kernel.usages("wan").values())
