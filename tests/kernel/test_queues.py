"""Trees of queues on the real kernel: what is written is read back, holds packets back, and leaves nothing behind."""

from __future__ import annotations

import errno
import pickle
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from netlimit.errors import KernelError
from netlimit.htb import LONGEST_QUEUE, size_beside, size_leaf
from netlimit.kernel import queues, rtnetlink, tc
from netlimit.kernel.fake import FakeKernel
from netlimit.plan import WriteTree, diff, drifted
from netlimit.state import State
from netlimit.tree import (
    BESIDE_HANDLE,
    FIRST_CHILD,
    INGRESS_DEVICE,
    LINE,
    MANAGEMENT,
    NEIGHBOURS,
    REST,
    SERVICES,
    TOP,
    Device,
    Leaf,
    QueueClass,
    Queues,
    SavedRoot,
    Topology,
    Tree,
    Usage,
    alike,
    classid,
    format_classid,
)
from tests.kernel.worker import RemoteKernel

ROOT, OTHER = 0x6E01, 0x6E02
HERE, THERE = "10.3.0.1", "10.3.0.2"
RATES = [1_000, 12_345, 125_000, 123_456_789, 2**32 - 1, 2**32 + 5, LINE]
HOLDER = QueueClass(classid(ROOT, TOP), 10**6, LINE, 100_000, 10**6, 60_000)
HOST = QueueClass(classid(FIRST_CHILD, TOP), 10**6, 10**6, 10_000, 10_000, 1_514, Leaf("bfifo", 100_000))


