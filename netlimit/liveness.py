"""Whether who reports now and then still does: by the clock of the database, which is one for all hosts."""

from __future__ import annotations

from datetime import timedelta

SILENCE = timedelta(seconds=15)
"""After this a controller that does not report, as it does every five, is taken to be gone or kept from its work."""

GONE = timedelta(hours=1)
"""After this nobody waits for it any more: it was switched off for good, or goes by another name."""

AHEAD = timedelta(seconds=5)
"""What was reported so much later than now proves nothing: a clock was set back since."""


def is_recent(silence: timedelta | None, within: timedelta) -> bool:
    """Whether somebody was heard of lately who was `silence` ago (None: never); less than nothing is yet to come."""
    return silence is not None and -AHEAD <= silence <= within


def is_gone(silence: timedelta | None) -> bool:
    """Whether somebody who was heard of `silence` ago has been silent for too long to be waited for."""
    return silence is not None and silence > GONE


def say_ahead(silence: timedelta | None) -> str:
    """What is to be known of a last report that is yet to come, to stand behind its time; nothing of any other."""
    if silence is None or silence >= -AHEAD:
        return ""
    return f", which is yet to come: it was written by a clock that was {say_span(-silence)} ahead"


def say_span(span: timedelta) -> str:
    """A time in words, as long as it may be."""
    seconds = round(span.total_seconds())
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds % 60, "s")]
    return " ".join(f"{number} {unit}" for number, unit in parts if number)
