"""Tunnels that end on a host, and whom it reaches by them: a rule for the outer address of the far end cuts off all who
come through it, whatever their own addresses are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # for the types alone
    from netlimit.kernel.base import Connection, Kernel

EVERYWHERE = ("0.0.0.0/0", "::/0")
TUNNELS = frozenset(
    [
        *("vxlan", "geneve", "bareudp", "gre", "gretap", "erspan", "ip6gre", "ip6gretap", "ip6erspan"),
        *("ipip", "sit", "ip6tnl", "vti", "vti6", "xfrm", "wireguard", "amneziawg", "ovpn", "tun"),
    ]
)
"""The kinds of link that are tunnels, as rtnetlink names them; `tun` is tap, too."""
FAR_END = "the far end of the tunnel "
"""How the reason of such an outer address begins."""
MOST_NEAR = 4
"""So many of the host's own addresses count with which somebody talks."""
_DEEPEST = 4
"""So many tunnels in each other are followed."""


class End(NamedTuple):
    """The far end of a tunnel: its outer address (None: not known), and the networks that lie behind it."""

    outer: str | None
    networks: tuple[str, ...] = EVERYWHERE


class Tunnel(NamedTuple):
    """A device with the far ends that are known. `by_hop`: it looks for the next hop among the networks of its ends
    (a tunnel of Ethernet frames), not for the destination."""

    device: str
    ends: tuple[End, ...] = ()
    by_hop: bool = False


class Tunnels(NamedTuple):
    """All of a host, by the index of the device; `problems` are sentences on what could not be read."""

    found: Mapping[int, Tunnel] = {}
    problems: tuple[str, ...] = ()


class Hop(NamedTuple):
    """Where packets to an address go next: the index of the device, and the address of the next hop there."""

    device: int
    address: str


FindHops = Callable[[Iterable[str]], Mapping[str, tuple[Hop, ...]]]


class Passage(NamedTuple):
    """A device by which an address is reached."""

    device: str
    reached: str

    def describe(self) -> str:
        """The reason why the outer address of its far end is safe."""
        return f"{FAR_END}{self.device}, by which {self.reached} is reached"


class Followed(NamedTuple):
    """The far ends of tunnels by their outer addresses, and the tunnels that are in use of which it is not known."""

    ends: Mapping[str, Passage]
    hidden: tuple[Passage, ...] = ()


def follow_on(
    kernel: Kernel, reached: Iterable[str], ports: Iterable[int], keepers: Collection[int]
) -> tuple[Followed, str | None]:
    """By which far ends these addresses are `reached` from a host that is managed by these `ports` of servers of
    `keepers`, also where its answers are routed by the address that they talk with; and what could not be read. Raises
    KernelError."""
    reached = tuple(reached)
    tunnels = kernel.tunnels()
    near = find_near(kernel.connections(ports, keepers), frozenset(reached))
    return follow(reached, tunnels.found, partial(kernel.hops, near=near)), "; ".join(tunnels.problems) or None


def find_near(connections: Iterable[Connection], reached: Collection[str]) -> dict[str, tuple[str, ...]]:
    """A few of the host's own addresses with which each of those `reached` talks."""
    found: dict[str, dict[str, None]] = {}
    for each in connections:
        if each.far in reached and len(near := found.setdefault(each.far, {})) < MOST_NEAR:
            near[each.near] = None
    return {far: tuple(near) for far, near in found.items()}


def follow(reached: Iterable[str], tunnels: Mapping[int, Tunnel], find_hops: FindHops) -> Followed:
    """By which far ends these addresses are `reached`, those of the first ones first; also where one tunnel leads
    through another."""
    ends: dict[str, Passage] = {}
    hidden: dict[Passage, None] = {}
    indexes = {number: _Index(tunnel.ends) for number, tunnel in tunnels.items()}
    pending = {each: each for each in reached if _is_followed(each)}
    for _ in range(_DEEPEST):
        hops = find_hops(pending) if pending and tunnels else {}
        outer: dict[str, str] = {}
        for hop, address in ((hop, each) for each in pending for hop in hops.get(each, ()) if hop.device in tunnels):
            tunnel = tunnels[hop.device]
            passage = Passage(tunnel.device, pending[address])
            for end in indexes[hop.device].find(hop.address if tunnel.by_hop else address):
                if end is None:
                    hidden[passage] = None
                elif _is_followed(end) and end not in ends:
                    ends[end] = passage
                    outer[end] = passage.reached
        pending = outer
    return Followed(ends, tuple(hidden))


class _Index:
    """The ends of one tunnel by their networks, put in order when the first address is looked for."""

    def __init__(self, ends: Iterable[End]) -> None:
        self._ends = ends
        self._found: dict[tuple[int, int, int], dict[str | None, None]] | None = None
        self._lengths: list[tuple[int, int]] = []

    def find(self, address: str) -> tuple[str | None, ...]:
        """The outer addresses of the ends of the longest prefix around an address."""
        if self._found is None:
            self._found = self._arrange()
            self._lengths = sorted({(version, length) for version, length, _ in self._found}, reverse=True)
        wanted = ip_address(address)
        for version, length in self._lengths:
            if version == wanted.version:
                key = version, length, int(wanted) >> wanted.max_prefixlen - length
                if key in self._found:
                    return tuple(self._found[key])
        return ()

    def _arrange(self) -> dict[tuple[int, int, int], dict[str | None, None]]:
        found: dict[tuple[int, int, int], dict[str | None, None]] = {}
        for end in self._ends:
            for text in end.networks:
                network = ip_network(text, strict=False)
                bits = int(network.network_address) >> network.max_prefixlen - network.prefixlen
                found.setdefault((network.version, network.prefixlen, bits), {})[end.outer] = None
        return found


def _is_followed(text: str) -> bool:
    """Whether an address says where it is: one of a link says so together with its device only."""
    address = ip_address(text)
    return not (address.is_link_local or address.is_loopback or address.is_multicast or address.is_unspecified)
