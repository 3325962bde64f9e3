"""The host's own addresses."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address

from netlimit.kernel import rtnetlink
from netlimit.kernel.names import read_names
from netlimit.tree import INGRESS_DEVICE

_GET_ADDRESS = 22
_ADDRESS = struct.Struct("=4xI")
"""struct ifaddrmsg (linux/if_addr.h): last, the index of the device."""
_FAR, _OWN = 1, 2
"""IFA_ADDRESS, which is that of the other end where there is one, and IFA_LOCAL."""


def read_own() -> tuple[str, ...]:
    """The addresses of every device but ours, by netlink. Raises OSError."""
    return tuple(sorted({address for _, address in _read_each()}))


def read_firsts() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """By device the address that a REDIRECT gives to what comes by it: the first of each family, as the kernel has
    them in order; of IPv6, no link-local one. Raises OSError."""
    found: dict[int, dict[int, str]] = {}
    for index, address in _read_each():
        read = ip_address(address)
        if not read.is_loopback and not (read.version == 6 and read.is_link_local):
            found.setdefault(index, {}).setdefault(read.version, address)
    names = read_names()
    # What comes by loopback has been translated as it was sent.
    return tuple(
        (names[index], tuple(each.values())) for index, each in found.items() if names.get(index, "lo") != "lo"
    )


def _read_each() -> Iterator[tuple[int, str]]:
    ours = _find_ours()
    for body in rtnetlink.read_whole(_GET_ADDRESS, bytes(_ADDRESS.size)):
        if (index := _ADDRESS.unpack_from(body)[0]) != ours:
            told = rtnetlink.decode(body, _ADDRESS.size)
            yield index, str(ip_address(told.get(_OWN) or told[_FAR]))


def _find_ours() -> int:
    try:
        return socket.if_nametoindex(INGRESS_DEVICE)
    except OSError:
        return 0  # the index of no device
