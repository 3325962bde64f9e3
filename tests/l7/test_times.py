"""A log that keeps each time once, with what was heavy, tells what one tells that keeps it for every hit."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from netlimit.l7.memory.times import Times, merge

MOST = 7
hits = st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(0, MOST))
"""How much later, how heavy, and how many are kept then."""


def write(steps: list[tuple[int, int, int]], period: int) -> tuple[Times, list[int]]:
    """The log, and each hit's time."""
    times, plain, now = Times(), list[int](), 100
    for later, weight, most in steps:
        now += later
        assert times.forget(now - period, now) == times.size
        plain = [time for time in plain if time > now - period]
        assert times.size == len(plain)
        if weight == 1 and times.ends is None:
            times.append(now)
            plain.append(now)
            continue
        plain = [*plain, *[now] * weight][-most:] if most else []
        assert times.add(now, weight, most) == len(plain)
    return times, plain


def expand(times: Times) -> list[int]:
    return [time for time, weight in times.list_newest() for _ in range(weight)][::-1]


@given(st.lists(hits, max_size=20), st.integers(1, 10))
def test_it_tells_the_time_of_each_hit(steps: list[tuple[int, int, int]], period: int) -> None:
    times, plain = write(steps, period)
    assert [times.find(number) for number in range(1, times.size + 1)] == expand(times) == plain
    assert times.cost <= 2 * max(1, len(steps))


@given(st.lists(st.lists(hits, max_size=10), min_size=1, max_size=4))
def test_merged_logs_are_as_large_as_the_largest_and_have_the_newest_hits(
    several: list[list[tuple[int, int, int]]],
) -> None:
    logs = [write(steps, 10) for steps in several]
    most = max(len(plain) for _, plain in logs)
    newest = sorted(time for _, plain in logs for time in plain)
    assert expand(merge([times for times, _ in logs])) == newest[len(newest) - most :]


def test_a_clock_set_back_forgets_what_is_to_come() -> None:
    times = Times()
    times.add(100, 5, 9)
    assert times.forget(20, 50) == 0
    assert (times.size, times.ends, times.start) == (0, None, 0)


class Watched(Times):
    """A log that tells how many of its times are looked at."""

    looks = 0

    def list_newest(self) -> Iterator[tuple[int, int]]:
        """As any other."""
        for each in super().list_newest():
            Watched.looks += 1
            yield each


def test_of_many_logs_no_more_is_looked_at_than_is_kept() -> None:
    logs = [Watched(range(start, start + 20)) for start in range(1000)]
    assert expand(merge(logs)) == sorted(time for log in logs for time in log)[-20:]
    assert 20 <= Watched.looks <= 60
