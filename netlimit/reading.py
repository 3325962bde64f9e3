"""Reading a file that somebody has named, whatever it is: waits for nobody, and reads no more than is sensible."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST = 64 * 2**20
"""The most bytes of a file that is named to a command."""
_CHUNK = 2**20


class Unreadable(OSError):
    """It is no file that can be read as a whole; `strerror` says why."""


def read_whole(path: Path, most: int = MOST) -> bytes:
    """All that a file holds, or what comes out of a pipe that somebody writes to. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    found = os.fstat(descriptor)
    if stat.S_ISDIR(found.st_mode):  # of which Python makes no file
        os.close(descriptor)
        raise Unreadable(0, "it is a directory", str(path))
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if found.st_size > most:
            raise Unreadable(0, f"it is larger than {most} bytes", str(path))
        parts = [_begin(descriptor, path)] if stat.S_ISFIFO(found.st_mode) else []
        size = sum(map(len, parts))
        while (part := file.read(_CHUNK)) is None or part:
            if part is None:
                raise Unreadable(0, "it is a device that gives nothing", str(path))
            parts.append(part)
            size += len(part)
            if size > most:
                raise Unreadable(0, f"it is larger than {most} bytes", str(path))
        return b"".join(parts)


def _begin(pipe: int, path: Path) -> bytes:
    """The first that is in a pipe; from then on its writer is waited for. Raises Unreadable if there is none."""
    try:
        first = os.read(pipe, _CHUNK)
    except BlockingIOError:
        first = b""
    else:
        if not first:
            raise Unreadable(0, "it is a pipe that nobody writes to", str(path))
    os.set_blocking(pipe, True)
    return first
