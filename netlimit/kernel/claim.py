"""Claims on a network namespace: to be its one controller, to be the one who writes now, and to have it left alone.

A claim is an NFLOG group to which nobody ever logs. A group belongs to the netlink socket that has bound it
(nfulnl_recv_config in net/netfilter/nfnetlink_log.c), the kernel lets only those speak of groups who have CAP_NET_ADMIN
over the network namespace, and gives it back when the socket goes, however its process ends. So nobody else can take a
claim, feign one or keep somebody from his; and it holds between containers with mounts, process ids and users of their
own, whom a lock file, or the credentials of an abstract socket, would not tell apart. The kernel answers at once,
however many sockets others keep open: no list of them is read, which whoever likes could make long.

A kernel without NFLOG has `netlimit.kernel.membership` instead.
"""

from __future__ import annotations

import errno
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from netlimit.errors import KernelError, Occupied
from netlimit.kernel import membership

_NETLINK_NETFILTER = 12
_PACKET, _CONFIG = 4 << 8, 4 << 8 | 1
"""Messages of NFNL_SUBSYS_ULOG: one that only the kernel sends, and one that sets up a group."""
_BIND = struct.pack("=HHBxxx", 5, 1, 1)
"""NFULA_CFG_CMD: NFULNL_CFG_CMD_BIND. Without a command, the kernel only says whose the group is."""
_HEADER, _GROUP = struct.Struct("=IHHII"), struct.Struct("!BBH")
_REQUEST_ACKNOWLEDGED = 0x5
_ANSWER_SECONDS = 5.0
"""The first question may load a module."""
_SHORTEST, _LONGEST = 0.005, 0.02
"""Seconds between two tries: by chance, so that those who wait take turns."""
_NOBODYS, _UNKNOWN = errno.ENODEV, errno.EINVAL
"""What the kernel says of a group that nobody has, and where it has no NFLOG."""


class Claim(IntEnum):
    """What is claimed, by the number of its group: those who log use small ones."""

    CONTROLLER = 0x6E6C
    WRITER = 0x6E6D
    PAUSE = 0x6E6E


@contextmanager
def claimed(claim: Claim, purpose: str, patience: float, taken: str) -> Iterator[None]:
    """Hold a claim on this thread's network namespace. Raises KernelError: Occupied, with `taken` as its reason, when
    somebody else has held it for `patience` seconds."""
    deadline = time.monotonic() + patience
    while (held := _try_claim(claim, purpose)) is None:
        if time.monotonic() >= deadline:
            raise Occupied(purpose, taken)
        time.sleep(random.uniform(_SHORTEST, _LONGEST))  # noqa: S311  no secret
    with held:
        yield


def is_claimed(claim: Claim, purpose: str) -> bool:
    """Whether somebody holds the claim now: another process, or another part of this one. Raises KernelError."""
    with _open_socket(purpose) as asking:
        said = _ask(asking, purpose, _CONFIG, claim)
        if said == _UNKNOWN:
            return membership.has_members(claim, purpose)
        if said != _NOBODYS:
            _check(asking, purpose, said)
        return said != _NOBODYS


def _try_claim(claim: Claim, purpose: str) -> socket.socket | None:
    """The socket that holds the claim; None if it is somebody else's."""
    asking = _open_socket(purpose)
    try:
        said = _ask(asking, purpose, _CONFIG, claim, _BIND)
        if said == 0:
            return asking
        if said == _UNKNOWN:
            asking.close()
            return membership.try_join(claim, purpose)
        _check(asking, purpose, said)
    except BaseException:
        asking.close()
        raise
    asking.close()
    return None


def _check(asking: socket.socket, purpose: str, said: int) -> None:
    """EPERM says that the group is another's; or that who asks may not ask anything. Raises KernelError."""
    if said not in (errno.EPERM, errno.EBUSY):
        raise KernelError(purpose, f"the kernel refuses to tell who does so: {os.strerror(said)}")
    if said == errno.EPERM and _ask(asking, purpose, _PACKET, 0) == errno.EPERM:
        raise KernelError(purpose, f"{os.strerror(said)}; {membership.PRIVILEGE}")


def _open_socket(purpose: str) -> socket.socket:
    opened = membership.open_netlink(_NETLINK_NETFILTER, purpose)
    opened.settimeout(_ANSWER_SECONDS)
    return opened


def _ask(asking: socket.socket, purpose: str, kind: int, group: int, command: bytes = b"") -> int:
    """Send one message about a group; the error number of the answer, 0 for none. Raises KernelError."""
    body = _GROUP.pack(socket.AF_UNSPEC, 0, group) + command
    try:
        asking.send(_HEADER.pack(_HEADER.size + len(body), kind, _REQUEST_ACKNOWLEDGED, 1, 0) + body)
        answer = asking.recv(1 << 12)
    except OSError as error:
        raise KernelError(purpose, f"the kernel does not answer: {error.strerror or error}") from None
    said: int = -struct.unpack_from("=i", answer, _HEADER.size)[0]
    return said