@pytest.fixture
def kernel(untouched: RemoteKernel) -> RemoteKernel:
    """A gateway with a card called `near`, behind which packets come out at `far`."""
    lines = [
        "link add name near type veth peer name far",
        "link set near up",
        "link set far up",
        f"addr add {HERE}/24 dev near",
        f"neigh replace {THERE} lladdr 02:00:00:00:00:02 nud permanent dev near",
    ]
    untouched.run("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
    untouched.run("ip", "-batch", "-", stdin="\n".join(lines))
    return untouched


BUCKET = "tbf rate 8mbit burst 10000b limit 300000b"


def grow(root: int = ROOT) -> Tree:
    """A tree with a host in a child HTB, a budget, and a place for the rest."""
    top, holder, child = classid(root, TOP), classid(root, 1), FIRST_CHILD
    classes = {
        top: HOLDER._replace(parent=classid(root, 0), rate=LINE, burst=10**6),
        classid(root, REST): HOST._replace(parent=top, quantum=60_000),
        classid(root, 0x1000): HOST._replace(parent=top, rate=250_000),
        holder: HOLDER._replace(parent=top),
        classid(child, TOP): HOLDER._replace(parent=classid(child, 0)),
        classid(child, 1): HOST,
        classid(child, 2): HOST._replace(rate=2_000_000, ceil=3_000_000),
    }
    return Tree(root, classes=classes, children={child: holder})


def plant(tree: Tree, device: str = "near", put_back: SavedRoot | None = None) -> WriteTree:
    return WriteTree(device, tree.handle, tree, tree.classes, tree.children, put_back=put_back)


def assert_alike(found: Tree, wanted: Tree) -> None:
    assert (found.handle, found.children) == (wanted.handle, wanted.children)
    assert found.classes.keys() == wanted.classes.keys()
    for name, each in wanted.classes.items():
        assert alike(each, found.classes[name]), f"{each} became {found.classes[name]}"


def show(kernel: RemoteKernel) -> str:
    return kernel.run("tc", "qdisc", "show") + kernel.run("tc", "class", "show", "dev", "near")


# -- written and read back ------------------------------------------------------------------------------------------


def test_a_device_without_queues_of_anybody(kernel: RemoteKernel) -> None:
    assert kernel.queues() == Queues()
    assert kernel.usages("near") == {}


def test_a_tree(kernel: RemoteKernel) -> None:
    kernel.apply(plant(grow()))
    found = kernel.queues()
    assert found.trees.keys() == {"near"}
    assert found.foreign == {}
    assert_alike(found.trees["near"], grow())


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("burst", [1_600, 12_345, 250_000])
def test_every_rate_of_a_class(kernel: RemoteKernel, rate: int, burst: int) -> None:
    top = QueueClass(classid(ROOT, 0), rate, min(2 * rate, LINE), burst, burst, 60_000, Leaf("bfifo", 1))
    tree = Tree(ROOT, classes={classid(ROOT, TOP): top})
    kernel.apply(plant(tree))
    assert_alike(kernel.queues().trees["near"], tree)


# -- changed --------------------------------------------------------------------------------------------------------


def test_what_is_done_already_is_no_error(kernel: RemoteKernel) -> None:
    kernel.apply(plant(grow()))
    kernel.apply(plant(grow()))
    assert_alike(kernel.queues().trees["near"], grow())


def test_a_class_changes_and_others_come_and_go(kernel: RemoteKernel) -> None:
    kernel.apply(plant(grow()))
    changed, new, gone = classid(FIRST_CHILD, 1), classid(FIRST_CHILD, 3), classid(FIRST_CHILD, 2)
    classes = {changed: HOST._replace(rate=500_000, leaf=Leaf("bfifo", 50_000)), new: HOST}
    step = WriteTree("near", ROOT, classes=classes, gone=(gone,))
    for _ in range(2):
        kernel.apply(step)
        wanted = {**grow().classes, **classes}
        del wanted[gone]
        assert_alike(kernel.queues().trees["near"], replace(grow(), classes=wanted))


def test_a_queue_of_packets_by_an_earlier_version_is_drift_and_becomes_one_of_bytes(kernel: RemoteKernel) -> None:
    host = classid(FIRST_CHILD, 1)
    kernel.apply(plant(grow()))
    send(kernel, 3, host)
    kernel.run("tc", "qdisc", "replace", "dev", "near", "parent", format_classid(host), "pfifo", "limit", "100")
    found = kernel.queues().trees["near"].classes
    assert {name for name, each in grow().classes.items() if not alike(each, found[name])} == {host}
    kernel.apply(WriteTree("near", ROOT, classes={host: HOST}))
    assert_alike(kernel.queues().trees["near"], grow())
    # The class itself has stayed.
    assert kernel.usages("near")[host].packets == 3


def test_the_quantum_of_a_class_that_others_lie_in_cannot_be_changed_and_is_no_drift(kernel: RemoteKernel) -> None:
    """A cap was there when its tree was made, and is not any more."""
    top, holder = classid(ROOT, TOP), classid(ROOT, 1)
    capped = {**grow().classes, top: grow().classes[top]._replace(rate=6_250_000, ceil=6_250_000, quantum=25_000)}
    kernel.apply(plant(replace(grow(), classes=capped)))
    for step in diff(State(trees={"near": grow()}), State(trees=kernel.queues().trees)).steps:
        kernel.apply(step)
    found = kernel.queues().trees
    assert drifted({"near": grow()}, found) is None, "what cannot be changed is not tried over and over"
    other = {**found["near"].classes, holder: found["near"].classes[holder]._replace(quantum=2_000)}
    assert drifted({"near": grow()}, {"near": replace(found["near"], classes=other)}) == "near"


def test_a_class_goes_with_all_that_hangs_on_it(kernel: RemoteKernel) -> None:
    kernel.apply(plant(grow()))
    kernel.apply(WriteTree("near", ROOT, gone=(classid(ROOT, 1), classid(FIRST_CHILD, 1))))
    assert set(kernel.queues().trees["near"].classes) == {classid(ROOT, minor) for minor in (TOP, REST, 0x1000)}
    kernel.apply(WriteTree("near", ROOT, gone=(classid(ROOT, TOP),)))
    assert kernel.queues().trees["near"] == Tree(ROOT)


def test_a_bucket_that_an_earlier_version_made_of_a_cap_makes_way_for_a_tree_and_goes(kernel: RemoteKernel) -> None:
    plain = ("tc", "qdisc", "replace", "dev", "near", "root", "handle", f"{OTHER:x}:", *BUCKET.split())
    for wanted in (State(trees={"near": grow()}), State()):
        kernel.run(*plain)
        found = kernel.queues()
        assert (found.trees.keys(), found.foreign) == ({"near"}, {})
        for step in diff(wanted, State(trees=found.trees)).steps:
            kernel.apply(step)
        assert drifted(wanted.trees, kernel.queues().trees) is None


def test_a_tree_takes_the_place_of_another(kernel: RemoteKernel) -> None:
    kernel.apply(plant(grow()))
    kernel.apply(plant(grow(OTHER)))
    assert_alike(kernel.queues().trees["near"], grow(OTHER))


def test_children_that_no_packet_reaches_are_not_there_and_come_back(kernel: RemoteKernel) -> None:
    kernel.apply(plant(grow()))
    kernel.run("tc", "filter", "del", "dev", "near", "parent", "6e01:")
    assert kernel.queues().trees["near"].children == {}
    kernel.apply(WriteTree("near", ROOT, classes={classid(ROOT, 1): HOLDER}, children=grow().children))
    assert_alike(kernel.queues().trees["near"], grow())


def test_a_refused_line_is_told_with_the_kernels_words(kernel: RemoteKernel) -> None:
    kernel.apply(plant(grow()))
    orphan = HOST._replace(parent=classid(0x7002, TOP))
    with pytest.raises(KernelError, match=r"class replace dev near parent 7002:ffff classid 7002:1 .*No such file"):
        kernel.apply(WriteTree("near", ROOT, classes={classid(0x7002, 1): orphan}))


# -- ended ----------------------------------------------------------------------------------------------------------


def test_nothing_stays_after_the_end(kernel: RemoteKernel) -> None:
    before = show(kernel)
    kernel.apply(plant(grow()))
    for _ in range(2):
        kernel.apply(WriteTree("near", ROOT, drop=True))
        assert show(kernel) == before


def test_a_device_that_is_gone(kernel: RemoteKernel) -> None:
    kernel.apply(plant(grow()))
    kernel.run("ip", "link", "del", "near")
    kernel.apply(WriteTree("near", ROOT, drop=True))
    kernel.apply(WriteTree("near", ROOT, gone=(classid(ROOT, 1),)))
    assert kernel.usages("near") == {}
    with pytest.raises(KernelError, match="there is no device near"):
        kernel.apply(plant(grow()))


def test_the_device_for_what_ends_here(kernel: RemoteKernel) -> None:
    for _ in range(2):
        kernel.apply(plant(grow(), INGRESS_DEVICE))
    assert_alike(kernel.queues().trees[INGRESS_DEVICE], grow())
    assert "UP" in kernel.run("ip", "-o", "link", "show", INGRESS_DEVICE)
    for _ in range(2):
        kernel.apply(WriteTree(INGRESS_DEVICE, ROOT, drop=True))
    assert INGRESS_DEVICE not in kernel.run("ip", "-o", "link", "show")


def test_the_device_for_what_ends_here_was_made_by_somebody_else_and_is_down(kernel: RemoteKernel) -> None:
    kernel.run("ip", "link", "add", "name", INGRESS_DEVICE, "type", "ifb")
    kernel.apply(plant(grow(), INGRESS_DEVICE))
    assert "UP" in kernel.run("ip", "-o", "link", "show", INGRESS_DEVICE)
    assert_alike(kernel.queues().trees[INGRESS_DEVICE], grow())


def test_the_device_for_what_ends_here_is_set_down_and_up_again(kernel: RemoteKernel) -> None:
    kernel.apply(plant(grow(), INGRESS_DEVICE))
    kernel.run("ip", "link", "set", INGRESS_DEVICE, "down")
    desired = State(trees={INGRESS_DEVICE: grow()})
    assert drifted(desired.trees, kernel.queues().trees) == INGRESS_DEVICE
    for step in diff(desired, State(trees=kernel.queues().trees)).steps:
        kernel.apply(step)
    assert "UP" in kernel.run("ip", "-o", "link", "show", INGRESS_DEVICE)
    assert_alike(kernel.queues().trees[INGRESS_DEVICE], grow())


def test_the_device_for_what_ends_here_goes_also_when_it_is_down(kernel: RemoteKernel) -> None:
    kernel.apply(plant(grow(), INGRESS_DEVICE))
    kernel.run("ip", "link", "set", INGRESS_DEVICE, "down")
    for step in diff(State(), State(trees=kernel.queues().trees)).steps:
        kernel.apply(step)
    assert INGRESS_DEVICE not in kernel.run("ip", "-o", "link", "show")


def test_other_devices_keep_their_trees_while_they_are_down(kernel: RemoteKernel) -> None:
    kernel.apply(plant(grow()))
    kernel.run("ip", "link", "set", "near", "down")
    assert_alike(kernel.queues().trees["near"], grow())
    kernel.apply(plant(grow()))
    assert "state DOWN" in kernel.run("ip", "-o", "link", "show", "near")


# -- roots of others ------------------------------------------------------------------------------------------------

RESTORABLE = {
    "pfifo 8: limit 77": "8: pfifo limit 77",
    "bfifo 8: limit 7000": "8: bfifo limit 7000",
    "a pfifo that drops at its head": "8: pfifo_head_drop limit 77",
    "pfifo_fast": "8: pfifo_fast",
    "a bucket": "8: tbf rate 3mbit burst 5kb limit 10kb",
    "a bucket with a peak": "8: tbf rate 3mbit burst 5kb latency 50ms peakrate 10mbit mtu 1540",
}


@pytest.mark.parametrize("words", RESTORABLE.values(), ids=RESTORABLE)
def test_what_was_saved_makes_way_and_comes_back(kernel: RemoteKernel, words: str) -> None:
    kernel.run("tc", "qdisc", "replace", "dev", "near", "root", "handle", *words.split())
    before = show(kernel)
    saved = kernel.save_root("near")
    kernel.apply(plant(grow(), put_back=saved))
    assert_alike(kernel.queues().trees["near"], grow())
    for _ in range(2):
        kernel.apply(WriteTree("near", ROOT, drop=True, put_back=saved))
        assert show(kernel) == before
    assert kernel.save_root("near") == saved


def test_a_root_of_somebody_else_stays(kernel: RemoteKernel) -> None:
    kernel.run("tc", "qdisc", "replace", "dev", "near", "root", "handle", "1:", "htb")
    kernel.run("tc", "class", "add", "dev", "near", "parent", "1:", "classid", "1:1", "htb", "rate", "1mbit")
    before = show(kernel)
    assert kernel.queues() == Queues(foreign={"near": "htb 1:"})
    with pytest.raises(KernelError, match="root qdisc htb 1: of somebody else"):
        kernel.apply(plant(grow()))
    kernel.apply(WriteTree("near", ROOT, drop=True))
    assert show(kernel) == before
    assert kernel.usages("near") == {}


def test_a_root_that_is_not_the_one_that_was_saved_stays(kernel: RemoteKernel) -> None:
    kernel.run("tc", "qdisc", "replace", "dev", "near", "root", "handle", "1:", "pfifo", "limit", "7")
    saved = kernel.save_root("near")
    kernel.run("tc", "qdisc", "replace", "dev", "near", "root", "handle", "1:", "pfifo", "limit", "8")
    with pytest.raises(KernelError, match="root qdisc pfifo 1: of somebody else"):
        kernel.apply(plant(grow(), put_back=saved))
    assert kernel.queues().foreign == {"near": "pfifo 1:"}


LOSING = {
    "htb": (["root handle 1: htb"], "htb 1: keeps more than can be read"),
    "a bucket around a tree": (
        ["root handle 1: tbf rate 3mbit burst 5kb limit 10kb", "parent 1:1 handle 2: htb"],
        r"tbf 1: holds another qdisc \(htb\)",
    ),
    "a bucket around another queue": (
        ["root handle 1: tbf rate 3mbit burst 5kb limit 10kb", "parent 1:1 handle 2: pfifo limit 3"],
        r"tbf 1: holds another qdisc \(pfifo\)",
    ),
    "a size table": (["root handle 1: stab overhead 18 linklayer ethernet pfifo limit 7"], "pfifo 1: has a size table"),
}


@pytest.mark.parametrize(("lines", "reason"), LOSING.values(), ids=LOSING)
def test_what_could_not_be_put_back_is_not_saved(kernel: RemoteKernel, lines: list[str], reason: str) -> None:
    for line in lines:
        kernel.run("tc", "qdisc", "add", "dev", "near", *line.split())
    with pytest.raises(KernelError, match=f"save the root qdisc of near.*{reason}"):
        kernel.save_root("near")


def test_there_is_nothing_to_save_where_nobody_else_was(kernel: RemoteKernel) -> None:
    for device in ("near", "nowhere"):
        with pytest.raises(KernelError, match="there is none but the kernel's own"):
            kernel.save_root(device)
    kernel.apply(plant(grow()))
    with pytest.raises(KernelError, match="there is none but the kernel's own"):
        kernel.save_root("near")


# -- packets --------------------------------------------------------------------------------------------------------


def send(kernel: RemoteKernel, packets: int, priority: int) -> None:
    """UDP packets of 1,000 bytes on the wire."""
    script = (
        "import socket, contextlib\n"
        "sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        f"sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, {priority})\n"
        "sock.setsockopt(socket.SOL_SOCKET, 32, 10_000_000)\n"  # SO_SNDBUFFORCE
        f"for _ in range({packets}):\n"
        "    with contextlib.suppress(OSError):\n"
        f"        sock.sendto(bytes(1000 - 42), ('{THERE}', 9))\n"
    )
    kernel.run("python3", "-c", script)


