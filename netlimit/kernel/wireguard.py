"""The peers of WireGuard devices: where each is (its endpoint), and what lies behind it (its allowed IPs); by generic
netlink, as linux/wireguard.h has it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator
from ipaddress import IPv6Address, ip_address

from netlimit.kernel import rtnetlink
from netlimit.plain import decode_name
from netlimit.tunnels import End

FAMILIES = frozenset(("wireguard", "amneziawg"))
"""The kinds of link, and the families of generic netlink by which they are asked."""
_NETLINK_GENERIC = 16
_CONTROL, _GET_FAMILY = 0x10, 3
_FAMILY_NUMBER, _FAMILY_NAME = 1, 2
_GENERIC = struct.Struct("=BBxx")
_GET_DEVICE, _VERSION = 0, 1
_DEVICE_INDEX, _DEVICE_PEERS = 1, 8
_PEER_KEY, _PEER_ENDPOINT, _PEER_ALLOWED = 1, 4, 9
_ALLOWED_ADDRESS, _ALLOWED_LENGTH = 2, 3


def read_ends(kind: str, device: int) -> list[End]:
    """The far ends of one device, by its index. Raises OSError."""
    body = _GENERIC.pack(_GET_DEVICE, _VERSION) + rtnetlink.encode(_DEVICE_INDEX, struct.pack("=I", device))
    return list(join_peers(rtnetlink.dump(_find_family(kind), body, _NETLINK_GENERIC)))


def join_peers(bodies: Iterable[bytes]) -> Iterator[End]:
    """The peers in the messages of one device. One with many allowed IPs goes on in the next message, without its
    endpoint, under the same key."""
    endpoints: dict[bytes, str | None] = {}
    networks: dict[bytes, list[str]] = {}
    for body in bodies:
        peers = rtnetlink.decode(body, _GENERIC.size).get(_DEVICE_PEERS, b"")
        for said in map(rtnetlink.decode, rtnetlink.list_values(peers)):
            key = said.get(_PEER_KEY, b"")
            endpoints[key] = endpoints.get(key) or _read_endpoint(said.get(_PEER_ENDPOINT, b""))
            networks.setdefault(key, []).extend(_read_allowed(said.get(_PEER_ALLOWED, b"")))
    yield from (End(endpoints[key], tuple(behind)) for key, behind in networks.items())


def _read_endpoint(data: bytes) -> str | None:
    """The address in a struct sockaddr_in or sockaddr_in6."""
    family = struct.unpack_from("=H", data)[0] if len(data) >= 8 else 0
    if family == socket.AF_INET:
        return str(ip_address(data[4:8]))
    if family == socket.AF_INET6 and len(data) >= 24:
        address = IPv6Address(data[8:24])
        return str(address.ipv4_mapped or address)
    return None


def _read_allowed(data: bytes) -> Iterator[str]:
    for said in map(rtnetlink.decode, rtnetlink.list_values(data)):
        address, length = said.get(_ALLOWED_ADDRESS, b""), said.get(_ALLOWED_LENGTH, b"")
        if len(address) in (4, 16) and length and length[0] <= 8 * len(address):
            yield f"{ip_address(address)}/{length[0]}"


def _find_family(name: str) -> int:
    """The number of a family of generic netlink. Raises OSError."""
    for body in rtnetlink.dump(_CONTROL, _GENERIC.pack(_GET_FAMILY, 1), _NETLINK_GENERIC):
        said = rtnetlink.decode(body, _GENERIC.size)
        if decode_name(said.get(_FAMILY_NAME, b"")) == name and len(said.get(_FAMILY_NUMBER, b"")) == 2:
            number: int = struct.unpack("=H", said[_FAMILY_NUMBER])[0]
            return number
    raise OSError(f"the kernel knows no family {name} of generic netlink")
