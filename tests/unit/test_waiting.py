"""Newcomers that found no room: who keeps sending, and who was seen once."""

from netlimit.waiting import Waiting


def test_who_keeps_sending_comes_before_who_is_seen_for_the_first_time() -> None:
    waiting = Waiting()
    for seen in (["10.1.0.2", "10.1.0.9"], ["10.1.0.3", "10.1.0.9"]):
        assert waiting.put_first("set", seen) == seen, "nobody is known to"
        waiting.note("set", seen)
        waiting.turn()
    assert waiting.put_first("set", ["10.1.0.3", "10.1.0.9"]) == ["10.1.0.9", "10.1.0.3"]


def test_who_was_seen_just_before_a_turn_may_be_in_the_set_still_and_has_not_sent_again() -> None:
    waiting = Waiting()
    waiting.note("set", ["10.1.0.9"])
    waiting.turn()
    assert waiting.put_first("set", ["10.1.0.2", "10.1.0.9"]) == ["10.1.0.2", "10.1.0.9"]


def test_those_that_keep_sending_are_counted() -> None:
    waiting = Waiting()
    waiting.note("set", ["10.1.0.2", "10.1.0.9"])
    waiting.note("other", ["10.1.0.7"])
    assert waiting.count() == 0
    waiting.turn()
    waiting.note("set", ["10.1.0.3", "10.1.0.9"])
    waiting.note("other", ["10.1.0.7"])
    assert waiting.count() == 2


def test_it_lasts_while_somebody_finds_no_room_from_turn_to_turn() -> None:
    waiting = Waiting()
    waiting.note("set", ["10.1.0.2"])
    waiting.turn()
    assert not waiting.lasts
    waiting.note("set", ["10.1.0.3"])
    waiting.turn()
    assert waiting.lasts
    waiting.turn()
    assert not waiting.lasts
