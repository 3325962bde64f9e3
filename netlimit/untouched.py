"""What no rule touches, whatever it names: the first rules of every hook.

Loopback, neighbour discovery, and the open connections by which this host is managed. Whatever stands here passes
blocks and limits, so each exemption must tell the true one from what merely looks like it.
"""

from __future__ import annotations

from collections.abc import Iterator

from netlimit.conditions import Matches, tell_own
from netlimit.limits import Facts
from netlimit.rules import MOST_PORTS
from netlimit.state import (
    OPEN_PREFIX,
    ChainRule,
    Connected,
    Continues,
    Enters,
    Has,
    Hook,
    HopLimit,
    Icmp6,
    IpSet,
    Is,
    Leaves,
    Match,
    Ports,
    Verdict,
    chain_rule,
)

MOST_OPEN = 16384
"""So many open connections are spared in each address family."""

NEIGHBOUR_DISCOVERY = range(133, 138)
"""The types of ICMPv6 by which neighbours find each other (RFC 4861)."""
NEVER_FORWARDED = 255
"""The hop limit of every packet that finds neighbours: no router has passed it on, for that lowers it."""

_RETURN = Verdict("RETURN")
_ON_THIS_LINK = Has("dst", "ff02::/16")
"""Multicast that no router forwards."""


def open_set(family: int) -> IpSet:
    """The connections by which this host is managed: far address and port, and the host's own address."""
    return IpSet(f"{OPEN_PREFIX}{family}", family, "ip,port,ip", size=MOST_OPEN)


def spare(family: int, hook: Hook, facts: Facts, opening: bool = False) -> Iterator[ChainRule]:
    """The rules that let pass what is never touched at a hook; `opening`: where only what opens connections is limited,
    rules do not depend on ports, which may change."""
    yield from _spare_second_pass(hook, facts)
    yield from _spare_loopback(hook)
    if family == 6:
        yield from _spare_neighbour_discovery(hook, facts)
    yield from _spare_management(family, hook, facts, opening)


def _spare_second_pass(hook: Hook, facts: Facts) -> Iterator[ChainRule]:
    """A packet of a VRF is asked once, as what comes in by a port, or leaves by one."""
    for vrf in sorted(facts.vrfs - facts.topology.unspeakable.keys()):
        if hook == "PREROUTING":
            yield chain_rule(_RETURN, Enters(vrf))
        if hook == "OUTPUT":
            yield chain_rule(_RETURN, Leaves(vrf))


def _spare_loopback(hook: Hook) -> Iterator[ChainRule]:
    if hook in ("PREROUTING", "INPUT"):
        yield chain_rule(_RETURN, Enters("lo"))
    if hook == "OUTPUT":
        yield chain_rule(_RETURN, Leaves("lo"))


def _spare_neighbour_discovery(hook: Hook, facts: Facts) -> Iterator[ChainRule]:
    """Let pass what finds neighbours: it has never been forwarded, and is not to be. Before routing its destination
    tells; nothing that is forwarded is spared, whatever its hop limit was when it came in."""
    own = tell_own(facts)
    ways: dict[Hook, tuple[tuple[Matches, Matches], ...]] = {
        "PREROUTING": (((_ON_THIS_LINK,), ()), ((), own)) if own else (((), ()),),
        "INPUT": (((), ()),),
        "OUTPUT": (((), ()),),
    }
    for before, behind in ways.get(hook, ()):
        for number in NEIGHBOUR_DISCOVERY:
            yield chain_rule(_RETURN, *before, Is("ipv6-icmp"), HopLimit(NEVER_FORWARDED), Icmp6(number), *behind)


def _spare_management(family: int, hook: Hook, facts: Facts, opening: bool) -> Iterator[ChainRule]:
    """Let pass what belongs to an open connection by which this host is managed, told by both its ends: a socket found
    for the packet may be one that listens, and a `block from` stands where connections are not tracked yet. No packet
    that opens a connection belongs to one, so whoever is blocked stays out; and it is the connection alone that passes,
    for it does not prove who is at its other end."""
    ports = tuple((port, port) for port in facts.management[:MOST_PORTS])
    if not ports or facts.capabilities.get("multiport6" if family == 6 else "multiport"):
        return
    name = open_set(family).name
    here: list[Match] = [] if opening else [Ports(ports, "src" if hook == "OUTPUT" else "dst")]
    if hook in ("PREROUTING", "INPUT"):
        yield chain_rule(_RETURN, Is("tcp"), Continues(), *here, Connected(name, "src"))
    if hook == "OUTPUT":
        yield chain_rule(_RETURN, Is("tcp"), Continues(), *here, Connected(name, "dst"))
