"""The time of day as it was once, carried on by a clock that nobody sets.

What waits for its turn must neither be lost nor be hurried nor held up because the time of day is set.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from netlimit.l7.memory.counter import SECOND, steady_clock
from netlimit.plain import read_text

Now = Callable[[], float]
"""Seconds since 1970."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def open_clock() -> Now:
    """One of this process alone: another that is opened after the time of day has been set differs from it."""
    clock = steady_clock()
    return lambda: (clock.read() + clock.origin) / SECOND


def find_boot() -> str | None:
    """Which boot of the machine this is, from the beginning of which `count_uptime` counts; None where nobody knows."""
    try:
        return read_text(_BOOT).strip() if hasattr(time, "CLOCK_BOOTTIME") else None
    except OSError:
        return None


def count_uptime() -> float:
    """Seconds since then, the same in all processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
