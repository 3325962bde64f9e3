"""Where something runs: in which network namespace, since which boot of which machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from netlimit.plain import read_text

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def find_place() -> str:
    """A word that is the same for all that runs there, and another anywhere else; none where the kernel tells none."""
    try:
        return f"{read_text(_BOOT).strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def count_uptime() -> float:
    """Seconds since the machine has started, by a clock that nobody sets and that goes on while it sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
