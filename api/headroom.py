"""How much memory this process may still take before it is ended for it (cgroup), or gets none (ulimit)."""

from __future__ import annotations

import resource
from pathlib import Path

from netlimit.plain import read_text

_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
_NAMES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""As cgroup 2 calls them, and 1: the limit, what is used, and what of that would be given up."""


def find_headroom(root: Path = _ROOT, process: Path = Path("/proc/self")) -> int | None:
    """Bytes that are left to this process by the tightest of its limits; None if there is none that can be read."""
    found = [_read_rlimit(process), *map(_read_group, _find_groups(root, process))]
    return min((each for each in found if each is not None), default=None)


def _find_groups(root: Path, process: Path) -> list[Path]:
    """The groups that this process is in, from the innermost outwards, as cgroup 2 has them, or 1."""
    try:
        lines = read_text(process / "cgroup").splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        inner = top / path.lstrip("/")
        groups += [each for each in (inner, *inner.parents) if each.is_relative_to(top)]
    return groups


def _read_group(group: Path) -> int | None:
    for most, used, cached in _NAMES:
        try:
            limit = read_text(group / most).strip()
            if limit == "max" or int(limit) >= _UNLIMITED:
                return None
            stat = dict(line.split() for line in read_text(group / "memory.stat").splitlines())
            # What is cached of files is given up before anything is ended.
            return int(limit) - int(read_text(group / used)) + int(stat.get(cached, 0))
        except (OSError, ValueError):
            continue
    return None


def _read_rlimit(process: Path) -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(read_text(process / "statm").split()[0])
    except (OSError, ValueError):
        return None
    return limit - pages * resource.getpagesize()
