"""Who else uses packet marks, and which bits of them are left for us.

A bit is *taken* when others may ever leave it set on a packet that we meet, or ask for a packet on which it is set: we
clear our bits, and would undo the one and keep the other from ever being true. Who writes zero to our bits, or asks for
zero in them, is in nobody's way: outside our chains they are zero. Marks go from packets to connections and back, so
what is taken is followed through both until nothing is added. A mask under which somebody writes or asks is *claimed*:
he does not need its other bits today, so they are left to him where there is a choice; and so is what cannot be read.

One place matters. A packet to be rejected bears all of our bits from mangle to filter in the same hook: who overwrites
them there lets it pass. Bits that he leaves alone are taken instead, where there are such.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

EVERY = 0xFFFFFFFF
USUAL = 0xFF000000
"""The bits that are ours where nobody else uses them."""
WIDTH = 8
"""So many bits are ours where there are as many."""
_NARROWEST = 2
"""Fewer bits have no room for two limits of a kind."""


def is_run(mask: int) -> bool:
    """Whether these are bits that can be ours: two or more of the 32, side by side."""
    ones = mask // (mask & -mask) if 0 < mask < 2**32 else 0
    return ones > 1 and ones & (ones + 1) == 0


@dataclass(frozen=True, slots=True)
class Bits:
    """Which bits a mark can have after it was written: constants, and those that it takes from the packet's mark and
    from the connection's. Not `sure`: more than is really written, for it could not be understood."""

    constant: int = 0
    packet: int = 0
    connection: int = 0
    sure: bool = True

    def under(self, mask: int) -> Bits:
        """What is left of it under a mask."""
        return Bits(self.constant & mask, self.packet & mask, self.connection & mask, self.sure or not mask)

    def may_become(self, mark: int, mask: int) -> bool:
        """Whether what is written, and not only what is left as it was, can make a mark equal to one under a mask; of a
        mark of zero, whether it can make it another."""
        new = self.constant | self.connection
        if not self.sure or not mark & mask:
            return bool(new & mask)
        return not self.constant & mask & ~mark and not mark & mask & ~(new | self.packet) and bool(mark & mask & new)

    def __or__(self, other: Bits) -> Bits:
        return Bits(
            self.constant | other.constant,
            self.packet | other.packet,
            self.connection | other.connection,
            self.sure and other.sure,
        )


UNKNOWN = Bits(EVERY, sure=False)


@dataclass(frozen=True, slots=True)
class Write:
    """Somebody writes the packet's mark, or the connection's. `owner` is a phrase that begins a sentence. `late`:
    behind all of our chains. `between`: the hooks in which a packet to be rejected may pass him before filter answers,
    as `FORWARD`, or `FORWARD6` of IPv6. `claims` is the mask that is his."""

    owner: str
    value: Bits
    connection: bool = False
    late: bool = False
    between: frozenset[str] = frozenset()
    claims: int = 0

    @property
    def wiped(self) -> int:
        """The bits that he overwrites on a packet to be rejected."""
        return EVERY & ~self.value.packet if self.between and not self.connection else 0

    @property
    def saved(self) -> int:
        """The bits of a packet to be rejected that he writes into the mark of its connection."""
        return self.value.packet if self.between and self.connection else 0


@dataclass(frozen=True, slots=True)
class Read:
    """Somebody asks for a mark with these bits set, and others under the same mask unset."""

    owner: str
    bits: int
    connection: bool = False
    sure: bool = True
    claims: int = 0


Use = Write | Read


