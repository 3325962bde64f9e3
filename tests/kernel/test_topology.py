"""Devices and routes of a real network namespace, and when they are read again."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from ipaddress import ip_network

import pytest

from netlimit.kernel import rtnetlink
from netlimit.kernel.topology import join_objects
from netlimit.plan import WriteTree
from netlimit.tree import INGRESS_DEVICE, MAIN_TABLE, Device, Lookup, Route, Tree
from tests.kernel.worker import RemoteKernel

PATIENCE = 60.0


@pytest.fixture
def kernel(untouched: RemoteKernel) -> RemoteKernel:
    """A gateway with two cards, of which the far ends are here too, but for one down and without addresses."""
    lines = [
        "link set lo up",
        "link add name left index 10 type veth peer name left-end index 11",
        "link add name right index 20 type veth peer name right-end index 21",
        *(f"link set {device} up" for device in ("left", "left-end", "right", "right-end")),
        "addr add 10.5.0.1/24 dev left",
        "addr add 10.6.0.1/24 dev right",
        "addr add fd05::1/64 dev left nodad",
        "addr add fd06::1/64 dev right nodad",
    ]
    untouched.run("ip", "-batch", "-", stdin="\n".join(lines))
    return untouched


CONNECTED = {
    Route("10.5.0.0/24", ("left",), connected=True, attached=True),
    Route("10.6.0.0/24", ("right",), connected=True, attached=True),
    Route("fd05::/64", ("left",), connected=True, attached=True),
    Route("fd06::/64", ("right",), connected=True, attached=True),
}


def via(prefix: str, *gateways: str, table: int = MAIN_TABLE) -> Route:
    """A route by gateways, behind `left` or `right` as their addresses say."""
    devices = ("left" if gateway.startswith(("10.5.", "fd05:")) else "right" for gateway in gateways)
    return Route(prefix, tuple(dict.fromkeys(devices)), table=table, gateways=gateways)


def read_routes(kernel: RemoteKernel) -> set[Route]:
    routes = kernel.topology().routes
    assert len(set(routes)) == len(routes)
    return set(routes)


def test_devices_without_loopback_and_ours(kernel: RemoteKernel) -> None:
    kernel.apply(WriteTree(INGRESS_DEVICE, 0x6E01, Tree(0x6E01)))
    kernel.run("ip", "link", "add", "name", "spare", "index", "30", "type", "ifb")
    assert kernel.topology().devices == {
        "left": Device(10, True, "veth"),
        "left-end": Device(11, True, "veth"),
        "right": Device(20, True, "veth"),
        "right-end": Device(21, True, "veth"),
        "spare": Device(30, False, "ifb", queue=32),
    }


def test_what_is_connected(kernel: RemoteKernel) -> None:
    """Neither link-local and multicast prefixes, nor the local table, nor loopback."""
    kernel.run("ip", "route", "add", "10.7.0.0/24", "dev", "lo")
    assert read_routes(kernel) == CONNECTED


ROUTES = [
    ("default via 10.5.0.9", via("0.0.0.0/0", "10.5.0.9")),
    ("default via fd06::9", via("::/0", "fd06::9")),
    ("10.7.0.0/16 via 10.5.0.9 table 1000", via("10.7.0.0/16", "10.5.0.9", table=1000)),
    ("10.7.0.1 dev right", Route("10.7.0.1/32", ("right",), connected=True)),
    ("10.7.0.0/16 nexthop via 10.5.0.9 nexthop via 10.6.0.9", via("10.7.0.0/16", "10.5.0.9", "10.6.0.9")),
    ("10.7.0.0/16 nexthop via 10.5.0.8 nexthop via 10.5.0.9", via("10.7.0.0/16", "10.5.0.8", "10.5.0.9")),
    ("fd07::/48 nexthop via fd05::9 nexthop via fd06::9", via("fd07::/48", "fd05::9", "fd06::9")),
    ("10.7.0.0/16 via inet6 fd05::9 dev left", via("10.7.0.0/16", "fd05::9")),
    ("10.7.0.0/16 nhid 7", via("10.7.0.0/16", "10.5.0.9", "10.6.0.9")),
    ("fd07::/48 nhid 8", via("fd07::/48", "fd05::9")),
]


@pytest.mark.parametrize(("words", "route"), ROUTES, ids=[words for words, _ in ROUTES])
def test_a_route(kernel: RemoteKernel, words: str, route: Route) -> None:
    for hop in ("5 via 10.5.0.9 dev left", "6 via 10.6.0.9 dev right", "7 group 5/6", "8 via fd05::9 dev left"):
        kernel.run("ip", "nexthop", "add", "id", *hop.split())
    kernel.run("ip", "-6" if ":" in route.prefix else "-4", "route", "add", *words.split())
    assert read_routes(kernel) == {*CONNECTED, route}


NEXTHOPS = (
    "5 via 10.5.0.9 dev left",
    "6 via 10.6.0.9 dev right",
    "7 group 5/6,3",
    "8 via fd05::9 dev left",
    "9 dev right",
    "10 group 8",
    "11 blackhole",
    "12 via fd06::9 dev right",
    "13 group 8/12 type resilient buckets 8",
    "14 via 10.5.0.9 fdb",
)

BY_NEXTHOP = [
    ("10.7.0.0/16 nhid 5", via("10.7.0.0/16", "10.5.0.9")),
    ("10.7.0.0/16 nhid 7", via("10.7.0.0/16", "10.5.0.9", "10.6.0.9")),
    ("10.7.0.0/16 nhid 9 table 1000", Route("10.7.0.0/16", ("right",), connected=True, table=1000)),
    ("10.7.0.0/16 nhid 8", via("10.7.0.0/16", "fd05::9")),
    ("10.7.0.0/16 nhid 11", None),
    ("fd07::/48 nhid 8", via("fd07::/48", "fd05::9")),
    ("fd07::/48 nhid 10", via("fd07::/48", "fd05::9")),
    ("fd07::/48 nhid 13", via("fd07::/48", "fd05::9", "fd06::9")),
]


@pytest.fixture
def untold(kernel: RemoteKernel) -> RemoteKernel:
    """The gateway with nexthop objects, of which its routes tell the numbers alone, as on many hosts with FRR."""
    kernel.run("sh", "-c", "echo 0 > /proc/sys/net/ipv4/nexthop_compat_mode")
    for hop in NEXTHOPS:
        kernel.run("ip", "nexthop", "add", "id", *hop.split())
    return kernel


@pytest.mark.parametrize(("words", "route"), BY_NEXTHOP, ids=[words for words, _ in BY_NEXTHOP])
def test_a_route_that_tells_only_the_number_of_its_nexthop(
    untold: RemoteKernel, words: str, route: Route | None
) -> None:
    untold.run("ip", "-6" if words.startswith("fd") else "-4", "route", "add", *words.split())
    assert read_routes(untold) == {*CONNECTED, *([route] if route else [])}


def test_the_default_gateways_by_nexthops(untold: RemoteKernel) -> None:
    """They follow when a nexthop is given another gateway, of which no route tells then."""
    untold.run("ip", "route", "add", "default", "nhid", "7")
    untold.run("ip", "route", "add", "default", "nhid", "12", "table", "1000")
    untold.run("ip", "-6", "route", "add", "default", "nhid", "13")
    assert untold.topology().gateways == ("10.5.0.9", "10.6.0.9", "fd05::9", "fd06::9")
    untold.run("ip", "nexthop", "replace", "id", "6", "via", "10.6.0.8", "dev", "right")
    assert untold.topology().gateways == ("10.5.0.9", "10.6.0.8", "fd05::9", "fd06::9")
    untold.run("ip", "nexthop", "replace", "id", "7", "group", "6")
    assert untold.topology().gateways == ("10.6.0.8", "fd05::9", "fd06::9")
    untold.run("ip", "nexthop", "del", "id", "6")
    assert untold.topology().gateways == ("fd05::9", "fd06::9")


@pytest.mark.parametrize("kind", ["blackhole", "unreachable", "prohibit", "throw"])
def test_routes_that_lead_nowhere(kernel: RemoteKernel, kind: str) -> None:
    kernel.run("ip", "route", "add", kind, "10.7.0.0/16")
    assert read_routes(kernel) == CONNECTED


def test_a_link_without_carrier_leads_nowhere_where_routes_heed_that(kernel: RemoteKernel) -> None:
    for family in ("ipv4", "ipv6"):
        kernel.run("sysctl", "-qw", f"net.{family}.conf.left.ignore_routes_with_linkdown=1")
    kernel.run("ip", "route", "add", *["10.7.0.0/16", "nexthop", "via", "10.5.0.9", "nexthop", "via", "10.6.0.9"])
    kernel.run("ip", "link", "set", "left-end", "down")
    wanted = {*(route for route in CONNECTED if route.devices == ("right",)), via("10.7.0.0/16", "10.6.0.9")}
    end = time.monotonic() + PATIENCE
    while read_routes(kernel) != wanted and time.monotonic() < end:
        time.sleep(0.05)  # the kernel notes the other end's state a little later
    assert read_routes(kernel) == wanted


def test_a_link_that_has_lost_its_carrier_is_led_to_all_the_same(kernel: RemoteKernel) -> None:
    """What shapes there must not be missing when it comes back."""
    kernel.run("ip", "link", "set", "left-end", "down")
    end = time.monotonic() + PATIENCE
    while "linkdown" not in kernel.run("ip", "route") and time.monotonic() < end:
        time.sleep(0.05)
    assert "linkdown" in kernel.run("ip", "route")
    assert "linkdown" in kernel.run("ip", "-6", "route")
    assert read_routes(kernel) == CONNECTED


WATCH = """
import subprocess, sys, time
from netlimit.kernel.topology import TopologyWatch
watch = TopologyWatch()
last = None
while last is not watch.topology():  # links and addresses that have just been made tell of themselves for a while
    last = watch.topology()
    time.sleep(2)
