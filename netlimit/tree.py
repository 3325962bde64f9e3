"""The queues of a device, as tc has them: one HTB, with child HTBs for the many.

A packet finds its class by `skb->priority`. Its upper half is the handle of the qdisc that holds the class, so handles
differ between devices: the priority stays with a packet on its way from a VLAN to the device below. What stands beside
caps has a handle of no device (6e00:), for it does so on each of them.

    6e05: root HTB             one a device
      6e05:fffd                beside the cap, if there is one: answers of management ports to those who are safe
      6e05:fffc                                                what finds neighbours
      6e05:fffb                                                answers of management ports to anybody else
      6e05:fffa                                                what this host says to other routers
      6e05:ffff                everything else: the device's cap, or no limit
        6e05:fffe              what nothing claims; only where the device has a cap
        6e05:fff9              there, too: what else this host sends to those who are safe
        6e05:1000+             shared budgets, nested, and what is theirs alone
        6e05:1 … 6e05:fff      one for each child HTB, of the same number
          7001: … 7fff:        a child HTB
            7001:ffff          lends what the class above it has
              7001:10, 20, …   hosts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

FIRST_ROOT, LAST_ROOT = 0x6E01, 0x6EFF
FIRST_CHILD, LAST_CHILD = 0x7001, 0x7FFF
"""Handles of ours. Those from 8000 on are the kernel's own to give."""
TOP, REST = 0xFFFF, 0xFFFE
"""Minors: the class that holds all others of its qdisc but those beside the cap, and the one for what nothing
claims."""
MANAGEMENT, NEIGHBOURS, VISITORS, ROUTERS = 0xFFFD, 0xFFFC, 0xFFFB, 0xFFFA
BESIDE = (MANAGEMENT, NEIGHBOURS, VISITORS, ROUTERS)
"""Minors of the classes beside a cap."""
SERVICES = 0xFFF9
"""Minor of the class under a cap for what else this host sends to those who are safe."""
BESIDE_HANDLE = 0x6E00
"""The upper half of the priority that leads to these, on every device."""
FIRST_BUDGET, LAST_BUDGET = 0x1000, 0xFFF0
DIRECT = 1000
"""Packets of which nothing says a class that may wait at least, as many as for a card. Devices of PPP have 3 by
themselves, an IFB has 32: with a second sender others would lose packets that no rule names."""
LINE = 12_500_000_000
"""Bytes a second; what stands for no limit. Above it the nanoseconds that HTB counts in are too coarse."""
INGRESS_DEVICE = "nl-in"
"""The IFB device on which traffic that ends on this host is shaped."""
_COARSE_NS = 1_128
"""By how much the time of a burst can differ: tc cuts it to microseconds, the kernel to ticks of 64 ns."""


LeafKind = Literal["fq_codel", "bfifo", "pfifo"]


class Leaf(NamedTuple):
    """The queue of a class: its kind, and the most that it holds: bytes in a bfifo, packets in the others."""

    kind: LeafKind
    limit: int

    def __str__(self) -> str:
        return f"{self.kind} limit {self.limit}" + (" flows 64" if self.kind == "fq_codel" else "")


class QueueClass(NamedTuple):
    """A class of an HTB. `parent` is a class, or a qdisc (minor 0); rates are bytes a second, bursts and `quantum`
    bytes. `leaf` is None for a class that holds other classes, or a child HTB."""

    parent: int
    rate: int
    ceil: int
    burst: int
    cburst: int
    quantum: int
    leaf: Leaf | None = None

    def __str__(self) -> str:
        return (
            f"htb rate {8 * self.rate}bit ceil {8 * self.ceil}bit burst {self.burst}b cburst {self.cburst}b "
            f"quantum {self.quantum}"
        )


@dataclass(frozen=True, slots=True)
class Tree:
    """All of ours on one device: an HTB with `classes` by classid, of which those that `children` name (handle of the
    child: classid) hold child HTBs. So many packets without a class may wait as `direct` says (0: as may for the
    device), when the root is made: the kernel changes it no more."""

    handle: int
    classes: Mapping[int, QueueClass] = field(default_factory=dict)
    children: Mapping[int, int] = field(default_factory=dict)
    direct: int = field(default=0, compare=False)

    def lines(self) -> Iterator[str]:
        """A line for each part, as a golden text has it."""
        yield f"{format_handle(self.handle)} htb"
        hanging = {classid: handle for handle, classid in self.children.items()}
        for classid, each in sorted(self.classes.items()):
            queue = f" {format_handle(hanging[classid])} htb" if classid in hanging else f" {each.leaf}"
            below = queue if classid in hanging or each.leaf else ""
            yield f"{format_classid(classid)} parent {format_classid(each.parent)} {each}{below}"


class Usage(NamedTuple):
    """What a class has counted: packets and Ethernet bytes sent, packets dropped, how often it had to wait, and what
    waits now (packets and bytes)."""

    packets: int
    bytes: int
    dropped: int
    overlimits: int
    queued_packets: int
    queued_bytes: int


def classid(major: int, minor: int) -> int:
    """Put a classid together, as the kernel keeps it."""
    return major << 16 | minor


def major(classid: int) -> int:
    """The handle of the qdisc that holds a class."""
    return classid >> 16


def format_classid(classid: int) -> str:
    """As tc prints it: `6e01:ffff`, or `6e01:` for a qdisc."""
    return f"{classid >> 16:x}:{classid & 0xFFFF:x}" if classid & 0xFFFF else f"{classid >> 16:x}:"


