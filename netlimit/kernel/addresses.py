"""Whose addresses must not be cut off: the host's own, and those of whoever manages it at the moment."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from pyroute2 import IPRoute

from netlimit.kernel.base import Addresses

_ESTABLISHED = "01"


def read_addresses(ports: Collection[int]) -> Addresses:
    """Own addresses by netlink; peers are the far ends of established TCP connections to one of `ports`."""
    with IPRoute() as ipr:
        own = {message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS") for message in ipr.get_addr()}
    return Addresses(tuple(sorted(own)), tuple(sorted(set(_read_peers(ports)))))


def _read_peers(ports: Collection[int]) -> Iterator[str]:
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(path).read_text().splitlines()[1:]
        except OSError:  # a kernel without IPv6 has no such file
            continue
        for line in lines:
            local, remote, state = line.split()[1:4]
            if state == _ESTABLISHED and int(local.partition(":")[2], 16) in ports:
                address = _parse_hex(remote.partition(":")[0])
                if not ip_address(address).is_loopback:
                    yield address


def _parse_hex(text: str) -> str:
    """An address as /proc/net/tcp has it: 32-bit words in the byte order of the host (here little-endian)."""
    raw = bytes.fromhex(text)
    address = ip_address(b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4)))
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)
