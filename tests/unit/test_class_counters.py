"""What classes count, added up by rule: nothing is lost or counted twice when classes come, go and change hands."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlimit.counting import Tally
from netlimit.plan import WriteTree
from netlimit.tree import Tree, Usage

NOW = datetime(2030, 1, 1, tzinfo=UTC)
A, B, C = 0x70010001, 0x70010002, 0x70010003


def used(packets: int, *, dropped: int = 0, waiting: int = 0) -> Usage:
    return Usage(packets, 100 * packets, dropped, 0, waiting, 100 * waiting)


def read(tally: Tally, held: Mapping[int, list[int]], **usages: Usage) -> dict[int, int]:
    """One reading of a device: the packets that have matched each of the rules whose counters changed."""
    numbers = {"a": A, "b": B, "c": C}
    classes = {rule: [("wan", number) for number in own] for rule, own in held.items()}
    counters = tally.read_usages(classes, {"wan": {numbers[n]: usage for n, usage in usages.items()}}, NOW)
    return {each.rule_id: each.total.matched_packets for each in counters}


def test_a_rule_counts_what_its_classes_do() -> None:
    tally = Tally()
    assert read(tally, {1: [A, B]}, a=used(3), b=used(4)) == {1: 7}
    assert read(tally, {1: [A, B]}, a=used(3), b=used(4)) == {}
    assert read(tally, {1: [A, B]}, a=used(3), b=used(6)) == {1: 9}


def test_what_waits_and_what_is_dropped_has_matched() -> None:
    tally = Tally()
    assert read(tally, {1: [A]}, a=used(3, dropped=2, waiting=5)) == {1: 10}
    assert read(tally, {1: [A]}, a=used(8, dropped=2)) == {1: 10}, "what waited was sent"


def test_classes_come_and_go() -> None:
    tally = Tally()
    read(tally, {1: [A]}, a=used(10))
    assert read(tally, {1: [A, B]}, a=used(10), b=used(2)) == {1: 12}
    assert read(tally, {1: [B]}, b=used(5)) == {1: 15}
    assert read(tally, {1: []}) == {1: 15}
    assert read(tally, {1: [C]}, c=used(1)) == {1: 16}


def test_a_class_that_went_and_came_back_between_two_readings_counts_from_nothing() -> None:
    tally = Tally()
    read(tally, {1: [A, B]}, a=used(1000), b=used(500))
    assert read(tally, {1: [A, B]}, a=used(5), b=used(600)) == {1: 1605}
    assert read(tally, {1: [A, B]}, a=used(0), b=used(605)) == {1: 1610}, "though their sum is the same"


def test_a_rule_does_not_take_over_what_its_class_has_counted_for_another() -> None:
    tally = Tally()
    read(tally, {1: [A, B]}, a=used(100), b=used(10))
    assert read(tally, {1: [B], 2: [A]}, a=used(103), b=used(11)) == {1: 111, 2: 3}
    assert read(tally, {1: [A, B], 2: []}, a=used(105), b=used(11)) == {1: 113, 2: 3}


def test_nor_if_the_other_rule_is_gone() -> None:
    tally = Tally()
    read(tally, {1: [A]}, a=used(100))
    tally.forget(1)
    assert read(tally, {2: [A]}, a=used(103)) == {2: 3}


def test_a_class_that_went_counts_from_nothing_even_if_it_soon_counts_more() -> None:
    tally = Tally()
    read(tally, {1: [A], 3: [B]}, a=used(100), b=used(50))
    tally.forget(1)
    tally.leave(WriteTree("wan", 0x7001, gone=(A,)))
    assert read(tally, {2: [A], 3: [B]}, a=used(103), b=used(51)) == {2: 103, 3: 51}


@pytest.mark.parametrize("change", [{"root": Tree(0x7001)}, {"drop": True}])
def test_so_do_all_of_a_tree_that_is_made_anew(change: dict[str, Any]) -> None:
    tally = Tally()
    read(tally, {1: [A], 2: [B]}, a=used(100), b=used(50))
    tally.leave(WriteTree("lan", 0x7001, **change))
    assert read(tally, {1: [A], 2: [B]}, a=used(101), b=used(50)) == {1: 101}, "another device's"
    tally.leave(WriteTree("wan", 0x7001, **change))
    assert read(tally, {1: [A], 2: [B]}, a=used(102), b=used(50)) == {1: 203, 2: 100}


def test_a_reading_of_some_rules_takes_nothing_from_the_others() -> None:
    tally = Tally()
    read(tally, {1: [A], 2: [B]}, a=used(1), b=used(1))
    assert read(tally, {1: [A]}, a=used(2), b=used(5)) == {1: 2}
    assert read(tally, {1: [A], 2: [B]}, a=used(2), b=used(7)) == {2: 7}


def test_counting_goes_on_over_a_restart() -> None:
    tally = Tally()
    read(tally, {1: [A, B]}, a=used(100), b=used(10))
    kept = dict(tally._counters)
    assert read(Tally(kept), {1: [A, B]}, a=used(101), b=used(13)) == {1: 114}
    assert read(Tally(kept), {1: [A, B]}, a=used(2), b=used(1)) == {1: 113}, "the host has started again"


def test_a_rule_that_was_policed_counts_anew_in_its_classes() -> None:
    tally = Tally()
    read(tally, {1: [A]}, a=used(100))
    tally.restart(1)
    assert read(tally, {1: [A]}, a=used(30)) == {1: 130}


def test_that_nothing_was_counted_is_news_to_somebody_who_asks() -> None:
    tally = Tally()
    assert read(tally, {1: [A]}, a=used(0)) == {}
    (counters,) = tally.read_usages({1: [("wan", A)]}, {"wan": {A: used(0)}}, NOW, fresh=True)
    assert (counters.total.matched_packets, counters.since) == (0, NOW)


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 50)), max_size=6)))
def test_every_packet_is_counted_once_for_the_rule_that_has_the_class(rounds: list) -> None:
    """Between two readings a class belongs to one rule; it may change hands, or be made anew, at each of them."""
    tally, sent, shown = Tally(), {1: 0, 2: 0}, {1: 0, 2: 0}
    counts = dict.fromkeys("abc", 0)
    for moves in rounds:
        held: dict[int, list[int]] = {1: [], 2: []}
        usages = {}
        for name, rule, packets in {move[0]: move for move in moves}.values():
            if not rule:
                continue
            if name not in counts:
                counts[name] = 0
            counts[name] += packets
            sent[rule] += packets
            held[rule].append({"a": A, "b": B, "c": C}[name])
            usages[name] = used(counts[name])
        counts = {name: count for name, count in counts.items() if name in usages}
        shown |= read(tally, held, **usages)
    assert shown == sent
