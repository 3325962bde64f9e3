"""What a kernel must be able to do for the controller; `linux.py` does it for real, `fake.py` in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from netlimit.conflicts import HostReport
from netlimit.marks import MarkUse
from netlimit.plan import Step, SwitchTable
from netlimit.state import Entry, State, Structure
from netlimit.tree import Queues, SavedRoot, Topology, Usage
from netlimit.tunnels import Hop, Tunnels

TURN_SECONDS = 10.0
"""For which a command waits until another process has written."""


class Reading(NamedTuple):
    """An entry as it was found, with its counters: packets, and IP bytes."""

    entry: Entry
    packets: int
    bytes: int


class Unanswered(str):
    """Why it is not known whether the host can do something: it was asked, and for a reason that may pass there was no
    answer."""

    __slots__ = ()


QUEUEING = frozenset({"htb", "fq_codel", "bpf", "ifb"})
"""The capabilities that queues take; what limits takes the others."""


class HostFacts(NamedTuple):
    """What the kernel says of the host.

    `capabilities` maps each to None or the reason why it is missing, or `Unanswered`; `hz` is the clock tick; `notes`
    are sentences that an operator should know.
    """

    capabilities: Mapping[str, str | None]
    hz: int
    notes: tuple[str, ...]


_ANY4 = "0.0.0.0"  # noqa: S104 - as the kernel writes it; nothing is bound here


class Door(NamedTuple):
    """Where this host can be managed: a TCP port of its own, at one of its addresses, or ("::") at any, or ("0.0.0.0")
    at any of IPv4."""

    port: int
    address: str = "::"

    def takes(self, connection: Connection) -> bool:
        """Whether a connection can have come in by it."""
        everywhere = self.address == "::" or (self.address == _ANY4 and connection.family == 4)
        return self.port == connection.near_port and (everywhere or self.address == connection.near)


class Addresses(NamedTuple):
    """The host's own addresses, those that have a session by SSH at the moment, where SSH takes such, and what is not
    known of that: sentences for an operator."""

    own: tuple[str, ...]
    peers: tuple[str, ...]
    doors: tuple[Door, ...] = ()
    notes: tuple[str, ...] = ()


class Connection(NamedTuple):
    """An open TCP connection of this host: family, the far end, the near one, and the user whose socket it is (None:
    no process has it, for it waits to be accepted, or has been closed). It prints as ipset has it."""

    family: int
    far: str
    port: int
    near: str
    near_port: int = 0
    owner: int | None = None

    def __str__(self) -> str:
        return f"{self.far},tcp:{self.port},{self.near}"


class Kernel(Protocol):
    """A kernel that holds our objects.

    Only objects with our prefix are ever seen or touched. `apply` does one step: a table is switched all or nothing,
    lines for sets and trees are written one after the other, and those before a refused one stay. Doing what is done
    already is no error, nor is removing what is not there. A refusal raises KernelError with the kernel's own words;
    the caller observes again and plans anew. Nothing is retried here, save that a table which another program changed
    in the same moment is read again first.
    """

    def probe(self) -> HostFacts:
        """Find out what the host can do. Leaves no trace on it."""
        ...

    def survey(self, thorough: bool = True) -> HostReport:
        """Look for what on this host gets in the way of limits; not `thorough` leaves out what takes long."""
        ...

    def marks(self, patience: float = 0.0) -> MarkUse:
        """What is known of who else uses packet marks; the same object as before while nothing has changed. A look is
        under way beside the caller, who waits up to `patience` seconds for the first."""
        ...

    def addresses(self) -> Addresses:
        """Read whose addresses must not be cut off."""
        ...

    def tunnels(self) -> Tunnels:
        """Read the tunnels that end on this host, with the outer addresses of their far ends. Raises KernelError."""
        ...

    def hops(
        self, addresses: Iterable[str], near: Mapping[str, Collection[str]] | None = None
    ) -> Mapping[str, tuple[Hop, ...]]:
        """Find out where packets to some addresses go next; nothing for what leads nowhere. `near` are this host's own
        addresses with which each of them talks: ways that routing rules have for these count too, and those for packet
        marks. Raises KernelError."""
        ...

    def connections(self, ports: Iterable[int], owners: Collection[int]) -> Iterable[Connection]:
        """The TCP connections to some of this host's ports that both ends have agreed to, of these users and of nobody;
        where that takes long, those that were found last. Raises KernelError."""
        ...

    def exclusive(self, patience: float = TURN_SECONDS) -> AbstractContextManager[None]:
        """Keep every other netlimit process on this host from writing meanwhile. Raises Occupied where another one does
        so for `patience` seconds, and KernelError."""
        ...

    def sole(self) -> AbstractContextManager[None]:
        """Be the one controller of this kernel. Raises KernelError when there is another."""
        ...

    def controlled(self) -> bool:
        """Whether some process is the controller of this kernel now."""
        ...

    def put_off(self) -> AbstractContextManager[None]:
        """Have every controller keep its hands off meanwhile, whatever its database says. Raises KernelError when
        somebody else does so."""
        ...

    def is_put_off(self) -> bool:
        """Whether somebody does so now. Raises KernelError."""
        ...

    def end_hanging_writer(self) -> str | None:
        """End the process that hangs in `exclusive`, if there is one that this one may end; the sentence that tells it.
        To be asked every second or so: it takes several looks to know. Never raises."""
        ...

    def structure(self) -> Structure:
        """Read sets (without entries), chains and hooks: cheap, whatever the number of rules."""
        ...

    def readings(self, names: Iterable[str]) -> dict[str, dict[str, Reading]]:
        """Read the entries of some sets with their counters; sets that do not exist are left out."""
        ...

    def leftovers(self) -> tuple[str, ...]:
        """What of ours could not be taken away, for somebody else uses it: sentences. It counts as gone, until nobody
        uses it any more."""
        ...

    def held(self) -> tuple[str, ...]:
        """What of ours nothing of ours uses any more, but others do, and how to remove what keeps it: sentences. From
        then on it counts as gone, as what could not be taken away does. Raises KernelError."""
        ...

    def counts(self, names: Iterable[str]) -> dict[str, int]:
        """Count the entries of some sets, without reading them; sets that do not exist are left out."""
        ...

    def translating(self) -> frozenset[int]:
        """The address families in which somebody may translate addresses and ports (NAT). Never raises."""
        ...

    def topology(self) -> Topology:
        """Read devices and routes; the same object as before while nothing has changed."""
        ...

    def queues(self) -> Queues:
        """Read our trees, and who else has a root qdisc."""
        ...

    def usages(self, device: str) -> dict[int, Usage]:
        """Read what the classes of a device have counted, by classid. Nothing for a device without a tree of
        ours.

        A class that holds others, or a child HTB, says of what was dropped and what waits the sum of all leaves below
        it: a tree counts that in leaves only. That sum shrinks when a leaf goes. Packets, bytes and overlimits are the
        class's own."""
        ...

    def save_root(self, device: str) -> SavedRoot:
        """Read a foreign root qdisc so that it can be put back. Raises KernelError for one that cannot."""
        ...

    def refused_buckets(self, step: SwitchTable) -> Mapping[str, str]:
        """Which of the buckets of a step that was refused are refused by themselves, by the names of their tables, with
        the reason: some of them, where they are many. None where not even a usual one is taken. Raises KernelError."""
        ...

    def ingress(self) -> Mapping[str, str]:
        """The devices that have our program on their ingress, with its digest."""
        ...

    def barred(self) -> Mapping[str, str]:
        """The devices on whose ingress no program of ours can be put, with what is in the way and what to do."""
        ...

    def kept_clsacts(self) -> tuple[str, ...]:
        """The devices whose clsact qdisc is kept for the next program on their ingress."""
        ...

    def ingress_readings(self, names: Iterable[str]) -> dict[str, dict[str, Reading]]:
        """Read the entries of lanes with their counters; lanes without any are left out."""
        ...

    def ingress_seen(self, names: Iterable[str]) -> dict[str, dict[str, int]]:
        """Read which addresses have been seen, with the mark under which, and forget them."""
        ...

    def apply(self, step: Step) -> None:
        """Take one step. Raises KernelError, and LeadMissing where nothing would lead packets to the classes."""
        ...

    def reopened(self) -> Kernel:
        """The same kernel for a copy of this process, which must not use the sockets of this one."""
        ...


def observe(kernel: Kernel, lanes: Iterable[str] = ()) -> State:
    """Read all of ours. The kernel does not tell the lanes of the ingress; it must be asked for each by its name."""
    structure = kernel.structure()
    found = kernel.readings(name for name, ipset in structure.sets.items() if not ipset.lives)
    entries = {name: read_entries(found.get(name, {})) for name in structure.sets}
    programs = kernel.ingress()
    if programs:
        entries |= {name: read_entries(held) for name, held in kernel.ingress_readings(lanes).items()}
    return State(structure, entries, kernel.queues().trees, found_programs=programs)


def read_entries(held: Mapping[str, Reading]) -> dict[str, Entry]:
    """Entries without their counters."""
    return {key: reading.entry for key, reading in held.items()}
