"""How busy the machine or the upstream is, for limits that stretch while there is room."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

_PSI = Path("/proc/pressure")
_RESOURCES = ("cpu", "memory", "io")
_SOME = re.compile(r"^some avg10=(\d+\.\d+)", re.MULTILINE)
_FRESH = 1.0


def read_pressure() -> float:
    """The part of the last ten seconds in which work waited for CPU, memory or disk, whichever is most: 0 to 1.

    From pressure stall information (Documentation/accounting/psi.rst in the kernel); where the kernel has none, the
    load of the last minute for each CPU.
    """
    stalled = [_read_stall(_PSI / resource) for resource in _RESOURCES]
    known = [part for part in stalled if part is not None]
    if known:
        return max(known)
    return min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _read_stall(path: Path) -> float | None:
    try:
        match = _SOME.search(path.read_text("ascii"))
    except OSError:
        return None
    return float(match[1]) / 100 if match else None


class Pressure:
    """The pressure of the moment: what the application says of its upstream, else what the machine tells of itself."""

    def __init__(self, read: Callable[[], float] = read_pressure, clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._value = 0.0
        self._at = float("-inf")
        self._signal: float | None = None

    def signal(self, value: float | None) -> None:
        """Say how busy the upstream is, from 0 (idle) to 1 (full); None leaves it to the machine again."""
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{value} is no pressure; it is a number from 0 (idle) to 1 (full).")
        self._signal = value

    def has_room(self, priority: int) -> bool:
        """Whether a request of this priority (0 to 100) may go over its limit: while the pressure in percent is below.

        So the lower priority is refused first, 0 always, and 100 only where everything is full.
        """
        return self.value * 100 < priority

    @property
    def value(self) -> float:
        """From 0 to 1; read from the machine at most once a second."""
        if self._signal is not None:
            return self._signal
        now = self._clock()
        if now - self._at >= _FRESH:
            self._at, self._value = now, self._read()
        return self._value
