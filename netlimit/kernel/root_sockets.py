"""Root's TCP sockets, read in a thread: any user can open a million of his own, and the kernel lists them all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from netlimit.kernel.sockets import ESTABLISHED, LISTENING, Socket, read_sockets

PATIENCE = 0.1
"""Seconds that a reading may hold up who asks; after that he gets what was found the last time."""
_SHARE = 4
"""After a reading, none begins for so many times as long."""
_ROOT = 0


def list_root_sockets() -> list[Socket]:
    """Those that listen or are connected. Raises OSError."""
    return list(read_sockets([ESTABLISHED, LISTENING], owner=_ROOT))


class RootSockets:
    """The same without a wait. For one thread."""

    def __init__(self, read: Callable[[], list[Socket]] = list_root_sockets) -> None:
        self._read = read
        self._thread: threading.Thread | None = None
        self._found: list[Socket] | None = None
        self._error: OSError | None = None
        self._rests_until = 0.0

    def read(self) -> list[Socket]:
        """Those that there are, or were when it was last looked; the first time until they are known. Raises
        OSError."""
        if self._thread is None and time.monotonic() >= self._rests_until:
            self._thread = threading.Thread(target=self._look, name="sockets", daemon=True)
            self._thread.start()
        if self._thread is not None:
            self._thread.join(None if self._found is None else PATIENCE)
            if not self._thread.is_alive():
                self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._found or []

    def _look(self) -> None:
        began = time.monotonic()
        try:
            self._found = self._read()
        except OSError as error:
            self._error = error
        ended = time.monotonic()
        self._rests_until = ended + _SHARE * (ended - began)
