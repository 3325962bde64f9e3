from __future__ import annotations

from itertools import count

import pytest

from api.buckets import Buckets


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    clock = Clock()
    buckets = Buckets(rate=2, burst=3, most=10, clock=clock)
    assert [buckets.take("a") for _ in range(4)] == [0, 0, 0, 0.5]
    assert buckets.take("b") == 0
    clock.now = 0.25
    assert buckets.take("a") == pytest.approx(0.25)
    clock.now = 0.5
    assert buckets.take("a") == 0
    assert buckets.take("a") == 0.5
    clock.now = 1000
    assert [buckets.take("a") for _ in range(4)] == [0, 0, 0, 0.5]


def test_what_is_given_back_does_not_count_and_fills_no_bucket_above_its_rim() -> None:
    buckets = Buckets(rate=1, burst=2, most=10, clock=Clock())
    buckets.take("a")
    for _ in range(5):
        buckets.give_back("a")
    assert [buckets.take("a") for _ in range(3)] == [0, 0, 1]


def test_memory_is_bounded_and_who_came_longest_ago_is_forgotten() -> None:
    buckets = Buckets(rate=1, burst=1, most=100, clock=Clock())
    for number, _ in zip(count(), range(10_000), strict=False):
        buckets.take(number)
        assert buckets.take("often") == (0 if number == 0 else 1)
    assert len(buckets) == 100
