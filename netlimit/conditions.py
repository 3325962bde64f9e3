"""What selects traffic at a hook: alternatives of matches.

Rules `from` speak of the ports that were sent. Where limits and blocks stand, NAT may have led a packet to another one
(DNAT, REDIRECT); connection tracking knows the first. Of answers it is the port of whom they are for: behind a
masquerade, that host's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from netlimit.limits import Facts
from netlimit.rates import Kind
from netlimit.rules import Direction, Protocol, Selector
from netlimit.state import Enters, Hook, Invalid, Is, IsOwn, Leaves, Led, Match, Opens, Ports, SentPorts, Syn

Matches = tuple[Match, ...]


def ask_for_sent_ports(selector: Selector, direction: Direction, hook: Hook) -> bool:
    """Whether ports are meant that a packet may have no more at this hook."""
    return bool(selector.ports) and direction is Direction.FROM and hook != "PREROUTING"


def select(
    selector: Selector,
    direction: Direction,
    hook: Hook,
    family: int,
    kind: Kind = Kind.PACKETS,
    ports: tuple[Match, ...] = (),
) -> Iterator[Matches]:
    """The alternatives for the traffic by the ports that it has at this hook, and what more is asked of `ports`; none
    where it cannot pass."""
    if not _passes(selector, direction, hook):
        return
    found = (Ports(selector.ports), *ports) if selector.ports else ()
    yield from _complete(selector, direction, found, family, kind)


def select_sent(selector: Selector, direction: Direction, family: int, kind: Kind = Kind.PACKETS) -> Iterator[Matches]:
    """The alternatives for what NAT leads elsewhere, by the ports to which it was sent."""
    for low, high in selector.ports:
        yield from _complete(selector, direction, (SentPorts(low, high),), family, kind)


def select_all(selector: Selector, direction: Direction, hook: Hook, family: int) -> Iterator[Matches]:
    """The alternatives for the traffic, whether it is led elsewhere or not."""
    if not ask_for_sent_ports(selector, direction, hook):
        yield from select(selector, direction, hook, family)
        return
    for way in (Led(inverted=True), Led(answers=True)):
        yield from select(selector, direction, hook, family, ports=(way,))
    yield from select_sent(selector, direction, family)


def may_meet(one: Selector, other: Selector, alike: bool) -> bool:
    """Whether a packet can be of both. Where their ports are not `alike`, some those that were sent and some those to
    which it is led, they tell nothing."""
    return one.meets(other if alike else replace(other, ports=()))


def tell_own(facts: Facts) -> Matches:
    """What tells that a packet is for an address of this host's own, of what is asked again where it is forwarded. The
    kernel's word for that leaves out the addresses on ports of VRFs: where there are such, it is not asked."""
    return () if facts.vrfs else (IsOwn("dst"),)


def _passes(selector: Selector, direction: Direction, hook: Hook) -> bool:
    """Whether traffic can be told here by its interface."""
    hooks = ("PREROUTING", "INPUT", "FORWARD") if direction is Direction.FROM else ("FORWARD", "OUTPUT")
    return not selector.interface or hook in hooks


def _complete(selector: Selector, direction: Direction, ports: Matches, family: int, kind: Kind) -> Iterator[Matches]:
    """With the interface, the protocol, source ports, and what a kind of rate counts."""
    matches: list[Match] = []
    if selector.interface:
        matches.append(Enters(selector.interface) if direction is Direction.FROM else Leaves(selector.interface))
    if selector.source_ports:
        ports = (*ports, Ports(selector.source_ports, "src"))
    counted = kind in (Kind.CONNECTIONS, Kind.CONCURRENT)
    # Every SYN, whatever connection tracking takes it for: it ignores one where it believes the connection open, or
    # over for less than ten seconds, and what ends a connection for the peer need not end it for connection tracking.
    # No honest connection has a SYN later.
    tcp: list[Match] = [Syn()] if counted else []
    opens: list[Match] = [Opens()] if counted else []
    if selector.protocol is Protocol.ANY:
        if not opens:
            yield tuple(matches)
            return
        yield (*matches, Is("tcp"), *tcp)
        yield (*matches, Is("tcp", inverted=True), *opens)
        if kind is Kind.CONNECTIONS:  # it reckons the checksum of UDP there, so it tracks none (Linux 6.18)
            yield (*matches, Is("udplite"), Invalid())
        return
    name = "ipv6-icmp" if selector.protocol is Protocol.ICMP and family == 6 else selector.protocol.value
    yield (*matches, Is(name), *ports, *(tcp if selector.protocol is Protocol.TCP else opens))