def format_handle(handle: int) -> str:
    """As tc prints it: `6e01:`."""
    return f"{handle:x}:"


def is_beside(number: int) -> bool:
    """Whether a classid is that of a class beside a device's cap."""
    return is_ours(number >> 16) and number & 0xFFFF in BESIDE


def is_ours(handle: int) -> bool:
    """Whether a root qdisc with this handle is ours."""
    return FIRST_ROOT <= handle <= LAST_ROOT


def alike(wanted: QueueClass | None, found: QueueClass | None) -> bool:
    """Whether a class is as it should be; bursts may differ by what tc and the kernel make of their time."""
    if wanted is None or found is None:
        return wanted is found
    return (
        wanted._replace(burst=found.burst, cburst=found.cburst) == found
        and _alike_burst(wanted.burst, found.burst, wanted.rate)
        and _alike_burst(wanted.cburst, found.cburst, wanted.ceil)
    )


def _alike_burst(wanted: int, found: int, rate: int) -> bool:
    return abs(wanted - found) <= 2 + _COARSE_NS * rate // 10**9


# -- where packets go -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Device:
    """A network device: its index, whether it is up, the kind of link ("" for a card), the device that it belongs to as
    a port or a slave, or the macvlan of mode passthru above it, if any, and how many packets may wait for it (its
    txqueuelen)."""

    index: int
    up: bool
    kind: str = ""
    master: str = ""
    queue: int = DIRECT


MAIN_TABLE = 254


class Route(NamedTuple):
    """A unicast route: the prefix (as text), the devices of its next hops, their gateways, and the number of its table.
    `connected`: reached without a gateway. `attached`: the host has an address in it, of which the kernel made the
    route. `partial`: only some packets to its prefix go by it, as it asks for a TOS or for a source."""

    prefix: str
    devices: tuple[str, ...]
    connected: bool = False
    attached: bool = False
    table: int = MAIN_TABLE
    gateways: tuple[str, ...] = ()
    partial: bool = False


class Lookup(NamedTuple):
    """A routing rule that leads packets of a family to a table. `always`: all that come to it; else some, whichever.
    `suppressed`: of what is found there, prefixes up to this length do not count (-1: all do)."""

    family: int
    table: int
    always: bool = False
    suppressed: int = -1


class Diversion(NamedTuple):
    """A route whose encapsulation takes what comes in before it is forwarded (a lightweight tunnel that redirects
    input): the prefix, and the encapsulation as `ip route` names it."""

    prefix: str
    encapsulation: str

    @property
    def hides(self) -> bool:
        """Whether another packet may be forwarded in place of the one that came in; else its destination is another."""
        return self.encapsulation not in ("seg6 mode inline", "rpl", "ila")


@dataclass(frozen=True, eq=False)
class Topology:
    """Devices by name (without loopback and ours), routes of all tables but the local one, the addresses of the default
    gateways, and the networks of which every address ends on this host by its routes: its own addresses, what is local
    by a route (`ip route add local`), broadcast and anycast; `ending` are those whose every packet ends here, for the
    local table says so and is asked first. `segments` are the destinations of which packets
    are taken out of their tunnel by the route itself (seg6local), `diversions` those of which they are put into one
    before they are forwarded; `lookups` are the routing rules in the order in which they are asked (none: not known).
    `unspeakable` are devices whose name no tool can be told so that it means them alone: they are none of `devices`,
    and nothing is written for them, but routes may lead there. `throws` are routes without devices: what goes to their
    prefixes is looked for in the tables that are asked after theirs. One reading of them: compared by identity."""

    devices: Mapping[str, Device] = field(default_factory=dict)
    routes: tuple[Route, ...] = ()
    gateways: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    ending: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()
    diversions: tuple[Diversion, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    unspeakable: Mapping[str, Device] = field(default_factory=dict)
    throws: tuple[Route, ...] = ()

    @property
    def every(self) -> Mapping[str, Device]:
        """All devices, those of which nothing can be written too."""
        return {**self.devices, **self.unspeakable}

    @property
    def entered(self) -> frozenset[str]:
        """The devices by which packets come in, whether routes lead there or not: all that are up. What comes in by a
        port of a bridge or bond comes in by that, but by a port of a VRF itself."""
        masters = {name for name, each in self.every.items() if each.kind != "vrf"}
        return frozenset(name for name, each in self.every.items() if each.up and each.master not in masters)

    @cached_property
    def joining(self) -> frozenset[str]:
        """The bridges of several ports, which forward from one to another."""
        ports = Counter(device.master for device in self.every.values())
        return frozenset(name for name, each in self.every.items() if each.kind == "bridge" and ports[name] > 1)


@dataclass(frozen=True, slots=True)
class SavedRoot:
    """A root qdisc that was there before ours, as it can be put back: its handle, kind, and the bytes of its options
    (hexadecimal)."""

    handle: int
    kind: str
    options: str


@dataclass(frozen=True, slots=True)
class Queues:
    """What root qdiscs there are: `trees` of ours, and `foreign` ones, each said as tc does (`htb 1:`), by device.

    Those that the kernel itself put there (handle 0) are neither: they make way, and come back by themselves.
    """

    trees: Mapping[str, Tree] = field(default_factory=dict)
    foreign: Mapping[str, str] = field(default_factory=dict)