def count_arrived(kernel: RemoteKernel) -> int:
    return int(kernel.run("cat", "/sys/class/net/far/statistics/rx_packets"))


@pytest.mark.parametrize("handle", [ROOT, 0x6EFF])
def test_the_priority_of_a_packet_is_its_class(kernel: RemoteKernel, handle: int) -> None:
    kernel.apply(plant(grow(handle)))
    for minor, packets in ((1, 3), (2, 5)):
        send(kernel, packets, classid(FIRST_CHILD, minor))
    send(kernel, 7, classid(handle, 0x1000))
    send(kernel, 1, 0)
    send(kernel, 1, classid(0x7ABC, 1))
    assert {name: usage[:2] for name, usage in kernel.usages("near").items() if usage.packets} == {
        classid(FIRST_CHILD, 1): (3, 3_000),
        classid(FIRST_CHILD, 2): (5, 5_000),
        classid(FIRST_CHILD, TOP): (8, 8_000),
        classid(handle, 1): (8, 8_000),
        classid(handle, 0x1000): (7, 7_000),
        classid(handle, REST): (2, 2_000),
        classid(handle, TOP): (17, 17_000),
    }


def test_what_waits_and_what_is_lost_is_counted(kernel: RemoteKernel) -> None:
    slow = classid(FIRST_CHILD, 1)
    kernel.apply(plant(grow()))
    kernel.apply(WriteTree("near", ROOT, classes={slow: HOST._replace(rate=1_000, ceil=1_000, burst=1_000)}))
    send(kernel, 120 + 10, slow)
    usage = kernel.usages("near")[slow]
    assert usage.queued_packets == 100
    assert usage.queued_bytes == 100_000
    assert usage.dropped + usage.packets == 30
    assert usage.dropped > 0
    assert usage.overlimits > 0


