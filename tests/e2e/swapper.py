"""Somebody with the rights of one of our users who exchanges names in directories for links, FIFOs and other files, as
fast as he can, until he is ended: `python swapper.py USER GROUP TARGET NAME…`. No devices: only root makes any."""

from __future__ import annotations

import os
import pwd
import sys
import time
from contextlib import suppress
from itertools import cycle

SECONDS = 60.0


def swap(name: str, target: str) -> None:
    """Put links to the target and its directory, a hard link, a FIFO and a link to a device in the place of a name, one
    after the other."""
    aside = f"{name}.aside"
    for plant in (
        lambda: os.symlink(target, name),
        lambda: os.link(target, name, follow_symlinks=False),
        lambda: os.symlink(os.path.dirname(target), name),
        lambda: os.mkfifo(name),
        lambda: os.symlink("/dev/tty", name),
    ):
        with suppress(OSError):
            os.rename(name, aside)
        with suppress(OSError):
            plant()
        with suppress(OSError):
            os.unlink(name)
        with suppress(OSError):
            os.rename(aside, name)


def main(user: str, group: str, target: str, *names: str) -> None:
    """Go on for a minute at most."""
    os.setgroups([])
    os.setgid(int(group))
    os.setuid(pwd.getpwnam(user).pw_uid)
    print("begun", flush=True)
    end = time.monotonic() + SECONDS
    for name in cycle(names):
        swap(name, target)
        if time.monotonic() > end:
            break


if __name__ == "__main__":
    main(*sys.argv[1:])
