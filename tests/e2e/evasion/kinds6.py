"""Kinds of IPv6 packets."""

from __future__ import annotations

import struct
from dataclasses import replace

from tests.e2e.evasion.headers import (
    AH,
    DSTOPTS,
    ESP,
    FRAGMENT,
    GRE,
    HIP,
    HOPOPTS,
    ICMP6,
    IPIP,
    IPV6,
    MOBILITY,
    NONE,
    OSPF,
    PORT,
    ROUTING,
    SCTP,
    SHIM6,
    TCP,
    UDP,
    UDPLITE,
    VRRP,
    Ends,
    authentication_header,
    fragment_header,
    icmp,
    ip4,
    ip6,
    option_header,
    routing_header,
    tcp,
    udp,
)
from tests.e2e.evasion.kinds import Build, Kind
from tests.e2e.evasion.kinds4 import FLAGS, SYN

ALL_NODES = "ff02::1"
DISCOVERY = "neighbour discovery"


def _udp(name: str, build: Build) -> Kind:
    return Kind(name, build, "udp")


def _tcp(name: str, flags: int, opens: bool) -> Kind:
    return Kind(name, lambda e: [ip6(e, TCP, tcp(e, flags, b"x" * 40))], "tcp", opens)


def _other(name: str, following: int, payload: bytes = b"x" * 64, opens: bool = False) -> Kind:
    return Kind(name, lambda e: [ip6(e, following, payload)], opens=opens)


def _message(name: str, kind: int, hops: int = 64, opens: bool = False, **fields: object) -> Kind:
    """An ICMPv6 message with 16 bytes as neighbour discovery has them: an address, and then data."""
    body = bytes.fromhex("fd000002000000000000000000000099") + b"x" * 64
    return Kind(
        name,
        lambda e: [ip6(e, ICMP6, icmp(e, kind, rest=bytes(4), data=body), hops=hops)],
        opens=opens,
        **fields,  # type: ignore[arg-type]  # Kind's own
    )


