"""Who still has a class by himself, by what classes have counted, reading by reading."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest

from netlimit.presence import IDLE, Presence
from netlimit.tree import Usage

START = datetime(2030, 1, 1, tzinfo=UTC)
PACE = 15
"""Seconds from one reading to the next."""


class Readings:
    """A device whose classes are read time and again."""

    def __init__(self, few: int = 0) -> None:
        self.presence = Presence(few=few)
        self.seconds = 0.0

    def read(self, counted: Mapping[int, int], waiting: int = 0, wanted: int = 0) -> set[int]:
        """What is idle at the next reading, by the packets that classes have counted; so many wait in each."""
        self.seconds += PACE
        usages = {number: Usage(packets, 0, 0, 0, waiting, 0) for number, packets in counted.items()}
        now = START + timedelta(seconds=self.seconds)
        return self.presence.find_idle("lan", usages, set(counted), now, wanted)


def test_a_class_through_which_nothing_has_gone_goes_at_its_second_reading() -> None:
    """Its first packet went through the newcomers' class; there may be no such host, as in a scan."""
    readings = Readings()
    assert readings.read({1: 0, 2: 5}) == set()
    assert readings.read({1: 0, 2: 5}) == {1}


@pytest.mark.parametrize("pause", [30, 60, 100])
def test_where_few_are_who_sends_once_in_two_minutes_keeps_his_class(pause: int) -> None:
    """As what keeps a connection open does: his class would be made and unmade for good."""
    readings, counted = Readings(few=1), -1
    for second in range(0, 1200, PACE):
        if second % pause < PACE:
            counted += 1
        assert readings.read({1: counted}) == set(), second


def test_a_class_that_has_sent_stays_for_two_minutes() -> None:
    readings, passed = Readings(), 0
    readings.read({1: 1})
    while not readings.read({1: 1}):
        passed += PACE
    assert passed + PACE == IDLE.total_seconds()


def test_a_class_in_which_something_waits_stays() -> None:
    readings = Readings()
    assert [readings.read({1: 0}, waiting=1) for _ in range(20)] == [set()] * 20


def test_a_number_that_is_given_out_again_has_all_the_time_of_a_new_one() -> None:
    readings = Readings()
    readings.read({1: 0})
    assert readings.read({1: 0}) == {1}
    assert readings.read({1: 0}) == set(), "somebody else has it now"
    assert readings.read({1: 0}) == {1}


@pytest.mark.parametrize("phase", range(PACE))
def test_who_sends_every_twenty_seconds_is_not_made_and_unmade(phase: int) -> None:
    """It may happen once, before the first packet has gone through the class."""
    readings, counted, unmade = Readings(), None, 0
    for second in range(phase, 600):
        if (second - phase) % 20 == 0:
            counted = 0 if counted is None else counted + 1
        if second and second % PACE == 0 and counted is not None and readings.read({1: counted}):
            counted, unmade = None, unmade + 1
    assert unmade <= 1


def test_the_longest_idle_make_room_where_places_are_wanted() -> None:
    readings = Readings()
    readings.read({1: 1, 2: 1, 3: 1, 4: 1})
    readings.read({1: 2, 2: 1, 3: 1, 4: 1})
    readings.read({1: 2, 2: 1, 3: 2, 4: 2})
    assert readings.read({1: 2, 2: 1, 3: 2, 4: 3}, wanted=2) == {1, 2}


def test_who_has_sent_since_the_last_reading_makes_no_room() -> None:
    readings = Readings()
    readings.read({1: 1, 2: 1})
    assert readings.read({1: 2, 2: 1}, wanted=5) == {2}


def test_those_that_never_sent_are_the_first_to_make_room() -> None:
    readings = Readings()
    readings.read({1: 1, 2: 0})
    assert readings.read({1: 1, 2: 0}, wanted=1) == {2}


def test_those_that_stay_are_told_the_longest_idle_first() -> None:
    readings = Readings()
    readings.read({1: 1, 2: 1, 3: 1})
    readings.read({1: 2, 2: 1, 3: 2})
    readings.read({1: 2, 2: 1, 3: 3})
    assert readings.presence.line_up("lan") == [2, 1, 3]
    assert readings.presence.line_up("wan") == []
