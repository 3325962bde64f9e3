"""Reading addresses and networks as people and programs write them.

An IPv4 address is one however it is written: `::ffff:10.1.0.9`, as programs with one socket for both families have it,
is 10.1.0.9. No packet carries it as an IPv6 address, so that a rule for it would never hit.
"""

from __future__ import annotations

from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
MAPPED = IPv6Network("::ffff:0:0/96")
"""IPv4 addresses written as those of IPv6."""
_COMPATIBLE = IPv6Network("::/96")
_LONGEST = len("ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255/128")
_SHORTEST = 10
"""Prefixes of ::/9 and shorter hold addresses in use besides (64:ff9b::, of translators)."""


def read_address(text: str) -> Address:
    """An address, IPv4 as such, without a zone. Raises ValueError."""
    address = ip_address(text.strip().partition("%")[0])
    return (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address


def read_network(text: str, strict: bool = True) -> Network:
    """An address or CIDR, IPv4 as such. Raises ValueError; if `strict`, also for host bits."""
    return unmap(ip_network(text.strip(), strict=strict))


def read_plain(text: object) -> str | None:
    """An address or CIDR that somebody has kept, in the form in which every tool of the kernel takes it: without a
    zone, host bits and blanks, IPv4 as such. None for all else, whatever it is."""
    if not isinstance(text, str) or len(text) > _LONGEST or "%" in text:
        return None
    try:
        network = unmap(ip_network(text))
    except ValueError:
        return None
    return str(network) if "/" in text else str(network.network_address)


def unmap(network: Network) -> Network:
    """The IPv4 network that is written so; the network itself if it is not."""
    if isinstance(network, IPv4Network) or not network.subnet_of(MAPPED):
        return network
    return IPv4Network((int(network.network_address) & 0xFFFFFFFF, network.prefixlen - MAPPED.prefixlen))


def explain_unused(network: Network) -> str | None:
    """Why no packet is in a network; None if there may be one (once it is unmapped)."""
    if isinstance(network, IPv4Network):
        return None
    if _SHORTEST <= network.prefixlen < MAPPED.prefixlen and MAPPED.subnet_of(network):
        return (
            f"{network} holds IPv4 addresses written as those of IPv6 (::ffff:0:0/96), and no other that is in use: no "
            "packet of IPv6 is in it. Name the IPv4 network as such, or everything of IPv6 as ::/0."
        )
    if network.subnet_of(_COMPATIBLE) and int(network.network_address) > 0xFFFF:
        four = IPv4Network((int(network.network_address) & 0xFFFFFFFF, network.prefixlen - 96))
        plain = str(four.network_address) if four.prefixlen == 32 else str(four)
        return f"{network} is an IPv4 address written in a way that is out of use; write {plain}."
    return None
