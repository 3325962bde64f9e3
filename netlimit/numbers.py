"""Numbers that must stay put while the kernel holds something that carries them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from netlimit.marks import is_run

PurposeKey = tuple[str, str]
"""What a number is for: a group, within which numbers differ, and a name."""
Numbering = dict[PurposeKey, int]
"""What may be in the kernel, with the number that it has (0: needs none)."""


MARK_BITS: PurposeKey = ("packet mark", "")
"""What the bits of the packet mark are kept under in which entries carry their numbers."""


TRANSLATED: PurposeKey = ("translated", "")
"""What the address families are kept under in which somebody translated: 1 for IPv4, 2 for IPv6, 3 for both."""
_FAMILIES = ((1, 4), (2, 6))


def find_translated(kept: Mapping[PurposeKey, int]) -> frozenset[int]:
    """Those families, as they were kept."""
    return frozenset(family for bit, family in _FAMILIES if kept.get(TRANSLATED, 0) & bit)


def number_families(families: Collection[int]) -> int:
    """The number under which families are kept."""
    return sum(bit for bit, family in _FAMILIES if family in families)


def find_mark_bits(kept: Mapping[PurposeKey, int]) -> int | None:
    """The bits of the packet mark that are in force; None where nothing is kept, or what somebody else has written."""
    mask = kept.get(MARK_BITS, 0)
    return mask if is_run(mask) else None


class Numbers:
    """Gives out numbers and remembers them; what is not `used` any more goes at `settle`."""

    def __init__(self, kept: Mapping[PurposeKey, int] | None = None) -> None:
        self.kept: Numbering = {}
        self.used: set[PurposeKey] = set()
        self._names: dict[str, dict[int, str]] = {}
        for (group, name), number in (kept or {}).items():
            # Of two that have the same number, as only somebody else can have written them, the first keeps it.
            if self._names.setdefault(group, {}).setdefault(number, name) == name or not number:
                self.kept[group, name] = number

    def take(self, group: str, name: str, among: range, first: Iterable[int] = ()) -> int | None:
        """The number of a purpose, a new one out of `among` if it has none, of which some come `first`; None when all
        are taken."""
        key = (group, name)
        number = self.kept.get(key)
        if number is None or number not in among:
            names = self._names.setdefault(group, {})
            number = next((each for each in chain(first, among) if each not in names), None)
            if number is None:
                return None
            names[number] = name
            self.kept[key] = number
        self.used.add(key)
        return number

    def has_room(self, group: str, among: range) -> bool:
        """Whether there is a number left for a new purpose."""
        names = self._names.get(group, {})
        return any(each not in names for each in among)

    def take_over(self, group: str, name: str, among: range, first: PurposeKey | None = None) -> PurposeKey | None:
        """Have a purpose take the number of one of its group that is not in use any more, at best that of `first`;
        which one has lost it, None when all are in use."""
        names = self._names.get(group, {})
        unused = [number for number in sorted(names) if number in among and (group, names[number]) not in self.used]
        if not unused:
            return None
        number = next((each for each in unused if (group, names[each]) == first), unused[0])
        former = (group, names[number])
        del self.kept[former]
        names[number] = name
        self.kept[group, name] = number
        self.used.add((group, name))
        return former

    def keep(self, key: PurposeKey, number: int) -> None:
        """Keep a number that is given."""
        self.kept[key] = number
        self.used.add(key)

    def note(self, key: PurposeKey) -> None:
        """Keep a purpose that needs no number."""
        self.kept.setdefault(key, 0)
        self.used.add(key)

    def find(self, group: str, number: int) -> str | None:
        """The name of what has a number."""
        return self._names.get(group, {}).get(number)

    def release(self, group: str, name: str) -> None:
        """A purpose is not in use any more."""
        self.used.discard((group, name))

    def release_all(self, group: str, but: Collection[str] = ()) -> None:
        """Nothing of a group is in use any more, but for some names."""
        self.used -= {(group, name) for name in self._names.get(group, {}).values() if name not in but}

    @property
    def retired(self) -> set[PurposeKey]:
        """What may still be in the kernel, but is not in use."""
        return self.kept.keys() - self.used

    def settle(self) -> set[PurposeKey]:
        """The kernel holds nothing any more but what is in use; returns what went."""
        retired = self.retired
        for group, name in retired:
            self._names.get(group, {}).pop(self.kept.pop((group, name)), None)
        return retired