def waiting_and_lost(usage: Usage) -> tuple[int, int, int]:
    return usage.dropped, usage.queued_packets, usage.queued_bytes


MERGED = f"""
import contextlib, socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, 12, int(sys.argv[1]))  # SO_PRIORITY
sock.setsockopt(socket.SOL_SOCKET, 32, 100_000_000)  # SO_SNDBUFFORCE
sock.setsockopt(socket.SOL_UDP, 103, 1400)  # UDP_SEGMENT
for _ in range(60):
    with contextlib.suppress(OSError):
        sock.sendto(bytes(1400 * 44), ("{THERE}", 9))
"""


def test_a_queue_holds_no_longer_when_packets_come_merged(kernel: RemoteKernel) -> None:
    host, rate = classid(FIRST_CHILD, 1), 1_000_000
    kernel.apply(plant(grow()))
    slow = HOST._replace(rate=rate, ceil=rate, burst=5_000, cburst=5_000, leaf=size_leaf("bfifo", rate))
    kernel.apply(WriteTree("near", ROOT, classes={host: slow}))
    kernel.run(sys.executable, "-c", MERGED, str(host))
    usage = kernel.usages("near")[host]
    assert usage.dropped > 0
    assert rate * LONGEST_QUEUE / 2 < usage.queued_bytes <= rate * LONGEST_QUEUE


