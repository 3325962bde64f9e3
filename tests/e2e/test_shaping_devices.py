"""Devices that are shaped: whole ones, several, those that come and go, and those that have a qdisc of somebody's."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from netlimit.records import State
from scripts.testbed import streams
from scripts.testbed.errors import LabError
from scripts.testbed.namespaces import OFFLOADS, SERVER, WAN, Lab
from tests.e2e.gateway import Gateway
from tests.e2e.loads import megabits, offer, passed, shape

HOST, OTHER = "10.1.80.1", "10.1.80.2"
UP, FAR = "10.3.0.1", "10.3.0.2"
"""A second way out of the gateway, `dsl`, and the server's end of it."""


@pytest.fixture(autouse=True)
def addresses(lab: Lab) -> None:
    lab.add_client_addresses(HOST, OTHER)


# What makes `dsl`, where it is made, and the device of the server that it leads to.
KINDS = {
    "veth": ("link add dsl type veth peer name far netns {server}", "far"),
    "bridge": ("link add dsl type bridge", "port"),
    "macvlan": ("link add dsl link wan type macvlan mode bridge", "eth0"),
    "vlan": ("link add dsl link wan type vlan id 5", "eth0.5"),
}


@contextmanager
def uplink(lab: Lab, kind: str) -> Iterator[None]:
    """The gateway has a device `dsl` of a kind. Raises LabError where the kernel has none."""
    make, far = KINDS[kind]
    try:
        lab.gateway.ip(make.format(server=lab.server.name))
        if kind == "bridge":
            lab.gateway.ip(
                f"link add dsl-port type veth peer name port netns {lab.server.name}", "link set dsl-port up"
            )
            lab.gateway.ip("link set dsl-port master dsl")
        if kind == "vlan":
            lab.server.ip("link add eth0.5 link eth0 type vlan id 5")
        lab.server.ip(f"link set {far} up", f"addr replace {FAR}/16 dev {far}")
        (link,) = json.loads(lab.server.run("ip", "-j", "link", "show", far).stdout)
        lab.gateway.ip("link set dsl up", f"addr add {UP}/16 dev dsl")
        lab.gateway.ip(f"neigh replace {FAR} lladdr {link['address']} nud permanent dev dsl")
        yield
    finally:
        for namespace, device in ((lab.gateway, "dsl"), (lab.gateway, "dsl-port"), (lab.server, "eth0.5")):
            namespace.run("ip", "link", "del", device, check=False)
        lab.server.run("ip", "addr", "del", f"{FAR}/16", "dev", "eth0", check=False)


def offered_kinds(lab: Lab) -> list[str]:
    """The kinds of device that this kernel has."""
    found = []
    for kind in KINDS:
        try:
            with uplink(lab, kind):
                found.append(kind)
        except LabError as error:
            if "Unknown device type" not in str(error):
                raise
    return found


def show(lab: Lab, device: str) -> str:
    return lab.gateway.run("tc", "qdisc", "show", "dev", device).stdout


def test_a_cap_holds_the_queues_of_hosts_that_join(gateway: Gateway, lab: Lab) -> None:
    gateway.put(shape("0.0.0.0/0", "3 Mbit/s", per="target", interface="wan"))
    with streams.receive(lab.server) as receiver, offer(lab.client, "", HOST, OTHER, megabits=4, seconds=7.2) as sender:
        began = time.time()
        time.sleep(2.2)
        (host,) = gateway.put(shape(HOST))
        joined = time.time() - began
        time.sleep(2.5)
        left = time.time() - began
        gateway.remove(host)
        sender.report()
    report = receiver.report()
    both = HOST, OTHER
    assert megabits(report, *both, after=0.5, during=1.5).is_about(3)
    assert megabits(report, HOST, after=joined + 0.3, during=1.8).is_about(1)
    assert megabits(report, OTHER, after=joined + 0.3, during=1.8).is_about(2)
    assert megabits(report, *both, after=left + 0.5, during=1.5).is_about(3)


TUNNELS = 300


@contextmanager
def many_tunnels(lab: Lab) -> Iterator[None]:
    """The gateway has more devices with networks behind them than there are handles for."""
    names = [f"tun{number}" for number in range(TUNNELS)]
    made = [f"link add {name} type veth peer name p{name}" for name in names] + [
        f"link set {name} up" for name in names
    ]
    given = [f"addr add 10.{30 + at // 200}.{at % 200}.1/24 dev {name}" for at, name in enumerate(names)]
    try:
        lab.gateway.ip(*made, *given)
        yield
    finally:
        lab.gateway.ip(*(f"link del {name}" for name in names))


