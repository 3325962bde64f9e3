"""By which far ends of tunnels somebody is reached, and how what the kernel says of them is read."""

from __future__ import annotations

import socket
import struct
from base64 import b64encode
from collections.abc import Iterable
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroute2.netlink.generic.wireguard import wgmsg

from netlimit.kernel import rtnetlink
from netlimit.kernel.tunnels import Switching, read_forwarding, read_hops, read_remote
from netlimit.kernel.wireguard import join_peers
from netlimit.tunnels import FAR_END, End, Followed, Hop, Passage, Tunnel, follow

ADMIN, CUSTOMER = "10.8.0.2", "10.9.0.2"
WG, VX, CARD = 5, 6, 1


# -- by which ------------------------------------------------------------------------------------------------------


def test_only_the_peer_whose_allowed_ips_are_the_longest_counts() -> None:
    ends = End("192.0.2.1", ("10.0.0.0/8", "::/0")), End("192.0.2.2", ("10.8.0.0/30",)), End(None, ("10.9.0.0/16",))
    found = follow(
        [ADMIN, CUSTOMER, "172.16.0.1"],
        {WG: Tunnel("wg0", ends)},
        lambda addresses: {each: (Hop(WG, each),) for each in addresses},
    )
    assert found == Followed({"192.0.2.2": Passage("wg0", ADMIN)}, (Passage("wg0", CUSTOMER),))
    assert found.ends["192.0.2.2"].describe() == f"{FAR_END}wg0, by which {ADMIN} is reached"


def test_who_is_reached_by_a_card_makes_nobody_safe() -> None:
    tunnels = {WG: Tunnel("wg0", (End("192.0.2.1"),))}
    assert follow([ADMIN], tunnels, lambda _: {ADMIN: (Hop(CARD, ADMIN),)}) == Followed({})
    assert follow([ADMIN], tunnels, lambda _: {}) == Followed({})


def test_a_tunnel_of_frames_goes_by_the_next_hop() -> None:
    ends = End("192.0.2.1", ("10.8.0.9",)), End("192.0.2.2", (ADMIN,))
    tunnels = {VX: Tunnel("vx0", ends, by_hop=True)}
    assert list(follow([ADMIN], tunnels, lambda _: {ADMIN: (Hop(VX, "10.8.0.9"),)}).ends) == ["192.0.2.1"]


def test_tunnels_in_tunnels_are_followed_and_one_that_leads_into_itself_ends() -> None:
    tunnels = {WG: Tunnel("wg0", (End("192.0.2.1"),)), VX: Tunnel("vx0", (End("10.8.0.9"),))}
    hops = {ADMIN: (Hop(VX, ADMIN),), "10.8.0.9": (Hop(WG, "10.8.0.9"),), "192.0.2.1": (Hop(WG, "192.0.2.1"),)}
    found = follow([ADMIN], tunnels, lambda addresses: {each: hops[each] for each in addresses})
    assert found.ends == {"10.8.0.9": Passage("vx0", ADMIN), "192.0.2.1": Passage("wg0", ADMIN)}


@pytest.mark.parametrize("address", ["fe80::1", "127.0.0.1", "ff02::1", "0.0.0.0"])  # noqa: S104
def test_what_does_not_say_where_it_is_leads_nowhere_and_is_no_end(address: str) -> None:
    tunnels = {WG: Tunnel("wg0", (End(address),))}

    def find(addresses: Iterable[str]) -> dict[str, tuple[Hop, ...]]:
        return {each: (Hop(WG, each),) for each in addresses}

    assert follow([address, ADMIN], tunnels, find) == Followed({})


# -- what the kernel says ------------------------------------------------------------------------------------------


def write_peer(key: str, endpoint: str | None, *allowed: str) -> dict[str, object]:
    """A peer as pyroute2 has it."""
    attributes: list[list[object]] = [["WGPEER_A_PUBLIC_KEY", {"value": b64encode(key.encode().ljust(32))}]]
    if endpoint:
        attributes.append(["WGPEER_A_ENDPOINT", {"addr": endpoint, "port": 51820}])
    return {"attrs": [*attributes, ["WGPEER_A_ALLOWEDIPS", [write_allowed(each) for each in allowed]]]}


def write_allowed(text: str) -> dict[str, object]:
    network = ip_network(text)
    return {
        "attrs": [
            ["WGALLOWEDIP_A_FAMILY", socket.AF_INET if network.version == 4 else socket.AF_INET6],
            ["WGALLOWEDIP_A_IPADDR", network.network_address.packed],
            ["WGALLOWEDIP_A_CIDR_MASK", network.prefixlen],
        ]
    }


def write_device(*peers: dict[str, object]) -> bytes:
    """What a WireGuard device answers, put together by pyroute2, without the header of netlink."""
    message = wgmsg()
    message["cmd"], message["version"] = 0, 1
    message["attrs"] = [["WGDEVICE_A_IFNAME", "wg0"], ["WGDEVICE_A_PEERS", list(peers)]]
    message.encode()
    return bytes(message.data)[16:]