def cut(ends: Ends, payload: bytes, sizes: tuple[int, ...], following: int = UDP, hops: int = 64) -> list[bytes]:
    """Fragments of these sizes (multiples of 8), and one with the rest."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append((start, payload[start : start + size]))
        start += size
    pieces.append((start, payload[start:]))
    last = len(pieces) - 1
    return [
        ip6(ends, FRAGMENT, fragment_header(following, ends.number, offset // 8, n != last) + piece, hops=hops)
        for n, (offset, piece) in enumerate(pieces)
    ]


def _overlap(ends: Ends) -> list[bytes]:
    payload = udp(ends, b"x" * 64)
    false = struct.pack("!HH", 1, 9999) + payload[4:]
    pieces = ((0, payload[:24], True), (0, false[:24], True), (3, payload[24:], False))
    return [ip6(ends, FRAGMENT, fragment_header(UDP, ends.number, at, more) + p) for at, p, more in pieces]


def _behind_options(ends: Ends) -> list[bytes]:
    """The first fragment has only a header of options: the ports are in the second (RFC 7112 forbids it)."""
    return cut(ends, option_header(UDP, words=3) + udp(ends), (32,), DSTOPTS)


def _twice(ends: Ends) -> list[bytes]:
    """Fragments in an atomic fragment."""
    inner = fragment_header(UDP, ends.number, 0, False) + udp(ends)
    return [ip6(ends, FRAGMENT, fragment_header(FRAGMENT, ends.number, 0, False) + inner)]


def _inner4(number: int) -> bytes:
    ends = Ends("10.1.0.9", "10.2.0.9", number)
    return ip4(ends, UDP, udp(ends))


def _chain(*headers: int) -> Build:
    """Extension headers in this order, before UDP."""

    def build(ends: Ends) -> list[bytes]:
        following, payload = UDP, udp(ends)
        for header in reversed(headers):
            part = {
                HOPOPTS: lambda f: option_header(f),
                DSTOPTS: lambda f: option_header(f),
                ROUTING: lambda f: routing_header(f, 0, ends.destination),
                FRAGMENT: lambda f: fragment_header(f, ends.number, 0, False),
                AH: lambda f: authentication_header(f),
            }[header](following)
            following, payload = header, part + payload
        return [ip6(ends, following, payload)]

    return build


_NAMES = {HOPOPTS: "hop-by-hop", DSTOPTS: "destination", ROUTING: "routing", FRAGMENT: "atomic fragment", AH: "AH"}
_ORDERS = (
    (HOPOPTS,),
    (DSTOPTS,),
    (ROUTING,),
    (FRAGMENT,),
    (AH,),
    (HOPOPTS, DSTOPTS),
    (HOPOPTS, ROUTING),
    (HOPOPTS, FRAGMENT),
    (DSTOPTS, ROUTING),
    (ROUTING, DSTOPTS),
    (DSTOPTS, FRAGMENT),
    (FRAGMENT, DSTOPTS),
    (ROUTING, FRAGMENT),
    (FRAGMENT, ROUTING),
    (DSTOPTS, HOPOPTS),
    (ROUTING, HOPOPTS),
    (FRAGMENT, HOPOPTS),
    (AH, DSTOPTS),
    (AH, FRAGMENT),
    (HOPOPTS, DSTOPTS, ROUTING, FRAGMENT, AH, DSTOPTS),
    (DSTOPTS,) * 8,
)

KINDS: tuple[Kind, ...] = (
    _udp("UDP", lambda e: [ip6(e, UDP, udp(e))]),
    _udp("UDP without data", lambda e: [ip6(e, UDP, udp(e, b""))]),
    Kind("UDP without a checksum", lambda e: [ip6(e, UDP, udp(e, wrong="no checksum"))], "udp", opens=False),
    Kind("UDP, bad checksum", lambda e: [ip6(e, UDP, udp(e, wrong="checksum"))], "udp", opens=False),
    _udp("hop limit 1", lambda e: [ip6(e, UDP, udp(e), hops=1)]),
    _udp("hop limit 255", lambda e: [ip6(e, UDP, udp(e), hops=255)]),
    _udp("a traffic class", lambda e: [ip6(e, UDP, udp(e), traffic_class=0xBB)]),
    *(_tcp(f"TCP {name}", flags, opens) for name, flags, opens in FLAGS),
    *(_udp(f"headers: {', '.join(_NAMES[h] for h in order)}", _chain(*order)) for order in _ORDERS),
    _udp("a routing header of type 2", lambda e: [ip6(e, ROUTING, routing_header(UDP, 2, e.destination) + udp(e))]),
    _udp(
        "a routing header of type 4 (segment routing)",
        lambda e: [ip6(e, ROUTING, routing_header(UDP, 4, e.destination) + udp(e))],
    ),
    _udp(
        "a routing header with a segment left",
        lambda e: [ip6(e, ROUTING, routing_header(UDP, 0, e.destination, left=1) + udp(e))],
    ),
    _udp("2 kB of padding", lambda e: [ip6(e, DSTOPTS, option_header(UDP, words=150) + udp(e))]),
    _udp("fragments in order", lambda e: cut(e, udp(e, b"x" * 400), (200, 200))),
    _udp("fragments, the last first", lambda e: cut(e, udp(e, b"x" * 400), (200, 200))[::-1]),
    _udp("tiny fragments", lambda e: cut(e, udp(e, b"x" * 64), (8, 8, 8))),
    Kind("TCP flags in the second fragment", lambda e: cut(e, tcp(e, SYN, b"x" * 40), (8,), TCP), "tcp"),
    _udp("fragments that overlap", _overlap),
    _udp("ports in the second fragment", _behind_options),
    _udp("a fragment in a fragment", _twice),
    _udp("a first fragment alone", lambda e: cut(e, udp(e, b"x" * 400), (200,))[:1]),
    _udp("a later fragment alone", lambda e: cut(e, udp(e, b"x" * 400), (200,))[1:]),
    Kind("ICMPv6 echo", lambda e: [ip6(e, ICMP6, icmp(e, 128))]),
    Kind("ICMPv6 echo reply", lambda e: [ip6(e, ICMP6, icmp(e, 129))], opens=False),
    Kind("ICMPv6 unreachable", lambda e: [ip6(e, ICMP6, icmp(e, 1, 4, bytes(4), b"x" * 64))], opens=False),
    *(_message(f"ICMPv6 {kind}, hop limit 64", kind) for kind in range(133, 138)),
    *(_message(f"ICMPv6 {kind}, hop limit 255", kind, 255, spared=DISCOVERY) for kind in range(133, 138)),
    *(
        Kind(
            f"ICMPv6 {kind} in fragments, hop limit 255",
            lambda e, kind=kind: cut(e, icmp(e, kind, rest=bytes(4), data=b"x" * 120), (64,), ICMP6, 255),
            opens=False,
            spared=DISCOVERY,
        )
        for kind in (133, 135, 136)
    ),
    *(
        Kind(
            f"ICMPv6 {kind} behind destination options, hop limit 255",
            lambda e, kind=kind: [
                ip6(e, DSTOPTS, option_header(ICMP6) + icmp(e, kind, rest=bytes(4), data=b"x" * 80), hops=255)
            ],
            opens=False,
            spared=DISCOVERY,
        )
        for kind in (135,)
    ),
    *(_message(f"ICMPv6 {kind} (multicast listener)", kind, 1) for kind in (130, 131, 132, 143)),
    _message("ICMPv6 of an unknown type", 200),
    _message("ICMPv6 135 to all nodes, hop limit 64", 135, 64, destination=ALL_NODES),
    _message("ICMPv6 135 to all nodes, hop limit 255", 135, 255, destination=ALL_NODES, spared=DISCOVERY),
    Kind("SCTP", lambda e: [ip6(e, SCTP, struct.pack("!HHII", 9, PORT, 0, 0) + b"x" * 32)], opens=False),
    Kind("UDP-Lite", lambda e: [ip6(e, UDPLITE, udp(e))]),
    _other("GRE", GRE, struct.pack("!HH", 0, 0x86DD) + b"x" * 60),
    _other("ESP", ESP),
    Kind("4in6", lambda e: [ip6(e, IPIP, _inner4(e.number))], opens=False),
    Kind("IPv6 in IPv6", lambda e: [ip6(e, IPV6, ip6(e, UDP, udp(e)))], opens=False),
    _other("no next header", NONE),
    _other("mobility", MOBILITY, bytes((NONE, 7)) + b"x" * 62),
    _other("HIP", HIP, bytes((NONE, 7)) + b"x" * 62),
    _other("Shim6", SHIM6, bytes((NONE, 7)) + b"x" * 62),
    replace(_other("VRRP", VRRP), spared="VRRP"),
    replace(_other("OSPF", OSPF), spared="OSPF"),
    _other("protocol 253", 253),
    Kind("to all nodes", lambda e: [ip6(e, UDP, udp(e), hops=1)], "udp", destination=ALL_NODES),
)
