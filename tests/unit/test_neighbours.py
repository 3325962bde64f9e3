"""Those who use packet marks come and go: rules and bits stay calm."""

from __future__ import annotations

from itertools import pairwise

import pytest

from netlimit.kernel.fake import FakeKernel
from netlimit.marks import EVERY, USUAL, Bits, MarkUse, Read, Use, Write
from netlimit.neighbours import CALM_SECONDS, REMEMBERED_SECONDS, Neighbours

FIRST, SECOND = Write("X", Bits(0x1000000)), Read("Y", 0x10000)
ALL = Read("Z", EVERY)


class Watched:
    """A host whose neighbours are looked at once a second; bits in force are those that were chosen."""

    def __init__(self, asked: int | None = None) -> None:
        self.second = 0.0
        self.kernel = FakeKernel()
        self.neighbours = Neighbours(self.kernel, asked, lambda: self.second)

    def look(self, *uses: Use) -> bool:
        self.second += 1
        self.kernel.mark_use = MarkUse(uses)
        changed = self.neighbours.look()
        self.neighbours.keep(self.neighbours.choice.mask)
        return changed

    @property
    def mask(self) -> int:
        return self.neighbours.choice.mask


@pytest.mark.parametrize("rounds", [[(FIRST,), ()], [(FIRST,), (SECOND,)], [(FIRST,), (), (SECOND,), ()]])
def test_rules_that_come_and_go_move_the_bits_once_each_at_most(rounds: list[tuple[Use, ...]]) -> None:
    host = Watched()
    masks = []
    for _ in range(60):
        for uses in rounds:
            host.look(*uses)
            masks.append(host.mask)
    moves = sum(one != other for one, other in pairwise(masks))
    assert moves <= 1
    assert not host.mask & 0x1000000


def test_bits_that_were_used_long_ago_are_free_again() -> None:
    host = Watched()
    host.look(FIRST)
    assert host.mask == 0xFF0000
    host.second += REMEMBERED_SECONDS
    host.look(SECOND)
    assert host.mask == USUAL


MANY = (Read("X", 0xFFFF0000), Write("Y", Bits(0xCA6C)))
"""What leaves two bits side by side."""


def test_bits_that_others_have_left_for_long_are_ours_again_where_there_were_few() -> None:
    """Or limits that have found no room among those few stay out of force for ever."""
    host = Watched()
    host.look(*MANY)
    assert host.mask.bit_count() == 2
    host.look(MANY[0])
    narrow = host.mask
    assert narrow.bit_count() == 2, "who has just been there may come again"
    host.second += REMEMBERED_SECONDS
    host.look(MANY[0])
    assert host.mask == 0xFF00
    host.second += REMEMBERED_SECONDS
    host.look()
    assert host.mask == 0xFF00, "as many as there can be: no reason to move"


@pytest.mark.parametrize("asked", [None, 0x3])
def test_after_a_start_few_bits_become_more_only_once_others_had_time_to_come(asked: int | None) -> None:
    host = Watched(asked)
    host.neighbours.keep(0x3)
    assert host.mask == 0x3
    host.look()
    assert host.mask == 0x3
    host.second += REMEMBERED_SECONDS
    host.look()
    assert host.mask == (asked or USUAL)


def test_what_cannot_be_looked_at_widens_no_bits() -> None:
    host = Watched()
    host.neighbours.keep(0x3)
    host.look()
    host.second += REMEMBERED_SECONDS
    host.kernel.mark_use = MarkUse(unread=("nft ends with status 1",))
    host.neighbours.look()
    assert host.mask == 0x3


def test_what_is_remembered_is_used_where_nothing_else_is_left() -> None:
    host = Watched()
    host.look(Read("X", 0xFFFFFF00))
    assert host.mask == 0xFF
    host.look(Read("Y", 0x000000FF))
    assert host.neighbours.choice.problem is None
    assert host.mask == USUAL


@pytest.mark.parametrize("asked", [None, USUAL])
def test_who_takes_all_bits_every_second_has_rules_looked_at_again_a_few_times_only(asked: int | None) -> None:
    host = Watched(asked)
    host.look()
    changes = sum(host.look(*uses) for _ in range(60) for uses in ((ALL,), ()))
    assert changes <= 3
    assert host.neighbours.choice.problem is not None, "and it is told all the while"
    for _ in range(int(CALM_SECONDS) + 1):
        host.look()
    assert host.neighbours.choice.problem is None


def test_who_comes_and_goes_once_is_believed_at_once() -> None:
    host = Watched()
    assert not host.look()
    assert host.look(ALL)
    assert host.look()


def test_as_many_as_somebody_cares_to_invent_are_not_all_remembered() -> None:
    host = Watched()
    for number in range(0, 20_000, 100):
        host.look(*(Write(f"X{each}", Bits(7)) for each in range(number, number + 100)))
    assert len(host.neighbours._seen) <= 4096
