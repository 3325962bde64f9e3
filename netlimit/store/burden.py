"""What one statement takes of the process that makes it: who may write a SQLite file can give rows without end."""

from __future__ import annotations

import re

from netlimit.plain import read_text
from netlimit.resident import read_resident
from netlimit.stalls import Overworked

MEMORY = 2**30
"""Bytes that the process may grow by while a statement works, or half of what is free, where that is less. Reading
100,000 rules takes a fifth of it."""
_SHORT = 0.25
"""Seconds of work before which memory is not looked at."""
_FREE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)


class Burden:
    """Of one statement, all its calls together."""

    worked = 0.0
    """Seconds."""
    _before: int | None = None
    _room = 0

    def find_excess(self, worked: float) -> Overworked | None:
        """The error for a statement that has taken too much memory when it has worked for so long, in seconds."""
        if worked < _SHORT:
            return None
        held = read_resident()
        if self._before is None:
            self._before, self._room = held, min(MEMORY, _find_free() // 2)
        if held - self._before <= self._room:
            return None
        return Overworked(f"what it was asked was broken off after it had taken {self._room >> 20} MiB of memory")


def _find_free() -> int:
    """Bytes of memory that processes could have yet (proc(5), meminfo)."""
    found = _FREE.search(read_text("/proc/meminfo"))
    return int(found[1]) * 1024 if found else 2 * MEMORY
