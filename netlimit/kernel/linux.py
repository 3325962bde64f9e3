"""The real kernel: sets by ipset, chains by python-iptables or iptables-legacy-restore, the rest by pyroute2."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pyroute2 import NetlinkError

from netlimit.conflicts import HostReport
from netlimit.errors import KernelError
from netlimit.kernel import addresses, capabilities, ingress, ipset, iptables, libiptc, queues, sessions, set_uses, tc
from netlimit.kernel.background import Background
from netlimit.kernel.base import TURN_SECONDS, Addresses, Connection, HostFacts, Reading, Unanswered
from netlimit.kernel.claim import Claim, claimed, is_claimed
from netlimit.kernel.connections import ConnectionReader
from netlimit.kernel.holders import HolderWatch
from netlimit.kernel.marks import MarkReader
from netlimit.kernel.nft_ingress import EarlyChainReader
from netlimit.kernel.notices import LINKS, QUEUES, Watched
from netlimit.kernel.survey import NFTABLES, TWINS, look_round
from netlimit.kernel.tools import Listing
from netlimit.kernel.topology import TopologyWatch
from netlimit.kernel.translation import TranslationReader
from netlimit.kernel.tunnels import TunnelReader, find_hops
from netlimit.marks import MarkUse
from netlimit.plan import Step, SwitchTable, WriteIngress, WriteSets, WriteTree
from netlimit.state import ChainId, Structure
from netlimit.tree import Queues, SavedRoot, Topology, Usage
from netlimit.tunnels import Hop, Tunnels

_PATIENCE, _MOMENT = 10.0, 0.5
"""Seconds for which the rules of nftables may be read, and the end of another controller is waited for."""
_LONGEST = 120.0
"""Seconds after which a listing of nftables is given up."""


class LinuxKernel:
    """The kernel of the network namespace in which this process runs; see `base.Kernel` for the contract."""

    def __init__(self) -> None:
        self._watch = TopologyWatch()
        self._tunnels = TunnelReader()
        self._sockets = Background(sessions.list_root_sockets)
        self._connections = ConnectionReader()
        self._tables = iptables.TableReader()
        self._writer: iptables.Writer | None = None
        self._marks = MarkReader(self._tables)
        self._translation = TranslationReader()
        self._queues = Watched(LINKS | QUEUES, queues.QueueReader().read)
        self._nftables = Listing(*NFTABLES, longest=_LONGEST)
        self._twins = {table: Listing(*command, longest=_LONGEST) for table, command in TWINS.items()}
        self._busy: frozenset[str] = frozenset()
        self._foreign: dict[str, str] = {}
        self._writers = HolderWatch(Claim.WRITER)
        chains = EarlyChainReader()
        self._ingress = Watched(LINKS | QUEUES, lambda: ingress.read_ingress(chains.read()), chains.read)

    def probe(self) -> HostFacts:
        """Find out what this host can do. Leaves no trace on it."""
        with _translated("probe the host"):
            found = capabilities.probe()
            if found.capabilities["ifb"] is None:
                found = found._replace(capabilities={**found.capabilities, "ifb": tc.find_foreign_device()})
            found = found._replace(capabilities={**found.capabilities, **_occupied(found.capabilities)})
        lacking = found.capabilities.get(capabilities.LIBRARY)
        if self._writer is None or not isinstance(lacking, Unanswered):
            self._writer = iptables.find_writer(lacking)
        if found.capabilities["iptables"] is None and self._writer is libiptc:
            libiptc.load()  # now rather than while the first rule waits
        return found

    def survey(self, thorough: bool = True) -> HostReport:
        """Look for what on this host gets in the way of limits."""
        with _translated("look round"):
            patience = _PATIENCE if thorough else _MOMENT
            listing = partial(self._nftables.read, patience)
            foreign = self.queues().foreign
            return look_round(
                *(capabilities.read_hz(), foreign, Path("/"), thorough, listing),
                lambda table: self._twins[table].read(patience),
                *(self.topology, self._ingress.get),
            )

    def marks(self, patience: float = 0.0) -> MarkUse:
        """What is known of who else uses packet marks; the same object as before while nothing has changed."""
        with _translated("look for packet marks"):
            return self._marks.read(patience)

    def addresses(self) -> Addresses:
        """Read whose addresses must not be cut off."""
        with _translated("read addresses"):
            return Addresses(addresses.read_own(), *sessions.read_sessions(self._sockets.get))

    def tunnels(self) -> Tunnels:
        """Read the tunnels that end on this host, with the outer addresses of their far ends."""
        with _translated("read tunnels"):
            return self._tunnels.read()

    def hops(
        self, addresses: Iterable[str], near: Mapping[str, Collection[str]] | None = None
    ) -> dict[str, tuple[Hop, ...]]:
        """Find out where packets to some addresses go next; nothing for what leads nowhere."""
        with _translated("look up routes"):
            return find_hops(addresses, near)

    def connections(self, ports: Iterable[int], owners: Collection[int]) -> list[Connection]:
        """The TCP connections to some of this host's ports that both ends have agreed to, of these users and of nobody;
        where that takes long, those that were found last."""
        with _translated("read open connections"):
            return self._connections.read(ports, owners)

    @contextmanager
    def exclusive(self, patience: float = TURN_SECONDS) -> Iterator[None]:
        """Keep every other netlimit process in this network namespace from writing meanwhile."""
        taken = f"another process of netlimit has been writing for {patience:g} seconds"
        with claimed(Claim.WRITER, "write to the kernel", patience, taken):
            yield

    @contextmanager
    def sole(self) -> Iterator[None]:
        """Be the one controller of this network namespace."""
        taken = (
            "another controller runs here already, on this host or in a container that has its network; stop it first, "
            "one is enough"
        )
        with claimed(Claim.CONTROLLER, "be the controller of this host", _MOMENT, taken):
            yield

    def controlled(self) -> bool:
        """Whether some process is the controller of this network namespace now."""
        return is_claimed(Claim.CONTROLLER, "look for the controller")

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Have every controller of this network namespace keep its hands off meanwhile."""
        with claimed(Claim.PAUSE, "put off the controller", _MOMENT, "another process does so already"):
            yield

    def is_put_off(self) -> bool:
        """Whether somebody does so now."""
        return is_claimed(Claim.PAUSE, "look whether it is put off")

    def end_hanging_writer(self) -> str | None:
        """End the process that hangs while it is the one who writes; the sentence that tells it."""
        return self._writers.end_hanging()

    def structure(self) -> Structure:
        """Read sets (without entries), chains and hooks."""
        with _translated("read the structure"):
            sets, self._foreign = ipset.part_sets()
            if self._busy:
                # What is left for others who use it is none of ours, until they do no more.
                self._busy = (self._busy & sets.keys()) - ipset.find_unused()
            sets = {name: found for name, found in sets.items() if name not in self._busy}
            chains4, hooks4 = self._tables.read(4)
            chains6, hooks6 = self._tables.read(6)
            return Structure(sets, {**chains4, **chains6}, {**hooks4, **hooks6})

    def leftovers(self) -> tuple[str, ...]:
        """What of ours could not be taken away, for somebody else uses it; and what has our names, and is none of
        ours."""
        chains = (chain for held in self._tables.held.values() for chain in held)
        found = [*(f"The set {name}" for name in sorted(self._busy)), *(f"The chain {each}" for each in sorted(chains))]
        used = (f"{each} is used by a rule of somebody else, and cannot go as long as it is." for each in found)
        return (*used, *(self._foreign[name] for name in sorted(self._foreign)))

    def readings(self, names: Iterable[str]) -> dict[str, dict[str, Reading]]:
        """Read the entries of some sets with their counters."""
        with _translated("read sets"):
            return ipset.read_entries(names)

    def held(self) -> tuple[str, ...]:
        """What of ours nothing of ours uses any more, but others do, and how to remove what keeps it."""
        with _translated("look who uses our sets"):
            ours = self._read_words()
            empty = self._find_empty_chains()
            users = {name: users for name, users in ipset.count_users().items() if name not in ours}
            self._busy |= users.keys()
            told = set_uses.say_held(users, set_uses.find_uses(users)) if users else ()
        return (*told, *map(set_uses.say_held_chain, empty))

    def _find_empty_chains(self) -> list[ChainId]:
        """The chains of ours that are there for others alone."""
        return sorted(
            chain for family, held in self._tables.held.items() for chain in held - self._tables.read(family)[0].keys()
        )

    def counts(self, names: Iterable[str]) -> dict[str, int]:
        """Count the entries of some sets, without reading them."""
        with _translated("count entries"):
            return ipset.count_entries(names)

    def translating(self) -> frozenset[int]:
        """The address families in which somebody may translate addresses and ports (NAT). Never raises."""
        return self._translation.read()

    def topology(self) -> Topology:
        """Read devices and routes; the same object as before while nothing has changed."""
        with _translated("read devices and routes"):
            return self._watch.topology()

    def queues(self) -> Queues:
        """Read our trees, and who else has a root qdisc."""
        with _translated("read queues"):
            return self._queues.get()

    def usages(self, device: str) -> dict[int, Usage]:
        """Read what the classes of a device have counted."""
        with _translated(f"read the queues of {device}"):
            return queues.read_usages(device)

    def save_root(self, device: str) -> SavedRoot:
        """Read a foreign root qdisc so that it can be put back. Raises KernelError for one that cannot."""
        with _translated(f"save the root qdisc of {device}"):
            return queues.save_root(device)

    def refused_buckets(self, step: SwitchTable) -> Mapping[str, str]:
        """Which buckets of a step are refused by themselves, with the reason."""
        with _translated("try buckets"):
            self._tables.forget()
            return iptables.find_refused(step, self._find_writer())

    def ingress(self) -> Mapping[str, str]:
        """The devices that have our program on their ingress, with its digest."""
        with _translated("read what is on the ingress"):
            return self._ingress.get().programs

    def barred(self) -> Mapping[str, str]:
        """The devices on whose ingress no program of ours can be put, with what is in the way and what to do."""
        with _translated("read what is on the ingress"):
            return self._ingress.get().barred

    def kept_clsacts(self) -> tuple[str, ...]:
        """The devices whose clsact qdisc is kept for the next program on their ingress."""
        with _translated("read what is on the ingress"):
            return ingress.read_kept()

    def ingress_readings(self, names: Iterable[str]) -> dict[str, dict[str, Reading]]:
        """Read the entries of lanes with their counters."""
        with _translated("read lanes"):
            return ingress.read_entries(names)

    def ingress_seen(self, names: Iterable[str]) -> dict[str, dict[str, int]]:
        """Read which addresses have been seen, and forget them."""
        with _translated("read who has been seen"):
            return ingress.read_seen(names)

    def apply(self, step: Step) -> None:
        """Take one step. Raises KernelError."""
        with _translated(f"write {type(step).__name__}"):
            if isinstance(step, WriteSets):
                self._write_sets(step)
            elif isinstance(step, SwitchTable):
                self._tables.forget()
                iptables.switch_table(step, iptables.choose_writer(step, self._find_writer()))
            elif isinstance(step, WriteTree):
                tc.write_tree(step)
            elif isinstance(step, WriteIngress):
                ingress.write_ingress(step)

    def _find_writer(self) -> iptables.Writer:
        if self._writer is None:
            self._writer = iptables.find_writer(capabilities.judge_library())
        return self._writer

    def reopened(self) -> LinuxKernel:
        """With sockets of its own, for a copy of this process."""
        another = LinuxKernel()
        another._busy = self._busy
        return another

    def _write_sets(self, step: WriteSets) -> None:
        refused = ipset.write_sets(step, self._busy)
        self._busy = (self._busy - {each.name for each in step.create}) | refused
        if refused:
            ours = sorted(refused & self._read_words())
            if ours:
                self._busy -= set(ours)
                raise KernelError(str(step), f"the set {ours[0]} cannot be destroyed: it is in use by a chain of ours")
            users = {name: users for name, users in ipset.count_users().items() if name in refused}
            if spent := set_uses.find_spent(users, set_uses.find_uses(users)):
                ipset.flush_sets(spent)

    def _read_words(self) -> set[str]:
        """All words of our rules, the names of sets among them."""
        chains = [chains for family in (4, 6) for chains in self._tables.read(family)]
        return {word for each in chains for rules in each.values() for rule in rules for word in rule.text.split()}


def _occupied(found: Mapping[str, str | None]) -> Mapping[str, str]:
    """What sets of somebody else keep from being done, of what the host can do."""
    if found["ipset"] is not None:
        return {}
    return {name: reason for name, reason in ipset.find_occupied().items() if found.get(name) is None}


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Whatever the tools and libraries raise is a KernelError to the caller."""
    try:
        yield
    except (OSError, subprocess.SubprocessError, NetlinkError) as error:
        raise KernelError(what, str(error)) from error
