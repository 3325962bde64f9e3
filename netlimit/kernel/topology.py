"""Devices, routes and routing rules, read by netlink, and read again only after something has changed."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from ipaddress import ip_address
from itertools import chain
from typing import Any, NamedTuple

from pyroute2 import IPRoute

from netlimit.kernel import rtnetlink
from netlimit.kernel.background import Background
from netlimit.kernel.encapsulation import SEG6LOCAL, read_encapsulation
from netlimit.kernel.lookups import RULES, find_lookups, read_rules
from netlimit.kernel.names import is_speakable, read_name
from netlimit.kernel.notices import LINKS, LONGEST_TRUST, Notices, Watched
from netlimit.tree import DIRECT, INGRESS_DEVICE, MAIN_TABLE, Device, Diversion, Lookup, Route, Topology

_GROUPS = LINKS | RULES | 0x10 | 0x40 | 0x100 | 0x400 | 1 << 31
"""These, and changes of addresses, routes and nexthop objects (RTMGRP_…, RTNLGRP_NEXTHOP)."""
_MADE_BY_KERNEL = 2
"""RTPROT_KERNEL: the route to the network of an address."""
_LOOPBACK = 0x8
_ETHERNET = 1
"""ARPHRD_ETHER."""
_UP = 0x1
_DEAD = 0x1
"""RTNH_F_DEAD: no packet goes there. So says the kernel of one whose carrier is away (RTNH_F_LINKDOWN) only where it is
told to heed that (ignore_routes_with_linkdown): else it goes on leading packets there, which pass once it is back."""
_UNICAST, _THROW = 1, 9
_LOCAL = (2, 3, 4)
"""RTN_LOCAL, RTN_BROADCAST, RTN_ANYCAST."""
_DEFAULT: dict[int, int] = {socket.AF_INET: 1, socket.AF_INET6: 3}
"""The longest prefixes that stand for all addresses: VPNs write 0.0.0.0/1 and 128.0.0.0/1, or 2000::/3."""
_LOCAL_TABLE = 255
_CLONED = 0x200
_GET_ROUTE, _GET_NEXTHOP = 26, 106
_ROUTE = struct.Struct("=BBBBBBBBI")
"""struct rtmsg: family, length of the prefix, that of the source, TOS, table, protocol, scope, type, flags."""
_NEXT_HOP, _NUMBER = struct.Struct("=HBxi"), struct.Struct("=I")
_DESTINATION, _DEVICE, _GATEWAY, _MULTIPATH, _TABLE, _VIA, _OBJECT = 1, 4, 5, 9, 15, 18, 30
_ENCAPSULATION, _ENCAPSULATED = 21, 22
_TABLED, _PREFIXED = slice(_ROUTE.size, _ROUTE.size + 4), slice(_ROUTE.size + 8, _ROUTE.size + 12)
"""The heads of the first two attributes of a route: of its table, which takes eight bytes, and of its destination."""
_TABLE_HEAD = struct.pack("=HH", 8, _TABLE)
_SIZES = {struct.pack("=HH", 4 + size, _DESTINATION): size for size in (4, 16)}
"""How long the destination is, by the head of its attribute."""
_NEXTHOP, _MEMBER = struct.Struct("=4xI"), struct.Struct("=I4x")
"""What is wanted of struct nhmsg (the flags) and of struct nexthop_grp (the number of an object)."""
_OBJECT_NUMBER, _OBJECT_GROUP, _OBJECT_DEVICE, _OBJECT_GATEWAY = 1, 2, 5, 6
_OBJECT_ENCAPSULATION, _OBJECT_ENCAPSULATED = 7, 8
_PATIENCE = 1.0
"""Seconds: what takes longer to read is followed up later."""
_SHORT_READING = 0.05
_READING_SHARE = 50
"""A reading that takes more processor time is followed by so many times that of rest, whatever changes meanwhile: on a
host with many routes something always does. Of the last two the shorter counts: the garbage collector may have run in
one of them, and few routes are to be followed at once."""
_LONG_REST, _LEAST_SHARE = 30.0, 10
"""More seconds than these are rested only behind a reading of which they are ten times the time: a million routes take
ten seconds, in which nothing else is done."""


class TopologyWatch:
    """Keeps the last reading until the kernel says that links, addresses or routes have changed, or half a minute has
    passed. While a long reading of routes goes on, in a thread, and while it rests from one, it follows devices all the
    same."""

    def __init__(self) -> None:
        self._notices = Notices(_GROUPS)
        self._devices = Watched(LINKS, _read_links)
        self._reading = Background(self._read_anew, _PATIENCE, rests=0)
        self._read: Topology | None = None
        self._until = self._rested = self._spent = 0.0
        self._stale = False

    def topology(self) -> Topology:
        """The same object as before while nothing has changed that it tells, or the last reading was too long to read
        again already. Raises OSError."""
        began = time.monotonic()
        self._stale = self._notices.heard() or self._stale or began >= self._until
        if self._read is None or self._reading.goes_on or (self._stale and began >= self._rested):
            self._stale = self._stale and self._reading.goes_on  # one that begins now takes in what has changed
            try:
                self._read = self._reading.get()
            except OSError:
                self._stale = True
                raise
        if (self._stale or self._reading.goes_on) and (links := self._devices.get()) != (
            self._read.devices,
            self._read.unspeakable,
        ):
            self._read = replace(self._read, devices=links.devices, unspeakable=links.unspeakable)
        return self._read

    def _read_anew(self) -> Topology:
        spent = time.thread_time()
        found = read_topology()
        spent = time.thread_time() - spent
        self._rested = time.monotonic() + _find_rest(min(spent, self._spent))
        self._spent = spent
        self._until = time.monotonic() + LONGEST_TRUST
        # Much of what the kernel tells changes nothing here: the MTU of a link, the lifetime of an address.
        return self._read if self._read is not None and _says_the_same(self._read, found) else found


def _says_the_same(one: Topology, other: Topology) -> bool:
    return all(getattr(one, each.name) == getattr(other, each.name) for each in fields(Topology))


def _find_rest(spent: float) -> float:
    if spent <= _SHORT_READING:
        return 0.0
    return min(_READING_SHARE * spent, max(_LONG_REST, _LEAST_SHARE * spent))


def read_topology() -> Topology:
    """Devices without loopback and ours, unicast routes of every table but the local one, and the rules that lead to
    tables."""
    links = _read_links()
    dumps = (
        rtnetlink.dump(_GET_ROUTE, _ROUTE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0))
        for family in (socket.AF_INET, socket.AF_INET6)
    )
    bodies = list(chain.from_iterable(dumps))
    objects = cache(_read_objects)  # read once, and only if a route tells no more than the number of one
    found = list(_take_apart(bodies, objects))
    names = {device.index: name for each in links for name, device in each.items()}
    gateways, local, lookups = _read_gateways(found), sorted(set(_read_local(bodies))), find_lookups(read_rules())
    led = sorted({Diversion(_write_prefix(way, at), tunnel) for at, way in found for tunnel in way.tunnels})
    segments = tuple(each.prefix for each in led if each.encapsulation == SEG6LOCAL)
    diversions = tuple(each for each in led if each.encapsulation != SEG6LOCAL)
    throws = tuple(_read_routes([each for each in found if each[1].throws], names))
    routes = tuple(_read_routes([each for each in found if not each[1].throws] if throws else found, names))
    ends = tuple(dict.fromkeys(prefix for prefix, _ in local))
    ending = _find_ending(local, lookups)
    return Topology(
        links.devices, routes, gateways, ends, ending, segments, diversions, lookups, links.unspeakable, throws
    )


class _Links(NamedTuple):
    """Devices by name: those that tools can be told, and the others."""

    devices: dict[str, Device]
    unspeakable: dict[str, Device]


def _read_links() -> _Links:
    with IPRoute() as ipr:
        found = dict(_read_devices(ipr.get_links()))
    speakable = {name: device for name, device in found.items() if is_speakable(name)}
    return _Links(speakable, {name: device for name, device in found.items() if name not in speakable})


def _read_local(bodies: Iterable[bytes]) -> Iterator[tuple[str, int]]:
    """What ends on this host by a route, and the table. One for everything is that of a transparent proxy, for what was
    marked."""
    for body in bodies:
        family, length, _, _, table, _, _, kind, flags = _ROUTE.unpack_from(body)
        if kind in _LOCAL and length and not flags & _CLONED:
            address = rtnetlink.decode(body, _ROUTE.size).get(_DESTINATION, b"")
            prefix = ip_address(address.ljust(16 if family == socket.AF_INET6 else 4, b"\0"))
            if not prefix.is_loopback:
                yield f"{prefix}/{length}", table


def _find_ending(local: Iterable[tuple[str, int]], lookups: Iterable[Lookup]) -> tuple[str, ...]:
    """The networks of which no packet gets past the local table, for it is asked first. Into another one only some are
    led, such as those that a transparent proxy has marked."""
    first = {each.family: each for each in reversed(tuple(lookups))}
    asked = {family for family, each in first.items() if each == Lookup(family, _LOCAL_TABLE, always=True)}
    return tuple(prefix for prefix, table in local if table == _LOCAL_TABLE and (6 if ":" in prefix else 4) in asked)


def _read_devices(messages: Iterable[Any]) -> Iterator[tuple[str, Device]]:
    found = [(message, read_name(message.get_attr("IFLA_IFNAME") or b"")) for message in messages]
    names = {message["index"]: name for message, name in found}
    takers = {message.get_attr("IFLA_LINK"): name for message, name in found if _takes_all(message)}
    for message, name in found:
        if not message["flags"] & _LOOPBACK and name != INGRESS_DEVICE:
            about = message.get_attr("IFLA_LINKINFO")
            kind = (about.get_attr("IFLA_INFO_KIND") if about else None) or ""
            if kind == "tun" and message["ifi_type"] == _ETHERNET:
                kind = "tap"
            above = message.get_attr("IFLA_MASTER")
            master = names.get(above, f"device {above}") if above else takers.get(message["index"], "")
            queue = message.get_attr("IFLA_TXQLEN")
            up = bool(message["flags"] & _UP)
            yield name, Device(message["index"], up, kind, master, DIRECT if queue is None else queue)


def _takes_all(message: Any) -> bool:
    """Whether a device takes all packets that come in by the one below, in this namespace: a macvlan of mode passthru,
    whatever MAC address they are for. They would come by on both."""
    about = message.get_attr("IFLA_LINKINFO")
    if about is None or about.get_attr("IFLA_INFO_KIND") != "macvlan":
        return False
    if message.get_attr("IFLA_LINK_NETNSID") is not None:
        return False
    data = about.get_attr("IFLA_INFO_DATA")
    return data is not None and data.get_attr("IFLA_MACVLAN_MODE") == "passthru"


class _Hop(NamedTuple):
    """A next hop: the index of its device (0 for none), the address of its gateway (None for none), and the
    encapsulation that takes what comes in (empty for none)."""

    device: int
    gateway: str | None
    tunnel: str = ""


_Hops = Sequence[tuple[int, _Hop]]
"""Next hops, each with its flags."""


class _Way(NamedTuple):
    """What is wanted of a unicast route, but for its prefix: a full table has a million, and few ways. `hops` are those
    that packets can go by, `gateways` those of all, `tunnels` the encapsulations that take what comes in. `attached`:
    the kernel made it, for an address. `partial`: it asks for more, a TOS or a source. `throws`: it has the next table
    asked."""

    family: int
    length: int
    table: int
    attached: bool
    hops: tuple[_Hop, ...]
    gateways: tuple[str, ...]
    tunnels: tuple[str, ...] = ()
    partial: bool = False
    throws: bool = False


def _take_apart(bodies: Iterable[bytes], objects: Callable[[], Mapping[int, _Hops]]) -> Iterator[tuple[bytes, _Way]]:
    """Prefixes and ways of routes as the kernel sends them, by hand: pyroute2 takes three hundred times as long.
    `objects` gives the nexthop objects, by number."""
    ways: dict[bytes, _Way | None] = {}
    for body in bodies:
        prefix, rest = _cut_prefix(body)
        if rest not in ways:
            ways[rest] = _read_way(rest, objects)
        way = ways[rest]
        if way is not None:
            yield prefix, way


def _cut_prefix(body: bytes) -> tuple[bytes, bytes]:
    """The destination of a route (empty for everything), and what else is told of it."""
    size = _SIZES.get(body[_PREFIXED]) if body[_TABLED] == _TABLE_HEAD else None
    if size is not None:  # so the kernel tells it
        end = _PREFIXED.stop + size
        return body[_PREFIXED.stop : end], body[: _PREFIXED.start] + body[end:]
    return rtnetlink.decode(body, _ROUTE.size).get(_DESTINATION, b""), body


def _read_way(body: bytes, objects: Callable[[], Mapping[int, _Hops]]) -> _Way | None:
    """None for what drops or stays here, and for what the kernel has only noted of one address (RTM_F_CLONED), as
    whoever answers it may have it do."""
    family, length, of_source, tos, table, protocol, _, kind, flags = _ROUTE.unpack_from(body)
    if kind not in (_UNICAST, _THROW) or flags & _CLONED:
        return None
    said = rtnetlink.decode(body, _ROUTE.size)
    hops: _Hops
    if _MULTIPATH in said:
        hops = list(_split_hops(said[_MULTIPATH]))
    elif _OBJECT in said and _DEVICE not in said:
        hops = objects().get(_read_number(said[_OBJECT]), ())
    else:
        hops = [(flags, _read_hop(said))]
    if _TABLE in said:
        (table,) = _NUMBER.unpack_from(said[_TABLE])
    usable = tuple(hop for state, hop in hops if not state & _DEAD)
    gateways = tuple(hop.gateway for _, hop in hops if hop.gateway is not None)
    tunnels = tuple(hop.tunnel for _, hop in hops if hop.tunnel)
    attached, partial = protocol == _MADE_BY_KERNEL, bool(of_source or tos)
    return _Way(family, length, table, attached, usable, gateways, tunnels, partial, kind == _THROW)


def _split_hops(data: bytes) -> Iterator[tuple[int, _Hop]]:
    """The next hops of a route with several, each with its flags. Nexthop objects are told as such too, as long as
    net.ipv4.nexthop_compat_mode is 1, as it is by default; of a route that is told their number alone."""
    start = 0
    while start + _NEXT_HOP.size <= len(data):
        length, flags, device = _NEXT_HOP.unpack_from(data, start)
        if length < _NEXT_HOP.size:
            return
        said = rtnetlink.decode(data[start + _NEXT_HOP.size : start + length])
        yield flags, _Hop(device, _read_gateway(said), _read_tunnel(said))
        start += (length + 3) & ~3


def _read_objects() -> Mapping[int, _Hops]:
    return join_objects(rtnetlink.dump(_GET_NEXTHOP, bytes(_NEXTHOP.size)))


def join_objects(bodies: Iterable[bytes]) -> dict[int, _Hops]:
    """Nexthop objects as the kernel sends them, by number. A group has the next hops of its members; a group in a group
    the kernel does not take."""
    single: dict[int, _Hops] = {}
    groups: dict[int, bytes] = {}
    for body in bodies:
        if len(body) < _NEXTHOP.size:
            continue
        said = rtnetlink.decode(body, _NEXTHOP.size)
        number = _read_number(said.get(_OBJECT_NUMBER, b""))
        if _OBJECT_GROUP in said:
            groups[number] = said[_OBJECT_GROUP]
        else:
            tunnel = read_encapsulation(said.get(_OBJECT_ENCAPSULATION, b""), said.get(_OBJECT_ENCAPSULATED, b""))
            gateway = _read_address(said.get(_OBJECT_GATEWAY, b""))
            hop = _Hop(_read_number(said.get(_OBJECT_DEVICE, b"")), gateway, tunnel)
            single[number] = ((*_NEXTHOP.unpack_from(body), hop),)
    return single | {number: _find_members(data, single) for number, data in groups.items()}


def _find_members(data: bytes, single: Mapping[int, _Hops]) -> _Hops:
    """The next hops of a group, in its order."""
    whole = len(data) - len(data) % _MEMBER.size
    return tuple(hop for (number,) in _MEMBER.iter_unpack(data[:whole]) for hop in single.get(number, ()))


def _read_number(data: bytes) -> int:
    """A number as the kernel sends it; 0, which is the number of nothing, if it is none."""
    number: int = _NUMBER.unpack_from(data)[0] if len(data) >= _NUMBER.size else 0
    return number


def _read_hop(said: Mapping[int, bytes]) -> _Hop:
    device = _NUMBER.unpack_from(said[_DEVICE])[0] if _DEVICE in said else 0
    return _Hop(device, _read_gateway(said), _read_tunnel(said))


def _read_tunnel(said: Mapping[int, bytes]) -> str:
    if _ENCAPSULATION not in said:
        return ""
    return read_encapsulation(said[_ENCAPSULATION], said.get(_ENCAPSULATED, b""))


def _read_gateway(said: Mapping[int, bytes]) -> str | None:
    """That of an IPv4 route may have an IPv6 address (`via inet6`)."""
    return _read_address(said.get(_GATEWAY) or said.get(_VIA, b"")[2:])


def _read_address(address: bytes) -> str | None:
    return str(ip_address(address)) if len(address) in (4, 16) else None


def _read_routes(found: Iterable[tuple[bytes, _Way]], names: Mapping[int, str]) -> Iterator[Route]:
    ways = {id(way): way for _, way in found}
    likes = {number: _read_like(way, names) for number, way in ways.items()}
    for prefix, way in found:
        like = likes[id(way)]
        if like is not None and not _is_link_local(way, prefix):
            yield Route(_write_prefix(way, prefix), *like[1:])


def _read_like(way: _Way, names: Mapping[int, str]) -> Route | None:
    """A route that goes such a way, None for one that leads nowhere known."""
    known = tuple(dict.fromkeys(names[hop.device] for hop in way.hops if hop.device in names))
    if way.table == _LOCAL_TABLE or not (known or way.throws):
        return None
    gateways = tuple(dict.fromkeys(hop.gateway for hop in way.hops if hop.gateway))
    return Route(
        "", known, not gateways and not way.throws, way.attached and not gateways, way.table, gateways, way.partial
    )


def _read_gateways(found: Iterable[tuple[bytes, _Way]]) -> tuple[str, ...]:
    """The next hops of default routes, those of the main table first; and of what stands in a default route's place
    that another one has covered."""
    default = (way for _, way in found if way.length <= _DEFAULT[way.family])
    ways = sorted((way.table != MAIN_TABLE, gateway) for way in default for gateway in way.gateways)
    return tuple(dict.fromkeys(gateway for _, gateway in ways))


def _write_prefix(way: _Way, prefix: bytes) -> str:
    if way.family == socket.AF_INET:
        return f"{socket.inet_ntop(socket.AF_INET, prefix or bytes(4))}/{way.length}"
    return f"{ip_address(prefix or bytes(16))}/{way.length}"


def _is_link_local(way: _Way, prefix: bytes) -> bool:
    """Of fe80::/10 and ff00::/8."""
    if way.family != socket.AF_INET6 or len(prefix) != 16 or prefix[0] < 0xFE:
        return False
    first, second = prefix[:2]
    linked = way.length >= 10 and first == 0xFE and second & 0xC0 == 0x80
    return linked or (way.length >= 8 and first == 0xFF)
