"""What waits in a class of ours is charged to no socket that has other far ends, too; and what others hang there."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest

from netlimit.plan import WriteIngress, WriteTree, diff, drifted
from netlimit.state import State
from netlimit.tree import REST, TOP, Leaf, QueueClass, Tree, classid
from tests.kernel.worker import RemoteKernel

ROOT, HERE, THERE = 0x6E01, "10.3.0.1", "10.3.0.2"
HERE6, THERE6 = "fd00:3::1", "fd00:3::2"
CLASS, TOP_CLASS, REST_CLASS = classid(ROOT, 0x1000), classid(ROOT, TOP), classid(ROOT, REST)
HOLDER = QueueClass(classid(ROOT, 0), 10**8, 10**8, 10**6, 10**6, 60_000)
SLOW = QueueClass(TOP_CLASS, 1_000, 1_000, 2_000, 2_000, 1_514, Leaf("bfifo", 100_000))
TREE = Tree(ROOT, {TOP_CLASS: HOLDER, CLASS: SLOW})
CAPPED = replace(TREE, classes={**TREE.classes, REST_CLASS: SLOW})
FIRST = "filter add dev near egress pref 1"
WHY = {
    "ingress": "it has a qdisc of the kind ingress, with which there can be no clsact (tc qdisc del dev near ingress).",
    "egress_block 7 clsact": "its egress has a filter block that is shared between devices, on which netlimit puts "
    "nothing.",
}
SENT = 20
SEND = f"""
import fcntl, json, socket, struct, sys, termios
family, kind, protocol, near, far, port, priority = json.loads(sys.argv[1])
sock = socket.socket(family, kind, protocol)
sock.setsockopt(socket.SOL_SOCKET, 12, priority)  # SO_PRIORITY
if near:
    sock.bind(("", near))
if port:
    sock.connect((far, port))
for _ in range({SENT}):
    sock.sendto(bytes([8, 0, 247, 255]) + bytes(1000), (far, port or 9 * (kind == 2)))
