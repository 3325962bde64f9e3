"""Tunnel devices with the outer addresses of their far ends, and by which device an address is reached; by netlink."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from ipaddress import IPv6Address, ip_address
from itertools import islice
from typing import NamedTuple

from netlimit.kernel import rtnetlink, wireguard
from netlimit.kernel.background import Background
from netlimit.kernel.marks import read_routing_marks
from netlimit.kernel.names import read_name
from netlimit.tunnels import TUNNELS, End, Hop, Tunnel, Tunnels

_GET_LINK, _GET_ROUTE, _GET_NEIGHBOUR = 18, 26, 30
_LINK, _ROUTE, _NEIGHBOUR = struct.Struct("=Bxxxi8x"), struct.Struct("=BBBBBBBBI"), struct.Struct("=BxxxiHBB")
_LINK_NAME, _LINK_BELOW, _LINK_MASTER, _LINK_ABOUT, _LINK_ELSEWHERE = 3, 5, 10, 18, 37
_KIND, _DATA = 1, 2
_REMOTES = {
    **dict.fromkeys(("vxlan",), (2, 16)),
    **dict.fromkeys(("geneve",), (2, 7)),
    **dict.fromkeys(("gre", "gretap", "erspan", "ip6gre", "ip6gretap", "ip6erspan"), (7,)),
    **dict.fromkeys(("ipip", "sit", "ip6tnl"), (3,)),
    **dict.fromkeys(("vti", "vti6"), (5,)),
}
"""Which attributes of a kind of link are the outer address of its far end (IFLA_VXLAN_GROUP, IFLA_GRE_REMOTE, …)."""
_STANDING = frozenset(("vlan", "macvlan", "macvtap", "ipvlan", "ipvtap"))
"""Kinds of link of which all goes by the one that they stand on."""
_MATCH = 0x2000
"""RTM_F_FIB_MATCH: the route itself is wanted, with all of its next hops."""
_DESTINATION, _SOURCE, _DEVICE, _GATEWAY, _MULTIPATH, _MARK, _VIA = 1, 2, 4, 5, 9, 16, 18
_HOP = struct.Struct("=HBxi")
_NEIGHBOUR_ADDRESS, _NEIGHBOUR_MAC, _NEIGHBOUR_MASTER = 1, 2, 9
_PERMANENT = 0x80
"""NUD_PERMANENT: the administrator has said so."""
_TAUGHT = 0x10
"""NTF_EXT_LEARNED: a routing daemon has (EVPN)."""
_NOBODY = bytes(6)
_UNREACHED = frozenset((13, 22, 101, 113))
"""EACCES, EINVAL, ENETUNREACH, EHOSTUNREACH: what a lookup says of prohibited, blackholed and unknown destinations."""
_MOST_ASKS = 2048
"""So many lookups are made for all addresses together, or one of each."""
_SHORT, _SHARE, _LONGEST = 0.05, 50, 120.0
"""A reading that takes more processor time is followed by so many times that of rest, up to the longest: there may be
many peers."""


class TunnelReader:
    """Reads in a thread, and keeps the last reading while it goes on, or rests from it: who may send to a device that
    learns fills its table, and half a million entries take the kernel half a minute (measured)."""

    def __init__(self) -> None:
        self._reading = Background(self._read_anew, rests=0.0)
        self._kept: Tunnels | None = None
        self._rested = 0.0

    def read(self) -> Tunnels:
        """All tunnels. Raises OSError."""
        if self._kept is None or self._reading.goes_on or time.monotonic() >= self._rested:
            self._kept = self._reading.get()
        return self._kept

    def _read_anew(self) -> Tunnels:
        began = time.thread_time()
        found = read_tunnels()
        spent = time.thread_time() - began
        self._rested = time.monotonic() + (min(_SHARE * spent, _LONGEST) if spent > _SHORT else 0.0)
        return found


class Ask(NamedTuple):
    """How a way is asked for: from which of this host's own addresses (None: whichever it takes), and with which packet
    mark (0: none)."""

    source: str | None = None
    mark: int = 0


def find_hops(
    addresses: Iterable[str], near: Mapping[str, Collection[str]] | None = None
) -> dict[str, tuple[Hop, ...]]:
    """Where packets to these addresses go next, as the routing of this host has it; nothing for what it does not lead
    anywhere. `near` are this host's own addresses with which each of them talks: what leaves from there, and what bears
    a mark for which routing rules ask, may go another way, which counts too. Raises OSError."""
    wanted = list(addresses)
    marks = list_marks(read_routing_marks()) if wanted else []
    most = max(1, _MOST_ASKS // max(1, len(wanted)))
    found = {}
    for address in wanted:
        asks = list_asks((near or {}).get(address, ()), marks, most)
        found[address] = tuple(dict.fromkeys(hop for ask in asks for hop in _find_hops(address, ask)))
    return found


def list_marks(asked: Iterable[tuple[int, int]]) -> list[int]:
    """A mark for each of those (value, mask) that routing rules ask for."""
    return [mark for mark in dict.fromkeys(value & mask for value, mask in asked) if mark]


def list_asks(near: Iterable[str], marks: Iterable[int], most: int) -> list[Ask]:
    """How the ways to somebody are asked for, `most` times: first without a mark, as most packets are sent."""
    sources = [None, *near]
    return list(islice((Ask(source, mark) for mark in (0, *marks) for source in sources), most))


def _find_hops(address: str, ask: Ask) -> Iterator[Hop]:
    try:
        bodies = rtnetlink.ask(_GET_ROUTE, _write_ask(address, ask))
    except OSError as error:
        if error.errno not in _UNREACHED:
            raise
        return
    for found in bodies:
        yield from read_hops(found, address)


def _write_ask(address: str, ask: Ask) -> bytes:
    packed, source = ip_address(address).packed, ip_address(ask.source).packed if ask.source else b""
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    body = _ROUTE.pack(family, 8 * len(packed), 8 * len(source), 0, 0, 0, 0, 0, _MATCH)
    body += rtnetlink.encode(_DESTINATION, packed)
    body += rtnetlink.encode(_SOURCE, source) if source else b""
    return body + (rtnetlink.encode(_MARK, struct.pack("=I", ask.mark)) if ask.mark else b"")


def read_hops(body: bytes, address: str) -> Iterator[Hop]:
    """The next hops of a route to an address."""
    said = rtnetlink.decode(body, _ROUTE.size)
    if _MULTIPATH in said:
        data, start = said[_MULTIPATH], 0
        while start + _HOP.size <= len(data):
            length, _, device = _HOP.unpack_from(data, start)
            if length < _HOP.size:
                return
            yield Hop(device, _read_gateway(rtnetlink.decode(data[start + _HOP.size : start + length])) or address)
            start += (length + 3) & ~3
    elif len(said.get(_DEVICE, b"")) == 4:
        yield Hop(struct.unpack("=i", said[_DEVICE])[0], _read_gateway(said) or address)


def _read_gateway(said: Mapping[int, bytes]) -> str | None:
    return _read_address(said.get(_GATEWAY) or said.get(_VIA, b"")[2:])


class _Link(NamedTuple):
    """A device: its number (index), name and kind, what its kind says of it, the devices below and above it, and
    whether its outer side is in another network namespace."""

    number: int
    name: str
    kind: str
    data: Mapping[int, bytes]
    below: int
    master: int
    elsewhere: bool


def read_tunnels() -> Tunnels:
    """All tunnels whose outer side is in this network namespace, and what stands on them. Raises OSError."""
    links = [_read_link(body) for body in rtnetlink.dump(_GET_LINK, _LINK.pack(0, 0))]
    tunnels = [link for link in links if link.kind in TUNNELS and not link.elsewhere]
    ports = {link.number: link.master for link in tunnels if link.master and link.kind != "tun"}
    switched = bool(ports) or any(link.kind == "vxlan" for link in tunnels)
    table = Switching(*(_dump_neighbours(family) for family in (socket.AF_BRIDGE, 0))) if switched else Switching()
    found: dict[int, Tunnel] = {}
    problems: list[str] = []
    for link in tunnels:
        try:
            found[link.number] = _read_tunnel(link, table)
        except OSError as error:
            found[link.number] = Tunnel(link.name, (End(None),))
            problems.append(f"of {link.name}: {error}")
    for link in links:
        if link.kind in _STANDING and link.below in found and not link.elsewhere:
            found[link.number] = found[link.below]
        elif link.number in ports.values() and link.kind == "bridge":
            hosts = table.list_behind({port for port, master in ports.items() if master == link.number}, link.number)
            found[link.number] = Tunnel(link.name, (End(None, hosts),), by_hop=True)
    return Tunnels(found, tuple(problems))


def _read_link(body: bytes) -> _Link:
    _, index = _LINK.unpack_from(body)
    said = rtnetlink.decode(body, _LINK.size)
    about = rtnetlink.decode(said.get(_LINK_ABOUT, b""))
    below, master = (_read_number(said.get(number, b"")) for number in (_LINK_BELOW, _LINK_MASTER))
    kind, data = read_name(about.get(_KIND, b"")), rtnetlink.decode(about.get(_DATA, b""))
    return _Link(index, read_name(said.get(_LINK_NAME, b"")), kind, data, below, master, _LINK_ELSEWHERE in said)


def _read_tunnel(link: _Link, table: Switching) -> Tunnel:
    """One tunnel. Raises OSError."""
    if link.kind in wireguard.FAMILIES:
        return Tunnel(link.name, tuple(wireguard.read_ends(link.kind, link.number)))
    if link.kind == "vxlan":
        return Tunnel(link.name, table.list_ends(link.number, read_remote(link.kind, link.data)), by_hop=True)
    return Tunnel(link.name, (End(read_remote(link.kind, link.data)),))


def read_remote(kind: str, data: Mapping[int, bytes]) -> str | None:
    """The one far end that the link itself tells, None for none."""
    addresses = (_read_address(data.get(number, b"")) for number in _REMOTES.get(kind, ()))
    return next((each for each in addresses if each and _is_one(each)), None)


class Forwarding(NamedTuple):
    """What is known of a MAC address or of a neighbour: its device and the bridge above it, its state and flags, its
    address, and its MAC address."""

    device: int
    master: int
    state: int
    flags: int
    address: str | None
    mac: bytes


class Switching:
    """Which frames go where: by forwarding tables, and by the neighbours of this host."""

    def __init__(self, forwarding: Iterable[Forwarding] = (), neighbours: Iterable[Forwarding] = ()) -> None:
        self._names: dict[tuple[int, bytes], list[str]] = {}
        for each in neighbours:
            if each.address and each.mac and each.mac != _NOBODY:
                self._names.setdefault((each.device, each.mac), []).append(each.address)
        asked = {_NOBODY, *(mac for _, mac in self._names)}
        self._forwarding = tuple(each for each in forwarding if each.mac in asked)  # many have no name here

    def list_ends(self, device: int, remote: str | None) -> tuple[End, ...]:
        """The far ends of a VXLAN device, whose own is `remote`.

        What it has learned counts only where the administrator has named that end too: whoever can send it a packet
        could else teach it his address. Where several ends get what is for nobody in particular, none is known to be
        that of an address."""
        mine = [each for each in self._forwarding if each.device == device and each.address and _is_one(each.address)]
        named = [remote, *(each.address for each in mine if each.mac == _NOBODY)]
        flooded = dict.fromkeys(address for address in named if address)
        ends = [
            End(each.address, networks)
            for each in mine
            if each.mac != _NOBODY
            and (each.state & _PERMANENT or each.flags & _TAUGHT or each.address in flooded)
            and (networks := self._list_names(device, each.mac))
        ]
        return (*ends, End(next(iter(flooded)) if len(flooded) == 1 else None))

    def list_behind(self, ports: set[int], bridge: int) -> tuple[str, ...]:
        """The neighbours on a bridge that are behind these ports."""
        macs = {each.mac for each in self._forwarding if each.device in ports and each.master == bridge}
        return tuple(network for mac in sorted(macs) for network in self._list_names(bridge, mac))

    def _list_names(self, device: int, mac: bytes) -> tuple[str, ...]:
        return tuple(self._names.get((device, mac), ()))


def _dump_neighbours(family: int) -> Iterator[Forwarding]:
    return map(read_forwarding, rtnetlink.dump(_GET_NEIGHBOUR, _NEIGHBOUR.pack(family, 0, 0, 0, 0)))


def read_forwarding(body: bytes) -> Forwarding:
    """An entry of a forwarding table, or a neighbour (ndmsg)."""
    _, device, state, flags, _ = _NEIGHBOUR.unpack_from(body)
    said = rtnetlink.decode(body, _NEIGHBOUR.size)
    address, mac = _read_address(said.get(_NEIGHBOUR_ADDRESS, b"")), said.get(_NEIGHBOUR_MAC, b"")
    return Forwarding(device, _read_number(said.get(_NEIGHBOUR_MASTER, b"")), state, flags, address, mac)


def _read_number(data: bytes) -> int:
    number: int = struct.unpack("=I", data)[0] if len(data) == 4 else 0
    return number


def _read_address(data: bytes) -> str | None:
    if len(data) not in (4, 16):
        return None
    address = ip_address(data)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def _is_one(text: str) -> bool:
    """Whether it is the address of one host."""
    address = ip_address(text)
    return not (address.is_unspecified or address.is_multicast)
