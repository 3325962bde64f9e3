"""Waiting for a lock file that other processes take too."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from netlimit.errors import KernelError

_SECONDS = 10


@contextmanager
def locked(path: str, purpose: str) -> Iterator[None]:
    """Hold a lock file. Raises KernelError when another process keeps it for ten seconds."""
    try:
        # Nobody else may open it: whoever can, can keep it.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KernelError(purpose, f"the lock file {path} cannot be opened: {error.strerror}") from None
    with os.fdopen(descriptor, "r+") as lock:
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise KernelError(purpose, f"another program has held {path} for {_SECONDS} seconds") from None
                time.sleep(0.01)
        yield
