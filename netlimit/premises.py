"""The host around a kernel, as far as rules depend on it: what it can do, its addresses and devices, who is safe."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from netlimit.conflicts import find_conflicts, is_serious
from netlimit.kernel.base import Addresses, HostFacts, Kernel
from netlimit.limits import Facts, own_addresses, parse_safe
from netlimit.records import DISPENSABLE, HostStatus
from netlimit.safety import SafeSet
from netlimit.tree import Queues, SavedRoot, Topology

if TYPE_CHECKING:  # for the types alone
    from netlimit.controller import Setup

log = logging.getLogger(__name__)
Roots = Mapping[str, SavedRoot]


class Premises:
    """What was found out of one host. `probe` comes first."""

    def __init__(self, kernel: Kernel, setup: Setup) -> None:
        self._kernel = kernel
        self._setup = setup
        self._found: HostFacts | None = None
        self._where = Addresses((), ())
        self._safe = SafeSet(setup.safe, setup.servers)
        self._ports = set(setup.ports)
        self._topology = Topology()
        self._foreign: Mapping[str, str] = {}
        self._conflicts: tuple[str, ...] = ()

    @property
    def facts(self) -> Facts:
        """What compiling goes by."""
        assert self._found is not None, "probe comes first"
        return Facts(
            host=self._setup.host,
            mark_mask=self._setup.mark_mask,
            set_size=self._setup.set_size,
            own=own_addresses(self._where.own),
            safe=parse_safe(tuple(self._safe.reasons)),
            management=self._management,
            capabilities=self._found.capabilities,
            topology=self._topology,
            foreign=self._foreign,
            hz=self._found.hz,
        )

    def probe(self, reported: Iterable[HostStatus]) -> None:
        """Find out what the host can do, once; `reported` is what gateways have said before. Who was safe a moment ago
        is so still, though this process has not seen him."""
        if self._found is None:
            self._found = self._kernel.probe(self._setup.mark_mask)
            for status in reported:
                if status.host == self._setup.host:
                    self._safe.recall(status.safe_reasons)
        for name, reason in self._found.capabilities.items():
            if reason and name in DISPENSABLE:
                log.info("Not there, and not needed: %s. %s", name, reason)
            elif reason:
                log.warning("Missing: %s. %s", name, reason)

    def probe_again(self) -> bool:
        """Find out whether the host can do something else now than when it was probed."""
        before, self._found = self._found, self._kernel.probe(self._setup.mark_mask)
        return before is None or before.capabilities != self._found.capabilities

    def look(self, saved: Roots) -> None:
        """Read devices, routes, and the root qdiscs of others."""
        self._topology = self._kernel.topology()
        self.find_foreign(self._kernel.queues(), saved)

    def has_moved(self) -> bool:
        """Whether devices or routes are others than at the last look."""
        return self._kernel.topology() is not self._topology

    def forget(self) -> None:
        """Devices and their qdiscs may be others than those that are known."""
        self._topology = Topology()

    def find_foreign(self, queues: Queues, saved: Roots) -> bool:
        """Note the devices with a root qdisc of somebody else, but for those that may be taken over as they are now;
        whether they are others than before."""
        before = self._foreign
        self._foreign = {
            device: text
            for device, text in queues.foreign.items()
            if device not in saved or self._kernel.save_root(device) != saved[device]
        }
        return self._foreign != before

    def find_safe(self, clients: Iterable[str], now: float) -> set[str] | None:
        """Find out the host's own addresses, who is safe at `now` (Unix time), and the ports by which it is managed.
        The addresses that have joined or left; None if nothing has changed."""
        where = self._kernel.addresses()
        before, ports = {*self._where.own, *self._safe.reasons}, self._management
        self._safe.update(now, where.peers, self._topology.gateways, clients)
        self._where = where
        self._ports.update(where.ports)
        changed = before ^ {*self._where.own, *self._safe.reasons}
        return changed if changed or ports != self._management else None

    def look_for_conflicts(self) -> None:
        """Look for what gets in the way of limits."""
        before = self._conflicts
        self._conflicts = tuple(map(str, filter(is_serious, find_conflicts(self._kernel.survey(thorough=False)))))
        for conflict in self._conflicts:
            if conflict not in before:
                log.warning("%s", conflict)

    def describe(self) -> dict[str, object]:
        """What a gateway says of its host: fields of HostStatus."""
        if self._found is None:
            return {}
        return {
            "capabilities": self._found.capabilities,
            "hz": self._found.hz,
            "notes": (*self._found.notes, *self._conflicts),
            "own": self._where.own,
            "management": self._management,
            "safe": tuple(self._safe.reasons),
            "safe_reasons": dict(self._safe.reasons),
        }

    @property
    def _management(self) -> tuple[int, ...]:
        """The ports of which open connections pass. One stays when sshd ends: those that it served go on."""
        return tuple(sorted(self._ports))
