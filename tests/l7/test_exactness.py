"""Whoever races for a key in memory: exactly the limit is admitted. With Redis: redis/test_exactness.py."""

from __future__ import annotations

from tests.l7.racing import make_limits, race_tasks, race_threads

TIMES = 50


def test_a_hundred_tasks() -> None:
    assert race_tasks(make_limits(37, TIMES)) == [37] * TIMES


def test_sixteen_threads() -> None:
    assert race_threads(make_limits(41, TIMES)) == [41] * TIMES