@pytest.mark.parametrize(
    ("larger", "smaller"),
    [
        (Leaf("bfifo", 80_000), Leaf("bfifo", 5_000)),
        (Leaf("pfifo", 52), Leaf("pfifo", 2)),
    ],
)
def test_a_queue_that_shrinks_keeps_what_waits_and_takes_no_more(
    kernel: RemoteKernel, larger: Leaf, smaller: Leaf
) -> None:
    host, slow = _plant_slow(kernel, larger)
    send(kernel, 30, host)
    before = kernel.usages("near")[host]
    kernel.apply(WriteTree("near", ROOT, classes={host: slow._replace(leaf=smaller)}))
    send(kernel, 10, host)
    after = kernel.usages("near")[host]
    assert before.queued_packets > 20
    assert before.queued_packets - after.queued_packets <= after.packets - before.packets, "only what was sent has gone"
    assert after.dropped - before.dropped == 10


@pytest.mark.parametrize("smaller", [16, 40])
def test_an_fq_codel_that_shrinks_keeps_what_it_may_hold(kernel: RemoteKernel, smaller: int) -> None:
    try:
        host, slow = _plant_slow(kernel, Leaf("fq_codel", 1024))
    except KernelError as error:
        pytest.skip(f"This kernel has none: {error}")
    send(kernel, 60, host)
    kernel.apply(WriteTree("near", ROOT, classes={host: slow._replace(leaf=Leaf("fq_codel", smaller))}))
    assert kernel.queues().trees["near"].classes[host].leaf == Leaf("fq_codel", smaller)
    assert smaller - 5 <= kernel.usages("near")[host].queued_packets <= smaller


def test_a_merged_packet_fits_into_the_smallest_queue(kernel: RemoteKernel) -> None:
    """Counted in bytes it would be lost each time."""
    host, _ = _plant_slow(kernel, size_leaf("bfifo", 10**6, 0))
    kernel.run(sys.executable, "-c", MERGED, str(host))
    usage = kernel.usages("near")[host]
    assert usage.queued_packets == 2
    assert usage.queued_bytes > 30_000


