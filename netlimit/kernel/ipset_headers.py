"""What the kernel says about sets, without their entries (linux/netfilter/ipset/ip_set.h).

Anybody may give a set any name, lines that look like those of another set too, and no form in which ipset prints it
says where the name ends. So the kernel itself is asked: there a name has a length.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from netlimit.kernel import rtnetlink
from netlimit.plain import decode_name
from netlimit.state import SET_PREFIX

_NETFILTER, _LIST = 12, 6 << 8 | 7
_GENERIC = bytes([socket.AF_UNSPEC, 0, 0, 0])
"""struct nfgenmsg."""
_PROTOCOL, _NAME, _TYPE, _FAMILY, _FLAGS, _DATA = 1, 2, 3, 5, 6, 7
_VERSION = 6
"""Of the protocol: what Linux before 4.20 speaks, and those since then still do."""
_HEADERS_ONLY = 1 << 2
_TIMEOUT, _SET_FLAGS, _SLOTS, _SIZE, _NETMASK, _ENTRIES, _USERS = 6, 8, 18, 19, 20, 24, 25
_COUNTERS, _COMMENT, _MARKS = 1 << 3, 1 << 4, 1 << 6
_OURS = re.compile(rf"{SET_PREFIX}[\w.-]+", re.ASCII)
_TYPES = {
    "a|b|d|l|q|safe|exempt|blocked": "hash:net",
    "off|seen|peer": "hash:ip",
    "open|led": "hash:ip,port,ip",
}
_TOLD = {re.compile(rf"{SET_PREFIX}(?:{names})([46])(?:-.*)?"): kind for names, kind in _TYPES.items()}
"""What the name of a set of ours tells of its type, and of its family."""


class SetHeader(NamedTuple):
    """A set: its name, its type such as "hash:net", the address family, the default timeout in seconds (-1: it has
    none), whether entries may carry marks (skbinfo), counters and comments, the most entries (maxelem), the prefix
    length that it keeps (0: whole addresses), how many slots it has, how many entries, and how many rules and sets use
    it."""

    name: str
    kind: str
    family: int
    timeout: int
    marks: bool
    counters: bool
    comments: bool
    size: int
    netmask: int
    slots: int
    entries: int
    users: int

    @property
    def is_foreign(self) -> bool:
        """Whether it is of a type, or of a family, that no set of ours with this name has."""
        for name, kind in _TOLD.items():
            told = name.fullmatch(self.name)
            if told:
                return (self.kind, self.family) != (kind, int(told[1]))
        return self.kind not in _TYPES.values()


def read_headers() -> list[SetHeader]:
    """The sets whose names can be ours. Others that only begin so, and go on with what we never write, are left alone:
    tools could not be told of them either. Raises OSError."""
    return [header for header in _read_all() if _OURS.fullmatch(header.name)]


def _read_all() -> Iterator[SetHeader]:
    asked = rtnetlink.encode(_PROTOCOL, bytes([_VERSION])) + rtnetlink.encode(_FLAGS, struct.pack(">I", _HEADERS_ONLY))
    for body in rtnetlink.dump(_LIST, _GENERIC + asked, _NETFILTER):
        told = rtnetlink.decode(body, len(_GENERIC))
        if _NAME in told:
            yield _take_apart(told, rtnetlink.decode(told.get(_DATA, b"")))


def _take_apart(told: dict[int, bytes], data: dict[int, bytes]) -> SetHeader:
    flags = _number(data.get(_SET_FLAGS))
    return SetHeader(
        name=decode_name(told[_NAME]),
        kind=decode_name(told.get(_TYPE, b"")),
        family=6 if told.get(_FAMILY) == bytes([socket.AF_INET6]) else 4,
        timeout=_number(data.get(_TIMEOUT), -1),
        marks=bool(flags & _MARKS),
        counters=bool(flags & _COUNTERS),
        comments=bool(flags & _COMMENT),
        size=_number(data.get(_SIZE)),
        netmask=_number(data.get(_NETMASK)),
        slots=_number(data.get(_SLOTS)),
        entries=_number(data.get(_ENTRIES)),
        users=_number(data.get(_USERS)),
    )


def _number(value: bytes | None, otherwise: int = 0) -> int:
    return otherwise if value is None else int.from_bytes(value, "big")
