"""Devices and routes of a real network namespace, and when they are read again."""

from __future__ import annotations

import sys

import pytest

from netlimit.plan import WriteTree
from netlimit.tree import INGRESS_DEVICE, Device, Route, Tree
from tests.kernel.worker import RemoteKernel


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
    Route("10.5.0.0/24", ("left",), connected=True),
    Route("10.6.0.0/24", ("right",), connected=True),
    Route("fd05::/64", ("left",), connected=True),
    Route("fd06::/64", ("right",), connected=True),
}


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
        "spare": Device(30, False, "ifb"),
    }


def test_what_is_connected(kernel: RemoteKernel) -> None:
    """Neither link-local and multicast prefixes, nor the local table, nor loopback."""
    kernel.run("ip", "route", "add", "10.7.0.0/24", "dev", "lo")
    assert read_routes(kernel) == CONNECTED


ROUTES = [
    ("default via 10.5.0.9", Route("0.0.0.0/0", ("left",))),
    ("default via fd06::9", Route("::/0", ("right",))),
    ("10.7.0.0/16 via 10.5.0.9 table 1000", Route("10.7.0.0/16", ("left",))),
    ("10.7.0.1 dev right", Route("10.7.0.1/32", ("right",), connected=True)),
    ("10.7.0.0/16 nexthop via 10.5.0.9 nexthop via 10.6.0.9", Route("10.7.0.0/16", ("left", "right"))),
    ("10.7.0.0/16 nexthop via 10.5.0.8 nexthop via 10.5.0.9", Route("10.7.0.0/16", ("left",))),
    ("fd07::/48 nexthop via fd05::9 nexthop via fd06::9", Route("fd07::/48", ("left", "right"))),
    ("10.7.0.0/16 via inet6 fd05::9 dev left", Route("10.7.0.0/16", ("left",))),
    ("10.7.0.0/16 nhid 7", Route("10.7.0.0/16", ("left", "right"))),
    ("fd07::/48 nhid 8", Route("fd07::/48", ("left",))),
]


@pytest.mark.parametrize(("words", "route"), ROUTES, ids=[words for words, _ in ROUTES])
def test_a_route(kernel: RemoteKernel, words: str, route: Route) -> None:
    for hop in ("5 via 10.5.0.9 dev left", "6 via 10.6.0.9 dev right", "7 group 5/6", "8 via fd05::9 dev left"):
        kernel.run("ip", "nexthop", "add", "id", *hop.split())
    kernel.run("ip", "-6" if ":" in route.prefix else "-4", "route", "add", *words.split())
    assert read_routes(kernel) == {*CONNECTED, route}


@pytest.mark.parametrize("kind", ["blackhole", "unreachable", "prohibit", "throw"])
def test_routes_that_lead_nowhere(kernel: RemoteKernel, kind: str) -> None:
    kernel.run("ip", "route", "add", kind, "10.7.0.0/16")
    assert read_routes(kernel) == CONNECTED


def test_a_link_that_is_down_leads_nowhere(kernel: RemoteKernel) -> None:
    kernel.run("ip", "route", "add", *["10.7.0.0/16", "nexthop", "via", "10.5.0.9", "nexthop", "via", "10.6.0.9"])
    kernel.run("ip", "link", "set", "left-end", "down")
    right = {route for route in CONNECTED if route.devices == ("right",)}
    assert read_routes(kernel) == {*right, Route("10.7.0.0/16", ("right",))}


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
    """All of them, of every table; the routes to other networks have none, nor has a route that drops."""
    kernel.run("ip", "route", "add", "10.7.0.0/16", "via", "10.5.0.7")
    kernel.run("ip", "route", "add", "blackhole", "default", "metric", "900")
    assert kernel.topology().gateways == ()
    kernel.run("ip", "route", "add", "default", "nexthop", "via", "10.5.0.8", "nexthop", "via", "10.6.0.9")
    kernel.run("ip", "route", "add", "default", "via", "inet6", "fd05::8", "dev", "left", "table", "1000")
    kernel.run("ip", "route", "add", "default", "via", "fd06::9")
    assert kernel.topology().gateways == ("10.5.0.8", "10.6.0.9", "fd05::8", "fd06::9")
    kernel.run("ip", "route", "replace", "default", "via", "10.5.0.9")
    assert kernel.topology().gateways == ("10.5.0.9", "fd05::8", "fd06::9")
