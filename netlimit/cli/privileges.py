"""What this process may do, and giving it up."""

from __future__ import annotations

import ctypes
import os
import pwd
import re
import signal
import struct
from collections.abc import Iterable
from enum import IntEnum

from netlimit import stalls
from netlimit.cli.errors import CommandError
from netlimit.plain import read_text

USER = "netlimit"
"""Whom the API runs as."""

CONTROLLER = "netlimit-controller"
"""Whom the controller runs as where netlimit is installed."""

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG, _PR_SET_KEEPCAPS = 1, 2, 8  # linux/prctl.h
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _RAISE = 24, 38, 47, 2
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3, linux/capability.h
_libc = ctypes.CDLL(None, use_errno=True)


class Capability(IntEnum):
    """What root may do, cut in pieces (capabilities(7)): those that concern netlimit."""

    NET_ADMIN = 12
    NET_RAW = 13
    SYS_ADMIN = 21
    BPF = 39


NETWORK = (Capability.NET_ADMIN, Capability.NET_RAW)
"""What ipset, iptables and tc need, and all that a controller has."""


def is_root() -> bool:
    """Whether this process may become another user."""
    return os.geteuid() == 0


def may_change_network() -> bool:
    """Whether this process has the capabilities that ipset and iptables need."""
    return set(NETWORK) <= read_capabilities()


def read_capabilities() -> set[Capability]:
    """Which capabilities are in force for this process."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", read_text("/proc/self/status"), re.MULTILINE)
    bits = int(found[1], 16) if found else 0
    return {each for each in Capability if bits & 1 << each}


def find_user(name: str) -> pwd.struct_passwd:
    """The user of this name. Raises CommandError."""
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise CommandError(
            f"There is no user {name!r} for the API to run as: make it with `adduser --system --group {name}`, "
            "or name another user with --api-user."
        ) from None


def find_keepers(api_user: str) -> frozenset[int]:
    """The ids of the users whose servers this host is managed by: root, whom the API runs as, and, where all is run by
    one user, that one."""
    try:
        return frozenset({0, os.geteuid(), pwd.getpwnam(api_user).pw_uid})
    except KeyError:
        return frozenset({0, os.geteuid()})


def become(user: pwd.struct_passwd, keeping: Iterable[Capability] = ()) -> None:
    """Give up root for good, but for some capabilities, which programs that this process starts have too. What
    `end_with_parent` has promised still holds."""
    stalls.dismiss()  # the kernel gives each thread rights of its own
    kept = sorted(set(keeping))
    dies_by = ctypes.c_int()
    _prctl(_PR_GET_PDEATHSIG, ctypes.byref(dies_by))
    parent = os.getppid()
    _bound(kept)
    os.setgroups(os.getgrouplist(user.pw_name, user.pw_gid))
    os.setgid(user.pw_gid)
    _prctl(_PR_SET_KEEPCAPS, 1)
    os.setuid(user.pw_uid)
    _set_capabilities(kept)
    for each in kept:
        _prctl(_PR_CAP_AMBIENT, _RAISE, each)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if dies_by.value:  # the kernel forgets it when a process changes its user
        end_with_parent(parent)


def _bound(kept: Iterable[Capability]) -> None:
    """No program that is started from here on can have others."""
    last = int(read_text("/proc/sys/kernel/cap_last_cap"))
    for number in set(range(last + 1)) - set(kept):
        _prctl(_PR_CAPBSET_DROP, number)


def _set_capabilities(kept: Iterable[Capability]) -> None:
    """Have these and no others: effective, permitted and inheritable alike."""
    bits = sum(1 << each for each in kept)
    low, high = bits & 0xFFFFFFFF, bits >> 32
    header, sets = struct.pack("=Ii", _CAPABILITY_VERSION, 0), struct.pack("=6I", *[low] * 3, *[high] * 3)
    _check(_libc.capset(header, sets))


def end_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGTERM when its parent, of this process id, is gone; end if it is already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise CommandError("The process that started this one has ended.")


def _prctl(option: int, *arguments: object) -> None:
    _check(_libc.prctl(option, *arguments, *[0] * (4 - len(arguments))))


def _check(answer: int) -> None:
    if answer != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
