"""Looking whether the kernel holds what was applied: structure and trees at once, entries in turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import TypeVar

from netlimit.compile import Compilation
from netlimit.drift import PLACES
from netlimit.errors import KernelError
from netlimit.kernel.base import Kernel, Reading, read_entries
from netlimit.plan import are_displaced, diff, drifted, same_place
from netlimit.state import Chains, Entry, State, Structure
from netlimit.tree import INGRESS_DEVICE, Queues, Tree

T = TypeVar("T")
Drift = Mapping[str, str]
"""What is not as it was applied, in words, by its kind ("chains", "places", "sets", "entries", "queues", "ingress")."""


def _are_there(found: Chains, wanted: Chains) -> bool:
    """Whether all jumps are there, wherever they stand."""
    return found.keys() == wanted.keys() and all(
        found[hook] == rules or are_displaced(found[hook], rules) for hook, rules in wanted.items()
    )


def _find_ended(entries: Mapping[str, Entry], now: float) -> set[str]:
    return {key for key, entry in entries.items() if 0 < entry.expires <= now}


def _leave_out(entries: Mapping[str, Entry], ended: Collection[str]) -> Mapping[str, Entry]:
    return {key: entry for key, entry in entries.items() if key not in ended} if ended else entries


def _keep(found: Mapping[str, T], there: Collection[str]) -> Mapping[str, T]:
    """What devices have that are there."""
    return {device: each for device, each in found.items() if device in there}


class Inspection:
    """Looks at one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._sound: Mapping[str, Tree] | None = None
        self._turns: Iterator[tuple[str, ...]] = iter(())
        self._short: Mapping[str, int] = {}
        self.turns = 0
        """How many looks at entries it takes to see all of them."""

    def look(self, compilation: Compilation) -> Drift:
        """What of chains and sets is not as it was applied."""
        return self.look_at_structure(compilation.state.structure)

    def look_at_structure(self, desired: Structure) -> Drift:
        """What of chains and sets is not as here."""
        found = self._kernel.structure()
        drift = {}
        if found.sets != desired.sets:
            drift["sets"] = "the sets"
        if found.chains != desired.chains or not _are_there(found.hooks, desired.hooks):
            drift["chains"] = "the chains"
        elif found.hooks != desired.hooks:
            drift[PLACES] = "the places of our jumps"
        return drift

    def look_at_queues(
        self, compilation: Compilation, queues: Queues, list_devices: Callable[[], Collection[str]]
    ) -> Drift:
        """What of the trees, as they were read, and of the programs on the ingress is not as it was applied. Devices
        are asked for behind both, for what goes with one is no drift; where none are told, all count as there."""
        desired, programs = compilation.state, self._kernel.ingress()
        drift: dict[str, str] = {}
        device = self._find_drifted(desired.trees, queues.trees)
        if device is None and programs == desired.programs:
            return drift
        there = {*list_devices()}
        if there:
            there.add(INGRESS_DEVICE)
            device = drifted(_keep(desired.trees, there), _keep(queues.trees, there))
        if device is not None:
            drift["queues"] = f"the queues of {device}"
        if programs != desired.programs and (not there or _keep(programs, there) != _keep(desired.programs, there)):
            drift["ingress"] = "the programs on the ingress"
        return drift

    def forget(self) -> None:
        """Trees are about to be written."""
        self._sound = None

    def doubt(self, compilation: Compilation) -> bool:
        """Whether sets hold fewer entries than they should, which the kernel tells for next to nothing. They are looked
        at next then, and once for each number: what has ended is no drift."""
        wanted = {name: len(entries) for name, entries in compilation.entries.items() if entries}
        try:
            counts = self._kernel.counts(wanted)
        except KernelError:
            return False  # their turns come all the same
        short = {name: count for name, count in counts.items() if count < wanted[name]}
        doubted = {name for name, count in short.items() if self._short.get(name) != count}
        self._short = short
        turns = [names for names in compilation.owners if not doubted.isdisjoint(names)]
        others = doubted.difference(*turns)
        self._turns = chain(turns, ((name,) for name in sorted(others)), self._turns)
        return bool(doubted)

    def next_turn(self, compilation: Compilation) -> tuple[str, ...] | None:
        """The sets, or the lane, whose entries are to be looked at now; None at the end of a round."""
        names = next(self._turns, None)
        if names is None:
            others = set(compilation.state.entries) - {name for owned in compilation.owners for name in owned}
            others.difference_update(compilation.peer_sets)  # there can be many, and none of them is drift
            turns = [*compilation.owners, *((name,) for name in sorted(others))]
            self._turns, self.turns = iter(turns), len(turns)
        return names

    def read(self, compilation: Compilation, names: tuple[str, ...]) -> dict[str, dict[str, Reading]] | None:
        """The entries of these sets with their counters; None if they are a lane of the ingress, or gone."""
        sets = compilation.structure.sets.keys() & set(names)
        return self._kernel.readings(sets) if sets else None

    def compare(
        self,
        compilation: Compilation,
        names: tuple[str, ...],
        readings: Mapping[str, Mapping[str, Reading]] | None,
        now: float,
    ) -> Drift:
        """What of the entries that were read is not as it was applied. What has ended at `now` (Unix time) the kernel
        may have taken out by itself."""
        if readings is None:
            return self._look_at_lane(compilation, names[0])
        sets = {name: ipset for name, ipset in compilation.structure.sets.items() if name in names}
        part = Structure(sets)
        ended = {name: _find_ended(compilation.entries[name], now) for name in sets}
        entries = {name: _leave_out(compilation.entries[name], ended[name]) for name in sets}
        wanted = State(part, entries)
        found = {name: _leave_out(read_entries(held), ended.get(name, ())) for name, held in readings.items()}
        return {"entries": f"entries of the set {names[0]}"} if diff(wanted, State(part, found)) else {}

    def _look_at_lane(self, compilation: Compilation, name: str) -> Drift:
        wanted = compilation.state.entries.get(name)
        if wanted is None or not compilation.state.programs:  # it has gone since the round began, or nobody looks there
            return {}
        found = read_entries(self._kernel.ingress_readings([name]).get(name, {}))
        if found.keys() != wanted.keys() or not all(same_place(wanted[key], found[key]) for key in found):
            return {"entries": f"entries of the lane {name}"}
        return {}

    def _find_drifted(self, desired: Mapping[str, Tree], trees: Mapping[str, Tree]) -> str | None:
        """The first device whose tree is not as it should be. A tree that is the same object as the last time is as it
        was: of a thousand classes that is seen at once."""
        if trees == self._sound:
            return None
        device = drifted(desired, trees)
        self._sound = trees if device is None else None
        return device
