"""What this process may do, and giving it up."""

from __future__ import annotations

import ctypes
import os
import pwd
import re
import signal
from pathlib import Path

from netlimit.cli.errors import CommandError

USER = "netlimit"
"""Whom the API runs as."""

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 2, 38  # linux/prctl.h
_CAP_NET_ADMIN, _CAP_NET_RAW = 1 << 12, 1 << 13  # linux/capability.h
_libc = ctypes.CDLL(None, use_errno=True)


def is_root() -> bool:
    """Whether this process may become another user."""
    return os.geteuid() == 0


def may_change_network() -> bool:
    """Whether this process has the capabilities that ipset and iptables need."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text("ascii"), re.MULTILINE)
    needed = _CAP_NET_ADMIN | _CAP_NET_RAW
    return found is not None and int(found[1], 16) & needed == needed


def find_user(name: str) -> pwd.struct_passwd:
    """The user of this name. Raises CommandError."""
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise CommandError(
            f"There is no user {name!r} for the API to run as: make it with `adduser --system --group {name}`, "
            "or name another user with --api-user."
        ) from None


def become(user: pwd.struct_passwd) -> None:
    """Give up root for good. What `end_with_parent` has promised still holds."""
    dies_by = ctypes.c_int()
    _prctl(_PR_GET_PDEATHSIG, ctypes.byref(dies_by))
    parent = os.getppid()
    os.initgroups(user.pw_name, user.pw_gid)
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if dies_by.value:  # the kernel forgets it when a process changes its user
        end_with_parent(parent)


def end_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGTERM when its parent, of this process id, is gone; end if it is already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise CommandError("The process that started this one has ended.")


def _prctl(option: int, argument: object) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
