"""What keeps gateways alive towards each other, and is spared like neighbour discovery: VRRP, OSPF, BFD, BGP and IGMP.

Where a limit or a block swallows the adverts of its neighbour, a gateway takes itself for the only one. Nothing that is
routed is spared. What is multicast on this link (224.0.0.0/24, ff02::/16) ends here, or a bridge passes it on, between
routers that hear each other over it; where the protocol sends it with the largest hop limit, it has come from this very
link; and what is sent to one address must be for this host. Other gateways of the same database are believed without
that.

Few packets are of these protocols: they are led to a chain of their own, and who is not spared there is looked at
closely like all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address, ip_network

from netlimit.conditions import tell_own
from netlimit.limits import Facts
from netlimit.packet import Packet, Side
from netlimit.state import (
    CHAIN_PREFIX,
    ChainRule,
    Continues,
    Diverted,
    Effect,
    Has,
    Hook,
    HopLimit,
    Icmp6,
    Is,
    Jump,
    Match,
    Ports,
    SetClass,
    Verdict,
    chain_rule,
)
from netlimit.untouched import NEIGHBOUR_DISCOVERY, NEVER_FORWARDED

BGP = 179
VRRP, OSPF, PIM, EIGRP, IGMP = "vrrp", "ospf", "pim", "eigrp", "igmp"
"""Protocols."""
BFD, BFD_ECHO, BFD_FAR = 3784, 3785, 4784
"""UDP ports (RFC 5881, RFC 5883)."""
SEALED = {4: ("ah", "esp"), 6: ("esp",)}
"""Protocols in which routers sign or seal what they say (RFC 2338, RFC 4552). With IPv6 the kernel looks through AH."""
HELLO_PORTS = {4: (520, 646, 1985, 6696), 6: (521, 646, 2029, 6696)}
"""UDP ports of what is multicast on a link: RIP, LDP, HSRP, Babel."""
LISTENER_TYPES = (130, 131, 132, 143)
"""ICMPv6 (RFC 2710, RFC 3810): who listens to what, asked and told with a hop limit of 1."""
LINK = {4: "224.0.0.0/24", 6: "ff02::/16"}
MULTICAST = {4: "224.0.0.0/4", 6: "ff00::/8"}
MOST_PEERS = 64
"""So many addresses of other gateways are believed, in each family."""

_RETURN = Verdict("RETURN")
_SIDES: tuple[Side, Side] = ("dst", "src")
_FIRST_HOP = 255
AGAIN = f"{CHAIN_PREFIX}FORWARD-AGAIN"
"""The chain for what was spared in PREROUTING and is forwarded all the same."""
PERHAPS = f"{CHAIN_PREFIX}FORWARD-PERHAPS"
"""The chain for what was spared in PREROUTING if its destination was another there."""


def near_name(hook: Hook) -> str:
    """The chain for what may be of these protocols."""
    return f"{CHAIN_PREFIX}{hook}-NEAR"


def lead(family: int, hook: Hook, facts: Facts) -> Iterator[ChainRule]:
    """The rules of a hook that lead there; none where nothing is spared, or cannot be told."""
    if _find_lack(family, facts):
        return
    near = Jump(near_name(hook), goto=True)
    if hook == "FORWARD":
        # Of the multicast of a link only bridges forward anything, and what takes packets out of tunnels of SRv6 and
        # hands them to a next hop, whomever they are for.
        if not facts.topology.segments:
            yield chain_rule(near, Has("dst", LINK[family]))
        return
    yield chain_rule(near, Has("dst", MULTICAST[family]))
    yield from (chain_rule(near, *matches) for matches in sent_to_one(family, facts))


def sent_to_one(family: int, facts: Facts) -> Iterator[tuple[Match, ...]]:
    """What of these protocols routers send to one address, by what it is; nothing where nothing can be spared."""
    if _find_lack(family, facts):
        return
    yield from ((Is(protocol),) for protocol in (VRRP, OSPF))
    yield Is("udp"), _ports(BFD, BFD_ECHO, BFD_FAR)
    if _find_peers(family, facts):
        yield from ((Is(protocol),) for protocol in SEALED[family])
        yield from ((Is("tcp"), _ports(BGP, side=side)) for side in _SIDES)


def ask_again(family: int, facts: Facts, on_link: bool = False) -> Iterator[ChainRule]:
    """The rules of FORWARD that ask again what was spared in PREROUTING by its destination, which may have been
    translated since: from one for this host, or from a multicast address that comes to it alone. A hop limit is one
    less here, and what had 1 is not forwarded; but a bridge passes on all as it is, so who listens to what is asked
    for, and, `on_link`, what finds neighbours. By what a packet is, before anything else is asked of it: few are."""
    again = Jump(AGAIN, goto=True)
    perhaps = Jump(PERHAPS, goto=True) if _knows_destinations(family, facts) else again
    if not _find_lack(family, facts):
        yield from (chain_rule(perhaps, Is(protocol)) for protocol in (VRRP, OSPF, PIM, EIGRP, *SEALED[family]))
        known = bool(_find_peers(family, facts))  # whoever they are: all that is forwarded would be asked for each
        yield chain_rule(
            perhaps, Is("udp"), _ports(BFD, BFD_ECHO, *HELLO_PORTS[family], *((BFD_FAR,) if known else ()))
        )
        yield from (chain_rule(perhaps, Is("tcp"), _ports(BGP, side=side)) for side in (_SIDES if known else ()))
        listens = (Is(IGMP),) if family == 4 else (Is("ipv6-icmp"), HopLimit(1))
        yield chain_rule(again, Has("dst", MULTICAST[family]), *listens)
    if family == 6:
        for number in NEIGHBOUR_DISCOVERY:
            yield chain_rule(again, Is("ipv6-icmp"), HopLimit(NEVER_FORWARDED - (not on_link)), Icmp6(number))


def find_diverted(family: int, facts: Facts) -> Iterator[ChainRule]:
    """The rules of FORWARD that tell what PREROUTING has spared: what is for this host or a multicast address up to
    now, as a bridge passes it on, or was until NAT gave it another destination. Where nobody translates, that is not
    asked, for to ask would bring connection tracking to hosts that have none."""
    again = Jump(AGAIN, goto=True)
    if family in facts.translated:
        yield from (chain_rule(again, Diverted(answers)) for answers in (False, True))
    yield chain_rule(again, *tell_own(facts))
    yield chain_rule(again, Has("dst", MULTICAST[family]))


def _knows_destinations(family: int, facts: Facts) -> bool:
    """Whether FORWARD can tell what a packet was sent to when PREROUTING saw it. With IPv6 prefixes may be translated
    without anybody knowing (NPT), and routing headers lead on; VRFs leave open what is this host's own; and what SRv6
    takes out of tunnels passes no PREROUTING."""
    unheard = family in facts.translated and facts.capabilities.get("conntrack") is not None
    return family == 4 and not (unheard or facts.vrfs or facts.topology.segments)


def spare(family: int, hook: Hook, facts: Facts) -> Iterator[ChainRule]:
    """The rules of that chain, but for what becomes of whoever is not spared."""
    yield from _spare_on_link(family)
    if hook == "FORWARD":
        return
    if hook == "OUTPUT":
        yield from _choose_own(_RETURN)
        yield from (chain_rule(_RETURN, Has("dst", peer)) for peer in _find_peers(family, facts))
    else:
        own = tell_own(facts)
        yield chain_rule(_RETURN, Is(VRRP), HopLimit(_FIRST_HOP, family), *own)
        yield chain_rule(_RETURN, Is(OSPF), *own)
        yield chain_rule(_RETURN, Is("udp"), _ports(BFD), HopLimit(_FIRST_HOP, family), *own)
        # An echo comes back from the neighbour, who has forwarded it.
        yield chain_rule(_RETURN, Is("udp"), _ports(BFD_ECHO), HopLimit(_FIRST_HOP - 1, family), *own)
        for peer in _find_peers(family, facts):
            yield chain_rule(_RETURN, Has("src", peer), Has("dst", MULTICAST[family]))
            yield chain_rule(_RETURN, Has("src", peer), *own)


def _spare_on_link(family: int) -> Iterator[ChainRule]:
    here = Has("dst", LINK[family])
    yield chain_rule(_RETURN, here, Is(VRRP), HopLimit(_FIRST_HOP, family))
    yield from (chain_rule(_RETURN, here, Is(protocol)) for protocol in (OSPF, PIM, EIGRP, *SEALED[family]))
    yield chain_rule(_RETURN, here, Is("udp"), _ports(*HELLO_PORTS[family]))
    if family == 4:
        yield chain_rule(_RETURN, Has("dst", MULTICAST[4]), Is(IGMP), HopLimit(1, 4))
    else:
        for number in LISTENER_TYPES:
            yield chain_rule(_RETURN, Has("dst", MULTICAST[6]), Is("ipv6-icmp"), HopLimit(1), Icmp6(number))


def classify(family: int, effect: SetClass, opening: SetClass) -> Iterator[ChainRule]:
    """The rules that give a class to what this host itself says to other gateways; `opening` is for what anybody can
    make it say: answers to who asks port 179 for a connection."""
    yield chain_rule(effect, Has("dst", LINK[family]))
    yield from _choose_own(effect)
    for side in (_ports(BGP), _ports(BGP, side="src")):
        yield chain_rule(opening, Is("tcp"), side)
        yield chain_rule(effect, Is("tcp"), Continues(resets=False), side)


def _choose_own(effect: Effect) -> Iterator[ChainRule]:
    """What this host itself sends of these protocols to one address."""
    yield from (chain_rule(effect, Is(protocol)) for protocol in (VRRP, OSPF))
    yield chain_rule(effect, Is("udp"), _ports(BFD, BFD_ECHO, BFD_FAR))


def stands_beside(packet: Packet) -> bool:
    """Whether what this host itself sends has that class."""
    if packet.protocol == "tcp":
        return BGP in (packet.port, packet.source_port)
    bfd = packet.protocol == "udp" and packet.port in (BFD, BFD_ECHO, BFD_FAR)
    return bfd or packet.protocol in (VRRP, OSPF) or packet.dst in ip_network(LINK[packet.dst.version])


def find_advert(packet: Packet, facts: Facts) -> str | None:
    """What a packet keeps alive, for an operator, so that no rule touches it; None if it is none of these."""
    family, own = packet.dst.version, packet.in_interface is None
    bridged = not own and packet.out_interface is not None  # or routed, but not to the multicast of a link
    if _find_lack(family, facts) or (bridged and packet.dst not in ip_network(LINK[family])):
        return None
    bfd = packet.protocol == "udp" and packet.port in (BFD, BFD_ECHO, BFD_FAR)
    name = {VRRP: "VRRP", OSPF: "OSPF"}.get(packet.protocol, "BFD" if bfd else "")
    if own and name:
        return name
    if _is_on_link(packet):
        return name or "what routers tell each other"
    if _tells_listeners(packet):
        return "what tells who listens to a multicast address"
    here = str(packet.dst) in facts.own
    if name and here and _is_first_hop(packet):
        return name
    multicast = packet.dst in ip_network(MULTICAST[family])
    sealed = packet.protocol in SEALED[family]
    leads = multicast or name or sealed or (packet.protocol == "tcp" and BGP in (packet.port, packet.source_port))
    known = not bridged and str(packet.dst if own else packet.src) in _find_peers(family, facts)
    return "what another gateway of this database says" if known and leads and (own or here or multicast) else None


def _is_on_link(packet: Packet) -> bool:
    """Whether it is what `_spare_on_link` lets pass, but for listeners."""
    family = packet.dst.version
    if packet.dst not in ip_network(LINK[family]):
        return False
    hello = packet.protocol == "udp" and packet.port in HELLO_PORTS[family]
    first_hop = packet.protocol == VRRP and packet.hop_limit == _FIRST_HOP
    return hello or first_hop or packet.protocol in (OSPF, PIM, EIGRP, *SEALED[family])


def _tells_listeners(packet: Packet) -> bool:
    family = packet.dst.version
    listener = packet.protocol == "icmp" and packet.icmp_type in LISTENER_TYPES
    told = packet.protocol == IGMP if family == 4 else listener
    return told and packet.dst in ip_network(MULTICAST[family]) and packet.hop_limit == 1


def _is_first_hop(packet: Packet) -> bool:
    """Whether its hop limit is that of its protocol, of which OSPF has none."""
    limits = {BFD: _FIRST_HOP, BFD_ECHO: _FIRST_HOP - 1, BFD_FAR: -1}
    wanted = limits.get(packet.port or 0) if packet.protocol == "udp" else _FIRST_HOP
    return packet.protocol == OSPF or packet.hop_limit == wanted


def _find_peers(family: int, facts: Facts) -> tuple[str, ...]:
    return tuple(sorted(peer for peer in facts.peers if ip_address(peer).version == family))[:MOST_PEERS]


def _find_lack(family: int, facts: Facts) -> bool:
    """Whether this host cannot tell hop limits, its own addresses, or one of several ports."""
    needs = ("ttl", "addrtype", "multiport") if family == 4 else ("hl6", "addrtype6", "multiport6")
    return any(map(facts.capabilities.get, needs))


def _ports(*ports: int, side: Side = "dst") -> Match:
    return Ports(tuple((port, port) for port in ports), side)