def test_more_devices_than_there_are_handles_for_keep_nobody_from_being_shaped(gateway: Gateway, lab: Lab) -> None:
    (rule,) = gateway.put(shape(HOST, direction="from"))
    with many_tunnels(lab):
        told = gateway.wait_for_state(rule, State.DEGRADED)
        assert re.search(r"What leaves by tun\d+, .* and 4\d more is not shaped: netlimit shapes on 255 devices", told)
        with streams.receive(lab.server) as receiver, offer(lab.client, "", HOST, megabits=4, seconds=4) as sender:
            sender.report()
        assert megabits(receiver.report(), HOST, after=0.5, during=3).is_about(1)
        assert len(re.findall(r"htb 6e\w\w: ", lab.gateway.run("tc", "qdisc").stdout)) == 255
    gateway.wait_for_state(rule, State.APPLIED)
    gateway.wait(lambda: not gateway.drift().steps, "what devices that have gone have left behind to go")


MERGED = f"""
import socket, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("{HOST}", 0))
sock.setsockopt(socket.SOL_UDP, 103, 1400)  # UDP_SEGMENT
began, sent = time.monotonic(), 0
while time.monotonic() - began < 8:
    while sent < (time.monotonic() - began) * 12e6 / 8:
        sent += sock.sendto(bytes(1400 * 44), ("{SERVER}", 9))
    time.sleep(0.002)
"""
STREAMS = f"""
import contextlib, socket, time
peers = [socket.create_connection(("{SERVER}", 9001), source_address=("{HOST}", 0)) for _ in range(20)]
for peer in peers:
    peer.setblocking(False)
began = time.monotonic()
while time.monotonic() - began < 8:
    for peer in peers:
        with contextlib.suppress(BlockingIOError):
            peer.send(bytes(65_536))
    time.sleep(0.002)
"""
SINK = """
import selectors, socket
server = socket.create_server(("", 9001), backlog=64)
print("up", flush=True)
found = selectors.DefaultSelector()
for _ in range(20):
    found.register(server.accept()[0], selectors.EVENT_READ)
while True:
    for key, _ in found.select():
        key.fileobj.recv(1 << 20)
"""


@contextmanager
def merging(lab: Lab) -> Iterator[None]:
    """Packets go through the gateway merged, as senders make them and cards deliver them."""
    ends = ((lab.client, "eth0"), (lab.gateway, "lan"), (lab.gateway, "wan"), (lab.server, "eth0"))

    def switch(way: str) -> None:
        for namespace, device in ends:
            namespace.run("ethtool", "-K", device, *(word for name in OFFLOADS for word in (name, way)))

    switch("on")
    try:
        yield
    finally:
        switch("off")


@pytest.mark.parametrize("script", [MERGED, STREAMS], ids=["datagrams", "streams"])
def test_nobody_under_a_cap_waits_long_for_what_another_sends_merged(gateway: Gateway, lab: Lab, script: str) -> None:
    gateway.put(shape("0.0.0.0/0", "8 Mbit/s", direction="to", per="target", interface="wan"))
    sink = lab.server.popen("python3", "-c", SINK, stdout=subprocess.PIPE)
    with merging(lab), sink:
        assert sink.stdout is not None
        sink.stdout.readline()
        with lab.client.popen("python3", "-c", script) as sender:
            time.sleep(3)
            taken = streams.round_trips(lab.client, SERVER, count=30, interval=0.1, source=OTHER)
            sender.kill()
        sink.kill()
    assert len(taken) > 15
    assert max(taken) < 400


@pytest.mark.parametrize("down", [False, True], ids=["from", "to"])
def test_a_qdisc_of_somebody_else_stays_and_the_rule_waits_for_it_to_go(gateway: Gateway, lab: Lab, down: bool) -> None:
    device, direction = ("lan", "to") if down else ("wan", "from")
    lab.gateway.run("tc", "qdisc", "add", "dev", device, "root", "handle", "5:", "pfifo", "limit", "100")
    (rule,) = gateway.add(shape(HOST, direction=direction, interface=device))
    state, sentence = gateway.state(rule)
    assert state is State.ERROR
    assert f"{device} has a qdisc that is not ours (pfifo 5:)" in sentence
    assert "pfifo 5:" in show(lab, device)
    lab.gateway.run("tc", "qdisc", "del", "dev", device, "root")
    gateway.wait_for_state(rule, State.APPLIED)
    assert gateway.class_of(HOST) in gateway.classes(device)


