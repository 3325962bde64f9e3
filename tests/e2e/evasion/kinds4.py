"""Kinds of IPv4 packets."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable
from dataclasses import replace

from tests.e2e.evasion.headers import (
    AH,
    DCCP,
    ESP,
    GRE,
    ICMP,
    IGMP,
    IPIP,
    IPV6,
    OSPF,
    PORT,
    SCTP,
    TCP,
    UDP,
    UDPLITE,
    VRRP,
    Ends,
    authentication_header,
    icmp,
    ip4,
    tcp,
    udp,
)
from tests.e2e.evasion.kinds import Kind

SYN, ACK, RST, FIN, PSH, URG, ECE, CWR = 2, 16, 4, 1, 8, 32, 64, 128
_LATER, _MORE, _WHOLE = 0, 1, 2
"""The upper three bits of a packet's fragment field: last fragment, more to come, don't fragment."""


def _udp(name: str, **fields: object) -> Kind:
    return Kind(name, lambda e: [ip4(e, UDP, udp(e), **fields)], "udp")  # type: ignore[arg-type]  # ip4's own


def _tcp(name: str, flags: int, opens: bool = False) -> Kind:
    return Kind(name, lambda e: [ip4(e, TCP, tcp(e, flags, b"x" * 40))], "tcp", opens)


def _other(name: str, protocol: int, payload: bytes = b"x" * 64, **fields: object) -> Kind:
    return Kind(name, lambda e: [ip4(e, protocol, payload, **fields)], opens=False)  # type: ignore[arg-type]  # ip4's own


def _options(name: str, options: Callable[[Ends], bytes]) -> Kind:
    return Kind(name, lambda e: [ip4(e, UDP, udp(e), options=options(e))], "udp")


def _source_route(kind: int) -> Callable[[Ends], bytes]:
    return lambda e: bytes((kind, 7, 4)) + ipaddress.IPv4Address(e.destination).packed


def cut(ends: Ends, payload: bytes, sizes: tuple[int, ...], protocol: int = UDP) -> list[bytes]:
    """Fragments of these sizes (multiples of 8), and one with the rest."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append((start, payload[start : start + size]))
        start += size
    pieces.append((start, payload[start:]))
    last = len(pieces) - 1
    return [
        ip4(ends, protocol, piece, flags=_LATER if number == last else _MORE, offset=offset // 8)
        for number, (offset, piece) in enumerate(pieces)
    ]


def _overlap(ends: Ends) -> list[bytes]:
    """The later fragment covers the ports of the first with others (RFC 1858)."""
    payload = udp(ends, b"x" * 64)
    false = struct.pack("!HH", 1, 9999) + payload[4:]
    return [
        ip4(ends, UDP, payload[:24], flags=_MORE),
        ip4(ends, UDP, false[:24], flags=_MORE),
        ip4(ends, UDP, payload[24:], offset=3),
    ]


def _quoting(ends: Ends) -> bytes:
    """What an ICMP error quotes: a packet that the destination is said to have sent."""
    back = Ends(ends.destination, ends.source, ends.number)
    return ip4(back, UDP, udp(back, b"x" * 16))


FLAGS = (
    ("FIN", FIN, False),
    ("SYN", SYN, True),
    ("RST", RST, False),
    ("PSH", PSH, False),
    ("ACK", ACK, False),
    ("URG", URG, False),
    ("ECE", ECE, False),
    ("CWR", CWR, False),
    ("no flag", 0, False),
    ("all flags", 0xFF, False),
    ("SYN+ACK", SYN | ACK, False),
    ("SYN+FIN", SYN | FIN, False),
    ("SYN+RST", SYN | RST, False),
    ("SYN+ECE+CWR", SYN | ECE | CWR, True),
    ("SYN+PSH+URG", SYN | PSH | URG, True),
    ("FIN+ACK", FIN | ACK, False),
    ("FIN+PSH+URG", FIN | PSH | URG, False),
)

KINDS: tuple[Kind, ...] = (
    _udp("UDP"),
    Kind("UDP from port 53", lambda e: [ip4(e, UDP, udp(e, port=PORT))], "udp", opens=False),
    Kind("UDP without data", lambda e: [ip4(e, UDP, udp(e, b""))], "udp"),
    Kind("UDP without a checksum", lambda e: [ip4(e, UDP, udp(e, wrong="no checksum"))], "udp"),
    Kind("UDP, bad checksum", lambda e: [ip4(e, UDP, udp(e, wrong="checksum"))], "udp", opens=False),
    Kind("UDP that says it is longer", lambda e: [ip4(e, UDP, udp(e, wrong="length"))], "udp", opens=False),
    _udp("bad IP checksum", wrong=True),
    _udp("TTL 1", ttl=1),
    _udp("TTL 255", ttl=255),
    _udp("DSCP EF, ECN CE", tos=0xBB),
    _udp("the evil bit", flags=4),
    _udp("don't fragment", flags=_WHOLE),
    *(_tcp(f"TCP {name}", flags, opens) for name, flags, opens in FLAGS),
    Kind(
        "TCP SYN with options",
        lambda e: [ip4(e, TCP, tcp(e, SYN, options=b"\x02\x04\x05\xb4\x04\x02\x01\x01"))],
        "tcp",
    ),
    Kind("TCP SYN, bad checksum", lambda e: [ip4(e, TCP, tcp(e, SYN, wrong=True))], "tcp"),
    _options("options: no-operations", lambda e: b"\x01" * 40),
    _options("options: record route", lambda e: b"\x07\x27\x04" + bytes(36) + b"\0"),
    _options("options: timestamp", lambda e: b"\x44\x24\x05\x00" + bytes(32)),
    _options("options: router alert", lambda e: b"\x94\x04\x00\x00"),
    _options("options: security", lambda e: b"\x82\x0b" + bytes(9) + b"\0"),
    _options("options: loose source route", _source_route(0x83)),
    _options("options: strict source route", _source_route(0x89)),
    _options("options: malformed", lambda e: b"\x07\x00\x00\x00"),
    Kind("fragments in order", lambda e: cut(e, udp(e, b"x" * 400), (200, 200)), "udp"),
    Kind("fragments, the last first", lambda e: cut(e, udp(e, b"x" * 400), (200, 200))[::-1], "udp"),
    Kind("tiny fragments", lambda e: cut(e, udp(e, b"x" * 64), (8, 8, 8)), "udp"),
    Kind("TCP flags in the second fragment", lambda e: cut(e, tcp(e, SYN, b"x" * 40), (8,), TCP), "tcp"),
    Kind("fragments that overlap", _overlap, "udp"),
    Kind("a first fragment alone", lambda e: cut(e, udp(e, b"x" * 400), (200,))[:1], "udp"),
    Kind("a later fragment alone", lambda e: cut(e, udp(e, b"x" * 400), (200,))[1:], "udp"),
    Kind("ICMP echo", lambda e: [ip4(e, ICMP, icmp(e, 8))]),
    Kind("ICMP echo reply", lambda e: [ip4(e, ICMP, icmp(e, 0))], opens=False),
    Kind("ICMP timestamp", lambda e: [ip4(e, ICMP, icmp(e, 13, data=bytes(12)))]),
    Kind("ICMP unreachable", lambda e: [ip4(e, ICMP, icmp(e, 3, 3, bytes(4), _quoting(e)))], opens=False),
    Kind("ICMP redirect", lambda e: [ip4(e, ICMP, icmp(e, 5, 1, bytes((10, 1, 0, 9)), _quoting(e)))], opens=False),
    Kind("ICMP of an unknown type", lambda e: [ip4(e, ICMP, icmp(e, 42))], opens=False),
    Kind("SCTP", lambda e: [ip4(e, SCTP, struct.pack("!HHII", 9, PORT, 0, 0) + b"x" * 32)], opens=False),
    Kind("UDP-Lite", lambda e: [ip4(e, UDPLITE, udp(e))]),
    Kind("DCCP", lambda e: [ip4(e, DCCP, struct.pack("!HHBBHI", 9, PORT, 4, 0, 0, 0) + bytes(16))], opens=False),
    _other("GRE", GRE, struct.pack("!HH", 0, 0x0800) + b"x" * 60),
    _other("ESP", ESP),
    Kind("AH", lambda e: [ip4(e, AH, authentication_header(UDP) + udp(e))], opens=False),
    Kind("IPIP", lambda e: [ip4(e, IPIP, ip4(e, UDP, udp(e)))], opens=False),
    _other("6in4", IPV6),
    _other("IGMP", IGMP, b"\x11\x64\xee\x9b\0\0\0\0", ttl=1),
    replace(_other("VRRP", VRRP, ttl=255), spared="VRRP"),
    replace(_other("OSPF", OSPF), spared="OSPF"),
    _other("protocol 0", 0),
    _other("protocol 255", 255),
    Kind("to 255.255.255.255", lambda e: [ip4(e, UDP, udp(e))], "udp", destination="255.255.255.255"),
    Kind("to the subnet's broadcast", lambda e: [ip4(e, UDP, udp(e))], "udp", destination="10.1.255.255"),
    Kind("to 224.0.0.1", lambda e: [ip4(e, UDP, udp(e), ttl=1)], "udp", destination="224.0.0.1"),
    Kind(
        "VRRP to 224.0.0.18",
        lambda e: [ip4(e, VRRP, b"x" * 64, ttl=255)],
        opens=False,
        destination="224.0.0.18",
        spared="VRRP",
    ),
    Kind("VRRP to 224.0.0.18, TTL 64", lambda e: [ip4(e, VRRP, b"x" * 64)], opens=False, destination="224.0.0.18"),
    Kind(
        "OSPF to 224.0.0.5",
        lambda e: [ip4(e, OSPF, b"x" * 64, ttl=1)],
        opens=False,
        destination="224.0.0.5",
        spared="OSPF",
    ),
    Kind(
        "IGMP to 224.0.0.1",
        lambda e: [ip4(e, IGMP, b"\x11\x64\xee\x9b\0\0\0\0", ttl=1)],
        opens=False,
        destination="224.0.0.1",
        spared="IGMP",
    ),
    Kind("to 239.1.2.3", lambda e: [ip4(e, UDP, udp(e))], "udp", destination="239.1.2.3"),
)
