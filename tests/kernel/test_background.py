"""What the kernel takes long to tell holds up nobody but who asks for the first time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from netlimit.kernel import background
from netlimit.kernel.background import Background


class Slow:
    """What a kernel tells that takes its time, once it may end."""

    def __init__(self) -> None:
        self.found: str | OSError = "old"
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self) -> str:
        self.begun.release()
        self.may_end.acquire()
        if isinstance(self.found, OSError):
            raise self.found
        return self.found


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    monkeypatch.setattr(background, "PATIENCE", 0.01)
    monkeypatch.setattr(background, "_SHARE", 0)
    slow = Slow()
    yield slow
    slow.may_end.release(100)


def settle(reading: Background[str]) -> None:
    """Wait until a reading has ended."""
    assert reading._thread is not None
    reading._thread.join(60)


def test_the_first_reading_is_waited_for_and_no_other(slow: Slow) -> None:
    reading = Background(slow)
    slow.may_end.release()
    assert reading.get() == "old"
    slow.found = "new"
    assert reading.get() == "old", "while it reads anew"
    assert reading.get() == "old"
    slow.may_end.release()
    settle(reading)
    assert reading.get() == "new"


def test_it_rests_after_a_long_reading(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_SHARE", 10**9)
    monkeypatch.setattr(background, "PATIENCE", 0.0)
    reading = Background(slow)
    slow.may_end.release(2)
    assert reading.get() == reading.get() == "old"
    assert slow.begun.acquire(blocking=False)
    assert not slow.begun.acquire(blocking=False)


def test_after_a_short_one_it_looks_at_once(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_SHARE", 10**9)
    monkeypatch.setattr(background, "PATIENCE", 60.0)
    reading = Background(slow)
    slow.may_end.release(2)
    assert reading.get() == "old"
    slow.found = "new"
    assert reading.get() == "new"


def test_what_cannot_be_read_says_so_each_time(slow: Slow) -> None:
    reading = Background(slow)
    slow.found = OSError("no room")
    slow.may_end.release(2)
    for _ in range(2):
        with pytest.raises(OSError, match="no room"):
            reading.get()
    slow.found = "new"
    slow.may_end.release()
    assert reading.get() == "new"
