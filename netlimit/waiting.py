"""Newcomers for whom a device has no room: who keeps sending is told from who was seen once, as in a scan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping


class Waiting:
    """Who found no room on a device, by the set in which he is seen. From one turn to the next passes more time than
    such a set remembers anybody, so who is in it before one and after the next has sent again."""

    def __init__(self) -> None:
        self._now: dict[str, Collection[str]] = {}
        self._before: Mapping[str, frozenset[str]] = {}
        self._former: Mapping[str, frozenset[str]] = {}

    def put_first(self, name: str, addresses: Iterable[str]) -> list[str]:
        """The addresses that are in a set, those that keep sending before the others."""
        former = self._former.get(name)
        return sorted(addresses, key=lambda each: each not in former) if former else list(addresses)

    def note(self, name: str, addresses: Collection[str]) -> None:
        """Not all of those in a set have found room."""
        self._now[name] = addresses

    def count(self) -> int:
        """How many keep sending, and had found no room already by the last turn."""
        return sum(
            len(self._before[name].intersection(held)) for name, held in self._now.items() if name in self._before
        )

    def turn(self) -> None:
        """Enough time has passed for the sets to forget whom they held at the last turn."""
        self._former, self._before = self._before, {name: frozenset(held) for name, held in self._now.items()}
        self._now = {}

    @property
    def lasts(self) -> bool:
        """Whether somebody found no room before the last turn, and before the one before it."""
        return bool(self._before and self._former)
