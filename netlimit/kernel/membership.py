"""Claims where the kernel has no NFLOG: a place in a netlink multicast group to which nobody ever sends.

Only those may join who have CAP_NET_ADMIN over the network namespace (netlink_bind in net/netlink/af_netlink.c:
NETLINK_FIB_LOOKUP has no groups for others). Who is in it stands in /proc/net/netlink, between all other netlink
sockets: whoever likes opens more, and the kernel takes ever longer to tell. So the reading ends after a second, and who
was not found by then is taken not to be there: two who write at once are put right by the next pass, and a controller
that waits enforces nothing.
"""

from __future__ import annotations

import logging
import os
import socket
import time

from netlimit.errors import KernelError

log = logging.getLogger(__name__)

PRIVILEGE = "it takes root, or CAP_NET_ADMIN over this network namespace"
LONGEST_READING = 1.0

_NETLINK_FIB_LOOKUP = 10
_MEMBERS = "/proc/thread-self/net/netlink"
_CHUNK = 1 << 12
"""The kernel takes long over each, and is not interrupted in it."""


def open_netlink(protocol: int, purpose: str) -> socket.socket:
    """A netlink socket. Raises KernelError."""
    try:
        return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    except OSError as error:
        raise KernelError(purpose, f"no netlink socket can be opened: {error.strerror}") from None


def has_members(claim: int, purpose: str) -> bool:
    """Whether somebody is in the group of a claim. Raises KernelError."""
    return bool(find_members(claim, purpose))


def try_join(claim: int, purpose: str) -> socket.socket | None:
    """The socket that holds the claim; None if it is somebody else's. Of two who try in the same moment each sees the
    other: then none gets it. Raises KernelError."""
    if has_members(claim, purpose):
        return None
    held = open_netlink(_NETLINK_FIB_LOOKUP, purpose)
    try:
        held.bind((0, _find_bit(claim)))
        if len(find_members(claim, purpose)) <= 1:
            return held
    except OSError as error:
        held.close()
        raise KernelError(purpose, f"{error.strerror}; {PRIVILEGE}") from None
    except BaseException:
        held.close()
        raise
    held.close()
    return None


def _find_bit(claim: int) -> int:
    return 1 << (29, 30, 28)[claim % 4]


def find_members(claim: int, purpose: str) -> set[bytes]:
    """The inodes of the sockets in the group of a claim. Raises KernelError.

    The list is longer than what the kernel tells at once, and may lack one where others end meanwhile: it is read
    twice."""
    deadline = time.monotonic() + LONGEST_READING
    try:
        lines = [line for _ in range(2) for line in _read_lines(deadline)]
    except OSError as error:
        raise KernelError(purpose, f"{_MEMBERS} cannot be read: {error.strerror}") from None
    protocol, bit = str(_NETLINK_FIB_LOOKUP).encode(), _find_bit(claim)
    fields = (line.split() for line in lines)
    return {each[-1] for each in fields if each[1:2] == [protocol] and int(each[3], 16) & bit}


def _read_lines(deadline: float) -> list[bytes]:
    """What can be read until the deadline, in whole lines."""
    chunks: list[bytes] = []
    descriptor = os.open(_MEMBERS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while chunk := os.read(descriptor, _CHUNK):
            chunks.append(chunk)
            if time.monotonic() >= deadline:
                log.warning("Too many netlink sockets are open on this host to find who else writes to the kernel.")
                return b"".join(chunks).splitlines()[:-1]
    finally:
        os.close(descriptor)
    return b"".join(chunks).splitlines()
