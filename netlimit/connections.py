"""The open connections by which this host is managed: which of them are spared, and that the kernel knows them.

They are followed apart from rules: they come and go by themselves, and are no drift. A port tells little: any user can
listen on it at another address, or connect from it. So the connection must have come in where this host is managed, and
the process that has it must belong to root, or to whom the API runs as.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from ipaddress import ip_address

from netlimit.errors import KernelError
from netlimit.kernel.base import Connection, Door, Kernel, Reading
from netlimit.limits import Facts
from netlimit.plan import WriteSets
from netlimit.state import Entry
from netlimit.untouched import MOST_OPEN, open_set

log = logging.getLogger(__name__)

Keys = Mapping[int, tuple[str, ...]]
"""Connections as sets have them, by address family."""


class OpenConnections:
    """Follows those of one host; `keepers` are the ids of the users whose they can be."""

    def __init__(self, kernel: Kernel, keepers: Collection[int] = (0,)) -> None:
        self._kernel = kernel
        self._keepers = frozenset(keepers)
        self._full = False
        self._unreadable = False

    def follow(self, facts: Facts, doors: Iterable[Door]) -> Keys:
        """Bring the kernel's sets, those that are there, up to date; what they shall hold. Raises KernelError."""
        names = {open_set(family).name: family for family in (4, 6)}
        readings = self._kernel.readings(names)
        held = {family: readings.get(name, {}).keys() for name, family in names.items()}
        found = self._read(facts)
        doors = list(doors)
        wanted = {}
        for family in (4, 6):
            ours = [each for each in found if each.family == family and self._is_ours(each, doors, held[family])]
            wanted[family] = self._choose(ours, held[family], facts)
        write_living(self._kernel, {name: wanted[family] for name, family in names.items()}, readings)
        return wanted

    def _read(self, facts: Facts) -> list[Connection]:
        """Those that are open now. What cannot be read is none: then nobody is spared by a connection, which the log
        says once."""
        try:
            found = list(self._kernel.connections(facts.management, self._keepers)) if facts.management else []
        except KernelError as error:
            if not self._unreadable:
                log.error("%s Open connections by which this host is managed are not spared by rules.", error)
            self._unreadable = True
            return []
        self._unreadable = False
        return found

    def _is_ours(self, connection: Connection, doors: Iterable[Door], held: Collection[str]) -> bool:
        """Whether this host is managed by it. One that no process has is so if it was before: it has something to say
        still. Nobody has accepted any other, and who will is not known."""
        mine = str(connection) in held if connection.owner is None else connection.owner in self._keepers
        return mine and any(door.takes(connection) for door in doors)

    def _choose(self, found: list[Connection], held: Collection[str], facts: Facts) -> tuple[str, ...]:
        """As many as are spared. Anybody can open connections: those of who is safe come first, then the oldest."""
        if len(found) > MOST_OPEN:
            if not self._full:
                text = "%d connections are open by which this host is managed; rules spare %d of them."
                log.warning(text, len(found), MOST_OPEN)
            found.sort(key=lambda each: (not _is_safe(each, facts), str(each) not in held, str(each)))
        self._full = len(found) > MOST_OPEN
        return tuple(map(str, found[:MOST_OPEN]))


def write_living(
    kernel: Kernel, wanted: Mapping[str, Collection[str]], readings: Mapping[str, Mapping[str, Reading]]
) -> None:
    """Have those sets that were read hold what is wanted. Raises KernelError."""
    add = {name: [key for key in wanted[name] if key not in held] for name, held in readings.items()}
    gone = {name: sorted(held.keys() - {*wanted[name]}) for name, held in readings.items()}
    for step in (  # what goes leaves room for what comes
        WriteSets(remove={name: tuple(keys) for name, keys in gone.items() if keys}),
        WriteSets(add={name: dict.fromkeys(keys, Entry()) for name, keys in add.items() if keys}),
    ):
        if step:
            kernel.apply(step)


def _is_safe(connection: Connection, facts: Facts) -> bool:
    far = ip_address(connection.far)
    return any(far.version == network.version and far in network for network in facts.safe)
