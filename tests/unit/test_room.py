"""Who is let in by the API, and who has to go for it."""

from __future__ import annotations

from itertools import count

import pytest

from api import room as rooms
from api.room import Guest, Room, Standing


class House:
    """A room, and who was dropped."""

    def __init__(self) -> None:
        self.room = Room()
        self.dropped: list[int] = []
        self._numbers = count()

    def enter(self, place: str, standing: Standing = Standing.STRANGER) -> Guest | None:
        number = next(self._numbers)
        return self.room.enter(place, standing, lambda: self.dropped.append(number))


@pytest.fixture
def house() -> House:
    return House()


def test_strangers_never_take_the_room_of_others(house: House) -> None:
    for number in range(5000):
        guest = house.enter(f"203.0.{number % 200}.{number % 250}")
        assert guest is not None
    assert len(house.room) == rooms.MOST[Standing.STRANGER]
    for standing in (Standing.LOCAL, Standing.KNOWN, Standing.PROXY):
        assert house.enter("203.0.113.9", standing) is not None
    assert len(house.room) == rooms.MOST[Standing.STRANGER] + 3


def test_who_has_waited_longest_goes_first(house: House) -> None:
    guests = [house.enter(f"203.{number}.113.9") for number in range(rooms.MOST[Standing.STRANGER])]
    assert guests[0] is not None
    house.room.answer(guests[0])
    house.enter("198.51.100.1")
    house.room.wait(guests[0])  # its answer is complete: it has waited for the shortest time
    house.enter("198.51.100.2")
    assert house.dropped == [1, 2]


def test_one_that_is_answered_never_goes(house: House) -> None:
    for number in range(rooms.MOST[Standing.STRANGER]):
        guest = house.enter(f"203.{number}.113.9")
        assert guest is not None
        house.room.answer(guest)
    assert house.enter("198.51.100.1") is None
    assert house.dropped == []
    house.room.leave(guest)
    house.room.leave(guest)
    assert house.enter("198.51.100.1") is not None


@pytest.mark.parametrize(
    ("places", "most"),
    [
        (["203.0.113.9"], rooms.MOST_OF_ONE[Standing.STRANGER]),
        ([f"203.0.113.{n}" for n in range(256)], rooms.MOST_OF_NETWORK[Standing.STRANGER]),
        ([f"2001:db8:0:1::{n:x}" for n in range(256)], rooms.MOST_OF_ONE[Standing.STRANGER]),
        ([f"2001:db8:0:{n:x}::1" for n in range(256)], rooms.MOST_OF_NETWORK[Standing.STRANGER]),
    ],
    ids=["address", "/24", "/64", "/48"],
)
def test_one_stranger_takes_the_place_of_himself(house: House, places: list[str], most: int) -> None:
    other = house.enter("198.51.100.1")
    for place in places * (512 // len(places)):
        house.enter(place)
    assert len(house.room) == most + 1
    assert other is not None
    house.room.answer(other)  # it is still there
    assert 0 not in house.dropped


def test_who_has_left_is_not_counted(house: House) -> None:
    for _ in range(3):
        guests = [house.enter("203.0.113.9") for _ in range(rooms.MOST_OF_ONE[Standing.STRANGER])]
        assert None not in guests
        for guest in guests:
            house.room.leave(guest)  # type: ignore[arg-type]
    assert house.dropped == []
    assert len(house.room) == 0
    house.room.wait(guest)  # type: ignore[arg-type]
    house.enter("203.0.113.9")
    assert house.dropped == []


@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_whose_are_answered_most_give_place_to_others(house: House, tokens: int) -> None:
    """All of this host's room is theirs; everybody else comes in all the same, and stays."""
    fill(house, tokens)
    others = [house.enter("127.0.0.1", Standing.LOCAL) for _ in range(rooms.KEPT)]
    assert None not in others
    assert len(house.dropped) == rooms.KEPT
    for guest in others:
        assert guest is not None
        guest.find_owner = lambda: "admin"
        house.room.answer(guest)
    for _ in range(rooms.KEPT):
        assert house.enter("127.0.0.1", Standing.LOCAL) is not None
    assert len(house.dropped) == 2 * rooms.KEPT
    assert max(house.dropped) < rooms.MOST[Standing.LOCAL], "not those of the others"


def test_nobody_who_has_few_is_cut_off(house: House) -> None:
    fill(house, rooms.MOST[Standing.LOCAL] // rooms.KEPT)
    assert house.enter("127.0.0.1", Standing.LOCAL) is None
    assert house.dropped == []


def fill(house: House, tokens: int) -> None:
    """Have all of this host's connections be answered, to so many tokens in turns."""
    for number in range(rooms.MOST[Standing.LOCAL]):
        guest = house.enter("127.0.0.1", Standing.LOCAL)
        assert guest is not None
        guest.find_owner = lambda owner=number % tokens: owner  # type: ignore[misc]
        house.room.answer(guest)
