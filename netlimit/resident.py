"""How much memory this process has."""

from __future__ import annotations

import os

from netlimit.plain import read_text

_PAGE = os.sysconf("SC_PAGE_SIZE")


def read_resident() -> int:
    """Bytes (proc(5), statm: resident)."""
    return int(read_text("/proc/self/statm").split()[1]) * _PAGE
