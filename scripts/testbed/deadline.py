"""When a tool of the testbed ends: no traffic goes on for ever, whoever started it."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from types import FrameType


class Deadline:
    """Over after `seconds`, on SIGTERM or Ctrl-C, and with `until_eof` when standard input ends.

    The last makes a tool end with the program that started it, even if that is killed.
    """

    def __init__(self, seconds: float, *, until_eof: bool = False) -> None:
        self.end = time.monotonic() + seconds
        self.until_eof = until_eof
        self._told = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told = True

    def over(self) -> bool:
        """Whether it is time to end."""
        if not self._told and self.until_eof:
            self._told = _at_eof()
        return self._told or time.monotonic() >= self.end

    def wait(self) -> None:
        """Sleeps until it is over."""
        while not self.over():
            time.sleep(0.01)


def _at_eof() -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(readable) and not os.read(sys.stdin.fileno(), 4096)


def ready() -> None:
    """Tells the program that started this tool that it is up."""
    print("ready", file=sys.stderr, flush=True)
