"""Tells when a core let nobody run: what a virtual machine's host takes, traffic has not got either."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable

STEP = 0.005
LEAST = 0.015
"""Seconds that count as a stall: who sleeps for a step is always woken a little late."""

Stall = tuple[float, float]
"""The Unix times of its begin and its end."""


class Watch:
    """Looks for stalls on each core that this process may use, until the block ends."""

    def __init__(self) -> None:
        self.found: list[Stall] = []
        self._ended = threading.Event()
        cores = sorted(os.sched_getaffinity(0))
        self._threads = [threading.Thread(target=self._look, args=(core,), daemon=True) for core in cores]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _look(self, core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread alone
        last = time.time()
        while not self._ended.is_set():
            time.sleep(STEP)
            now = time.time()
            if now - last > STEP + LEAST:
                self.found.append((last + STEP, now))
            last = now


def share(stalls: Iterable[Stall], begin: float, end: float) -> float:
    """How much of the time between two Unix times lies in stalls, of whichever core: 0 to 1."""
    stalled, reached = 0.0, begin
    for first, last in sorted(stalls):
        first, last = max(first, reached), min(last, end)
        if last > first:
            stalled, reached = stalled + last - first, last
    return stalled / (end - begin)
