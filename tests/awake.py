"""Time as a process has it that others may keep from running."""

from __future__ import annotations

import threading
import time
from types import TracebackType

_STEP = 0.01
_MOST = 5 * _STEP


class Awake:
    """Counts seconds until the block ends, but next to none while this process is not let run: what is to be quick is
    not slow because the machine has given all its time to others."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)

    def __enter__(self) -> Awake:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _count(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(_STEP):
            now = time.monotonic()
            self.seconds += min(now - last, _MOST)
            last = now