def test_the_queues_of_many_hosts_hold_their_shares_and_no_more(kernel: RemoteKernel) -> None:
    kernel.apply(plant(grow()))
    share = 2 * 2_375_000 // 64
    slow = HOST._replace(rate=1_000, ceil=1_000, burst=1_514, cburst=1_514, leaf=size_leaf("bfifo", 2_375_000, share))
    hosts = [classid(FIRST_CHILD, 16 * minor) for minor in range(1, 65)]
    kernel.apply(WriteTree("near", ROOT, classes=dict.fromkeys(hosts, slow)))
    for host in hosts[:8]:
        send(kernel, 100, host)
    usages = kernel.usages("near")
    for usage in map(usages.__getitem__, hosts[:8]):
        assert share // 1514 - usage.packets <= usage.queued_packets <= share // 1514
        assert usage.packets < 30, "the machine stood still"


def _plant_slow(kernel: RemoteKernel, leaf: Leaf) -> tuple[int, QueueClass]:
    """A host that sends next to nothing, with a queue of this kind."""
    host = classid(FIRST_CHILD, 1)
    slow = HOST._replace(rate=1_000, ceil=1_000, burst=1_514, cburst=1_514, leaf=leaf)
    classes = {**grow().classes, host: slow}
    kernel.apply(plant(replace(grow(), classes=classes)))
    return host, slow


def test_what_waits_and_is_lost_below_a_class_is_added_up(kernel: RemoteKernel) -> None:
    kernel.apply(plant(grow()))
    slow = HOST._replace(rate=1_000, ceil=1_000, burst=1_000, cburst=1_000)
    host, budget = classid(FIRST_CHILD, 1), classid(ROOT, 0x1000)
    kernel.apply(WriteTree("near", ROOT, classes={host: slow, budget: slow._replace(parent=classid(ROOT, TOP))}))
    send(kernel, 130, host)
    send(kernel, 120, budget)
    usages = kernel.usages("near")
    below = waiting_and_lost(usages[host])
    assert below[0] > 20
    assert below[1] == 100
    for above in (classid(FIRST_CHILD, TOP), classid(ROOT, 1)):
        assert waiting_and_lost(usages[above]) == below
    both = tuple(map(sum, zip(below, waiting_and_lost(usages[budget]), strict=True)))
    assert waiting_and_lost(usages[classid(ROOT, TOP)]) == both
    assert usages[classid(ROOT, TOP)].packets == usages[host].packets + usages[budget].packets


def test_what_is_below_a_class_is_added_up_in_memory_too() -> None:
    kernel = FakeKernel(routes=Topology({"near": Device(1, up=True)}))
    kernel.apply(plant(grow()))
    host, other, budget = classid(FIRST_CHILD, 1), classid(FIRST_CHILD, 2), classid(ROOT, 0x1000)
    kernel.used["near"] = {each: Usage(9, 900, 1, 7, 2, 200) for each in (host, other, budget)}
    kernel.used["near"][classid(ROOT, 1)] = Usage(18, 1_800, 5, 3, 0, 0)
    usages = kernel.usages("near")
    assert usages[host] == Usage(9, 900, 1, 7, 2, 200)
    assert usages[classid(FIRST_CHILD, TOP)] == Usage(0, 0, 2, 0, 4, 400)
    assert usages[classid(ROOT, 1)] == Usage(18, 1_800, 2, 3, 4, 400)
    assert usages[classid(ROOT, TOP)] == Usage(0, 0, 3, 0, 6, 600)
    assert usages[classid(ROOT, REST)] == Usage(0, 0, 0, 0, 0, 0)


def test_what_waits_stays_when_the_rate_changes(kernel: RemoteKernel) -> None:
    host = classid(FIRST_CHILD, 1)
    kernel.apply(plant(grow()))
    kernel.apply(WriteTree("near", ROOT, classes={host: HOST._replace(rate=1_000, ceil=1_000, burst=1_000)}))
    send(kernel, 60, host)
    waiting = kernel.usages("near")[host].queued_packets
    assert waiting > 40
    before = count_arrived(kernel)
    kernel.apply(WriteTree("near", ROOT, classes={host: HOST}))
    until = time.monotonic() + 60
    while kernel.usages("near")[host].queued_packets and time.monotonic() < until:
        time.sleep(0.05)
    assert count_arrived(kernel) - before == waiting
    assert kernel.usages("near")[host].dropped == 0


# -- a root that takes the place of another -------------------------------------------------------------------------