def test_the_peers_of_wireguard_with_their_endpoints_and_allowed_ips() -> None:
    first = write_device(
        write_peer("a", "192.0.2.1", "10.8.0.2/32", "fd08::/64"),
        write_peer("b", "2001:db8::1", "10.9.0.0/16"),
        write_peer("c", "::ffff:192.0.2.3", "10.10.0.0/16"),
        write_peer("d", None, "0.0.0.0/0"),
    )
    # A peer that does not fit into one message goes on in the next, which does not repeat its endpoint.
    second = write_device(write_peer("d", None, "::/0"), write_peer("b", None, "10.11.0.0/16"))
    assert list(join_peers([first, second])) == [
        End("192.0.2.1", ("10.8.0.2/32", "fd08::/64")),
        End("2001:db8::1", ("10.9.0.0/16", "10.11.0.0/16")),
        End("192.0.2.3", ("10.10.0.0/16",)),
        End(None, ("0.0.0.0/0", "::/0")),
    ]


@given(st.integers(0, 400), st.binary(max_size=40))
def test_whatever_bytes_come_are_read_without_an_error(cut: int, noise: bytes) -> None:
    whole = write_device(write_peer("a", "192.0.2.1", "10.8.0.2/32"), write_peer("b", "2001:db8::1", "fd08::/64"))
    ends = list(join_peers([whole[:cut] + noise + whole[cut + len(noise) :]]))
    found = follow([ADMIN, "fd08::2"], {WG: Tunnel("wg0", tuple(ends))}, lambda each: {a: (Hop(WG, a),) for a in each})
    assert all(ip_address(outer) for outer in found.ends)
    list(read_hops(bytes(12) + noise, ADMIN))
    read_forwarding(bytes(12) + noise)
    read_remote("vxlan", rtnetlink.decode(noise))


@pytest.mark.parametrize(
    ("kind", "number", "address"),
    [
        ("vxlan", 2, "192.0.2.1"), ("vxlan", 16, "2001:db8::1"), ("geneve", 2, "192.0.2.1"),
        ("geneve", 7, "2001:db8::1"), ("gre", 7, "192.0.2.1"),
        ("ip6gretap", 7, "2001:db8::1"), ("ipip", 3, "192.0.2.1"), ("sit", 3, "192.0.2.1"),
        ("ip6tnl", 3, "2001:db8::1"), ("vti", 5, "192.0.2.1"), ("vti6", 5, "2001:db8::1"),
    ],
)  # fmt: skip
def test_the_far_end_that_a_link_tells(kind: str, number: int, address: str) -> None:
    assert read_remote(kind, {number: ip_address(address).packed}) == address
    for none in ("0.0.0.0", "::", "239.1.1.1", "ff05::1"):  # noqa: S104
        assert read_remote(kind, {number: ip_address(none).packed}) is None
    assert read_remote("tun", {number: ip_address(address).packed}) is None


def forward(mac: int, far: str | None = None, state: int = 0x2, flags: int = 0x2) -> bytes:
    """An entry of the forwarding table of the VXLAN (ndmsg), learned unless the state says else."""
    said = rtnetlink.encode(2, mac.to_bytes(6, "big"))
    said += rtnetlink.encode(1, ip_address(far).packed) if far else b""
    return struct.pack("=BxxxiHBB", 7, VX, state, flags, 0) + said


def neighbour(mac: int, address: str) -> bytes:
    said = rtnetlink.encode(1, ip_address(address).packed) + rtnetlink.encode(2, mac.to_bytes(6, "big"))
    return struct.pack("=BxxxiHBB", 2, VX, 0x2, 0, 0) + said


def find_end(*forwarding: bytes, remote: str | None = None) -> list[str]:
    table = Switching(map(read_forwarding, forwarding), [read_forwarding(neighbour(7, ADMIN))])
    tunnel = Tunnel("vx0", table.list_ends(VX, remote), by_hop=True)
    return list(follow([ADMIN], {VX: tunnel}, lambda _: {ADMIN: (Hop(VX, ADMIN),)}).ends)


def test_what_a_vxlan_has_learned_makes_nobody_safe_whom_the_administrator_has_not_named() -> None:
    """Whoever can send it a packet can teach it."""
    assert find_end(forward(7, "203.0.113.66")) == []
    assert find_end(forward(7, "203.0.113.66"), remote="192.0.2.1") == ["192.0.2.1"]
    several = forward(0, "192.0.2.1", 0x80), forward(0, "192.0.2.2", 0x80)
    assert find_end(*several) == []
    assert find_end(*several, forward(7, "192.0.2.2")) == ["192.0.2.2"]
    assert find_end(*several, forward(7, "203.0.113.66")) == []
    assert find_end(forward(7, "192.0.2.3", 0x80), remote="192.0.2.1") == ["192.0.2.3"]
    assert find_end(forward(7, "192.0.2.4", flags=0x12)) == ["192.0.2.4"], "a routing daemon has said so (EVPN)"
