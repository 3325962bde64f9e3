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
    flow), `ends` whether it ends one (a FIN or RST of TCP), `established` whether it belongs to an open TCP connection
    that has an end on this host; `icmp_type` matters for ICMPv6 only, `hop_limit` for what finds neighbours, for what
    routers say to each other, and for what goes no further. `in_interface` is None for what this host sends,
    `out_interface` for what ends on it.
    `mark` is what others have written on it (SO_MARK, iptables, nftables) before it meets a chain of ours.
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
    hop_limit: int = 64
    ends: bool = False
    mark: int = 0