def test_a_new_root_comes_with_the_class_for_what_nothing_claims() -> None:
    """Until that is there, an HTB lets through whatever comes."""
    base, rest = tc._split(plant(grow()))
    assert [line.split(" rate ")[0] for line in base.lines()] == [
        "tc qdisc replace dev near root handle 6e01: htb default fffe",
        "tc class replace dev near parent 6e01: classid 6e01:ffff htb",
        "tc class replace dev near parent 6e01:ffff classid 6e01:fffe htb",
        "tc qdisc replace dev near parent 6e01:fffe bfifo limit 100000",
    ]
    lines = list(rest.lines())
    assert sorted([*base.lines(), *lines]) == sorted(plant(grow()).lines())
    assert lines[0].startswith("tc class replace dev near parent 6e01:ffff classid 6e01:1000")


def test_without_a_new_root_all_comes_in_one_go() -> None:
    step = replace(plant(grow()), root=None)
    base, rest = tc._split(step)
    assert not base
    assert rest == step


def test_a_host_without_tc_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "find_index", lambda device: 1)
    monkeypatch.setattr(queues, "read_root", lambda index: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KernelError, match="install the package iproute2"):
        tc.write_tree(plant(grow()))


FLOOD = f"""
import contextlib, socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, 32, 10_000_000)
while True:
    with contextlib.suppress(OSError):
        sock.sendto(bytes(1000 - 42), ("{THERE}", 9))
"""
CHANGE = """
import pickle, subprocess, sys, time
from netlimit.kernel import tc

def count_arrived():
    with open("/sys/class/net/far/statistics/rx_bytes") as count:
        return int(count.read())

bucket, tree, flood, cap = pickle.load(sys.stdin.buffer)
sender = subprocess.Popen([sys.executable, "-c", flood])
try:
    for _ in range(7):
        subprocess.run(["tc", "qdisc", "replace", "dev", "near", "root", "handle", *bucket.split()], check=True)
        time.sleep(0.1)
        began, before = time.monotonic(), count_arrived()
        tc.write_tree(tree)
        arrived = count_arrived() - before
        print(round(arrived - cap * (time.monotonic() - began)))
finally:
    sender.kill()
"""


def test_the_cap_stands_while_a_bucket_becomes_a_tree(kernel: RemoteKernel) -> None:
    """As it does when an earlier version is followed by this one; in most of several attempts: between two lines of
    one process others can still come in."""
    cap = 10**6
    classes = dict(grow().classes)
    for name in (classid(ROOT, TOP), classid(ROOT, REST)):
        classes[name] = classes[name]._replace(rate=cap, ceil=cap, burst=10_000, cburst=10_000)
    tree = replace(grow(), classes=classes)
    bucket = f"{OTHER:x}: tbf rate {8 * cap}bit burst 10000b limit 100000b"
    done = subprocess.run(
        ["ip", "netns", "exec", kernel.namespace, sys.executable, "-c", CHANGE],
        input=pickle.dumps((bucket, plant(tree), FLOOD, cap)),
        capture_output=True,
        check=True,
    )
    excess = [int(line) for line in done.stdout.split()]
    assert statistics.median(excess) < 150_000, f"bytes beyond the cap: {excess}"


# -- beside the cap -------------------------------------------------------------------------------------------------

FRAME = """
import socket, sys
device, protocol, priority, count = sys.argv[1], int(sys.argv[2], 16), int(sys.argv[3], 16), int(sys.argv[4])
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
sock.setsockopt(socket.SOL_SOCKET, 12, priority)  # SO_PRIORITY
sock.bind((device, protocol))
for _ in range(count):
    sock.send(bytes.fromhex("ffffffffffff02000000000a") + protocol.to_bytes(2, "big") + bytes(46))
"""


@pytest.fixture
def capped(kernel: RemoteKernel) -> RemoteKernel:
    """`near` is a port of a bridge, and has a cap."""
    for line in (
        "link add bridge0 type bridge",
        "link add in type veth peer name in-peer",
        "link set near master bridge0",
    ):
        kernel.run("ip", *line.split())
    for device in ("bridge0", "in", "in-peer"):
        kernel.run("ip", "link", "set", device, "up")
    kernel.run("ip", "link", "set", "in", "master", "bridge0")
    top = HOLDER._replace(parent=classid(ROOT, 0), rate=10**6, ceil=10**6)
    beside = {classid(ROOT, minor): each for minor, each in size_beside(classid(ROOT, 0), 10**6, 250, "bfifo").items()}
    under = {classid(ROOT, minor): HOST._replace(parent=classid(ROOT, TOP)) for minor in (REST, SERVICES)}
    kernel.apply(plant(Tree(ROOT, classes={classid(ROOT, TOP): top, **under, **beside})))
    return kernel


