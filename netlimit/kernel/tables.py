"""The tables of iptables as the kernel keeps them, to learn at little cost whether anything in them has changed."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_GET_INFO, _GET_ENTRIES = 64, 65
"""IPT_SO_GET_INFO and IPT_SO_GET_ENTRIES (linux/netfilter_ipv4/ip_tables.h); the same numbers for IPv6."""
_NAME = 32
_INFO = struct.Struct("=32s13I")
"""struct ipt_getinfo: the name of the table, then hooks, and last how many entries there are, and their size."""
_LENGTH = struct.Struct("=2xH")
_ATTEMPTS = 10


class _Family(NamedTuple):
    """How tables of an address family are asked for, where they are listed, and in an entry (struct ipt_entry) the
    places of its lengths and of its counters."""

    domain: int
    level: int
    names: str
    lengths: int
    counters: int


_FAMILIES = {
    4: _Family(socket.AF_INET, socket.SOL_IP, "/proc/net/ip_tables_names", 88, 96),
    6: _Family(socket.AF_INET6, socket.IPPROTO_IPV6, "/proc/net/ip6_tables_names", 140, 152),
}
_COUNTERS = bytes(16)


def digest_tables(family: int) -> bytes:
    """A digest of all tables of a family that are in use, without what they have counted. Raises OSError."""
    about = _FAMILIES[family]
    digest = hashlib.blake2b()
    names = _list_tables(about)
    if not names:  # then the host may not know the family at all
        return digest.digest()
    with socket.socket(about.domain, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        for name in names:
            digest.update(name.encode())
            for entry in _read_entries(sock.fileno(), about, name):
                digest.update(entry)
    return digest.digest()


def _list_tables(about: _Family) -> list[str]:
    """The tables that are in use; none where the kernel has not been asked for any since it started."""
    try:
        return sorted(Path(about.names).read_text().split())
    except FileNotFoundError:
        return []


def _read_entries(descriptor: int, about: _Family, name: str) -> Iterator[memoryview]:
    table = memoryview(_read_table(descriptor, about.level, name))
    start = 0
    while start < len(table):
        length: int = _LENGTH.unpack_from(table, start + about.lengths)[0]
        table[start + about.counters : start + about.counters + len(_COUNTERS)] = _COUNTERS
        yield table[start : start + length]
        start += length


def _read_table(descriptor: int, level: int, name: str) -> bytearray:
    """The entries of a table. It can grow between the question for its size and that for itself."""
    for attempt in range(_ATTEMPTS):
        info = _INFO.unpack(_ask(descriptor, level, _GET_INFO, name, _INFO.size - _NAME))
        try:
            return _ask(descriptor, level, _GET_ENTRIES, name, info[-1] + 8, struct.pack("=I", info[-1]))[_NAME + 8 :]
        except OSError as error:
            if error.errno != errno.EAGAIN or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _ask(descriptor: int, level: int, question: int, name: str, room: int, words: bytes = b"") -> bytearray:
    """getsockopt(2), which tells the kernel of which table it shall speak. Python's own cannot."""
    buffer = bytearray((name.encode().ljust(_NAME, b"\0") + words).ljust(_NAME + room, b"\0"))
    held = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    length = ctypes.c_uint32(len(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.getsockopt(descriptor, level, question, held, ctypes.byref(length)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return buffer
