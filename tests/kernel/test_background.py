"""What the kernel takes long to tell holds up nobody but who asks for the first time."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

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
def slow() -> Iterator[Slow]:
    slow = Slow()
    yield slow
    slow.may_end.release(100)


def settle(reading: Background[str]) -> None:
    """Wait until a reading has ended."""
    assert reading._thread is not None
    reading._thread.join(60)


def test_the_first_reading_is_waited_for_and_no_other(slow: Slow) -> None:
    reading = Background(slow, patience=0.01, rests=0.0)
    slow.may_end.release()
    assert reading.get() == "old"
    slow.found = "new"
    assert reading.get() == "old", "while it reads anew"
    assert reading.get() == "old"
    slow.may_end.release()
    settle(reading)
    assert reading.get() == "new"


def test_it_rests_after_a_long_reading(slow: Slow) -> None:
    reading = Background(slow, patience=0.0, rests=10**9)
    slow.may_end.release(2)
    assert reading.get() == reading.get() == "old"
    assert slow.begun.acquire(blocking=False)
    assert not slow.begun.acquire(blocking=False)


def test_after_a_short_one_it_looks_at_once(slow: Slow) -> None:
    reading = Background(slow, patience=60.0, rests=10**9)
    slow.may_end.release(2)
    assert reading.get() == "old"
    slow.found = "new"
    assert reading.get() == "new"


def test_what_cannot_be_read_says_so_each_time(slow: Slow) -> None:
    reading = Background(slow, patience=0.01, rests=0.0)
    slow.found = OSError("no room")
    slow.may_end.release(2)
    for _ in range(2):
        with pytest.raises(OSError, match="no room"):
            reading.get()
    slow.found = "new"
    slow.may_end.release()
    assert reading.get() == "new"


SHORT = """
import os, resource
from netlimit.kernel.background import Background

def say(reading):
    try:
        return reading.get()
    except OSError as error:
        return type(error).__name__

known, unknown = Background(lambda: "known"), Background(lambda: "found")
known.get()
most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
os.setresuid(65534, 65534, 65534)  # root has as many as he likes
resource.setrlimit(resource.RLIMIT_NPROC, (0, most))
print(say(known), say(unknown), say(unknown))
resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
print(say(known), say(unknown))
"""


def test_a_moment_without_a_process_to_be_had_passes(root: None) -> None:
    """What is known counts meanwhile."""
    said = subprocess.run([sys.executable, "-c", SHORT], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.splitlines() == ["known BlockingIOError BlockingIOError", "known found"]
