"""Tunnels of a real network namespace, and by which of them an address is reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from netlimit.tunnels import Followed, Hop, follow
from tests.kernel.worker import RemoteKernel

PATIENCE = 60.0
FAR, FAR6, OTHER = "10.5.0.2", "fd05::2", "10.5.0.3"


@pytest.fixture
def kernel(untouched: RemoteKernel) -> RemoteKernel:
    """A gateway with a card."""
    lines = [
        "link set lo up",
        "link add name left type veth peer name left-end",
        "link set left-end up",
        "link set left up",
        "addr add 10.5.0.1/24 dev left",
        "addr add fd05::1/64 dev left nodad",
    ]
    untouched.run("ip", "-batch", "-", stdin="\n".join(lines))
    return untouched


def add(kernel: RemoteKernel, kind: str, words: str = "") -> None:
    """A tunnel with addresses."""
    kernel.run("ip", "link", "add", "tunnel", "type", kind, *words.split())
    kernel.run("ip", "link", "set", "tunnel", "up")
    kernel.run("ip", "addr", "add", "10.8.0.1/24", "dev", "tunnel")


def find(kernel: RemoteKernel, *reached: str) -> Followed:
    found = kernel.tunnels()
    assert found.problems == ()
    return follow(reached, found.found, kernel.hops)


def ends(followed: Followed) -> Mapping[str, str]:
    return {outer: passage.reached for outer, passage in followed.ends.items()}


def check_remote(kernel: RemoteKernel, kind: str, words: str, remote: str) -> None:
    """The link itself tells its far end; it counts for whom the route leads through it."""
    add(kernel, kind, f"{words} remote {remote}")
    assert ends(find(kernel, "10.8.0.2")) == {remote: "10.8.0.2"}
    assert find(kernel, "10.5.0.9") == Followed({}), "who does not come through it does not count"
    kernel.run("ip", "route", "add", "10.77.0.0/16", "via", "10.8.0.9", "dev", "tunnel")
    assert ends(find(kernel, "10.77.3.4")) == {remote: "10.77.3.4"}


def test_the_far_end_that_a_link_tells(kernel: RemoteKernel) -> None:
    check_remote(kernel, "vxlan", "id 7 dstport 4789", FAR)


ADMIN = "203.0.113.50"
"""Who the main table does not lead to by a tunnel."""


@pytest.fixture
def policed(kernel: RemoteKernel) -> RemoteKernel:
    """A tunnel that table 100 leads into, and no routing rule that leads there yet."""
    add(kernel, "vxlan", f"id 7 dstport 4789 remote {FAR}")
    kernel.run("ip", "route", "add", "default", "dev", "left")
    kernel.run("ip", "route", "add", "default", "dev", "tunnel", "table", "100")
    return kernel


def find_policed(kernel: RemoteKernel, *near: str) -> set[str]:
    return set(follow([ADMIN], kernel.tunnels().found, partial(kernel.hops, near={ADMIN: near})).ends)


def test_what_a_routing_rule_leads_by_its_source_is_found(policed: RemoteKernel) -> None:
    policed.run("ip", "rule", "add", "from", "10.8.0.1", "lookup", "100")
    assert find_policed(policed, "10.8.0.1") == {FAR}
    assert find_policed(policed, "10.5.0.1", "10.8.0.1") == {FAR}, "each address of this host counts"
    assert find_policed(policed, "10.5.0.1") == set(), "his answers have another source"
    assert find_policed(policed) == set()
    assert find_policed(policed, "10.9.9.9", "10.8.0.1") == {FAR}, "one that this host does not have leads nowhere"


@pytest.mark.parametrize("mark", ["0x7", "0x700/0xff00"])
def test_what_a_routing_rule_leads_by_its_mark_is_found(policed: RemoteKernel, mark: str) -> None:
    policed.run("ip", "rule", "add", "fwmark", "0x1", "lookup", "main")
    policed.run("ip", "rule", "add", "fwmark", mark, "lookup", "100")
    assert find_policed(policed) == {FAR}


def test_a_source_and_a_mark_are_asked_for_together(policed: RemoteKernel) -> None:
    policed.run("ip", "rule", "add", "from", "10.8.0.1", "fwmark", "0x7", "lookup", "100")
    assert find_policed(policed, "10.8.0.1") == {FAR}
    assert find_policed(policed, "10.5.0.1") == set()


def test_a_source_counts_in_ipv6_routes_by_themselves(policed: RemoteKernel) -> None:
    policed.run("ip", "-6", "addr", "add", "fd08::1/64", "dev", "tunnel", "nodad")
    policed.run("ip", "-6", "route", "add", "default", "from", "fd08::/64", "dev", "tunnel")
    policed.run("ip", "-6", "route", "add", "default", "dev", "left")
    tunnels = policed.tunnels().found
    found = (
        follow(["2001:db8::9"], tunnels, partial(policed.hops, near={"2001:db8::9": (near,)}))
        for near in ("fd08::1", "fd05::1")
    )
    assert [set(each.ends) for each in found] == [{FAR}, set()]


def test_where_nothing_leads_there_is_no_next_hop(kernel: RemoteKernel) -> None:
    kernel.run("ip", "route", "add", "prohibit", "10.66.0.0/16")
    kernel.run("ip", "route", "add", "blackhole", "10.67.0.0/16")
    hops = kernel.hops(["10.66.0.1", "10.67.0.1", "192.0.2.1", "2001:db8::1", "10.5.0.9"])
    assert {address for address, found in hops.items() if found} == {"10.5.0.9"}


def test_of_several_ways_each_counts(kernel: RemoteKernel) -> None:
    kernel.run("ip", *["link", "add", "name", "right", "type", "veth", "peer", "name", "right-end"])
    for device in ("right", "right-end"):
        kernel.run("ip", "link", "set", device, "up")
    nexthops = ["nexthop", "via", "10.5.0.8", "dev", "left", "nexthop", "dev", "right"]
    kernel.run("ip", "route", "add", "10.77.0.0/16", *nexthops)
    first, second = kernel.hops(["10.77.0.1"])["10.77.0.1"]
    assert (first.address, second.address) == ("10.5.0.8", "10.77.0.1")
    assert first.device != second.device


def test_what_stands_on_a_tunnel_is_the_tunnel(kernel: RemoteKernel) -> None:
    add(kernel, "vxlan", f"id 7 dstport 4789 remote {FAR}")
    lines = [
        "link add name upon link tunnel type macvlan",
        "link set upon up",
        "addr add 10.9.0.1/24 dev upon",
    ]
    kernel.run("ip", "-batch", "-", stdin="\n".join(lines))
    assert ends(find(kernel, "10.9.0.2")) == {FAR: "10.9.0.2"}


def test_behind_a_bridge_the_far_end_is_not_known(kernel: RemoteKernel) -> None:
    add(kernel, "vxlan", f"id 7 dstport 4789 remote {FAR}")
    lines = [
        "link add name switch type bridge",
        "link set tunnel master switch",
        "link set switch up",
        "addr add 10.9.0.1/24 dev switch",
        "neigh add 10.9.0.2 lladdr 02:00:00:00:09:02 dev switch",
        "neigh add 10.9.0.3 lladdr 02:00:00:00:09:03 dev switch",
    ]
    kernel.run("ip", "-batch", "-", stdin="\n".join(lines))
    kernel.run("bridge", "fdb", "add", "02:00:00:00:09:02", "dev", "tunnel", "master", "static")
    found = find(kernel, "10.9.0.2", "10.9.0.3")
    assert (found.ends, [(each.device, each.reached) for each in found.hidden]) == ({}, [("switch", "10.9.0.2")])


def wait_for(kernel: RemoteKernel, reached: str, expected: Mapping[str, str]) -> None:
    """Wait until the ends are these: after a reading that took long, the kernel is not read again at once."""
    deadline = time.monotonic() + PATIENCE
    while (found := ends(find(kernel, reached))) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == expected


def test_a_vxlan_of_several_ends_goes_by_the_neighbour(kernel: RemoteKernel) -> None:
    add(kernel, "vxlan", "id 7 dstport 4789")
    assert [each.device for each in find(kernel, "10.8.0.2").hidden] == ["tunnel"]
    kernel.run("bridge", "fdb", "append", "00:00:00:00:00:00", "dev", "tunnel", "dst", FAR)
    wait_for(kernel, "10.8.0.2", {FAR: "10.8.0.2"})
    kernel.run("bridge", "fdb", "append", "00:00:00:00:00:00", "dev", "tunnel", "dst", OTHER)
    wait_for(kernel, "10.8.0.2", {})  # it may be either
    for last, far in (("2", FAR), ("3", OTHER), ("4", "10.5.0.4")):
        kernel.run("ip", "neigh", "add", f"10.8.0.{last}", "lladdr", f"02:00:00:00:08:0{last}", "dev", "tunnel")
        kernel.run("bridge", "fdb", "add", f"02:00:00:00:08:0{last}", "dev", "tunnel", "dst", far)
    wait_for(kernel, "10.8.0.4", {"10.5.0.4": "10.8.0.4"})  # as the administrator has it
    wait_for(kernel, "10.8.0.3", {OTHER: "10.8.0.3"})
    kernel.run("ip", "route", "add", "10.77.0.0/16", "via", "10.8.0.3")
    wait_for(kernel, "10.77.3.4", {OTHER: "10.77.3.4"})


def test_a_tunnel_in_a_tunnel(kernel: RemoteKernel) -> None:
    add(kernel, "vxlan", f"id 7 dstport 4789 remote {FAR}")
    kernel.run("ip", *["link", "add", "inside", "type", "vxlan", "id", "9", "dstport", "4790", "remote", "10.8.0.2"])
    kernel.run("ip", "link", "set", "inside", "up")
    kernel.run("ip", "addr", "add", "10.9.0.1/24", "dev", "inside")
    assert ends(find(kernel, "10.9.0.2")) == {"10.8.0.2": "10.9.0.2", FAR: "10.9.0.2"}


def test_tunnels_without_a_known_end_and_what_is_none(kernel: RemoteKernel) -> None:
    if not Path("/dev/net/tun").exists():
        pytest.skip("this kernel has no tun, or has not loaded it")
    kernel.run("ip", "tuntap", "add", "dev", "tunnel", "mode", "tun")
    kernel.run("ip", "link", "set", "tunnel", "up")
    kernel.run("ip", "addr", "add", "10.8.0.1/24", "dev", "tunnel")
    assert [each.reached for each in find(kernel, "10.8.0.2", "10.5.0.2").hidden] == ["10.8.0.2"]
    found = kernel.tunnels().found
    assert [tunnel.device for tunnel in found.values()] == ["tunnel"]
    assert kernel.hops(["10.8.0.2"])["10.8.0.2"] == (Hop(*found.keys(), "10.8.0.2"),)


def test_a_table_that_a_peer_has_filled_holds_nobody_up(kernel: RemoteKernel) -> None:
    """The kernel takes the longer for each entry the more there are."""
    words = "id 7 dstport 4789 local 10.5.0.1 dev left"
    add(kernel, "vxlan", words)
    assert kernel.tunnels().found
    learned = "".join(
        f"fdb append 02:66:{n >> 24:02x}:{n >> 16 & 255:02x}:{n >> 8 & 255:02x}:{n & 255:02x} dev tunnel dst {FAR}\n"
        for n in range(120_000)
    )
    kernel.run("bridge", "-batch", "-", stdin=learned)
    took = [time_of(partial(kernel.run, "bridge", "fdb", "show", "dev", "tunnel")), time_of(kernel.tunnels)]
    assert took[1] < took[0] / 2, took


def time_of(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
