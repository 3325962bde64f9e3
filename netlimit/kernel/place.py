"""Where something runs: in which network namespace, since which boot of which machine."""

from __future__ import annotations

import os
from pathlib import Path

from netlimit.plain import read_text

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def find_place() -> str:
    """A word that is the same for all that runs there, and another anywhere else; none where the kernel tells none."""
    try:
        return f"{read_text(_BOOT).strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""
