"""A gateway that a teardown has paused. Its controller keeps off; but a teardown that was killed, or that the kernel
refused, leaves limits in force that nobody looks after, and those the controller takes out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from netlimit.kernel.base import Kernel
from netlimit.teardown import finish

if TYPE_CHECKING:  # for the types alone: a store is handed over
    from netlimit.store import Store

TEARDOWN_SECONDS = 5.0
"""How long a teardown is waited for after it has paused the gateway."""


class Pause:
    """What is left to do while the gateway `host` is paused. `clock` tells seconds that nobody sets."""

    def __init__(self, host: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._due: float | None = None
        self._is_done = False

    def end(self) -> None:
        """The gateway is not paused, or not any more."""
        self._due, self._is_done = None, False

    def look(self, store: Store, kernel: Kernel) -> bool:
        """Once for each pause, see to it that the kernel holds nothing of ours; whether that was done now. Raises
        StoreError, and KernelError as long as something is left."""
        if self._due is None:
            self._due = self._clock() + TEARDOWN_SECONDS
        if self._is_done or self._clock() < self._due:
            return False
        finish(store, kernel, self._host)
        self._is_done = True
        return True
