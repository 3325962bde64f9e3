"""Many messages in one system call: sendmmsg(2) and recvmmsg(2), which Python's socket module has not."""

from __future__ import annotations

import ctypes
import os
import struct
import sys

# struct iovec and struct mmsghdr of 64-bit Linux:
#   name, namelen, iov, iovlen, control, controllen, flags, and the length that the kernel writes.
IOVEC = struct.Struct("=QQ")
HEADER = struct.Struct("=QI4xQQQQi4xI4x")
LENGTH = struct.Struct("=56xI4x")

_libc = ctypes.CDLL(None, use_errno=True)


class Column:
    """One part of every message: `size` bytes at `stride` intervals of a buffer (stride 0: all share them)."""

    def __init__(self, buffer: bytes | bytearray, size: int, stride: int | None = None) -> None:
        self.buffer = buffer if isinstance(buffer, bytearray) else bytearray(buffer)
        self.size = size
        self.stride = size if stride is None else stride
        self._address = _address_of(self.buffer)

    def at(self, index: int) -> int:
        """The address of this part of message `index`."""
        return self._address + index * self.stride


class Messages:
    """An array of messages over buffers that live as long as it does."""

    def __init__(self, count: int, data: Column, name: Column | None = None, control: Column | None = None) -> None:
        if sys.maxsize < 2**32:
            raise OSError("The testbed's traffic needs a 64-bit Python: it lays out C structures for one.")
        self.count = count
        iovecs = Column(b"".join(IOVEC.pack(data.at(i), data.size) for i in range(count)), IOVEC.size)
        self._parts = (data, name, control, iovecs)
        self._fresh = b"".join(
            HEADER.pack(*_place(name, i), iovecs.at(i), 1, *_place(control, i), 0, 0) for i in range(count)
        )
        self._headers = bytearray(self._fresh)
        self._address = _address_of(self._headers)

    def send(self, descriptor: int, start: int, count: int) -> int:
        """Sends messages start..start+count-1 and returns how many went out; OSError when none did."""
        address = ctypes.c_void_p(self._address + start * HEADER.size)
        return _result(_libc.sendmmsg(descriptor, address, count, 0))

    def receive(self, descriptor: int, flags: int) -> int:
        """Receives into the array and returns how many came; OSError (BlockingIOError) when none did."""
        self._headers[:] = self._fresh  # the kernel writes the lengths of what it gave over those it may give
        address = ctypes.c_void_p(self._address)
        return _result(_libc.recvmmsg(descriptor, address, self.count, flags, None))

    def lengths(self, count: int) -> list[int]:
        """The lengths of the first `count` messages received."""
        return [n for (n,) in LENGTH.iter_unpack(memoryview(self._headers)[: count * HEADER.size])]


def _place(column: Column | None, index: int) -> tuple[int, int]:
    return (0, 0) if column is None else (column.at(index), column.size)


def _address_of(buffer: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))


def _result(value: int) -> int:
    if value < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return value