def test_somebody_puts_a_qdisc_in_the_place_of_ours(gateway: Gateway, lab: Lab) -> None:
    (rule,) = gateway.put(shape(HOST, direction="to"))
    lab.gateway.run("tc", "qdisc", "replace", "dev", "lan", "root", "handle", "5:", "pfifo", "limit", "100")
    assert "pfifo 5:" in gateway.wait_for_state(rule, State.ERROR)
    assert "pfifo 5:" in show(lab, "lan")
    lab.gateway.run("tc", "qdisc", "del", "dev", "lan", "root")
    gateway.wait_for_state(rule, State.APPLIED)
    assert gateway.class_of(HOST) in gateway.classes("lan")


def test_a_device_that_is_not_there_yet(gateway: Gateway, lab: Lab) -> None:
    (rule,) = gateway.add(shape(HOST, interface="dsl"))
    assert gateway.state(rule) == (State.ERROR, "There is no device dsl on this host; there are lan, wan.")
    with uplink(lab, "veth"):
        gateway.wait_for_state(rule, State.APPLIED)
        assert gateway.class_of(HOST) in gateway.classes("dsl")
    gateway.wait_for_state(rule, State.ERROR)


def test_each_of_two_uplinks_gives_the_rate(gateway: Gateway, lab: Lab) -> None:
    with uplink(lab, "veth"):
        lab.gateway.ip(f"route add 198.51.100.1 via {SERVER}", f"route add 198.51.100.2 via {FAR}")
        lab.server.ip("addr add 198.51.100.1 dev lo", "addr add 198.51.100.2 dev lo")
        (rule,) = gateway.add(shape(HOST))
        state, sentence = gateway.state(rule)
        assert state is State.APPLIED
        assert sentence.startswith("Its traffic can leave by dsl and wan: the rate holds on each of them by itself.")
        with (
            streams.receive(lab.server) as receiver,
            offer(lab.client, "198.51.100.1", HOST, megabits=2, seconds=2.7),
            offer(lab.client, "198.51.100.2", HOST, megabits=2, seconds=2.7) as sender,
        ):
            sender.report()
        lab.server.ip("addr del 198.51.100.1 dev lo", "addr del 198.51.100.2 dev lo")
    assert megabits(receiver.report(), HOST, after=0.6, during=2).is_about(2)


def test_a_device_that_is_made_anew_under_load_is_shaped_within_two_seconds(gateway: Gateway, lab: Lab) -> None:
    kinds = offered_kinds(lab)
    assert {"veth", "bridge"} <= set(kinds)
    (rule,) = gateway.add(shape(FAR, direction="to"))
    shaped = {}
    with streams.receive(lab.server) as receiver, offer(lab.client, FAR, HOST, megabits=2, seconds=60) as sender:
        for kind in kinds:
            with uplink(lab, kind):
                wait_for_queues(gateway)
            gateway.wait_for_state(rule, State.ERROR)
            with uplink(lab, kind):
                made = time.time()
                wait_for_queues(gateway)
                assert time.time() - made < 2, f"{kind}: {gateway.log.read_text()[-9000:]}"
                shaped[kind] = time.time() + 0.3
                time.sleep(2)
            gateway.wait_for_state(rule, State.ERROR)
        sender.stop()
    report = receiver.report()
    for name, begin in shaped.items():
        assert passed(report, HOST, begin=begin, end=begin + 1.5).is_about(1), name


def wait_for_queues(gateway: Gateway) -> None:
    gateway.wait(lambda: gateway.class_of(FAR) in gateway.classes("dsl"), "the queues of the device")


def snapshot(lab: Lab) -> str:
    """What the devices of the gateway have, and what tables and sets it has."""
    tools = ("tc qdisc show", "ip -d link", "ip rule", "ip route", "ipset save")
    filters = (
        f"tc filter show dev {device} {end}" for device in ("lan", "wan") for end in ("root", "ingress", "egress")
    )
    return "\n".join(lab.gateway.run(*command.split()).stdout for command in (*tools, *filters))


OUTER = "udp dport 4789 oifname wan meta priority > 0:ffff"
COUNTED = f"""
add table ip ranks
add chain ip ranks out {{ type filter hook postrouting priority 0; }}
add rule ip ranks out {OUTER} counter
add rule ip ranks out {OUTER} meta priority and 0xf != 0 counter
"""


