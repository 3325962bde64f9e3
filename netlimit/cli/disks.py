"""Whether a disk takes writes now, before a command hangs at it: a call that hangs keeps even its process from ending.
So another process tries."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path

from netlimit.errors import Unavailable

HANGS_SECONDS = 3.0
"""How long it may take; who only has much to do, too."""
_MOST_OPEN = 1024


class Hanging(Unavailable):
    """A disk that has let a write hang."""


def try_disk(file: Path) -> None:
    """Raise Hanging where the disk of a file lets a write of it hang. A file that is missing is no matter here."""
    if not file.is_file():
        return
    child = os.fork()
    if not child:
        try:
            os.closerange(0, _MOST_OPEN)  # else who reads what this command prints waits for it
            os.utime(file, follow_symlinks=False)
        finally:
            os._exit(0)
    descriptor = os.pidfd_open(child)
    try:
        looking = select.poll()
        looking.register(descriptor, select.POLLIN)
        ended = bool(looking.poll(round(1000 * HANGS_SECONDS)))
    finally:
        os.close(descriptor)
    if not ended:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # it ends when the disk answers
        raise Hanging(
            f"The disk of {file} has let a write hang for {HANGS_SECONDS:g} seconds: it may be frozen for a backup, or "
            "be dying. Try again when it answers."
        )
    os.waitpid(child, 0)
