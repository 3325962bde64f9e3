"""Frames as an enemy makes them, from the client of a lab to its gateway."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from itertools import pairwise

from scripts.testbed.namespaces import CLIENT_MAC, LAN_MAC, Namespace

UDP, TCP, ICMP6, FRAGMENT = 17, 6, 58, 44


def send(namespace: Namespace, frames: Iterable[bytes], device: str = "eth0") -> None:
    """Send frames one after the other."""
    lines = "\n".join(frame.hex() for frame in frames)
    namespace.run(sys.executable, "-S", "-c", _SENDER, device, input=lines)


_SENDER = """
import socket, sys, time
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as out:
    out.bind((sys.argv[1], 0))
    for number, line in enumerate(sys.stdin):
        out.send(bytes.fromhex(line))
        if number % 64 == 63:
            time.sleep(0.002)
"""


def frame(packet: bytes, to: str = LAN_MAC) -> bytes:
    """A packet in Ethernet."""
    kind = 0x0800 if packet[0] >> 4 == 4 else 0x86DD
    return bytes.fromhex((to + CLIENT_MAC).replace(":", "")) + struct.pack("!H", kind) + packet


def checksum(data: bytes) -> int:
    """The Internet's (RFC 1071)."""
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ip(
    src: str, dst: str, protocol: int, payload: bytes, hops: int = 64, number: int = 1, at: int = 0, more: bool = False
) -> bytes:
    """A packet of either family; for IPv4, maybe a fragment."""
    source, goal = ip_address(src), ip_address(dst)
    if source.version == 6:
        return struct.pack("!IHBB", 6 << 28, len(payload), protocol, hops) + source.packed + goal.packed + payload
    flags = (0x2000 if more else 0) | at // 8
    start = struct.pack("!BBHHHBB", 0x45, 0, 20 + len(payload), number, flags, hops, protocol)
    ends = source.packed + goal.packed
    return start + struct.pack("!H", checksum(start + bytes(2) + ends)) + ends + payload


def fragments(src: str, dst: str, protocol: int, payload: bytes, cuts: Sequence[int], number: int) -> list[bytes]:
    """A payload in pieces, cut where it is said (multiples of 8)."""
    ends = [0, *cuts, len(payload)]
    made = []
    for at, end in pairwise(ends):
        piece, more = payload[at:end], end < len(payload)
        if ip_address(src).version == 4:
            made.append(ip(src, dst, protocol, piece, number=number, at=at, more=more))
        else:
            made.append(ip(src, dst, FRAGMENT, _tell(protocol, at, more, number) + piece))
    return made


def _tell(following: int, at: int, more: bool, number: int) -> bytes:
    return struct.pack("!BBHI", following, 0, at | more, number)


def udp(src: str, dst: str, port: int, source_port: int, data: bytes) -> bytes:
    """A datagram with its checksum."""
    return _seal(src, dst, UDP, struct.pack("!HHHH", source_port, port, 8 + len(data), 0) + data, 6)


def tcp(src: str, dst: str, port: int, source_port: int, flags: int, sequence: int = 1, answer: int = 1) -> bytes:
    """A segment without data; `flags` are FIN 1, SYN 2, RST 4, ACK 16."""
    words = struct.pack("!HHIIBBHHH", source_port, port, sequence, answer, 5 << 4, flags, 64, 0, 0)
    return _seal(src, dst, TCP, words, 16)


def icmp6(src: str, dst: str, kind: int, rest: bytes) -> bytes:
    """A message of ICMPv6."""
    return _seal(src, dst, ICMP6, struct.pack("!BBH", kind, 0, 0) + rest, 2)


def solicitation(src: str, dst: str, target: str, more: bytes = b"") -> bytes:
    """A neighbour solicitation, with whatever behind it."""
    return icmp6(src, dst, 135, bytes(4) + socket.inet_pton(socket.AF_INET6, target) + more)


def _seal(src: str, dst: str, protocol: int, data: bytes, at: int) -> bytes:
    ends = ip_address(src).packed + ip_address(dst).packed
    known = checksum(ends + struct.pack("!IHBB", len(data), 0, 0, protocol) + data)
    return data[:at] + struct.pack("!H", known) + data[at + 2 :]
