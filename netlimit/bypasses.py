"""Where what a target sends leaves past the queues of a rule that shapes it.

Such a rule without `interface` is not held on devices that lead to the target itself, but for those of default routes.
Of a network behind one device nothing is missed, for what two in it send each other does not come by here. But the
host leads some traffic back: between two networks behind one device, between parts of the target behind several, and
between those who reach each other by this host alone, as peers of a VPN do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from netlimit.limits import Facts
from netlimit.routes import Parsed, find_best, find_inside, read_table
from netlimit.routing import names_host
from netlimit.rules import Direction, Rule, Target, format_target
from netlimit.tree import Topology

MANY_PEERS = frozenset(("wireguard", "amneziawg", "ovpn", "tun"))
ONE_PEER = frozenset(("ppp", "gre", "ip6gre", "ipip", "sit", "ip6tnl", "vti", "vti6", "xfrm", "bareudp"))
"""Kinds of link without neighbours of their own: what two behind it send each other comes by this host. Those of the
second kind have one peer, unless the host has an address in a network there that has room for more."""
_MOST_NAMED = 3
_SHORTEST = 4
"""Prefixes below it are parts of a default route (0.0.0.0/1, 2000::/3)."""


class Bypass(NamedTuple):
    """A device by which what the target sends to these networks leaves unshaped; there may be `more` of them."""

    device: str
    networks: tuple[str, ...]
    more: bool = False


def find_bypasses(rule: Rule, facts: Facts) -> tuple[Bypass, ...]:
    """By which devices some of what a rule's target sends leaves unshaped, by name."""
    topology, target = facts.topology, rule.target
    if rule.direction is Direction.TO or rule.selector.interface or names_host(rule, facts):
        return ()
    # Who is reached by a default route alone may send as such an address only if nearly everybody may.
    best = (each for each in find_best(target, topology) if each.length or target.prefixlen < _SHORTEST)
    towards = [*best, *find_inside(target, topology)]
    parts: dict[str, list[Parsed]] = {}
    for each in towards:
        for device in each.route.devices:
            parts.setdefault(device, []).append(each)
    # Of what no rule can name its way tells.
    devices = parts.keys() - {*read_table(topology, target.version).default} - topology.unspeakable.keys()
    behind = _read_behind(topology, target.version) if devices else {}
    networks = len({(each.first, each.length) for each in towards})
    found = ((device, _find_reached(parts[device], networks, behind[device])) for device in sorted(devices))
    return tuple(_tell(device, reached) for device, reached in found if reached)


@lru_cache(maxsize=256)
def say_bypasses(bypasses: tuple[Bypass, ...]) -> str:
    """What an operator should know of them, and can do."""
    some = bypasses[:_MOST_NAMED]
    ways = [f"to {_join([*each.networks, *['others'] * each.more])} by {each.device}" for each in some]
    more = len(bypasses) - len(some)
    ways += [f"by {more} more device{'s' * (more > 1)}"] if more else []
    named = _join([f"`interface: {each.device}`" for each in some])
    mend = f"A rule with {named} shapes it." if len(some) == 1 else f"Rules with {named} shape it."
    return f"What it sends {', and '.join(ways)} is not shaped. {mend}"


def are_peers(network: Target, device: str, topology: Topology) -> bool:
    """Whether those in a network behind a device have no neighbours, and reach each other by this host alone."""
    behind = _read_behind(topology, network.version).get(device)
    if behind is None or not behind.peers:
        return False
    return any(each.network == network and _has_room(each) for each in behind.attached)


class _Behind(NamedTuple):
    """What a device leads to: networks that the host has an address in, and of the others, by each set of gateways, the
    first and the last. `peers`: those behind it are neighbours of this host alone, None if there is only one."""

    attached: list[Parsed]
    others: list[Parsed]
    peers: bool | None


def _find_reached(parts: list[Parsed], networks: int, behind: _Behind) -> list[Parsed]:
    """The networks behind a device to which some of a target's traffic comes back, or may; `parts` are those of the
    target that are behind it, of so many `networks`."""
    every = [*behind.attached, *behind.others]
    if len({(each.first, each.length) for each in parts}) < networks:
        return every
    if behind.peers is None:
        return []
    parts = [each for each in parts if each.length >= _SHORTEST]
    are_beside = _are_peers_beside if behind.peers else _are_beside
    return [each for each in every if not all(are_beside(part, each, behind) for part in parts)]


def _are_beside(part: Parsed, network: Parsed, behind: _Behind) -> bool:
    """Whether two networks of a link reach each other without this host: one lies in the other's, they have a router in
    common, or it is known to both of them that they are on the link, as routers tell it for IPv6."""
    home = next((each for each in behind.attached if part.is_within(each)), part)
    if network.is_within(home) or (network.route.connected and home.route.connected and part.version == 6):
        return True
    if network.route.connected:
        gateways = map(ip_address, part.route.gateways)
        return any(each in network.network or each.is_link_local for each in gateways)
    return not {*part.route.gateways}.isdisjoint(network.route.gateways)


def _are_peers_beside(part: Parsed, network: Parsed, behind: _Behind) -> bool:
    """The same where nobody has neighbours: what lies behind one peer, and a network with room for this host and him
    alone."""
    if network.route.attached:
        return not _has_room(network)
    return network.is_within(part)


def _has_room(network: Parsed) -> bool:
    return network.length < network.longest - 2


def _tell(device: str, reached: list[Parsed]) -> Bypass:
    networks = tuple(dict.fromkeys(format_target(each.network) for each in reached))
    return Bypass(device, networks[:_MOST_NAMED], len(networks) > _MOST_NAMED)


@lru_cache(maxsize=4)
def _read_behind(topology: Topology, family: int) -> Mapping[str, _Behind]:
    """What is routed by each device, and may come from or be led to another network."""
    attached: dict[str, list[Parsed]] = {}
    others: dict[str, dict[tuple[str, ...], tuple[Parsed, Parsed]]] = {}
    unrouted = _UNROUTED[family]
    for each in read_table(topology, family).ordered:
        if each.length < _SHORTEST or any(first <= each.first and each.last <= last for first, last in unrouted):
            continue
        for device in each.route.devices:
            if each.route.attached:
                attached.setdefault(device, []).append(each)
            else:
                ends = others.setdefault(device, {})
                first, last = ends.get(each.route.gateways, (each, each))
                ends[each.route.gateways] = first, max(last, each, key=lambda end: end.last)
    found = {}
    for device in read_table(topology, family).devices:
        near = attached.get(device, [])
        far = list(dict.fromkeys(end for ends in others.get(device, {}).values() for end in ends))
        found[device] = _Behind(near, far, _has_peers(device, near, topology))
    return found


def _find_ends(*networks: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(each.network_address), int(each.broadcast_address)) for each in map(ip_network, networks))


_UNROUTED = {4: _find_ends("169.254.0.0/16", "224.0.0.0/4"), 6: _find_ends("fe80::/10", "ff00::/8")}
"""What is of a link alone, or for many, by its first and last addresses."""


def _has_peers(device: str, attached: list[Parsed], topology: Topology) -> bool | None:
    link = topology.every.get(device)
    kind = link.kind if link else ""
    if kind in MANY_PEERS:
        return True
    if kind in ONE_PEER:
        return any(map(_has_room, attached)) or None
    return False


def _join(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
