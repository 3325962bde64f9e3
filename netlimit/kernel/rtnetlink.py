"""Messages of traffic control (rtnetlink(7)), put together and taken apart by hand.

pyroute2 decodes every field of every message: for 16,000 classes it takes 1.7 s, and this 0.1 s.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Container, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from netlimit.plain import decode_name

NEW_QDISC, GET_QDISC = 36, 38
GET_CLASS = 42
NEW_FILTER, GET_FILTER = 44, 46
CREATE, EXCLUSIVE, REPLACE = 0x400, 0x200, 0x100
ROOT = 0xFFFFFFFF
"""The parent of a root qdisc, and of the classes at the top of a qdisc (TC_H_ROOT)."""

_REQUEST, _ACKNOWLEDGE, _ECHO, _DUMP = 0x1, 0x4, 0x8, 0x300
_INTERRUPTED = 0x10
"""NLM_F_DUMP_INTR: while it was read, somebody has changed what is read, and some of it may be missing."""
_ATTEMPTS = 4
_ERROR, _DONE = 2, 3
_EXPLAINED = 0x200
_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
_HEADER = struct.Struct("=IHHII")
_TC = struct.Struct("=BxxxiIII")
_INDEX, _PARENT = struct.Struct("=4xi"), struct.Struct("=12xI")
"""What of _TC tells of which device, and what it hangs on."""
_ATTRIBUTE = struct.Struct("=HH")
_STATISTICS = frozenset((3, 4, 5, 7))
"""TCA_STATS, TCA_XSTATS, TCA_RATE, TCA_STATS2."""
_RECEIVE = 1 << 16
"""A message is at most half of it."""
_BUFFER = 1 << 22


class TcMessage(NamedTuple):
    """A qdisc, class or filter (struct tcmsg): the index of its device, its handle, that of its parent, what else the
    kernel says (of a class: the handle of its queue), and its attributes by number."""

    device: int
    handle: int
    parent: int
    info: int
    attributes: dict[int, bytes]


class _Answer(NamedTuple):
    """The bodies of the messages that came, and whether the kernel says that some may be missing."""

    bodies: list[bytes]
    interrupted: bool = False


def read_all(
    kind: int, index: int, parent: int = 0, extra: bytes = b"", hanging_on: Container[int] | None = None
) -> list[TcMessage]:
    """Everything of a kind on a device (a qdisc: on every one, whatever the index); with `hanging_on`, only what has
    one of these parents. Raises OSError."""
    bodies = read_bodies(kind, index, parent, extra)
    if hanging_on is not None:
        bodies = [body for body in bodies if find_parent(body) in hanging_on]
    return [take_apart(body) for body in bodies]


def read_bodies(kind: int, index: int, parent: int = 0, extra: bytes = b"") -> list[bytes]:
    """The same, as the kernel sends it. Raises OSError."""
    return read_whole(kind, _TC.pack(0, index, 0, parent, 0) + extra)


def read_whole(kind: int, body: bytes, protocol: int = socket.NETLINK_ROUTE) -> list[bytes]:
    """The bodies of all messages of a kind, of one moment. Raises OSError.

    What changes while it is read is read again, if the kernel says so; after some attempts, what there is must do.
    Linux 6.18 says so of devices and routes, but not of classes: while others go, a reading can miss a few.
    """
    for _ in range(_ATTEMPTS):
        answer = _ask(kind, _DUMP, body, protocol)
        if not answer.interrupted:
            break
    return answer.bodies


def cut_statistics(body: bytes) -> bytes:
    """What a qdisc or class is, without what it has counted: that stands behind it."""
    start, end = _TC.size, len(body)
    while start < end:
        length, number = _ATTRIBUTE.unpack_from(body, start)
        if number in _STATISTICS:
            return body[:start]
        start += (length + 3) & ~3
    return body


def find_device(body: bytes) -> int:
    """The index of the device on which a qdisc or class is."""
    index: int = _INDEX.unpack_from(body)[0]
    return index


def find_parent(body: bytes) -> int:
    """What a qdisc or class hangs on."""
    parent: int = _PARENT.unpack_from(body)[0]
    return parent


def read_one(kind: int, index: int, parent: int, handle: int = 0) -> TcMessage | None:
    """What hangs on a parent, or has a handle; None for nothing. Raises OSError."""
    # Without the echo, only those who listen to all changes would be told.
    flags = _ACKNOWLEDGE | _ECHO
    try:
        bodies = _ask(kind, flags, _TC.pack(0, index, handle, parent, 0)).bodies
    except FileNotFoundError:
        return None
    return take_apart(bodies[0]) if bodies else None


def write_one(kind: int, flags: int, message: TcMessage) -> None:
    """Make or replace one thing. Raises OSError with the kernel's words."""
    body = _TC.pack(0, message.device, message.handle, message.parent, message.info)
    body += b"".join(encode(number, value) for number, value in message.attributes.items())
    _ask(kind, _ACKNOWLEDGE | flags, body)