for line in sys.stdin:
    assert watch.topology() is last, f"before {line}"
    subprocess.run(["ip", *line.split()], check=True)
    assert watch.topology() is not last, f"after {line}"
    last = watch.topology()
"""

CHANGES = [
    "addr add 10.8.0.1/24 dev left",
    "route add default via 10.5.0.9",
    "-6 route add default via fd05::9",
    "addr add fd08::1/64 dev left nodad",
    "route del default",
    "link add name spare type ifb",
    "link del spare",
    "link set right down",
    "rule add from 10.7.0.0/16 lookup 1000",
    "-6 rule add iif left lookup 1000",
]


def test_it_is_read_again_only_after_a_change(kernel: RemoteKernel) -> None:
    kernel.run(sys.executable, "-c", WATCH, stdin="\n".join(CHANGES))


UNCHANGED = [
    "link set left mtu 1400",
    "link set left alias uplink",
    "neigh replace 10.5.0.9 lladdr 02:00:00:00:00:02 nud permanent dev left",
    "route replace 10.5.0.0/24 dev left scope link src 10.5.0.1 proto kernel",
    "link set right addr 02:00:00:00:00:09",
]


def test_what_changes_nothing_that_is_told_gives_the_same_object(kernel: RemoteKernel) -> None:
    script = WATCH.replace("is not last, f", "is last, f").replace("for line", "watch._until = 0.0\nfor line")
    kernel.run(sys.executable, "-c", script, stdin="\n".join(UNCHANGED))


def test_more_changes_than_are_told(kernel: RemoteKernel) -> None:
    """The kernel then says that it has lost some (ENOBUFS)."""
    script = (
        "import subprocess\n"
        "from netlimit.kernel.topology import TopologyWatch\n"
        "watch = TopologyWatch()\n"
        "last = watch.topology()\n"
        "lines = [f'route {verb} 10.9.0.{each}/32 dev left' for _ in range(10) for verb in ('add', 'del') "
        "for each in range(250)] + ['route add 10.9.1.0/32 dev left']\n"
        "subprocess.run(['ip', '-batch', '-'], input='\\n'.join(lines), text=True, check=True)\n"
        "new = watch.topology()\n"
        "assert new is not last\n"
        "assert watch.topology() is new\n"
    )
    kernel.run(sys.executable, "-c", script)


def test_the_default_gateways(kernel: RemoteKernel) -> None:
    """All of them, those of the main table first; routes to other networks have none, nor has a route that drops."""
    kernel.run("ip", "route", "add", "10.7.0.0/16", "via", "10.5.0.7")
    kernel.run("ip", "route", "add", "blackhole", "default", "metric", "900")
    assert kernel.topology().gateways == ()
    kernel.run("ip", "route", "add", "default", "nexthop", "via", "10.5.0.8", "nexthop", "via", "10.6.0.9")
    kernel.run("ip", "route", "add", "default", "via", "inet6", "fd05::8", "dev", "left", "table", "1000")
    kernel.run("ip", "route", "add", "default", "via", "fd06::9")
    assert kernel.topology().gateways == ("10.5.0.8", "10.6.0.9", "fd06::9", "fd05::8")
    kernel.run("ip", "route", "replace", "default", "via", "10.5.0.9")
    assert kernel.topology().gateways == ("10.5.0.9", "fd06::9", "fd05::8")


def test_halves_of_a_default_route_are_one(kernel: RemoteKernel) -> None:
    """So VPNs cover the one that there is."""
    for half in ("0.0.0.0/1", "128.0.0.0/1"):
        kernel.run("ip", "route", "add", half, "via", "10.5.0.7")
    kernel.run("ip", "route", "add", "2000::/3", "via", "fd05::7")
    kernel.run("ip", "route", "add", "64.0.0.0/2", "via", "10.6.0.7")
    assert kernel.topology().gateways == ("10.5.0.7", "fd05::7")


INTO = "encap seg6 mode encap segs fd05::9"
LED = {
    "encap seg6 mode encap segs fd05::9 dev left": ("seg6 mode encap", True),
    "encap seg6 mode inline segs fd05::9 dev left": ("seg6 mode inline", False),
    "encap seg6 mode encap.red segs fd05::9 via fd06::9": ("seg6 mode encap.red", True),
    "nexthop encap seg6 mode l2encap segs fd05::9 via fd06::9 nexthop via fd05::9": ("seg6 mode l2encap", True),
    "nhid 7": ("seg6 mode encap", True),
    "nhid 8": ("seg6 mode encap", True),
}


@pytest.mark.parametrize("route", LED)
def test_routes_that_lead_what_comes_in_into_tunnels(kernel: RemoteKernel, route: str) -> None:
    encapsulation, hides = LED[route]
    kernel.run("ip", "-6", *f"nexthop add id 7 {INTO} dev left".split())
    kernel.run("ip", "nexthop", "add", "id", "8", "group", "7")
    kernel.run("ip", "-6", "route", "add", "fd07::/64", *route.split())
    (found,) = kernel.topology().diversions
    assert (found.prefix, found.encapsulation, found.hides) == ("fd07::/64", encapsulation, hides)
    assert kernel.topology().segments == ()
    kernel.run("ip", "-6", "route", "del", "fd07::/64")
    assert kernel.topology().diversions == ()


def test_routes_that_put_what_is_forwarded_into_tunnels_lead_nothing_away(kernel: RemoteKernel) -> None:
    outward, inward = "encap ip id 7 dst 10.5.0.9 via 10.5.0.9 dev left", "encap seg6local action End dev left"
    kernel.run("ip", "route", "add", "10.7.0.0/16", *outward.split())
    kernel.run("ip", "-6", "route", "add", "fd07::1/128", *inward.split())
    assert kernel.topology().diversions == ()
    assert kernel.topology().segments == ("fd07::1/128",)
    kernel.run("ip", "route", "add", "10.8.0.0/16", *f"{INTO} dev left".split())
    assert [each.prefix for each in kernel.topology().diversions] == ["10.8.0.0/16"]


def test_routes_that_leave_networks_to_the_next_table(kernel: RemoteKernel) -> None:
    before = kernel.topology()
    for words in ("throw 10.7.0.0/16 table 7", "throw 10.8.0.0/16 table 7 tos 0x10", "blackhole 10.9.0.0/16 table 7"):
        kernel.run("ip", "route", "add", *words.split())
    kernel.run("ip", "-6", "route", "add", "throw", "fd07::/64", "table", "7")
    found = kernel.topology()
    assert found.routes == before.routes
    assert {*found.throws} == {
        Route("10.7.0.0/16", (), table=7),
        Route("10.8.0.0/16", (), table=7, partial=True),
        Route("fd07::/64", (), table=7),
    }


def test_the_bridge_that_a_device_belongs_to(kernel: RemoteKernel) -> None:
    kernel.run("ip", "link", "add", "name", "upper", "index", "30", "type", "bridge")
    before = kernel.topology()
    kernel.run("ip", "link", "set", "right", "down")
    kernel.run("ip", "link", "set", "right", "master", "upper")
    assert kernel.topology() is not before
    assert kernel.topology().devices["right"].master == "upper"
    assert kernel.topology().devices["upper"].kind == "bridge"
    kernel.run("ip", "link", "set", "right", "nomaster")
    assert kernel.topology().devices["right"].master == ""


@pytest.mark.parametrize(("mode", "master"), [("passthru", "upper"), ("bridge", ""), ("private", "")])
def test_the_macvlan_that_takes_all_that_comes_in_by_a_device(kernel: RemoteKernel, mode: str, master: str) -> None:
    kernel.run(*f"ip link add name upper index 30 link right type macvlan mode {mode}".split())
    devices = kernel.topology().devices
    assert {name: devices[name].master for name in ("left", "right", "upper")} == {
        "left": "",
        "right": master,
        "upper": "",
    }


def test_a_macvlan_upon_the_device_of_another_namespace_takes_nothing_from_ours(
    kernel: RemoteKernel,
) -> None:
    other = f"nl-above-{os.getpid()}"
    index = kernel.topology().devices["right"].index

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    ip("netns", "add", other)
    try:
        ip("-n", other, "link", "add", "card", "index", str(index), "type", "veth")
        ip("-n", other, *["link", "add", "link", "card", "name", "upper", "type", "macvlan", "mode", "passthru"])
        ip("-n", other, "link", "set", "upper", "netns", kernel.namespace)
        devices = kernel.topology().devices
        assert (devices["right"].master, devices["upper"].master) == ("", "")
    finally:
        ip("netns", "del", other)


def test_networks_of_which_every_packet_ends_here(kernel: RemoteKernel) -> None:
    """A transparent proxy has another table, for what was marked."""
    kernel.run("ip", "route", "add", "local", "10.7.0.0/24", "dev", "lo")
    kernel.run("ip", "-6", "route", "add", "local", "fd07::/64", "dev", "lo")
    kernel.run("ip", "route", "add", "local", "10.8.0.0/24", "dev", "lo", "table", "100")
    kernel.run("ip", "route", "add", "local", "10.9.0.1/32", "dev", "lo")
    found = kernel.topology()
    assert {"10.7.0.0/24", "fd07::/64", "10.8.0.0/24", "10.9.0.1/32", "10.5.0.255/32"} <= {*found.local}
    assert {"10.7.0.0/24", "fd07::/64", "10.9.0.1/32", "10.5.0.255/32"} <= {*found.ending}
    assert "10.8.0.0/24" not in found.ending
    kernel.run("ip", "rule", "add", "pref", "100", "lookup", "local")
    kernel.run("ip", "rule", "add", "pref", "50", "fwmark", "7", "lookup", "100")
    kernel.run("ip", "rule", "del", "pref", "0")
    ending = kernel.topology().ending
    assert "fd07::/64" in ending
    assert all(":" in each for each in ending), "another table is asked before"


RULES = (
    "pref 100 from 10.7.0.0/16 lookup 1000",
    "pref 101 to 10.7.0.0/16 lookup 70000",
    "pref 102 iif left lookup 1000",
    "pref 103 fwmark 7 lookup 1000",
    "pref 104 lookup main suppress_prefixlength 0",
    "pref 105 not fwmark 7 lookup 1000",
    "pref 106 not lookup 1000",
    "pref 107 tos 0x10 lookup 1000",
    "pref 108 lookup 1000 suppress_ifgroup 7",
    "pref 109 ipproto udp dport 53 lookup 1000",
    "pref 110 uidrange 0-0 lookup 1000",
    "pref 111 l3mdev",
    "pref 112 from 10.8.0.0/16 unreachable",
    "pref 113 lookup 1000 protocol static",
    "pref 114 nop",
)
LOCAL, DEFAULT = Lookup(4, 255, always=True), Lookup(4, 253, always=True)
MAIN = Lookup(4, MAIN_TABLE, always=True)
SOME = Lookup(4, 1000)


def read_lookups(kernel: RemoteKernel, family: int = 4) -> list[Lookup]:
    return [each for each in kernel.topology().lookups if each.family == family]


def test_routing_rules_that_lead_to_tables(kernel: RemoteKernel) -> None:
    assert kernel.topology().lookups == (LOCAL, MAIN, DEFAULT, *(each._replace(family=6) for each in (LOCAL, MAIN)))
    for rule in RULES:
        kernel.run("ip", "rule", "add", *rule.split())
    some = (SOME, SOME._replace(table=70000), SOME, SOME, MAIN._replace(suppressed=0))
    always = SOME._replace(always=True)
    assert read_lookups(kernel) == [LOCAL, *some, *(SOME,) * 6, always, MAIN, DEFAULT]
    assert len(read_lookups(kernel, 6)) == 2


def test_of_what_a_routing_rule_jumps_over_nothing_is_asked_of_every_packet(kernel: RemoteKernel) -> None:
    kernel.run("ip", "-6", "rule", "add", "pref", "100", "from", "fd07::/64", "goto", "32767")
    kernel.run("ip", "-6", "rule", "add", "pref", "32767", "lookup", "1000")
    jumped = [Lookup(6, 255), Lookup(6, MAIN_TABLE), Lookup(6, 1000)]
    assert read_lookups(kernel, 6) == jumped
    assert read_lookups(kernel) == [LOCAL, MAIN, DEFAULT], "the families have rules of their own"


def test_odd_nexthops_never_keep_routes_from_being_read() -> None:
    def encode(*attributes: tuple[int, bytes], flags: int = 0) -> bytes:
        return struct.pack("=4xI", flags) + b"".join(rtnetlink.encode(*each) for each in attributes)

    def number(value: int) -> bytes:
        return struct.pack("=I", value)

    left = (5, number(10))
    bodies = [
        b"",
        bytes(3),
        bytes(8) + b"\x02\x00",
        encode(),
        encode((1, b"\x01")),
        encode((1, number(1)), left, (6, b"\x0a"), (4000, b"what is this")),
        encode((1, number(2)), left, (6, bytes(16)), flags=1),
        encode((1, number(3)), (4, b"")),
        encode((2, b"\x01\x00\x00\x00\x00\x00\x00\x00" + bytes(3)), (1, number(4))),
        encode((1, number(5)), (2, b"".join(struct.pack("=I4x", each) for each in (2, 99, 5, 1)))),
        encode((1, number(6)), (2, b"")),
    ]
    found = join_objects(bodies)
    assert found[1] == ((0, (10, None, "")),)
    assert found[2] == ((1, (10, "::", "")),)
    assert found[3] == ((0, (0, None, "")),)
    assert found[4] == found[1]
    assert found[5] == (*found[2], *found[1])
    assert found[6] == ()


MANY = """
import subprocess, time
from netlimit.kernel import topology
from netlimit.kernel.topology import TopologyWatch, read_topology
lines = "\\n".join(f"route add 10.{40 + i // 250}.{i % 250}.0/24 via 10.5.0.9" for i in range(5000))
subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)
before = time.thread_time()
assert len(read_topology().routes) >= 5004
print(time.thread_time() - before)
topology._SHORT_READING = 0.0
watch = TopologyWatch()
watch.topology()
assert watch._rested <= time.monotonic(), "one may have taken long by chance"
subprocess.run(["ip", "route", "add", "10.98.0.0/16", "via", "10.5.0.9"], check=True)
last = watch.topology()
watch.topology()
rest = watch._rested - time.monotonic()
assert rest > 0
subprocess.run(["ip", "route", "add", "10.99.0.0/16", "via", "10.5.0.9"], check=True)
assert watch.topology() is last, "it rests"
subprocess.run("ip link del right; ip link add name right index 40 type veth peer name right-end index 41", shell=True)
assert watch.topology().devices["right"].index == 40, "of devices it hears at once"
last = watch.topology()
assert watch.topology() is last
assert len(last.routes) >= 5005
watch._rested = 0.0
assert watch.topology() is not last, "what changed meanwhile is read then"
"""


def test_many_routes_are_read_fast_and_seldom(kernel: RemoteKernel) -> None:
    """In processor time: pyroute2 takes ten times as long."""
    said = kernel.run(sys.executable, "-c", MANY)
    assert float(said) < 0.3


def test_routes_for_some_packets_alone(kernel: RemoteKernel) -> None:
    kernel.run("ip", "route", "add", "10.7.0.0/16", "tos", "0x10", "dev", "right")
    kernel.run("ip", "-6", "route", "add", "2001:db8:7::/48", "from", "fd00:9::/64", "dev", "left")
    assert read_routes(kernel) - CONNECTED == {
        Route("10.7.0.0/16", ("right",), connected=True, partial=True),
        Route("2001:db8:7::/48", ("left",), connected=True, partial=True),
    }


def test_odd_routes_are_read_as_they_are(kernel: RemoteKernel) -> None:
    kernel.run("ip", "-6", "route", "add", "::ffff:0:0/96", "dev", "left")
    kernel.run("ip", "-6", "route", "add", "fc00::/7", "nexthop", "via", "fd05::8", "nexthop", "via", "fd06::8")
    kernel.run("ip", "route", "add", "10.7.0.0/16", "dev", "right", "table", "70000")
    added = read_routes(kernel) - CONNECTED
    assert added == {
        Route(str(ip_network("::ffff:0:0/96")), ("left",), connected=True),
        via("fc00::/7", "fd05::8", "fd06::8"),
        Route("10.7.0.0/16", ("right",), connected=True, table=70000),
    }


def test_while_a_long_reading_goes_on_devices_are_followed_and_nobody_waits(kernel: RemoteKernel) -> None:
    """A full table of routes takes seconds."""
    script = (
        "import subprocess, threading, time\n"
        "from netlimit.kernel import topology\n"
        "topology._PATIENCE = 0.01\n"
        "watch, read, gate = topology.TopologyWatch(), topology.read_topology, threading.Event()\n"
        "first = watch.topology()\n"
        "while first is not watch.topology():\n"
        "    first = watch.topology()\n"
        "topology.read_topology = lambda: gate.wait(60) and read()\n"
        "subprocess.run('ip route add 10.9.0.0/24 dev left', shell=True, check=True)\n"
        "assert watch.topology() is first\n"
        "subprocess.run('ip link add name extra type veth peer name extra-end', shell=True, check=True)\n"
        "meanwhile = watch.topology()\n"
        "assert 'extra' in meanwhile.devices and meanwhile.routes == first.routes\n"
        "gate.set()\n"
        "end = time.monotonic() + 60\n"
        "while '10.9.0.0/24' not in [each.prefix for each in watch.topology().routes]:\n"
        "    assert time.monotonic() < end\n"
        "assert 'extra' in watch.topology().devices\n"
    )
    kernel.run(sys.executable, "-c", script)
