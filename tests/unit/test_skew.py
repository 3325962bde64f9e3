"""A gateway whose clock is not the database's is told how far they are apart."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from netlimit.liveness import say_span
from netlimit.skew import Skew

AT = datetime(2030, 5, 6, tzinfo=UTC)


def note(ahead: float, took: float = 0.0) -> Skew:
    """What a report shows by a clock so far ahead, in seconds, that came when it was half done."""
    skew, own = Skew(), AT + timedelta(seconds=ahead)
    skew.note(own - timedelta(seconds=took / 2), AT, own + timedelta(seconds=took / 2))
    return skew


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        (3600, "The clock of this gateway is 1 h ahead of the database's: rules that end do so by it, too early"),
        (-90, "The clock of this gateway is 1 min 30 s behind the database's: rules that end do so by it, too late"),
    ],
)
def test_clocks_that_are_apart_are_told(ahead: float, said: str, caplog: pytest.LogCaptureFixture) -> None:
    skew = note(ahead)
    assert skew.warning is not None
    assert skew.warning.startswith(said)
    skew.note(AT + timedelta(seconds=ahead), AT, AT + timedelta(seconds=ahead))
    assert caplog.text.count(said) == 1
    skew.note(AT, AT, AT)
    assert skew.warning is None


@pytest.mark.parametrize("ahead", [0, 4, -4])
def test_a_few_seconds_are_nothing(ahead: float) -> None:
    assert note(ahead).warning is None


def test_a_report_that_took_long_shows_the_least() -> None:
    assert note(30, took=60).warning is None
    assert note(-30, took=60).warning is None
    assert note(40, took=60).ahead == timedelta(seconds=10)
    assert note(-40, took=60).ahead == timedelta(seconds=-10)


@pytest.mark.parametrize(
    ("seconds", "said"), [(5.4, "5 s"), (60, "1 min"), (90_061, "1 d 1 h 1 min 1 s"), (86_400, "1 d")]
)
def test_spans_are_said_in_words(seconds: float, said: str) -> None:
    assert say_span(timedelta(seconds=seconds)) == said
