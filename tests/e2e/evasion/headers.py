"""Headers put together by hand, as only somebody who wants to evade a limit would: nothing is checked."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass

PORT = 53
"""The port that rules with ports name."""

ICMP, IGMP, IPIP, TCP, UDP, DCCP, IPV6, GRE, ESP, AH = 1, 2, 4, 6, 17, 33, 41, 47, 50, 51
ICMP6, NONE, OSPF, VRRP, SCTP, UDPLITE = 58, 59, 89, 112, 132, 136
HOPOPTS, ROUTING, FRAGMENT, DSTOPTS, MOBILITY, HIP, SHIM6 = 0, 43, 44, 60, 135, 139, 140


@dataclass(frozen=True)
class Ends:
    """Who sends to whom, and the number of the datagram: it makes source ports, identifications and flow labels."""

    source: str
    destination: str
    number: int

    @property
    def family(self) -> int:
        """4 or 6."""
        return 6 if ":" in self.source else 4

    def pack(self) -> bytes:
        """Both addresses."""
        return ipaddress.ip_address(self.source).packed + ipaddress.ip_address(self.destination).packed


def checksum(data: bytes) -> int:
    """The internet checksum (RFC 1071)."""
    padded = data + bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _sum_transport(ends: Ends, protocol: int, segment: bytes) -> int:
    length = struct.pack("!I", len(segment))
    pseudo = ends.pack() + (
        length + struct.pack("!I", protocol) if ends.family == 6 else struct.pack("!HH", protocol, len(segment))
    )
    return checksum(pseudo + segment)


def udp(
    ends: Ends, data: bytes = b"x" * 64, *, to: int = PORT, port: int = 0, wrong: str = "", protocol: int = UDP
) -> bytes:
    """A UDP datagram, or one of UDP-Lite, whose checksum covers all. `wrong` is "checksum", "no checksum" or
    "length"."""
    port = port or 20_000 + ends.number
    length = 8 + len(data) + (40 if wrong == "length" else 0)
    head = struct.pack("!HHHH", port, to, length, 0)
    value = _sum_transport(ends, protocol, head + data) or 0xFFFF
    value = {"checksum": value ^ 0x5555, "no checksum": 0}.get(wrong, value)
    return struct.pack("!HHHH", port, to, length, value) + data


def tcp(
    ends: Ends, flags: int, data: bytes = b"", *, options: bytes = b"", to: int = PORT, wrong: bool = False
) -> bytes:
    """A TCP segment with these flags."""
    port = 20_000 + ends.number
    offset = (20 + len(options)) // 4
    head = struct.pack("!HHIIBBHHH", port, to, 1000, 0, offset << 4, flags, 1024, 0, 0) + options
    value = _sum_transport(ends, TCP, head + data) ^ (0x5555 if wrong else 0)
    return head[:16] + struct.pack("!H", value) + head[18:] + data


def icmp(ends: Ends, kind: int, code: int = 0, rest: bytes = b"", data: bytes = b"x" * 56) -> bytes:
    """An ICMP or ICMPv6 message. `rest` are the four bytes behind the checksum (an echo's, if none are given)."""
    rest = rest or struct.pack("!HH", 20_000 + ends.number, 1)
    head = struct.pack("!BBH", kind, code, 0)
    value = _sum_transport(ends, ICMP6, head + rest + data) if ends.family == 6 else checksum(head + rest + data)
    return head[:2] + struct.pack("!H", value) + rest + data


def ip4(
    ends: Ends,
    protocol: int,
    payload: bytes,
    *,
    options: bytes = b"",
    ttl: int = 64,
    tos: int = 0,
    flags: int = 0,
    offset: int = 0,
    wrong: bool = False,
) -> bytes:
    """An IPv4 packet; `offset` in units of 8 bytes, `flags` the upper three bits."""
    options += bytes(-len(options) % 4)
    words = 5 + len(options) // 4
    head = struct.pack(
        "!BBHHHBBH",
        *(0x40 | words, tos, 4 * words + len(payload), 1 + ends.number, flags << 13 | offset, ttl, protocol, 0),
    )
    whole = head + ends.pack() + options
    value = checksum(whole) ^ (0x5555 if wrong else 0)
    return whole[:10] + struct.pack("!H", value) + whole[12:] + payload


def ip6(ends: Ends, following: int, payload: bytes, *, hops: int = 64, traffic_class: int = 0) -> bytes:
    """An IPv6 packet; `following` is the number of the next header."""
    first = 6 << 28 | traffic_class << 20 | (1 + ends.number)
    return struct.pack("!IHBB", first, len(payload), following, hops) + ends.pack() + payload


def option_header(following: int, *, words: int = 0) -> bytes:
    """A hop-by-hop or destination options header that only pads, of 8 and 8 times `words` bytes."""
    room = 8 * words + 4
    pads = b""
    while room > 0:
        size = min(room, 257)
        pads += bytes((1, size - 2)) + bytes(size - 2)
        room -= size
    return bytes((following, words)) + b"\x01\x00" + pads


def routing_header(following: int, kind: int, address: str, *, left: int = 0) -> bytes:
    """A routing header with one address (RFC 8200; 4 is segment routing, RFC 8754)."""
    extra = b"\x00\x00\x00\x00" if kind != 4 else bytes((0, 0, 0, 0))
    return bytes((following, 2, kind, left)) + extra + ipaddress.IPv6Address(address).packed


def fragment_header(following: int, number: int, offset: int, more: bool) -> bytes:
    """A fragment header; `offset` in units of 8 bytes."""
    return struct.pack("!BBHI", following, 0, offset << 3 | more, 1 + number)


def authentication_header(following: int) -> bytes:
    """An authentication header with a value of 12 bytes (RFC 4302)."""
    return struct.pack("!BBHII", following, 4, 0, 7, 1) + bytes(12)
