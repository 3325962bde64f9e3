"""Maps of eBPF, read and written many entries at a time."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Self

from netlimit.kernel.bpf import call, read_info
from netlimit.plain import decode_name

_CREATE, _GET_FD = 0, 14
_LOOKUP_BATCH, _UPDATE_BATCH, _DELETE_BATCH = 24, 26, 27
_BATCH = struct.Struct("=QQQQIIQQ")
_COUNT_AT = 32
_CHUNK = 4096
_NO_PREALLOC = 1
_INFO_BYTES = 40
_Buffer = ctypes.Array[ctypes.c_char]


class Kind(IntEnum):
    """What a map is: it forgets the least recently used when it is full, or it finds the longest prefix."""

    LRU_HASH = 9
    LPM_TRIE = 11


class Map:
    """An open map; a context manager that closes it. The methods raise OSError."""

    def __init__(self, fd: int, key_bytes: int, value_bytes: int, name: str) -> None:
        self.fd = fd
        self.name = name
        self._key_bytes = key_bytes
        self._value_bytes = value_bytes

    @classmethod
    def create(cls, kind: Kind, name: str, key_bytes: int, value_bytes: int, size: int) -> Self:
        """Make a map for at most `size` entries, which lives as long as it is open or a program uses it."""
        flags = _NO_PREALLOC if kind is Kind.LPM_TRIE else 0
        attributes = struct.pack("=IIIIIII16s", kind, key_bytes, value_bytes, size, flags, 0, 0, name.encode())
        return cls(call(_CREATE, bytearray(attributes)), key_bytes, value_bytes, name)

    @classmethod
    def open(cls, number: int) -> Self:
        """Open a map by its id."""
        fd = call(_GET_FD, bytearray(struct.pack("=III", number, 0, 0)))
        key_bytes, value_bytes, name = struct.unpack_from("=8xII8x16s", read_info(fd, bytes(_INFO_BYTES)))
        return cls(fd, key_bytes, value_bytes, decode_name(name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def update(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """Write entries; one that is there takes the new value."""
        pairs = list(entries)
        keys = ctypes.create_string_buffer(b"".join(key for key, _ in pairs))
        values = ctypes.create_string_buffer(b"".join(value for _, value in pairs))
        if pairs:
            _, error = self._try(_UPDATE_BATCH, ctypes.addressof(keys), ctypes.addressof(values), len(pairs))
            if error is not None:
                raise error

    def delete(self, keys: Iterable[bytes]) -> None:
        """Remove entries; one that is not there is no error."""
        wanted = list(keys)
        buffer = ctypes.create_string_buffer(b"".join(wanted))
        begin = 0
        while begin < len(wanted):
            place = ctypes.addressof(buffer) + begin * self._key_bytes
            done, error = self._try(_DELETE_BATCH, place, 0, len(wanted) - begin)
            if error is not None and error.errno != errno.ENOENT:
                raise error
            begin += done + 1  # the kernel stops at one that is missing

    def read(self) -> Iterator[tuple[bytes, bytes]]:
        """All entries. One that comes or goes meanwhile may be missing, another may come twice."""
        keys = ctypes.create_string_buffer(_CHUNK * self._key_bytes)
        values = ctypes.create_string_buffer(_CHUNK * self._value_bytes)
        place = ctypes.create_string_buffer(max(self._key_bytes, 4))
        begun = ended = False
        while not ended:
            count, error = self._try(
                _LOOKUP_BATCH,
                ctypes.addressof(keys),
                ctypes.addressof(values),
                _CHUNK,
                ctypes.addressof(place) if begun else 0,
                ctypes.addressof(place),
            )
            if error is not None and error.errno != errno.ENOENT:
                raise error
            begun, ended = True, error is not None
            yield from zip(_cut(keys, self._key_bytes, count), _cut(values, self._value_bytes, count), strict=True)

    def _try(
        self, command: int, keys: int, values: int, count: int, begin: int = 0, end: int = 0
    ) -> tuple[int, OSError | None]:
        """Give the kernel addresses; how many entries were done, and what stopped it."""
        attributes = bytearray(_BATCH.pack(begin, end, keys, values, count, self.fd, 0, 0))
        stopped = None
        try:
            call(command, attributes)
        except OSError as error:
            stopped = error
        return struct.unpack_from("=I", attributes, _COUNT_AT)[0], stopped


def _cut(buffer: _Buffer, size: int, count: int) -> Iterator[bytes]:
    data = buffer.raw
    return (data[start : start + size] for start in range(0, count * size, size))
