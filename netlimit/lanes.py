"""A lane: the packets that leave by one device and find their class by one address, in one set.

What differs in family, direction or selector cannot share a set, so it is another lane. Rules that name a protected
address have lanes of their own: those that were forced are asked before the safe set is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from ipaddress import ip_network

from netlimit.ingress import IngressLane
from netlimit.limits import Facts, digest, side_of, write_key
from netlimit.packet import Side
from netlimit.rules import Direction, Rule, Selector, Target
from netlimit.state import LANE_PREFIX, ROLLING_SLOTS, SEEN_PREFIX, IpSet
from netlimit.tree import INGRESS_DEVICE

SEEN_SECONDS = 10
"""How long an address that has no class is remembered."""
MOST_SEEN = 65536
ROOM = 65536
"""So many entries a lane's set takes at least: more than there can be classes on a device."""


@dataclass(frozen=True)
class Lane:
    """See the module. `selector` has no interface: `device` is where its packets leave."""

    device: str
    family: int
    direction: Direction
    selector: Selector
    exact: bool = False
    own: bool = False

    @cached_property
    def digest(self) -> str:
        """A short name for it."""
        own = (True,) * self.own
        return digest(write_key(self.device, self.family, self.direction, self.selector, self.exact, *own))

    @property
    def stands_here(self) -> bool:
        """Whether its rules name an address of the host itself, or one that is safe and they were forced to hit."""
        return self.exact or self.own

    @property
    def rank(self) -> int:
        """In which order lanes are asked: those of rules that were forced, of the host's own addresses, the others."""
        return 0 if self.exact else 1 if self.own else 2

    @property
    def order(self) -> tuple[int, bool]:
        """The same of lanes on the way out, where the last that knows a packet has it: its receiver comes behind its
        sender. The two meet only where peers of a VPN, and others without neighbours, reach each other by this host."""
        return self.rank, self.direction is Direction.TO

    @property
    def side(self) -> Side:
        """Where the target stands in a packet."""
        return side_of(self.direction)

    @property
    def name(self) -> str:
        """The name of its set."""
        return f"{LANE_PREFIX}{self.family}-{self.digest}"

    @property
    def incoming(self) -> bool:
        """Whether its packets end on this host."""
        return self.device == INGRESS_DEVICE

    def overlaps(self, other: Lane) -> bool:
        """Whether a packet can be of both."""
        return (self.device, self.family) == (other.device, other.family) and self.selector.meets(other.selector)


def find_lane(rule: Rule, device: str, facts: Facts) -> Lane:
    """The lane of a rule that shapes, on one device."""
    selector = replace(rule.selector, interface=None) if rule.selector.interface else rule.selector
    return Lane(device, rule.family, rule.direction, selector, facts.overrides(rule), facts.stands_here(rule))


@dataclass(frozen=True)
class OpenLane:
    """A lane in use. `newcomers` are the sets in which addresses are remembered that shall get a class of their own:
    (number under the mark, prefix length)."""

    lane: Lane
    newcomers: tuple[tuple[int, int], ...] = ()

    def sets(self, facts: Facts) -> Iterable[IpSet]:
        """Its set, and those for newcomers."""
        lane = self.lane
        # Whoever appears has an entry, and one that finds no room would fail every pass.
        yield IpSet(lane.name, lane.family, marks=True, size=max(facts.set_size, ROOM))
        for _, length in self.newcomers:
            mask = length if length != (32 if lane.family == 4 else 128) else 0
            name = seen_name(lane, length)
            size, slots = MOST_SEEN, ROLLING_SLOTS
            yield IpSet(name, lane.family, "ip", False, SEEN_SECONDS, size, rolling=True, netmask=mask, slots=slots)

    @property
    def ingress(self) -> IngressLane:
        """As the program on the ingress has it."""
        lane, selector = self.lane, self.lane.selector
        ports = selector.ports, selector.source_ports
        return IngressLane(lane.name, lane.family, lane.side, selector.protocol.value, *ports)


def seen_name(lane: Lane, length: int) -> str:
    """The set in which blocks of this prefix length are remembered that have no class yet."""
    return f"{SEEN_PREFIX}{lane.family}-{lane.digest}-{length}"


def block_of(address: str, length: int) -> Target:
    """The block of a prefix length that an address is in."""
    return ip_network((address.partition("/")[0], length), strict=False)
