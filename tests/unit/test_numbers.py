"""Numbers stay put while the kernel may hold something that carries them."""

from __future__ import annotations

import pytest

from netlimit.numbers import MARK_BITS, Numbers, find_mark_bits

FEW = range(1, 4)


def test_a_purpose_keeps_its_number_and_no_two_of_a_group_have_the_same() -> None:
    numbers = Numbers()
    assert [numbers.take("g", name, FEW) for name in "abab"] == [1, 2, 1, 2]
    assert numbers.take("h", "a", FEW) == 1
    assert (numbers.find("g", 2), numbers.find("g", 3), numbers.find("x", 1)) == ("b", None, None)


def test_when_all_are_taken_there_is_none() -> None:
    numbers = Numbers()
    for name in "abc":
        numbers.take("g", name, FEW)
    assert numbers.take("g", "d", FEW) is None
    assert ("g", "d") not in numbers.kept
    numbers.release("g", "b")
    assert numbers.take("g", "d", FEW) is None, "the kernel may still hold it"
    numbers.settle()
    assert numbers.take("g", "d", FEW) == 2


def test_a_number_that_nobody_uses_can_be_taken_over_at_once() -> None:
    numbers = Numbers()
    for name in "abc":
        numbers.take("g", name, FEW)
    assert numbers.take_over("g", "d", FEW) is None
    for name in "abc":
        numbers.release("g", name)
    assert numbers.take_over("g", "d", FEW, ("g", "b")) == ("g", "b")
    assert numbers.take_over("g", "e", FEW, ("g", "b")) == ("g", "a"), "that one has gone to another"
    assert numbers.kept == {("g", "e"): 1, ("g", "d"): 2, ("g", "c"): 3}
    assert numbers.settle() == {("g", "c")}


def test_what_is_released_stays_until_it_is_settled() -> None:
    numbers = Numbers()
    numbers.take("g", "a", FEW)
    numbers.release("g", "a")
    assert numbers.retired == {("g", "a")}
    assert numbers.kept == {("g", "a"): 1}
    assert numbers.settle() == {("g", "a")}
    assert numbers.kept == {}
    assert numbers.find("g", 1) is None


def test_what_is_released_and_taken_again_is_in_use() -> None:
    numbers = Numbers()
    numbers.take("g", "a", FEW)
    numbers.release("g", "a")
    assert numbers.take("g", "a", FEW) == 1
    assert numbers.settle() == set()


def test_what_was_kept_is_known_but_not_in_use() -> None:
    numbers = Numbers({("g", "a"): 1, ("g", "b"): 2, ("limit", ""): 0})
    assert numbers.take("g", "c", FEW) == 3
    assert numbers.take("g", "b", FEW) == 2
    assert numbers.retired == {("g", "a"), ("limit", "")}
    numbers.note(("limit", ""))
    assert numbers.settle() == {("g", "a")}


def test_a_whole_group_is_released_and_no_other() -> None:
    numbers = Numbers()
    for group in "gh":
        for name in "ab":
            numbers.take(group, name, FEW)
    numbers.release_all("g")
    numbers.release_all("never heard of")
    assert numbers.settle() == {("g", "a"), ("g", "b")}
    assert numbers.kept == {("h", "a"): 1, ("h", "b"): 2}


@pytest.mark.parametrize("kept", [0, -1, 1, 0x5, 0xF00F, 2**32, 0x1FF000000, -256])
def test_bits_of_the_mark_that_cannot_be_are_none(kept: int) -> None:
    assert find_mark_bits({MARK_BITS: kept}) is None


@pytest.mark.parametrize("kept", [0x3, 0xFF000000, 0xFFFFFFFF, 0x3F00])
def test_bits_of_the_mark_are_kept(kept: int) -> None:
    assert find_mark_bits({MARK_BITS: kept}) == kept
    assert find_mark_bits({}) is None
