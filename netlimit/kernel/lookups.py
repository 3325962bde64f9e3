"""The routing rules (`ip rule`) by which packets find the table of their route."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Container, Iterable, Mapping

from netlimit.kernel import rtnetlink
from netlimit.tree import Lookup

RULES = 1 << 7 | 1 << 18
"""Changes of them (RTNLGRP_IPV4_RULE, RTNLGRP_IPV6_RULE)."""
_GET_RULE = 34
_RULE = struct.Struct("=BBBBBxxBI")
"""struct fib_rule_hdr: family, lengths of the prefixes of destination and source, TOS, table, action, flags."""
_TO_TABLE, _GO_ON = 1, 2
_INVERTED = 0x2
_PRIORITY, _SUPPRESSED, _TABLE, _OF_VRFS, _ORIGIN = 6, 14, 15, 19, 21
_OF_EVERY_PACKET = frozenset((_PRIORITY, _SUPPRESSED, _TABLE, _ORIGIN))
"""What a rule may say that speaks of every packet."""
_NUMBER = struct.Struct("=i")


def read_rules() -> tuple[bytes, ...]:
    """The routing rules of both families, as the kernel sends them; none if it has been built without. Raises
    OSError."""
    try:
        dumps = [rtnetlink.dump(_GET_RULE, bytes([family]) + bytes(11)) for family in (socket.AF_INET, socket.AF_INET6)]
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return ()
    return tuple(body for bodies in dumps for body in bodies)


def read_attributes(body: bytes) -> dict[int, bytes]:
    """What a routing rule says, by number (FRA_…)."""
    return rtnetlink.decode(body, _RULE.size)


def find_lookups(rules: Iterable[bytes]) -> tuple[Lookup, ...]:
    """Those that lead to a table which they name, in the order in which the kernel asks them."""
    every = [(_RULE.unpack_from(each), read_attributes(each)) for each in rules]
    jumping = {head[0] for head, _ in every if head[5] == _GO_ON}  # what is jumped over is asked of some packets alone
    return tuple(
        _read_lookup(head, said, jumping) for head, said in every if head[5] == _TO_TABLE and _OF_VRFS not in said
    )


def _read_lookup(head: tuple[int, ...], said: Mapping[int, bytes], jumping: Container[int]) -> Lookup:
    family, *some, table, _, flags = head
    always = not (any(some) or flags & _INVERTED or family in jumping) and said.keys() <= _OF_EVERY_PACKET
    number, suppressed = _read_number(said, _TABLE, table), _read_number(said, _SUPPRESSED, -1)
    return Lookup(6 if family == socket.AF_INET6 else 4, number, always, suppressed)


def _read_number(said: Mapping[int, bytes], attribute: int, otherwise: int) -> int:
    number: int = _NUMBER.unpack_from(said[attribute])[0] if len(said.get(attribute, b"")) == 4 else otherwise
    return number
