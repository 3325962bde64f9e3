"""What `base.Kernel` promises of queues, lanes and the ingress, asked of the kernel in memory and of the real one."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address

import pytest
from hypothesis import HealthCheck, given, settings

from netlimit.errors import KernelError
from netlimit.ingress import Ingress, IngressLane
from netlimit.kernel.base import Kernel, observe
from netlimit.kernel.fake import FakeKernel
from netlimit.packet import Packet
from netlimit.plan import Step, WriteIngress, WriteTree, diff, drifted
from netlimit.rules import Rule
from netlimit.state import Entry, State
from netlimit.tree import (
    BESIDE,
    FIRST_CHILD,
    INGRESS_DEVICE,
    NEIGHBOURS,
    REST,
    SERVICES,
    TOP,
    Leaf,
    QueueClass,
    SavedRoot,
    Tree,
    classid,
    is_beside,
)
from tests.kernel.worker import RemoteKernel
from tests.unit import shapes
from tests.unit.shapes import HOME, Gateway, gateway_facts, histories, shape

ROOT = 0x6E02
CLIENTS = ("10.1.0.2", "10.1.0.3", "10.1.0.9", "10.1.1.2", "10.1.9.9", "fd00:1::2", "fd00:1::3")
SERVERS = ("10.2.0.2", "fd00:2::2")
HOST = QueueClass(classid(FIRST_CHILD, TOP), 125_000, 125_000, 3_528, 3_528, 1_514, Leaf("bfifo", 80_000))
FACTS = replace(gateway_facts, capabilities={"fq_codel": "not every kernel has it."})


@pytest.fixture(scope="module")
def router(root: None) -> Iterator[RemoteKernel]:
    """A gateway with clients behind `lan`, and the rest behind `wan`; what it sends there vanishes."""
    name = f"nl-g-{os.getpid()}-{secrets.token_hex(3)}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    kernel = RemoteKernel(name)
    kernel.run("sysctl", "-qw", "net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0")
    ways = (("lan", "10.1.0.1/16", "fd00:1::1/32", CLIENTS), ("wan", "10.2.0.1/16", "fd00:2::1/64", SERVERS))
    for device, address, address6, hosts in ways:
        lines = [
            f"link add name {device} type veth peer name {device}-peer",
            f"link set {device}-peer up",
            f"link set {device} up",
            f"addr add {address} dev {device}",
            f"addr add {address6} dev {device} nodad",
            *(f"neigh replace {host} lladdr 02:00:00:00:00:02 nud permanent dev {device}" for host in hosts),
        ]
        kernel.run("ip", "-batch", "-", stdin="\n".join(lines))
    kernel.run("ip", "route", "add", "default", "via", "10.2.0.2")
    kernel.run("ip", "-6", "route", "add", "default", "via", "fd00:2::2")
    yield kernel
    kernel.close()
    subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
def linux(router: RemoteKernel) -> Iterator[RemoteKernel]:
    """The real kernel, empty before and afterwards."""
    assert router.queues().trees == {}
    yield router
    wipe(router)


@pytest.fixture(params=["fake", "linux"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """One suite over both."""
    return FakeKernel(routes=HOME) if request.param == "fake" else request.getfixturevalue("linux")


def wipe(kernel: RemoteKernel) -> None:
    for step in diff(State(), observe(kernel)).steps:
        kernel.apply(step)
    for device in ("lan", "wan"):
        subprocess.run(
            ["ip", "netns", "exec", kernel.namespace, "tc", "qdisc", "del", "dev", device, "root"],
            check=False,
            capture_output=True,
        )


def settle(wanted: list[Rule]) -> Gateway:
    made = Gateway(FACTS)
    for rule in wanted:
        made.put(rule)
    made.sync()
    return made


def plant(gateway: Gateway, device: str = "lan", put_back: SavedRoot | None = None) -> WriteTree:
    tree = gateway.kernel.trees[device]
    return WriteTree(device, tree.handle, tree, tree.classes, tree.children, put_back=put_back)


def occupy(kernel: Kernel, device: str = "lan") -> SavedRoot:
    """Put a root qdisc of somebody else on a device."""
    if isinstance(kernel, FakeKernel):
        kernel.roots[device] = SavedRoot(1, "pfifo", "07000000")
    else:
        assert isinstance(kernel, RemoteKernel)
        kernel.run("tc", "qdisc", "replace", "dev", device, "root", "handle", "1:", "pfifo", "limit", "7")
    return kernel.save_root(device)


def refused(kernel: Kernel, step: Step) -> str:
    with pytest.raises(KernelError) as error:
        kernel.apply(step)
    return str(error.value)


HOSTS = [shape(1, "10.1.0.0/24", "20 Mbit/s", per="target"), *(shape(n, f"10.1.0.{n}", "2 Mbit/s") for n in (2, 3))]
CAP = shape(9, "0.0.0.0/0", "50 Mbit/s", per="target", interface="lan")


# -- trees ----------------------------------------------------------------------------------------------------------


def test_a_tree_is_read_back_and_writing_it_again_is_no_error(kernel: Kernel) -> None:
    gateway = settle(HOSTS)
    for _ in range(2):
        kernel.apply(plant(gateway))
        assert kernel.queues().foreign == {}
        assert drifted(gateway.kernel.trees, kernel.queues().trees) is None
        assert kernel.usages("lan").keys() == gateway.kernel.trees["lan"].classes.keys()


def test_a_cap_is_read_back_with_what_stands_beside_it_and_goes(kernel: Kernel) -> None:
    gateway = settle([*HOSTS, shape(9, "0.0.0.0/0", "8 kbit/s", per="target", interface="lan")])
    trees = gateway.kernel.trees
    assert {number & 0xFFFF for number in trees["lan"].classes if is_beside(number)} == set(BESIDE)
    for _ in range(2):
        kernel.apply(plant(gateway))
        assert drifted(trees, kernel.queues().trees) is None
    without = settle(HOSTS).kernel.trees
    for step in diff(State(trees=without), State(trees=kernel.queues().trees)).steps:
        kernel.apply(step)
    assert drifted(without, kernel.queues().trees) is None


def test_a_cap_of_an_earlier_version_is_parted_anew_and_keeps_its_root(kernel: Kernel) -> None:
    """It had no class under it for what this host itself sends to who is safe."""
    gateway = settle([*HOSTS, CAP])
    wanted = gateway.kernel.trees
    handle, classes = wanted["lan"].handle, dict(wanted["lan"].classes)
    cap, rest = classes[classid(handle, TOP)], classes[classid(handle, REST)]
    lacking = classes.pop(classid(handle, SERVICES))
    classes[classid(handle, REST)] = rest._replace(rate=rest.rate + lacking.rate)
    kernel.apply(replace(plant(gateway), classes=classes))
    for _ in range(2):
        steps = diff(State(trees=wanted), State(trees=kernel.queues().trees)).steps
        for step in steps:
            assert isinstance(step, WriteTree)
            assert (step.root, step.gone, step.drop) == (None, (), False)
            assert classid(handle, TOP) not in step.classes
            kernel.apply(step)
    assert steps == ()
    found = kernel.queues().trees["lan"].classes
    assert (found[classid(handle, TOP)].ceil, found[classid(handle, SERVICES)].ceil) == (cap.ceil, cap.ceil)


def test_classes_come_change_and_go_and_doing_it_twice_is_no_error(kernel: Kernel) -> None:
    gateway = settle(HOSTS)
    kernel.apply(plant(gateway))
    new, gone = classid(FIRST_CHILD, 7), classid(FIRST_CHILD, 0x10)
    changed = classid(FIRST_CHILD, 0x20)
    step = WriteTree(
        "lan", ROOT, classes={new: HOST, changed: HOST._replace(leaf=Leaf("bfifo", 100_000))}, gone=(gone,)
    )
    tree = gateway.kernel.trees["lan"]
    wanted = {**tree.classes, **step.classes}
    del wanted[gone]
    for _ in range(2):
        kernel.apply(step)
        assert drifted({"lan": replace(tree, classes=wanted)}, kernel.queues().trees) is None


def test_a_class_goes_with_all_that_hangs_on_it(kernel: Kernel) -> None:
    gateway = settle(HOSTS)
    kernel.apply(plant(gateway))
    budget = next(iter(gateway.traffics)).inner
    kernel.apply(WriteTree("lan", ROOT, gone=tuple(budget.values())))
    found = kernel.queues().trees["lan"]
    assert (set(found.classes), found.children) == ({classid(ROOT, TOP)}, {})


def test_a_class_does_not_move(kernel: Kernel) -> None:
    """Whoever wants one elsewhere makes another: so a plan never asks for it."""
    kernel.apply(plant(settle(HOSTS)))
    before = kernel.queues().trees
    number = next(number for number in before["lan"].classes if number & 0xFFFF == 0x1010)
    each = before["lan"].classes[number]
    kernel.apply(WriteTree("lan", ROOT, classes={number: each._replace(parent=classid(ROOT, TOP))}))
    assert drifted(before, kernel.queues().trees) is None


def test_a_class_of_a_child_that_is_not_there(kernel: Kernel) -> None:
    kernel.apply(plant(settle(HOSTS)))
    orphan = HOST._replace(parent=classid(0x7ABC, TOP))
    step = WriteTree("lan", ROOT, classes={classid(0x7ABC, 1): orphan})
    assert "tc class replace dev lan parent 7abc:ffff classid 7abc:1" in refused(kernel, step)


def test_a_class_that_is_too_deep(kernel: Kernel) -> None:
    """An HTB has eight levels, its top among them."""
    names = [classid(ROOT, TOP), *(classid(ROOT, 0x1001 + level) for level in range(8))]
    holder = HOST._replace(leaf=None)
    parents = [classid(ROOT, 0), *names]
    deep = {name: holder._replace(parent=parent) for name, parent in zip(names, parents, strict=False)}
    kernel.apply(WriteTree("lan", ROOT, Tree(ROOT), dict(list(deep.items())[:8])))
    assert "tree is too deep" in refused(kernel, WriteTree("lan", ROOT, classes={names[8]: deep[names[8]]}))
    assert set(kernel.queues().trees["lan"].classes) == set(names[:8])


def test_a_class_without_a_tree(kernel: Kernel) -> None:
    assert "tc class replace" in refused(kernel, WriteTree("lan", ROOT, classes={classid(ROOT, 1): HOST}))
    kernel.apply(WriteTree("lan", ROOT, gone=(classid(ROOT, 1),)))
    kernel.apply(WriteTree("lan", ROOT, drop=True))
    assert kernel.queues().trees == {}


def test_a_device_that_is_not_there(kernel: Kernel) -> None:
    gateway = settle(HOSTS)
    refused(kernel, replace(plant(gateway), device="nowhere"))
    refused(kernel, WriteTree("nowhere", ROOT, classes={classid(ROOT, 1): HOST}))
    kernel.apply(WriteTree("nowhere", ROOT, gone=(classid(ROOT, 1),)))
    kernel.apply(WriteTree("nowhere", ROOT, drop=True))
    assert kernel.usages("nowhere") == {}


def test_what_is_dropped_is_gone(kernel: Kernel) -> None:
    kernel.apply(plant(settle(HOSTS)))
    for _ in range(2):
        kernel.apply(WriteTree("lan", ROOT, drop=True))
        assert (kernel.queues().trees, kernel.usages("lan")) == ({}, {})


def test_the_root_of_somebody_else_stays(kernel: Kernel) -> None:
    occupy(kernel)
    assert kernel.queues().foreign == {"lan": "pfifo 1:"}
    refused(kernel, plant(settle(HOSTS)))
    kernel.apply(WriteTree("lan", ROOT, drop=True))
    kernel.apply(WriteTree("lan", ROOT, gone=(classid(ROOT, 1),)))
    assert (kernel.queues().foreign, kernel.queues().trees) == ({"lan": "pfifo 1:"}, {})


def test_the_root_that_was_saved_makes_way_and_is_put_back(kernel: Kernel) -> None:
    saved = occupy(kernel)
    gateway = settle(HOSTS)
    refused(kernel, plant(gateway, put_back=replace(saved, handle=2)))
    kernel.apply(plant(gateway, put_back=saved))
    assert kernel.queues().foreign == {}
    for _ in range(2):
        kernel.apply(WriteTree("lan", ROOT, drop=True, put_back=saved))
        assert kernel.save_root("lan") == saved
    assert kernel.queues().trees == {}


def test_what_is_not_there_cannot_be_saved(kernel: Kernel) -> None:
    for device in ("lan", "nowhere"):
        with pytest.raises(KernelError):
            kernel.save_root(device)


# -- the ingress ----------------------------------------------------------------------------------------------------

TCP, UDP = IngressLane("nl-t", 4, "dst", "tcp"), IngressLane("nl-u", 4, "dst", "udp", ((53, 53),))
OWN = ("10.1.0.1", "10.2.0.1")
INGRESS = Ingress(("lan", "wan"), OWN, (TCP, UDP))
HERE, AWAY = {"10.1.0.1": Entry(prio=7)}, {"10.2.0.0/16": Entry(0x1000000, 0xFF000000, prio=8)}


@pytest.fixture
def incoming(kernel: Kernel) -> Kernel:
    """A kernel with the device for what ends here."""
    gateway = settle([shape(1, "10.1.0.1")])
    kernel.apply(plant(gateway, INGRESS_DEVICE))
    return kernel


def entries(kernel: Kernel) -> dict[str, dict[str, Entry]]:
    found = kernel.ingress_readings(["nl-t", "nl-u", "nl-none"])
    return {name: {key: reading.entry for key, reading in held.items()} for name, held in found.items()}


def test_a_program_and_its_entries_are_read_back_and_writing_them_again_is_no_error(incoming: Kernel) -> None:
    step = WriteIngress(INGRESS, {"nl-t": HERE, "nl-u": AWAY})
    for _ in range(2):
        incoming.apply(step)
        assert incoming.ingress() == dict.fromkeys(("lan", "wan"), INGRESS.digest)
        assert entries(incoming) == {"nl-t": HERE, "nl-u": AWAY}


def test_entries_come_change_and_go(incoming: Kernel) -> None:
    incoming.apply(WriteIngress(INGRESS, {"nl-t": HERE, "nl-u": AWAY}))
    step = WriteIngress(
        add={"nl-t": {"10.1.0.1": Entry(prio=9), "10.2.0.1": Entry(prio=1)}}, remove={"nl-u": tuple(AWAY)}
    )
    for _ in range(2):
        incoming.apply(step)
        assert entries(incoming) == {"nl-t": step.add["nl-t"]}


def test_entries_there_do_not_end(incoming: Kernel) -> None:
    incoming.apply(WriteIngress(INGRESS, {"nl-t": {"10.1.0.1": Entry(prio=7, expires=int(time.time()) + 1000)}}))
    assert entries(incoming) == {"nl-t": HERE}


def test_a_lane_goes_with_its_entries_and_the_others_keep_theirs(incoming: Kernel) -> None:
    incoming.apply(WriteIngress(INGRESS, {"nl-t": HERE, "nl-u": AWAY}))
    incoming.apply(WriteIngress(replace(INGRESS, lanes=(UDP,))))
    assert entries(incoming) == {"nl-u": AWAY}
    incoming.apply(WriteIngress(INGRESS))
    assert entries(incoming) == {"nl-u": AWAY}


def test_a_program_leaves_a_device(incoming: Kernel) -> None:
    incoming.apply(WriteIngress(INGRESS, {"nl-t": HERE}))
    fewer = replace(INGRESS, devices=("lan",))
    incoming.apply(WriteIngress(fewer))
    assert incoming.ingress() == {"lan": fewer.digest}
    assert entries(incoming) == {"nl-t": HERE}


def test_where_no_device_has_a_program_its_entries_wait_for_the_next(incoming: Kernel) -> None:
    incoming.apply(WriteIngress(INGRESS, {"nl-t": HERE}))
    nowhere = replace(INGRESS, devices=())
    incoming.apply(WriteIngress(nowhere, {"nl-u": AWAY}))
    assert (incoming.ingress(), State(ingress=nowhere).programs) == ({INGRESS_DEVICE: nowhere.digest},) * 2
    assert entries(incoming) == {"nl-t": HERE, "nl-u": AWAY}
    incoming.apply(WriteIngress(INGRESS))
    assert incoming.ingress() == dict.fromkeys(("lan", "wan"), INGRESS.digest)
    assert entries(incoming) == {"nl-t": HERE, "nl-u": AWAY}


def test_without_a_program_nothing_looks_at_entries(incoming: Kernel) -> None:
    incoming.apply(WriteIngress(add={"nl-t": HERE}))
    assert (incoming.ingress(), entries(incoming)) == ({}, {})
    incoming.apply(WriteIngress(remove={"nl-t": ("10.1.0.1",)}))
    incoming.apply(WriteIngress(drop=True))
    assert (incoming.ingress(), entries(incoming), incoming.ingress_seen(["nl-t"])) == ({}, {}, {})


def test_without_its_device_there_is_no_program(kernel: Kernel) -> None:
    assert INGRESS_DEVICE in refused(kernel, WriteIngress(INGRESS, {"nl-t": HERE}))
    assert kernel.ingress() == {}


def test_a_device_that_is_not_there_gets_no_program(incoming: Kernel) -> None:
    incoming.apply(WriteIngress(replace(INGRESS, devices=("nowhere", *INGRESS.devices))))
    assert incoming.ingress().keys() == {*INGRESS.devices}


def test_what_is_dropped_knows_nobody(incoming: Kernel) -> None:
    incoming.apply(WriteIngress(INGRESS, {"nl-t": HERE}))
    for _ in range(2):
        incoming.apply(WriteIngress(drop=True))
        assert (incoming.ingress(), entries(incoming)) == ({}, {})
    incoming.apply(WriteIngress(INGRESS))
    assert entries(incoming) == {}


# -- whole states ---------------------------------------------------------------------------------------------------


def compare(gateway: Gateway, kernel: Kernel) -> None:
    """Both kernels hold the same, and it is what is desired."""
    desired = gateway.compilation.state
    found = observe(kernel, (lane.name for lane in (desired.ingress.lanes if desired.ingress else ())))
    assert found.structure == gateway.observed.structure == desired.structure
    assert found.programs == desired.programs
    assert drifted(desired.trees, found.trees) is None
    held = {name: entries for name, entries in found.entries.items() if entries}
    assert held == {name: entries for name, entries in desired.entries.items() if entries}


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(histories(3))
def test_the_real_kernel_goes_the_same_way_as_the_one_in_memory(
    linux: RemoteKernel, history: list[list[shapes.Step]]
) -> None:
    gateway = Gateway(FACTS)
    for steps in history:
        gateway.take([_let_last(step) for step in steps if step.what != "route"])
        for step in gateway.plan().steps:
            gateway.kernel.apply(step)
            linux.apply(step)
        gateway.compilation.settle()
        compare(gateway, linux)
        assert not diff(gateway.compilation.state, gateway.observed)
    wipe(linux)
    assert observe(linux) == State()


def _let_last(step: shapes.Step) -> shapes.Step:
    """The clock of the one in memory stands still: no end is the same in both."""
    lasting = (replace(each, expires_at=None) if isinstance(each, Rule) else each for each in step.arguments)
    return replace(step, arguments=tuple(lasting))


SENDING = [
    shape(1, "10.1.0.0/16", "20 Mbit/s", per="target"),
    shape(2, "10.1.0.0/24", "2 Mbit/s", per="host"),
    shape(3, "10.1.0.3", "3 Mbit/s"),
    shape(4, "10.1.9.9", "3 Mbit/s"),
    shape(5, "0.0.0.0/0", "50 Mbit/s", per="target", interface="wan"),
    shape(6, "fd00:1::/64", "5 Mbit/s", per="target", protocol="udp", ports=53),
]


def test_packets_wait_in_the_same_class_in_both(linux: RemoteKernel) -> None:
    gateway = settle(SENDING)
    gateway.see(["10.1.0.9"])
    gateway.sync()
    for step in diff(gateway.compilation.state, observe(linux)).steps:
        linux.apply(step)
    hosts = dict.fromkeys(CLIENTS, "lan") | dict.fromkeys(SERVERS, "wan")
    for host, device in hosts.items():
        for port in (53, 80):
            own = ip_address("fd00:1::1" if ":" in host else "10.1.0.1")
            expected = gateway.kernel.find_class(Packet(own, ip_address(host), port=port, out_interface=device))
            assert _passing(linux, device, host, port) == expected, f"{host} port {port}"


def _passing(kernel: RemoteKernel, device: str, host: str, port: int) -> int | None:
    """The class at the end of the way of a packet that the gateway sends; it may have to find its neighbour first."""
    before = kernel.usages(device)
    family, kind = "AF_INET6" if ":" in host else "AF_INET", "SOCK_DGRAM"
    send = f"import socket as s; s.socket(s.{family}, s.{kind}).sendto(bytes(7), ('{host}', {port}))"
    kernel.run("python3", "-c", send)
    tree, after = kernel.queues().trees[device], kernel.usages(device)
    counted = [number for number, usage in after.items() if usage.packets > before[number].packets]
    ends = [n for n in counted if n in tree.classes and tree.classes[n].leaf and n & 0xFFFF != NEIGHBOURS]
    assert len(ends) <= 1
    return ends[0] if ends else None
