"""What one statement takes of the process that makes it: who may write a SQLite file can give rows without end."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from netlimit.plain import read_text
from netlimit.resident import read_resident
from netlimit.stalls import Overworked

MEMORY = 2**30
"""Bytes that the process may grow by while a statement works, or half of what is free, where that is less. Reading
100,000 rules takes a fifth of it."""
_SHORT = 0.25
"""Seconds of work before which memory is not looked at."""
MEMINFO = Path("/proc/meminfo")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_FREE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)


class Burden:
    """Of one statement, all its calls together."""

    worked = 0.0
    """Seconds."""
    _before: int | None = None
    _room = 0

    def find_excess(self, worked: float) -> Overworked | None:
        """The error for a statement that has taken too much memory when it has worked for so long, in seconds. Who
        cannot see how much he has is not kept from working: his time is bounded, too."""
        if worked < _SHORT:
            return None
        try:
            held = read_resident()
        except OSError:
            return None
        if self._before is None:
            self._before, self._room = held, min(MEMORY, find_free() // 2)
        if held - self._before <= self._room:
            return None
        return Overworked(f"what it was asked was broken off after it had taken {self._room >> 20} MiB of memory")


def find_free() -> int:
    """Bytes of memory that processes could have yet (proc(5), meminfo); where that is not to be seen (a unit with
    `ProcSubset=pid`), half of what there is."""
    with suppress(OSError):
        if found := _FREE.search(read_text(MEMINFO)):
            return int(found[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * _PAGE // 2
