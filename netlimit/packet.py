"""A packet as far as rules can tell: what `explain` is asked about and what the fake kernel is given to trace."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Literal

Side = Literal["src", "dst"]
"""Where an address stands in a packet."""
Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet. `protocol` is "tcp", "udp", "icmp" (ICMPv6 in IPv6) or a name that no rule selects.

    `length` counts IP bytes. `opens` tells whether the packet opens a connection (a TCP SYN, the first datagram of a
    flow), `established` whether it belongs to an open TCP connection that has an end on this host; `icmp_type` matters
    for ICMPv6 only. `in_interface` is None for what this host sends, `out_interface` for what ends on it.
    """

    src: Address
    dst: Address
    protocol: str = "udp"
    port: int | None = None
    source_port: int | None = None
    in_interface: str | None = None
    out_interface: str | None = None
    length: int = 60
    opens: bool = False
    icmp_type: int = 128
    established: bool = False
