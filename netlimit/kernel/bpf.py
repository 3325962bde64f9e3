"""eBPF by the system call bpf(2) alone: programs are written as instructions, so no compiler has to be on the host."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import NamedTuple

from netlimit.errors import KernelError
from netlimit.plain import decode, decode_name

_CALL = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD = 5
_PIN, _GET_PINNED = 6, 7
_PROG_GET_FD = 13
_GET_INFO = 15
_SCHED_CLS = 3
_LICENSE = b"GPL"
_LOG_BYTES = 1 << 18
_MOST_MAPS = 64
_READ_ONLY = 1 << 3


class ProgramInfo(NamedTuple):
    """What the kernel says of a program: its name, and the ids of the maps that it uses."""

    name: str
    maps: tuple[int, ...]


def ins(op: int, dst: int = 0, src: int = 0, off: int = 0, imm: int = 0) -> bytes:
    """One instruction (RFC 9669): opcode, destination and source register, signed 16-bit offset, 32-bit immediate."""
    return struct.pack("=BBhI", op, dst | src << 4, off, imm & 0xFFFFFFFF)


def load_program(instructions: bytes, name: str) -> int:
    """Load a classifier for tc (SCHED_CLS) and return its file descriptor, which the caller closes.

    `name` has at most 15 letters, digits or underscores. Raises KernelError with the words of the kernel's verifier.
    """
    try:
        return _load(instructions, name, log=None)
    except OSError as refused:
        log = ctypes.create_string_buffer(_LOG_BYTES)
        try:
            return _load(instructions, name, log)
        except OSError as error:
            words = decode(log.value).strip()[-500:]
            raise KernelError(f"load the eBPF program {name}", words or _explain(error)) from refused


def pin(fd: int, path: str) -> None:
    """Give a program a name in a file system of the kind bpf. Raises OSError."""
    name = ctypes.create_string_buffer(path.encode())
    call(_PIN, bytearray(struct.pack("=QII", ctypes.addressof(name), fd, 0)))


def open_pinned(path: str) -> int:
    """Open a program by its name; its file must be readable, nothing else. Raises OSError."""
    name = ctypes.create_string_buffer(path.encode())
    return call(_GET_PINNED, bytearray(struct.pack("=QII", ctypes.addressof(name), 0, _READ_ONLY)))


def read_program(number: int) -> ProgramInfo:
    """Find out about a program by its id. Raises OSError."""
    fd = call(_PROG_GET_FD, bytearray(struct.pack("=III", number, 0, 0)))
    ids = (ctypes.c_uint32 * _MOST_MAPS)()
    try:
        # What is asked for must be said in the same structure: where the ids of maps shall go, and how many.
        info = read_info(fd, struct.pack("=52xIQ16x", _MOST_MAPS, ctypes.addressof(ids)))
    finally:
        os.close(fd)
    count, name = struct.unpack("=52xI8x16s", info)
    return ProgramInfo(decode_name(name), tuple(ids[:count]))


def read_info(fd: int, info: bytes) -> bytes:
    """What the kernel says of an open program or map (bpf_prog_info, bpf_map_info), of the same length as `info`.

    Raises OSError.
    """
    buffer = ctypes.create_string_buffer(info, len(info))
    call(_GET_INFO, bytearray(struct.pack("=IIQ", fd, len(info), ctypes.addressof(buffer))))
    return buffer.raw


def call(command: int, attributes: bytearray) -> int:
    """Make the system call; what the kernel answers in `attributes` (union bpf_attr) is there afterwards.

    Raises OSError, and KernelError on an architecture of which the number of the call is not known.
    """
    number = _CALL.get(platform.machine())
    if number is None:
        raise KernelError("bpf(2)", f"netlimit knows eBPF on {' and '.join(_CALL)}, not on {platform.machine()}")
    buffer = (ctypes.c_char * len(attributes)).from_buffer(attributes)
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(number, command, buffer, len(attributes))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _load(instructions: bytes, name: str, log: ctypes.Array[ctypes.c_char] | None) -> int:
    code = ctypes.create_string_buffer(instructions, len(instructions))
    license = ctypes.create_string_buffer(_LICENSE)
    where = (int(log is not None), len(log), ctypes.addressof(log)) if log is not None else (0, 0, 0)
    count = len(instructions) // len(ins(0))
    pointers = ctypes.addressof(code), ctypes.addressof(license)
    # The kernel's version and flags lie between the log and the name.
    attributes = struct.pack("=IIQQIIQII16s", _SCHED_CLS, count, *pointers, *where, 0, 0, name.encode())
    return call(_PROG_LOAD, bytearray(attributes))


def _explain(error: OSError) -> str:
    hint = "; the kernel needs CONFIG_BPF_SYSCALL" if error.errno == errno.ENOSYS else ""
    return f"{error.strerror}{hint}"
