"""Which classes a host's own traffic has at the caps of its devices: beside them, what those who manage it need.

A cap is one queue for all that leaves by a device. Where it is full, or next to nothing, the answer to whoever wants to
undo it would wait with all else. So what the management ports answer to those who are safe has a class beside the cap,
and nothing else is in it: whatever else a stranger or a local user can make this host send could fill it. What finds
neighbours has one of its own, and what is said to other routers; and a last one is for answers of the management ports
to anybody else: others can fill it, and those who are safe do not suffer. What else goes to who is safe has a class
under the cap, with a little for certain. Forwarded traffic is never among them, whoever it is of; nor is it so inside a
tunnel that begins here, though this host sends the packets around it.
"""

from __future__ import annotations

from collections.abc import Iterator

from netlimit import adverts
from netlimit.limits import Facts, safe_set
from netlimit.packet import Packet
from netlimit.rules import MOST_PORTS
from netlimit.state import CHAIN_PREFIX, ChainRule, Icmp6, InSet, Is, Leaves, Ports, SetClass, Verdict, chain_rule
from netlimit.tree import BESIDE_HANDLE, MANAGEMENT, NEIGHBOURS, ROUTERS, SERVICES, VISITORS, classid
from netlimit.untouched import NEIGHBOUR_DISCOVERY

CHAIN = f"{CHAIN_PREFIX}BESIDE"
"""The chain in mangle OUTPUT that gives packets their class; a lane that names who is safe comes later, and wins."""
LISTENERS_REPORT = (131, 132, 143)
"""ICMPv6 types (RFC 2710, RFC 3810): where nobody reports what it listens to, a switch may not hand on what finds
neighbours."""
LAST_SERVICE = 1023
"""UDP from a port up to this one is a service's own. Above it are tunnels (VXLAN, Geneve, WireGuard, OpenVPN, IPsec
behind NAT): their packets keep the class of what is inside, where the kernel hands it on, and else have none."""


def find_lack(family: int, facts: Facts) -> str | None:
    """Why packets of a family cannot be given these classes on this host; None if they can."""
    six = "6" if family == 6 else ""
    needs = (f"ip{six}tables", f"mangle{six}", f"classify{six}", f"multiport{six}", "ipset")
    return next((reason for reason in map(facts.capabilities.get, needs) if reason), None)


def classify(family: int, facts: Facts) -> Iterator[ChainRule]:
    """The rules of the chain; of those that match, the last decides."""
    yield chain_rule(Verdict("RETURN"), Leaves("lo"))
    safe = InSet(safe_set(family, facts).name, "dst")
    told = _tells_ports(family, facts)
    yield chain_rule(SetClass(_classid(SERVICES if told else MANAGEMENT)), Is("tcp"), safe)
    yield chain_rule(SetClass(_classid(SERVICES)), Is("icmp" if family == 4 else "ipv6-icmp"), safe)
    yield chain_rule(SetClass(_classid(SERVICES)), Is("udp"), Ports(((0, LAST_SERVICE),), "src"), safe)
    yield from adverts.classify(family, SetClass(_classid(ROUTERS)), SetClass(_classid(VISITORS)))
    ports = _list_ports(facts) if told else []
    yield from (chain_rule(SetClass(_classid(VISITORS)), Is("tcp"), each) for each in ports)
    yield from (chain_rule(SetClass(_classid(MANAGEMENT)), Is("tcp"), each, safe) for each in ports)
    if family == 6:
        for number in (*NEIGHBOUR_DISCOVERY, *LISTENERS_REPORT):
            yield chain_rule(SetClass(_classid(NEIGHBOURS)), Is("ipv6-icmp"), Icmp6(number))


def find_place(packet: Packet, facts: Facts) -> str | None:
    """Why a packet stands beside the cap of the device by which it leaves, for an operator; None if it does not."""
    if packet.in_interface is not None:
        return None
    told = _tells_ports(packet.dst.version, facts)
    types = (*NEIGHBOUR_DISCOVERY, *LISTENERS_REPORT)
    if packet.dst.version == 6 and packet.protocol == "icmp" and packet.icmp_type in types:
        reason = "this host sends it to find neighbours"
    elif told and packet.protocol == "tcp" and packet.source_port in facts.management:
        reason = f"this host sends it from port {packet.source_port}, by which it is managed"
        reason += ", to who is safe" if _is_safe(packet, facts) else ""
    elif adverts.stands_beside(packet):
        reason = "this host sends it to other routers"
    elif not told and packet.protocol == "tcp" and _is_safe(packet, facts):
        reason = "this host itself sends it to who is safe"
    else:
        return None
    return f"{reason}: that has a class beside the cap"


def _tells_ports(family: int, facts: Facts) -> bool:
    """Whether this host knows the ports by which it is managed, and can tell them."""
    lack = facts.capabilities.get("multiport6" if family == 6 else "multiport")
    return bool(facts.management) and lack is None


def _list_ports(facts: Facts) -> list[Ports]:
    """The management ports as sources, so many at once as a rule takes."""
    ports = [(port, port) for port in facts.management]
    return [Ports(tuple(ports[place : place + MOST_PORTS]), "src") for place in range(0, len(ports), MOST_PORTS)]


def _is_safe(packet: Packet, facts: Facts) -> bool:
    return any(packet.dst.version == net.version and packet.dst in net for net in facts.safe)


def _classid(minor: int) -> int:
    return classid(BESIDE_HANDLE, minor)
