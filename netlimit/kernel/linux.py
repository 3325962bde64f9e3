"""The real kernel: sets by ipset, chains by python-iptables, the rest by pyroute2."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from netlimit.kernel import addresses, capabilities, ipset, iptables
from netlimit.kernel.base import Addresses, HostFacts, Reading
from netlimit.kernel.lock import locked
from netlimit.plan import Step, WriteSets
from netlimit.state import Structure


class LinuxKernel:
    """The kernel of the network namespace in which this process runs; see `base.Kernel` for the contract.

    `ports` are the TCP ports by which the host is managed.
    """

    def __init__(self, ports: Collection[int] = (22,)) -> None:
        self._ports = frozenset(ports)

    def probe(self, mark_mask: int) -> HostFacts:
        """Find out what this host can do. Leaves no trace on it."""
        return capabilities.probe(mark_mask)

    def addresses(self) -> Addresses:
        """Read whose addresses must not be cut off."""
        return addresses.read_addresses(self._ports)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep every other netlimit process in this network namespace from writing meanwhile."""
        namespace = os.stat("/proc/self/ns/net").st_ino
        with locked(f"/run/netlimit-{namespace}.lock", "write to the kernel"):
            yield

    def structure(self) -> Structure:
        """Read sets (without entries), chains and hooks."""
        sets = ipset.read_sets()
        chains4, hooks4 = iptables.read_tables(4)
        chains6, hooks6 = iptables.read_tables(6)
        return Structure(sets, {**chains4, **chains6}, {**hooks4, **hooks6})

    def readings(self, names: Iterable[str]) -> dict[str, dict[str, Reading]]:
        """Read the entries of some sets with their counters."""
        held = ipset.read_sets()
        return {name: ipset.read_entries(name) for name in names if name in held}

    def apply(self, step: Step) -> None:
        """Take one step. Raises KernelError."""
        if isinstance(step, WriteSets):
            ipset.write_sets(step)
        else:
            iptables.switch_table(step)
