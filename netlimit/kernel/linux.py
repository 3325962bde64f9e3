"""The real kernel: sets by ipset, chains by python-iptables, the rest by pyroute2."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pyroute2 import NetlinkError

from netlimit.conflicts import HostReport
from netlimit.errors import KernelError
from netlimit.kernel import addresses, capabilities, ingress, ipset, iptables, queues, sessions, tc
from netlimit.kernel.base import Addresses, HostFacts, Reading
from netlimit.kernel.lock import is_locked, locked
from netlimit.kernel.notices import LINKS, QUEUES, Watched
from netlimit.kernel.survey import look_round
from netlimit.kernel.topology import TopologyWatch
from netlimit.plan import Step, SwitchTable, WriteIngress, WriteSets, WriteTree
from netlimit.state import Structure
from netlimit.tree import Queues, SavedRoot, Topology, Usage

LOCKS = Path("/run/netlimit")
"""Where the locks between netlimit's own processes are, named by the network namespace that they are for."""
_MOMENT = 0.5


class LinuxKernel:
    """The kernel of the network namespace in which this process runs; see `base.Kernel` for the contract."""

    def __init__(self) -> None:
        self._watch = TopologyWatch()
        self._tables = iptables.TableReader()
        self._queues = Watched(LINKS | QUEUES, queues.QueueReader().read)
        self._ingress = Watched(LINKS | QUEUES, ingress.read_ingress)

    def probe(self, mark_mask: int) -> HostFacts:
        """Find out what this host can do. Leaves no trace on it."""
        with _translated("probe the host"):
            found = capabilities.probe(mark_mask)
        if found.capabilities["iptables"] is None:
            iptables.load()  # now rather than while the first rule waits
        return found

    def survey(self, thorough: bool = True) -> HostReport:
        """Look for what on this host gets in the way of limits."""
        with _translated("look round"):
            return look_round(capabilities.read_hz(), self.queues().foreign, thorough=thorough)

    def addresses(self) -> Addresses:
        """Read whose addresses must not be cut off."""
        with _translated("read addresses"):
            return Addresses(addresses.read_own(), *sessions.read_sessions())

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep every other netlimit process in this network namespace from writing meanwhile."""
        with locked(_find_lock("lock"), "write to the kernel", keep=False):
            yield

    @contextmanager
    def sole(self) -> Iterator[None]:
        """Be the one controller of this network namespace."""
        purpose, lock = "be the controller of this host", _find_lock("controller")
        with ExitStack() as held:
            try:
                # Who looks whether there is a controller, as the guard does, holds the lock for a moment.
                held.enter_context(locked(lock, purpose, keep=False, patience=_MOMENT))
            except KernelError:
                if not is_locked(lock, purpose):
                    raise
                reason = "another controller runs here already; stop it first, one is enough"
                raise KernelError(purpose, reason) from None
            yield

    def controlled(self) -> bool:
        """Whether some process is the controller of this network namespace now."""
        return is_locked(_find_lock("controller"), "look for the controller")

    def structure(self) -> Structure:
        """Read sets (without entries), chains and hooks."""
        with _translated("read the structure"):
            sets = ipset.read_sets()
            chains4, hooks4 = self._tables.read(4)
            chains6, hooks6 = self._tables.read(6)
            return Structure(sets, {**chains4, **chains6}, {**hooks4, **hooks6})

    def readings(self, names: Iterable[str]) -> dict[str, dict[str, Reading]]:
        """Read the entries of some sets with their counters."""
        with _translated("read sets"):
            held = ipset.read_sets()
            return {name: ipset.read_entries(name) for name in names if name in held}

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

    def ingress(self) -> Mapping[str, str]:
        """The devices that have our program on their ingress, with its digest."""
        with _translated("read what is on the ingress"):
            return self._ingress.get()

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
                ipset.write_sets(step)
            elif isinstance(step, SwitchTable):
                self._tables.forget()
                iptables.switch_table(step)
            elif isinstance(step, WriteTree):
                tc.write_tree(step)
            elif isinstance(step, WriteIngress):
                ingress.write_ingress(step)


def _find_lock(name: str) -> str:
    """The lock file of this network namespace."""
    with _translated("find the lock"):
        LOCKS.mkdir(mode=0o750, exist_ok=True)
        return str(LOCKS / f"{os.stat('/proc/self/ns/net').st_ino}.{name}")


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Whatever the tools and libraries raise is a KernelError to the caller."""
    try:
        yield
    except (OSError, subprocess.SubprocessError, NetlinkError) as error:
        raise KernelError(what, str(error)) from error