@pytest.fixture
def tunnel(lab: Lab) -> Iterator[tuple[str, ...]]:
    """Hosts behind a VXLAN tunnel `inner`; counted are its packets that have a class, and those ranked by it."""
    hosts = tuple(f"10.9.0.{number}" for number in range(2, 12))
    for namespace, ends, addresses in (
        (lab.gateway, (WAN, SERVER), ("10.9.0.1",)),
        (lab.server, (SERVER, WAN), hosts),
    ):
        name = f"inner type vxlan id 7 local {ends[0]} remote {ends[1]} dstport 4789"
        namespace.ip(f"link add {name}", *(f"addr add {each}/24 dev inner" for each in addresses), "link set inner up")
    lab.client.ip("route add 10.9.0.0/24 via 10.1.0.1")
    lab.gateway.run("nft", "-f", "-", input=COUNTED)
    yield hosts
    lab.gateway.run("nft", "delete", "table", "ip", "ranks")
    lab.client.ip("route del 10.9.0.0/24")
    lab.gateway.ip("link del inner")
    lab.server.ip("link del inner")


def test_below_a_tunnel_nobody_is_ranked_by_his_class(gateway: Gateway, lab: Lab, tunnel: tuple[str, ...]) -> None:
    """pfifo_fast, prio and mqprio there go by the low four bits of the priority: some hosts would starve others."""
    gateway.add(*(shape(host, direction="to", interface="inner") for host in tunnel))
    gateway.wait(lambda: all(map(gateway.class_of, tunnel)), "classes")
    for host in tunnel:
        assert streams.ping(lab.client, host, count=2) == 2
    said = lab.gateway.run("nft", "list", "table", "ip", "ranks").stdout
    total, ranked = (int(each) for each in re.findall(r"counter packets (\d+)", said))
    assert total >= 2 * len(tunnel)
    assert ranked == 0


@pytest.mark.parametrize(("length", "waiting"), [(3, "direct_qlen 1000"), (4000, "direct_qlen 4000")])
def test_who_has_no_class_may_wait_on_a_device_that_has_hardly_room(
    gateway: Gateway, lab: Lab, length: int, waiting: str
) -> None:
    """As on any of PPP, which has room for three packets: what no rule names would be lost with a second sender."""
    usual = lab.gateway.run("cat", "/sys/class/net/wan/tx_queue_len").stdout.strip()
    gateway.clear()
    gateway.stop()
    lab.gateway.ip(f"link set wan txqueuelen {length}")
    try:
        gateway.start()
        gateway.put({"target": SERVER, "direction": "to", "action": "shape", "rate": "10 Mbit/s"})
        assert waiting in lab.gateway.run("tc", "qdisc", "show", "dev", "wan").stdout
    finally:
        gateway.clear()
        lab.gateway.ip(f"link set wan txqueuelen {usual}")


def test_a_root_that_is_made_anew_has_room_though_the_device_has_less_by_now(gateway: Gateway, lab: Lab) -> None:
    """Its txqueuelen was lowered meanwhile, which leaves the queue of a root alone that is there."""
    device = "/sys/class/net/wan/tx_queue_len"
    usual = lab.gateway.run("cat", device).stdout.strip()
    gateway.put({"target": SERVER, "direction": "to", "action": "shape", "rate": "10 Mbit/s"})
    lab.gateway.ip("link set wan txqueuelen 3")
    try:
        gateway.put({"target": HOST, "rate": "9 packets/s"})  # devices are looked at before
        lab.gateway.run("tc", "qdisc", "del", "dev", "wan", "root")

        def shown() -> str:
            return lab.gateway.run("tc", "qdisc", "show", "dev", "wan").stdout

        gateway.wait(lambda: " htb " in shown(), "a root")
        assert "direct_qlen 1000" in shown()
    finally:
        gateway.clear()
        lab.gateway.ip(f"link set wan txqueuelen {usual}")


def test_teardown_leaves_the_devices_as_they_were(gateway: Gateway, lab: Lab) -> None:
    gateway.do("teardown")
    before = snapshot(lab)
    gateway.do("apply")
    gateway.put(
        shape(HOST),
        shape(OTHER, direction="to"),
        shape("10.1.81.0/24", per="host"),
        shape("10.1.81.0/24", per="target"),
        shape("0.0.0.0/0", "100 Mbit/s", per="target", interface="wan"),
        shape("fd00:1::80"),
    )
    held = snapshot(lab)
    assert all(name in held for name in ("nl-in", "htb", "clsact", "bpf"))
    gateway.do("teardown")
    assert snapshot(lab) == before
    gateway.do("apply")
