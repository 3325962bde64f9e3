"""Devices and routes, read by netlink, and read again only after something has changed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any

from pyroute2 import IPRoute

from netlimit.kernel.notices import LINKS, LONGEST_TRUST, Notices
from netlimit.tree import INGRESS_DEVICE, Device, Route, Topology

_GROUPS = LINKS | 0x10 | 0x40 | 0x100 | 0x400
"""Changes of links, addresses and routes (linux/rtnetlink.h: RTMGRP_…)."""
_LOOPBACK = 0x8
_UP = 0x1
_DEAD = 0x1 | 0x10
"""RTNH_F_DEAD, RTNH_F_LINKDOWN: no packet goes there."""
_UNICAST = 1
_LOCAL_TABLE = 255
_UNROUTED = (IPv6Network("fe80::/10"), IPv6Network("ff00::/8"))


class TopologyWatch:
    """Keeps the last reading until the kernel says that links, addresses or routes have changed, or half a minute has
    passed."""

    def __init__(self) -> None:
        self._notices = Notices(_GROUPS)
        self._read: Topology | None = None
        self._until = 0.0

    def topology(self) -> Topology:
        """The same object as before while nothing has changed that it tells. Raises OSError."""
        if self._notices.heard() or self._read is None or time.monotonic() >= self._until:
            found = read_topology()
            # Much of what the kernel tells changes nothing here: the MTU of a link, the lifetime of an address.
            self._read = self._read if self._read is not None and _says_the_same(self._read, found) else found
            self._until = time.monotonic() + LONGEST_TRUST
        return self._read


def _says_the_same(one: Topology, other: Topology) -> bool:
    return (one.devices, one.routes, one.gateways) == (other.devices, other.routes, other.gateways)


def read_topology() -> Topology:
    """Devices without loopback and ours, and unicast routes of every table but the local one."""
    with IPRoute() as ipr:
        devices = dict(_read_devices(ipr.get_links()))
        messages = [each for family in (socket.AF_INET, socket.AF_INET6) for each in ipr.get_routes(family=family)]
    names = {device.index: name for name, device in devices.items()}
    return Topology(devices, tuple(_read_routes(messages, names)), tuple(sorted(_read_gateways(messages))))


def _read_devices(messages: Iterable[Any]) -> Iterator[tuple[str, Device]]:
    for message in messages:
        name = message.get_attr("IFLA_IFNAME")
        if not message["flags"] & _LOOPBACK and name != INGRESS_DEVICE:
            about = message.get_attr("IFLA_LINKINFO")
            kind = (about.get_attr("IFLA_INFO_KIND") if about else None) or ""
            yield name, Device(message["index"], bool(message["flags"] & _UP), kind)


def _read_routes(messages: Iterable[Any], names: Mapping[int, str]) -> Iterator[Route]:
    for message in messages:
        prefix = _read_prefix(message)
        if message["type"] != _UNICAST or message.get_attr("RTA_TABLE") == _LOCAL_TABLE or _is_link_local(prefix):
            continue
        hops = [hop for hop in _read_hops(message) if not hop["flags"] & _DEAD]
        devices = (_read_device(hop) for hop in hops)
        known = tuple(dict.fromkeys(names[index] for index in devices if index in names))
        if known:
            yield Route(str(prefix), known, connected=not any(map(_has_gateway, hops)))


def _read_gateways(messages: Iterable[Any]) -> set[str]:
    """The next hops of default routes. That of an IPv4 route may have an IPv6 address (`via inet6`)."""
    hops = [hop for each in messages if each["dst_len"] == 0 and each["type"] == _UNICAST for hop in _read_hops(each)]
    said = [hop.get_attr("RTA_GATEWAY") or (hop.get_attr("RTA_VIA") or {}).get("addr") for hop in hops]
    return {address for address in said if address}


def _read_hops(message: Any) -> Iterable[Any]:
    """The next hops of a route; one alone is said by the route itself. Nexthop objects are told as hops too, as long
    as net.ipv4.nexthop_compat_mode is 1, as it is by default."""
    return message.get_attr("RTA_MULTIPATH") or [message]


def _read_device(hop: Any) -> int:
    """The index of the device, 0 for none."""
    return (hop["oif"] if "oif" in hop else hop.get_attr("RTA_OIF")) or 0


def _has_gateway(hop: Any) -> bool:
    return bool(hop.get_attr("RTA_GATEWAY") or hop.get_attr("RTA_VIA"))


def _read_prefix(message: Any) -> IPv4Network | IPv6Network:
    anywhere = "::" if message["family"] == socket.AF_INET6 else "0.0.0.0"  # noqa: S104 - the default route
    return ip_network(f"{message.get_attr('RTA_DST') or anywhere}/{message['dst_len']}")


def _is_link_local(prefix: IPv4Network | IPv6Network) -> bool:
    return isinstance(prefix, IPv6Network) and any(map(prefix.subnet_of, _UNROUTED))
