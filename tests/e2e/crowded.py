"""A command of netlimit's that finds its temporary files where others have filled everything: `python -m
tests.e2e.crowded DIRECTORY guard`. The directory lies on /dev/shm, in a mount namespace of its own."""

from __future__ import annotations

import ctypes
import os
import sys

from netlimit.cli.main import app

_MS_BIND = 0x1000
_MEMORY = "/dev/shm"  # noqa: S108  what lies there is what is tried

if __name__ == "__main__":
    place = sys.argv.pop(1)
    if ctypes.CDLL(None, use_errno=True).mount(os.fsencode(place), os.fsencode(_MEMORY), b"none", _MS_BIND, None):
        raise OSError(ctypes.get_errno(), f"{_MEMORY}: {os.strerror(ctypes.get_errno())}")
    os.environ |= {"TMPDIR": _MEMORY, "SQLITE_TMPDIR": _MEMORY}
    app()
