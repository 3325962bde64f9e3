"""The host's own addresses."""

from __future__ import annotations

import socket
import struct
from ipaddress import ip_address

from netlimit.kernel import rtnetlink
from netlimit.tree import INGRESS_DEVICE

_GET_ADDRESS = 22
_ADDRESS = struct.Struct("=4xI")
"""struct ifaddrmsg (linux/if_addr.h): last, the index of the device."""
_FAR, _OWN = 1, 2
"""IFA_ADDRESS, which is that of the other end where there is one, and IFA_LOCAL."""


def read_own() -> tuple[str, ...]:
    """The addresses of every device but ours, by netlink. Raises OSError."""
    ours = _find_ours()
    found = set()
    for body in rtnetlink.read_whole(_GET_ADDRESS, bytes(_ADDRESS.size)):
        if _ADDRESS.unpack_from(body)[0] != ours:
            told = rtnetlink.decode(body, _ADDRESS.size)
            found.add(str(ip_address(told.get(_OWN) or told[_FAR])))
    return tuple(sorted(found))


def _find_ours() -> int:
    try:
        return socket.if_nametoindex(INGRESS_DEVICE)
    except OSError:
        return 0  # the index of no device
