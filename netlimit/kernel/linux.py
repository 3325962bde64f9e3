"""The real kernel: sets by ipset, chains by python-iptables, the rest by pyroute2."""

from __future__ import annotations

from collections.abc import Iterable

from netlimit.kernel import capabilities, ipset, iptables
from netlimit.kernel.base import HostFacts, Reading
from netlimit.plan import Step, WriteSets
from netlimit.state import Structure


class LinuxKernel:
    """The kernel of the network namespace in which this process runs; see `base.Kernel` for the contract."""

    def probe(self, mark_mask: int) -> HostFacts:
        """Find out what this host can do. Leaves no trace on it."""
        return capabilities.probe(mark_mask)

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
