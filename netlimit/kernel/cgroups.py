"""The control groups of sshd (cgroups(7), version 2): the kernel tells anybody in which one a socket was made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from netlimit.plain import read_text

_MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
"""Where version 2 is found: alone, or beside version 1."""
_NAME = re.compile(r"(openrc\.)?sshd?(@.*\.service|\.service|\.socket)?")
_UNITS = frozenset(f"/system.slice/{name}.{kind}" for name in ("ssh", "sshd") for kind in ("service", "socket"))
_OF_USERS = "user.slice"


def find_groups(
    daemons: Iterable[Path], is_stranger: Callable[[str], bool], mounts: Iterable[Path] = _MOUNTS
) -> set[int]:
    """The numbers of the groups that sshd has to itself: those of its units, and those in which its `daemons`
    (/proc/PID) run without a stranger: a process, given by its number, of root's that is not sshd's.

    In a container all processes may be in one group, and whatever root listens with there would look like sshd's.
    Groups below user.slice are sessions: what they hold is not sshd's, and users name their own.
    """
    with suppress(OSError):
        mount = next((each for each in mounts if (each / "cgroup.controllers").exists()), None)
        if mount is not None:
            paths = {path for path in map(_read_path, daemons) if path is not None and _may_be_own(path)}
            held = {path for path in paths if _NAME.fullmatch(path.name) or not _is_shared(mount, path, is_stranger)}
            return set(filter(None, (_read_number(mount, path) for path in {*map(PurePosixPath, _UNITS), *held})))
    return set()


def _read_path(process: Path) -> PurePosixPath | None:
    """The group of a process; None if it has ended, or the host has version 1 alone."""
    with suppress(OSError):
        for line in read_text(process / "cgroup").splitlines():
            if line.startswith("0::/"):
                return PurePosixPath(line.removeprefix("0::"))
    return None


def _may_be_own(path: PurePosixPath) -> bool:
    """Neither the group of all, nor a user's, nor one outside of the container that this process runs in."""
    return len(path.parts) > 1 and _OF_USERS not in path.parts and ".." not in path.parts


def _is_shared(mount: Path, path: PurePosixPath, is_stranger: Callable[[str], bool]) -> bool:
    """Whether others of root's run there too; so it is taken where that cannot be told."""
    try:
        return any(map(is_stranger, read_text(_locate(mount, path) / "cgroup.procs").split()))
    except OSError:
        return True


def _read_number(mount: Path, path: PurePosixPath) -> int | None:
    try:
        return _locate(mount, path).stat().st_ino
    except OSError:
        return None


def _locate(mount: Path, path: PurePosixPath) -> Path:
    return mount / path.relative_to("/")
