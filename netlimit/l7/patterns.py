"""Values with wildcards, and which of many fits first.

A document may have thousands, and a client may write a path that means twenty: so they are not tried one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

_FEW = 8
"""So many are tried one by one: that is as fast."""
T = TypeVar("T")


class Pattern(NamedTuple):
    """A value with wildcards: each `*` in it stands for any text, also for none."""

    key: str
    value: str
    """As it is written."""
    start: str
    middle: tuple[str, ...]
    end: str

    def fits(self, entry: tuple[str, str]) -> bool:
        """Whether an entry has this key, and a value as this."""
        key, value = entry
        if key != self.key or not value.startswith(self.start) or not value.endswith(self.end):
            return False
        position, end = len(self.start), len(value) - len(self.end)
        for part in self.middle:
            found = value.find(part, position, end)
            if found < 0:
                return False
            position = found + len(part)
        return position <= end


def make_pattern(key: str, value: str) -> Pattern:
    """The pattern of a value in which there is a `*`."""
    start, *middle, end = value.split("*")
    return Pattern(key, value, start, tuple(middle), end)


class Patterns(Generic[T]):
    """Patterns in the order of a document, each with what it leads to; none is added later."""

    __slots__ = "_by_end", "_by_start", "_ends", "_items", "_starts"

    def __init__(self, items: Iterable[tuple[Pattern, T]] = ()) -> None:
        self._items = tuple(items)
        self._by_start: dict[tuple[str, str], list[tuple[int, Pattern, T]]] = {}
        self._by_end: dict[tuple[str, str], list[tuple[int, Pattern, T]]] = {}
        for place, (pattern, led) in enumerate(self._items if len(self._items) > _FEW else ()):
            begins = len(pattern.start) >= len(pattern.end)
            index, text = (self._by_start, pattern.start) if begins else (self._by_end, pattern.end)
            index.setdefault((pattern.key, text), []).append((place, pattern, led))
        self._starts = _find_lengths(self._by_start)
        self._ends = _find_lengths(self._by_end)

    def __iter__(self) -> Iterator[tuple[Pattern, T]]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Patterns) and self._items == other._items

    __hash__ = None  # type: ignore[assignment]

    def find(self, entry: tuple[str, str]) -> tuple[Pattern, T] | None:
        """The first that fits."""
        if len(self._items) <= _FEW:
            return next((each for each in self._items if each[0].fits(entry)), None)
        key, value = entry
        place = len(self._items)
        for candidates in self._list_candidates(key, value):
            for at, pattern, _ in candidates:
                if at >= place:
                    break
                if pattern.fits(entry):
                    place = at
                    break
        return self._items[place] if place < len(self._items) else None

    def _list_candidates(self, key: str, value: str) -> Iterator[list[tuple[int, Pattern, T]]]:
        """Those that begin or end as a value does, each list in the order of the document."""
        for length in self._starts.get(key, ()):
            if (found := self._by_start.get((key, value[:length]))) is not None:
                yield found
        for length in self._ends.get(key, ()):
            if (found := self._by_end.get((key, value[-length:]))) is not None:
                yield found


def _find_lengths(index: Iterable[tuple[str, str]]) -> dict[str, list[int]]:
    """By key how long the texts are."""
    lengths: dict[str, set[int]] = {}
    for key, text in index:
        lengths.setdefault(key, set()).add(len(text))
    return {key: sorted(found) for key, found in lengths.items()}