def count_classes(kernel: RemoteKernel) -> dict[int, int]:
    return {number & 0xFFFF: usage.packets for number, usage in kernel.usages("near").items() if usage.packets}


@pytest.mark.parametrize(
    ("device", "protocol", "priority", "minor"),
    [
        ("near", 0x0806, 0, NEIGHBOURS),
        ("bridge0", 0x0806, 0, NEIGHBOURS),
        ("near", 0x88CC, 0, NEIGHBOURS),
        ("near", 0x88B5, 0, REST),
        ("near", 0x0800, classid(BESIDE_HANDLE, MANAGEMENT), MANAGEMENT),
        ("near", 0x0800, classid(BESIDE_HANDLE, SERVICES), SERVICES),
        ("near", 0x0800, classid(BESIDE_HANDLE, 0x1000), REST),
        ("near", 0x0800, 0x70000001, REST),
        ("in-peer", 0x0806, 0, REST),
        ("in-peer", 0x0806, classid(BESIDE_HANDLE, MANAGEMENT), REST),
    ],
    ids=[
        *("ARP", "ARP from the bridge", "LLDP", "anything else", "management", "services", "no class of ours"),
        *("no child", "ARP of others on the bridge", "what others would have"),
    ],
)
def test_what_has_a_class_of_its_own_at_a_cap(
    capped: RemoteKernel, device: str, protocol: int, priority: int, minor: int
) -> None:
    """What the host itself sends, and nothing that comes in by another device."""
    before = count_classes(capped)
    capped.run("python3", "-c", FRAME, device, f"{protocol:x}", f"{priority:x}", "40")
    after = count_classes(capped)
    grown = {number: after[number] - before.get(number, 0) for number in after if number != TOP}
    assert {number for number, count in grown.items() if count >= 40} == {minor}


def test_without_its_filter_nothing_stands_beside_a_cap_and_that_is_drift(capped: RemoteKernel) -> None:
    """Nor with the one that an earlier version has left."""
    wanted = capped.queues().trees
    where = "dev near parent 6e01: protocol all prio 1 handle 1 bpf bytecode"
    for earlier in (False, True):
        capped.run("tc", "filter", "del", "dev", "near", "parent", "6e01:")
        if earlier:
            capped.run("tc", "filter", "add", *where.split(), "1,6 0 0 4294967295,")
        found = capped.queues().trees
        assert drifted(wanted, found) == "near"
        for step in diff(State(trees=wanted), State(trees=found)).steps:
            capped.apply(step)
        assert drifted(wanted, capped.queues().trees) is None
        capped.run("python3", "-c", FRAME, "near", "806", "0", "40")
    assert count_classes(capped)[NEIGHBOURS] >= 80


# -- what the kernel answers ----------------------------------------------------------------------------------------


def message(kind: int, flags: int = 0x2, body: bytes = b"") -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body


def name_class(minor: int) -> bytes:
    return struct.pack("=BxxxiIII", 0, 7, classid(ROOT, minor), 0, 0)


@pytest.mark.parametrize(("flags", "last"), [(0x2, 0x2), (0x12, 0x2), (0x2, 0x12)], ids=["whole", "first", "last"])
def test_an_answer_says_that_something_may_be_missing(flags: int, last: int) -> None:
    """NLM_F_DUMP_INTR stands in some message, or in the last."""
    first = message(40, flags, name_class(1)) + message(40, 0x2, name_class(2))
    answer = rtnetlink._collect([first, message(3, last, bytes(4)), b"not read any more"])
    assert answer.bodies == [name_class(1), name_class(2)]
    assert answer.interrupted == (0x12 in (flags, last))


def test_a_refusal_is_an_error() -> None:
    with pytest.raises(OSError, match="No such file") as error:
        rtnetlink._collect([message(2, 0, struct.pack("=i", -errno.ENOENT) + bytes(16))])
    assert error.value.errno == errno.ENOENT


@pytest.mark.parametrize(("interruptions", "readings"), [(0, 1), (2, 3), (99, 4)])
def test_what_was_interrupted_is_read_again(monkeypatch: pytest.MonkeyPatch, interruptions: int, readings: int) -> None:
    answers = [rtnetlink._Answer([name_class(n)], interrupted=n <= interruptions) for n in range(1, 100)]
    left: Iterator[rtnetlink._Answer] = iter(answers)
    monkeypatch.setattr(rtnetlink, "_ask", lambda *_: next(left))
    assert [each.handle for each in rtnetlink.read_all(rtnetlink.GET_CLASS, 7)] == [classid(ROOT, readings)]
