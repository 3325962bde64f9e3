"""Room for connections: who is let in, and who has to go for it. Pure: sockets are for `api.connections`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from netlimit.l7.identity import find_block, find_network


class Standing(StrEnum):
    """Whose connection it is. Each has room of its own, which nobody else can take."""

    LOCAL = "of this host"
    KNOWN = "safe, or with a good token"
    PROXY = "a trusted proxy"
    STRANGER = "a stranger"


MOST = {Standing.LOCAL: 96, Standing.KNOWN: 192, Standing.PROXY: 256, Standing.STRANGER: 256}
"""Connections, of all together that stand alike."""
MOST_OF_ONE = {Standing.KNOWN: 96, Standing.STRANGER: 64}
"""Connections from one address (IPv6: one /64, in which a client may choose freely)."""
MOST_OF_NETWORK = {Standing.STRANGER: 128}
"""Connections from one /24 (IPv6: one /48)."""
KEPT = 4
"""Where there is no room, who has the most connections that are being answered gives up one, if he has more than so
many: a few tokens shut nobody out, as they would if each might keep a share of all."""


@dataclass(eq=False, slots=True)
class Guest:
    """A connection; `drop` ends it, and `find_owner` tells whose request is being answered, None if that is unknown."""

    standing: Standing
    groups: tuple[tuple[str, int], ...]
    """Whom it is counted to, with the most that there may be."""
    drop: Callable[[], None]
    find_owner: Callable[[], object] = lambda: None


@dataclass
class Room:
    """Connections that are open. Where there are too many, the one that has waited longest goes for the newest: whoever
    sends half a request and nothing more takes nobody's place. One that is being answered never goes."""

    _waiting: dict[Standing, dict[Guest, None]] = field(default_factory=lambda: {each: {} for each in Standing})
    """In the order in which they began to wait."""
    _inside: dict[Guest, None] = field(default_factory=dict)
    """In the order in which they came."""
    _counts: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, place: str | None, standing: Standing, drop: Callable[[], None]) -> Guest | None:
        """Let somebody in; None if there is no room. Others may be dropped for it."""
        guest = Guest(standing, _find_groups(place, standing), drop)
        for name, most in guest.groups:
            if self._counts[name] >= most and not self._make_room(standing, name):
                return None
        self._inside[guest] = None
        self._waiting[standing][guest] = None
        self._counts.update(name for name, _ in guest.groups)
        return guest

    def leave(self, guest: Guest) -> None:
        """A connection has ended. One that has left already is no error."""
        if guest not in self._inside:
            return
        del self._inside[guest]
        self._waiting[guest.standing].pop(guest, None)
        for name, _ in guest.groups:
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]

    def answer(self, guest: Guest) -> None:
        """Its request has come to its end, and is being answered."""
        self._waiting[guest.standing].pop(guest, None)

    def wait(self, guest: Guest) -> None:
        """It is to send something: a request, or the rest of one."""
        if guest in self._inside:
            self._waiting[guest.standing].setdefault(guest)

    def _make_room(self, standing: Standing, group: str) -> bool:
        # He first: who has just come must have time to say what he wants.
        waiting = (guest for guest in self._waiting[standing] if _is_of(guest, group))
        leaving = self._find_greedy(standing, group) or next(waiting, None)
        if leaving is None:
            return False
        self.leave(leaving)
        leaving.drop()
        return True

    def _find_greedy(self, standing: Standing, group: str) -> Guest | None:
        """The oldest connection of whom most are being answered, if these are many."""
        answered: dict[object, list[Guest]] = {}
        for guest in self._inside:
            if _is_of(guest, group) and guest not in self._waiting[standing]:
                owner = guest.find_owner()
                if owner is not None:
                    answered.setdefault(owner, []).append(guest)
        greediest = max(answered.values(), key=len, default=[])
        return greediest[0] if len(greediest) > KEPT else None


def _is_of(guest: Guest, group: str) -> bool:
    return any(name == group for name, _ in guest.groups)


def _find_groups(place: str | None, standing: Standing) -> tuple[tuple[str, int], ...]:
    """The narrowest first: who has too many himself gives up one of his own."""
    groups = []
    if place is not None and standing in MOST_OF_ONE:
        groups.append((f"{standing}/{find_block(place)}", MOST_OF_ONE[standing]))
    if place is not None and standing in MOST_OF_NETWORK:
        groups.append((f"{standing}/{find_network(place)}", MOST_OF_NETWORK[standing]))
    return (*groups, (standing.value, MOST[standing]))