print(*struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))))
"""
"""The protocol of the packets is UDP, or ICMP."""


@pytest.fixture
def kernel(untouched: RemoteKernel) -> RemoteKernel:
    lines = [
        "link add name near type veth peer name far",
        "link set near up",
        "link set far up",
        f"addr add {HERE}/24 dev near",
        f"addr add {HERE6}/64 dev near nodad",
        f"neigh replace {THERE} lladdr 02:00:00:00:00:02 nud permanent dev near",
        f"neigh replace {THERE6} lladdr 02:00:00:00:00:02 nud permanent dev near",
    ]
    untouched.run("ip", "-batch", "-", stdin="\n".join(lines))
    return untouched


def plant(kernel: RemoteKernel, tree: Tree = TREE, device: str = "near") -> None:
    kernel.apply(WriteTree(device, tree.handle, tree, tree.classes, tree.children))


def charge(
    kernel: RemoteKernel,
    priority: int,
    *,
    kind: int = 2,
    protocol: int = 0,
    near: int = 0,
    far: str = THERE,
    port: int = 0,
) -> int:
    """What a socket is still charged with when it has sent: datagrams from a port `near`, or connected to a `port`."""
    told = (10 if ":" in far else 2, kind, protocol, near, far, port, priority)
    return int(kernel.run(sys.executable, "-c", SEND, json.dumps(told)))


def show(kernel: RemoteKernel, side: str = "egress", device: str = "near") -> str:
    return kernel.run("tc", "-s", "filter", "show", "dev", device, side)


def is_repaired(kernel: RemoteKernel, tree: Tree = TREE) -> bool:
    """Whether what is missing is seen, and written, and there then."""
    if drifted({"near": tree}, kernel.queues().trees) != "near":
        return False
    for step in diff(State(trees={"near": tree}), State(trees=kernel.queues().trees)).steps:
        kernel.apply(step)
    return drifted({"near": tree}, kernel.queues().trees) is None


# -- who is charged -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", [THERE, THERE6])
@pytest.mark.parametrize(("kind", "protocol"), [(2, 0), (3, 1), (3, 58), (3, 253)])
def test_what_waits_is_charged_to_no_socket(kernel: RemoteKernel, kind: int, protocol: int, far: str) -> None:
    plant(kernel)
    assert charge(kernel, CLASS, kind=kind, protocol=protocol, far=far) <= 0
    assert kernel.usages("near")[CLASS].queued_packets >= SENT - 5


def test_a_clock_hears_when_its_packets_have_left(kernel: RemoteKernel) -> None:
    plant(kernel)
    for clock in ({"near": 319}, {"near": 320}, {"port": 123}, {"port": 319}):
        assert charge(kernel, CLASS, **clock) > 0
    assert charge(kernel, CLASS, near=123) <= 0


def test_what_nothing_claims_waits_only_under_a_cap(kernel: RemoteKernel) -> None:
    plant(kernel)
    assert "classid" not in show(kernel)
    kernel.apply(WriteTree("near", ROOT, classes=CAPPED.classes))
    assert charge(kernel, 0) <= 0
    assert kernel.usages("near")[REST_CLASS].queued_packets >= SENT - 5
    kernel.apply(WriteTree("near", ROOT, classes={TOP_CLASS: HOLDER}))
    assert charge(kernel, 0) <= 0
    kernel.apply(WriteTree("near", ROOT, gone=(REST_CLASS,)))
    assert drifted({"near": TREE}, kernel.queues().trees) is None
    assert "classid" not in show(kernel)


def test_what_a_queue_does_not_take_is_told_to_who_asks(kernel: RemoteKernel) -> None:
    """IP_RECVERR: the sender hears of ENOBUFS as ever."""
    plant(kernel)
    script = (
        "import socket\nsock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        f"sock.setsockopt(1, 12, {CLASS})\nsock.setsockopt(0, 11, 1)\nlost = 0\n"
        f"for _ in range(200):\n    try:\n        sock.sendto(bytes(1000), ('{THERE}', 9))\n"
        "    except OSError as error:\n        assert error.errno == 105, error\n        lost += 1\nprint(lost)"
    )
    lost = int(kernel.run(sys.executable, "-c", script))
    assert lost == kernel.usages("near")[CLASS].dropped > 90


# -- there, and put there again -------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["filter del dev near egress", "qdisc del dev near clsact"])
def test_what_somebody_takes_away_is_missed_and_written_again(kernel: RemoteKernel, damage: str) -> None:
    plant(kernel)
    assert drifted({"near": TREE}, kernel.queues().trees) is None
    kernel.run("tc", *damage.split())
    assert is_repaired(kernel)
    assert charge(kernel, CLASS) <= 0


def test_the_end_leaves_nothing(kernel: RemoteKernel) -> None:
    before = kernel.run("tc", "qdisc", "show")
    plant(kernel)
    assert kernel.kept_clsacts() == ()
    assert kernel.survey().clsacts == ("near",)
    assert kernel.survey().charged == {}
    kernel.apply(WriteTree("near", ROOT, drop=True))
    assert kernel.run("tc", "qdisc", "show") == before


def test_what_is_left_without_a_tree_goes_in_the_end(kernel: RemoteKernel) -> None:
    plant(kernel)
    kernel.run("tc", "qdisc", "del", "dev", "near", "root")
    assert kernel.kept_clsacts() == ("near",)
    kernel.apply(WriteIngress(drop=True, whole=True))
    assert kernel.kept_clsacts() == ()
    assert "clsact" not in kernel.run("tc", "qdisc", "show")


# -- with others ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pref", ["40000", "2"])
def test_filters_of_others_see_each_packet_once_and_stay(kernel: RemoteKernel, pref: str) -> None:
    kernel.run("tc", "qdisc", "add", "dev", "near", "clsact")
    theirs = f"filter add dev near egress pref {pref} protocol ip u32 match u32 0 0 action mirred egress mirror dev lo"
    kernel.run("tc", *theirs.split())
    plant(kernel)
    assert charge(kernel, CLASS) <= 0
    assert re.findall(r"Mirror to device lo.*?Sent \d+ bytes (\d+) pkt", show(kernel), re.DOTALL) == [str(SENT)]
    assert kernel.survey().diverting == {}
    kernel.apply(WriteTree("near", ROOT, drop=True))
    assert set(re.findall(r"filter .* pref (\d+) (\w+) chain 0 fh", show(kernel))) == {(pref, "u32")}


@pytest.mark.parametrize("others", WHY)
def test_where_it_cannot_be_shaping_goes_on(kernel: RemoteKernel, others: str) -> None:
    kernel.run("tc", "qdisc", "add", "dev", "near", *others.split())
    plant(kernel)
    assert drifted({"near": TREE}, kernel.queues().trees) is None
    assert charge(kernel, CLASS) > 0
    assert "nl-out" not in show(kernel) + show(kernel, "ingress")
    assert kernel.survey().charged == {"near": WHY[others]}
    kernel.apply(WriteTree("near", ROOT, drop=True))
    assert others.split()[-1] in kernel.run("tc", "qdisc", "show", "dev", "near")


def test_who_stands_first_stays_first(kernel: RemoteKernel) -> None:
    kernel.run("tc", "qdisc", "add", "dev", "near", "clsact")
    kernel.run("tc", *f"{FIRST} protocol ip u32 match u32 0 0 classid 1:1".split())
    plant(kernel)
    assert drifted({"near": TREE}, kernel.queues().trees) is None
    assert "nl-out" not in show(kernel)
    kernel.run("tc", *FIRST.replace("add", "del").split())
    assert is_repaired(kernel)


TUNNEL = f"""
import fcntl, os, select, socket, struct
device = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", b"near", 0x1001))  # TUNSETIFF: IFF_TUN, IFF_NO_PI
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, 12, {CLASS})  # SO_PRIORITY
def take(number):
    sock.sendto(bytes([number]) * 100, ("{THERE}", 9))
    return os.read(device, 2000) if select.select([device], [], [], 0.5)[0] else b""
while not take(0):  # the kernel takes its time to let it send
    pass
for number in range(1, 4):
    packet = take(number)
    assert (packet[0], packet[28:]) == (0x45, bytes([number]) * 100), packet
"""


def test_a_device_without_a_link_layer_sends_the_same_packets(untouched: RemoteKernel) -> None:
    untouched.run("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
    untouched.run("ip", "tuntap", "add", "near", "mode", "tun")
    untouched.run("ip", "link", "set", "near", "up")
    untouched.run("ip", "addr", "add", f"{HERE}/24", "dev", "near")
    plant(untouched)
    assert "nl-out" in show(untouched)
    untouched.run(sys.executable, "-c", TUNNEL)
    assert untouched.usages("near")[CLASS].packets == 4