def encode(number: int, value: bytes) -> bytes:
    """One attribute."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), number) + value + bytes(-len(value) % 4)


def decode(data: bytes, start: int = 0) -> dict[int, bytes]:
    """The attributes in some bytes."""
    found = {}
    while start + _ATTRIBUTE.size <= len(data):
        length, number = _ATTRIBUTE.unpack_from(data, start)
        if length < _ATTRIBUTE.size:
            break
        found[number & 0x3FFF] = data[start + _ATTRIBUTE.size : start + length]
        start += (length + 3) & ~3
    return found


def list_values(data: bytes) -> Iterator[bytes]:
    """The values of the attributes in some bytes, also of several of one number (a list)."""
    return (value for _, value in list_attributes(data))


def list_attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The same, each with its number."""
    start = 0
    while start + _ATTRIBUTE.size <= len(data):
        length, number = _ATTRIBUTE.unpack_from(data, start)
        if length < _ATTRIBUTE.size:
            return
        yield number & 0x3FFF, data[start + _ATTRIBUTE.size : start + length]
        start += (length + 3) & ~3


def take_apart(body: bytes) -> TcMessage:
    """A message as the kernel sends it, field by field."""
    _, index, handle, parent, info = _TC.unpack_from(body)
    return TcMessage(index, handle, parent, info, decode(body, _TC.size))


def dump(kind: int, body: bytes, protocol: int = socket.NETLINK_ROUTE) -> list[bytes]:
    """The bodies of all messages of a kind. Raises OSError."""
    return _ask(kind, _DUMP, body, protocol).bodies


def ask(kind: int, body: bytes) -> list[bytes]:
    """The bodies of what is answered to one question. Raises OSError with the kernel's words."""
    return _ask(kind, _ACKNOWLEDGE, body).bodies


def _ask(kind: int, flags: int, body: bytes, protocol: int = socket.NETLINK_ROUTE) -> _Answer:
    """Send one message and give what is answered."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        sock.setsockopt(_SOL_NETLINK, _EXT_ACK, 1)
        sock.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
        sock.bind((0, 0))
        sock.send(_HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | flags, 1, 0) + body)
        return _collect(iter(lambda: sock.recv(_RECEIVE), b""))


def _collect(datagrams: Iterable[bytes]) -> _Answer:
    """What is answered, until the kernel says that this was all. Raises OSError for what it refuses."""
    bodies: list[bytes] = []
    interrupted = False
    for found, marks, body in chain.from_iterable(map(_split, datagrams)):
        if found == _ERROR:
            _check(marks, body)
            break
        interrupted |= bool(marks & _INTERRUPTED)
        if found == _DONE:
            break
        bodies.append(body)
    return _Answer(bodies, interrupted)


def _split(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The messages in a datagram: type, flags, body."""
    start = 0
    while start < len(data):
        length, kind, flags, _, _ = _HEADER.unpack_from(data, start)
        yield kind, flags, data[start + _HEADER.size : start + length]
        start += (length + 3) & ~3


def _check(flags: int, answer: bytes) -> None:
    """An answer with error 0 says yes; others may come with a sentence (NLMSGERR_ATTR_MSG)."""
    number = -struct.unpack_from("=i", answer)[0]
    if number:
        words = decode(answer, 4 + _HEADER.size) if flags & _EXPLAINED else {}
        raise OSError(number, decode_name(words[1]) if 1 in words else os.strerror(number))