@dataclass(frozen=True, slots=True)
class MarkUse:
    """What was found on a host. `unread` tells what could not be looked at, and why."""

    uses: tuple[Use, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """Our bits. `problem` says why limits that need marks cannot be enforced, `reject` why those that reject cannot, by
    the hook (as `Write.between` has it) in which they are asked; `notes` what an operator should know of the marks of
    others."""

    mask: int
    problem: str | None = None
    reject: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def choose(found: MarkUse, asked: int | None, kept: int | None = None) -> Choice:
    """The bits for us: those that were `asked` for, or (None) those that are `kept`, or others if they are taken."""
    taken, claimed = list(_find_taken(found.uses, doubtful=False)), list(_find_taken(found.uses, doubtful=True))
    wiped = _find_wiped(found.uses, _heed_connections(found.uses))
    mask = asked or _find_free(_add_up(taken), _add_up(claimed), wiped, kept)
    owner, bits = next(((owner, bits & mask) for owner, bits in taken if bits & mask), ("", 0))
    free = _find_free(_add_up(taken), _add_up(claimed), wiped, None)
    problem = None
    if bits and asked:
        advice = f"Set one that is free, such as {free:#010x}, or auto." if not free & _add_up(taken) else _NONE
        problem = f"{owner} uses bits {bits:#x} of the packet mark, which NETLIMIT_MARK_MASK {mask:#x} covers. {advice}"
    elif bits:
        problem = f"{owner} uses bits {bits:#x} of the packet mark, and others use the rest. {_NONE}"
    notes = tuple(_note(claimed, taken, mask, found.unread))
    return Choice(mask, problem, dict(_find_wiping(found.uses, mask)), notes)


_NONE = f"Free {_NARROWEST} bits of the mark side by side first."


def _find_taken(uses: tuple[Use, ...], doubtful: bool) -> Iterator[tuple[str, int]]:
    """Who takes which bits of the packet's mark where we meet it; with `doubtful`, also what may be meant for later."""
    writes = [use for use in uses if isinstance(use, Write) and (doubtful or use.value.sure)]
    reads = [use for use in uses if isinstance(use, Read) and (doubtful or use.sure)]
    packet, connection = 0, 0
    for read in reads:
        connection |= read.bits if read.connection else 0
    while True:
        before = packet, connection
        for write in writes:
            bits = _resolve(write.value, packet, connection)
            packet, connection = (packet, connection | bits) if write.connection else (packet | bits, connection)
        if before == (packet, connection):
            break
    for write in writes:
        if not write.connection and (doubtful or not write.late):
            yield write.owner, write.value.constant | (connection & write.value.connection)
    yield from ((read.owner, read.bits) for read in reads if not read.connection)
    if doubtful:
        yield from ((use.owner, use.claims) for use in uses if not use.connection)


def _resolve(value: Bits, packet: int, connection: int) -> int:
    return value.constant | (value.packet & packet) | (value.connection & connection)


def _find_free(taken: int, claimed: int, wiped: int, kept: int | None) -> int:
    """The bits for us: kept ones that nobody has taken, the usual ones, or others; the usual if there are none. Those
    that are `wiped` only where there are no others, of which there are as many."""
    found = _find_window(taken, (claimed | wiped, wiped, claimed, 0))
    if kept is not None and not kept & taken and (not kept & wiped or found is None or found & wiped):
        return kept
    return found or kept or USUAL


def _find_window(taken: int, avoided: Iterable[int]) -> int | None:
    """As many bits as there are that nobody has taken, but for those that are to be `avoided`, or else the next."""
    for width in range(WIDTH, _NARROWEST - 1, -1):
        windows = [((1 << width) - 1) << shift for shift in _shifts(width)]
        for others in avoided:
            for window in windows:
                if not window & (taken | others):
                    return window
    return None


def _shifts(width: int) -> Iterator[int]:
    """Whole bytes first, from the top."""
    whole = [shift for shift in (24, 16, 8, 0) if width == WIDTH]
    yield from chain(whole, (shift for shift in range(32 - width, -1, -1) if shift not in whole))


def _heed_connections(uses: Iterable[Use]) -> bool:
    """Whether anybody asks for marks of connections, or brings them back."""
    return any(use.connection if isinstance(use, Read) else not use.connection and use.value.connection for use in uses)


def _find_wiped(uses: Iterable[Use], heeds: bool) -> int:
    """The bits that somebody who leaves others overwrites, or saves in connections of whose marks somebody `heeds`."""
    bits = 0
    for use in uses:
        for each in (use.wiped, use.saved if heeds else 0) if isinstance(use, Write) else ():
            bits |= each if each != EVERY else 0
    return bits


def _find_wiping(uses: Collection[Use], mask: int) -> Iterator[tuple[str, str]]:
    told, heeds = set[str](), _heed_connections(uses)
    for use in uses:
        does = _say_wiping(use, mask, heeds) if isinstance(use, Write) else None
        if isinstance(use, Write) and does is not None:
            reason = f"{use.owner} {does} Use `drop`, or let it write under a mask that leaves them out."
            yield from ((hook, reason) for hook in sorted(use.between - told))
            told |= use.between


def _say_wiping(write: Write, mask: int, heeds: bool) -> str | None:
    where = f"the bits {mask:#x} of the packet mark between mangle and filter, which tell whom to reject"
    if mask & write.wiped:
        return f"overwrites {where}."
    if heeds and mask & write.saved:
        return f"saves {where}, in the mark of the connection, by which all else of it would be led elsewhere."
    return None


def _note(
    claimed: Iterable[tuple[str, int]], taken: Iterable[tuple[str, int]], mask: int, unread: Iterable[str]
) -> Iterator[str]:
    if mask & _add_up(taken):
        return
    owner, bits = next(((owner, bits & mask) for owner, bits in claimed if bits & mask), ("", 0))
    if bits:
        yield f"{owner} may use bits {bits:#x} of the packet mark, which netlimit uses too: {mask:#x}."
    yield from (f"Whether others use packet marks is not known: {reason}" for reason in unread)


def _add_up(found: Iterable[tuple[str, int]]) -> int:
    bits = 0
    for _, each in found:
        bits |= each
    return bits
