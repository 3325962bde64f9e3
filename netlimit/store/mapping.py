"""The memory that connections to one file of SQLite share (`-shm`, mapped): who may write it may also cut it, and who
then looks at what is gone gets SIGBUS, which ends him with all of his threads.

So it is noted what SQLite maps, and what was cut is made whole again when the signal comes: with zeros, from which
SQLite sees that the index of its log is gone, and makes it anew. A transaction may have seen both; `count_cuts` tells.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import sqlite3
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_FAILED = ctypes.c_void_p(-1).value
_READ_WRITE, _IN_PLACE = 0x1 | 0x2, 0x2 | 0x10 | 0x20  # MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS, see mmap(2)
_PATIENCE = 1000
"""Signals in succession with nothing to mend, as another thread has just done it, before one counts as a stranger's."""

_INDEX_HEAD = 48
_HEADERS = 2 * _INDEX_HEAD
"""Bytes of the two copies of what says that an index is whole."""
_HEAD, _VERSION = struct.Struct("=IIIBBHI"), 3007000
"""How it begins: its version, two numbers, whether it is made, a flag, the size of a page, the frames of the log."""
_BROUGHT = struct.Struct("=I")
"""What follows it: how many frames of the log have been brought into the file."""
_LOG_HEAD, _FRAME_HEAD = 32, 24
"""Bytes of the log itself (sqlite.org/fileformat2.html, 4.1)."""

_MAP = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    use_errno=True,
)  # fmt: skip
_UNMAP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, use_errno=True)
_HEED = ctypes.CFUNCTYPE(None, ctypes.c_int, use_errno=True)  # who is interrupted keeps his errno


class _Region(NamedTuple):
    """What is mapped of an open file, in bytes."""

    descriptor: int
    offset: int
    length: int

    def is_cut(self) -> bool:
        return os.fstat(self.descriptor).st_size < self.offset + self.length

    def fill(self) -> None:
        """Make it whole. Raises OSError, where there is no room, say."""
        os.posix_fallocate(self.descriptor, self.offset, self.length)


_library = ctypes.CDLL(None, use_errno=True)
_regions: dict[int, _Region] = {}
"""By address."""
_lost: set[int] = set()
"""Addresses of what was cut and could not be made whole: nobody else sees what is written there."""
_cuts = _vain = 0


class Log(NamedTuple):
    """How many bytes there are of a log, and whether all of it has been brought into its file."""

    size: int
    is_brought: bool


class Cut(sqlite3.OperationalError):
    """What a call was to work with was cut meanwhile."""

    def __init__(self) -> None:
        super().__init__("somebody cut the memory that its connections share, its file -shm, while it was in use")
        self.sqlite_errorname = "NETLIMIT_CUT"


def count_cuts() -> int:
    """How often this process has met something cut."""
    return _cuts


def is_lost() -> bool:
    """Whether something cut could not be made whole, and connections to its file are open yet."""
    return bool(_lost)


def void_indexes() -> None:
    """Have whoever comes next make the indexes of logs anew (sqlite.org/walformat.html): where one was cut while it was
    written to, it says that it is whole, and lacks what was there before."""
    for address, region in tuple(_regions.items()):
        if region.offset == 0:
            ctypes.memset(address, 0, _HEADERS)


def find_log(path: Path) -> Log | None:
    """The log of a database, by the index of it (sqlite.org/walformat.html, 2.1) that this process has mapped. Others
    may add to it meanwhile. None where nobody knows. Raises OSError."""
    index = path.with_name(f"{path.name}-shm").stat()
    for region in tuple(_regions.values()):
        with suppress(OSError):
            if region.offset == 0 and os.path.samestat(os.fstat(region.descriptor), index):
                # Not by its address, where there may be nothing any more once the last connection has been closed.
                return _read_log(os.pread(region.descriptor, _HEADERS + _BROUGHT.size, 0))
    return None


def _read_log(index: bytes) -> Log | None:
    """By the head of the index, which is there twice, and what follows it."""
    if len(index) < _HEADERS + _BROUGHT.size or index[:_INDEX_HEAD] != index[_INDEX_HEAD:_HEADERS]:
        return None
    version, _, _, is_made, _, size, frames = _HEAD.unpack_from(index)
    (brought,) = _BROUGHT.unpack_from(index, _HEADERS)
    length = _LOG_HEAD + frames * (_FRAME_HEAD + (size & 0xFE00) + ((size & 1) << 16))
    return Log(length, brought >= frames) if version == _VERSION and is_made else None


def make_calls() -> Mapping[bytes, Any]:
    """The calls with which SQLite is to map files, by its names for them. Raises AttributeError where the C library has
    no such calls."""
    map_file, unmap_file = _find("mmap64", _MAP), _find("munmap", _UNMAP)

    def note(address: int | None, length: int, rights: int, flags: int, descriptor: int, offset: int) -> int | None:
        mapped: int | None = map_file(address, length, rights, flags, descriptor, offset)
        if mapped not in (None, _FAILED):
            _regions[mapped] = _Region(descriptor, offset, length)
        return mapped

    def forget(address: int, length: int) -> int:
        _regions.pop(address, None)
        _lost.discard(address)
        return int(unmap_file(address, length))

    return {b"mmap": _MAP(note), b"munmap": _UNMAP(forget)}


def heed_cuts() -> Callable[[], object]:
    """Have what is cut mended from now on, in this process; what ends that. Raises AttributeError."""
    map_zeros, set_signal = _find("mmap64", _MAP), _library.signal
    set_signal.restype, set_signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]

    def mend(_signal: int) -> None:
        global _cuts, _vain
        try:
            mended = sum(_mend(address, map_zeros) for address in tuple(_regions))
            _cuts, _vain = _cuts + mended, 0 if mended else _vain + 1
            if _vain > _PATIENCE:
                end()
        except KeyboardInterrupt:  # SQLite is in between, and could not pass it on
            _thread.interrupt_main()

    call = _HEED(mend)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(call))
    before = set_signal(signal.SIGBUS, ctypes.cast(call, ctypes.c_void_p))

    def end() -> object:
        return set_signal(signal.SIGBUS, before)

    return end


def _mend(address: int, map_zeros: Callable[..., object]) -> bool:
    """Whether something was cut there that is whole now. What the file has no room for is in no file then."""
    region = _regions.get(address)
    if region is None:
        return False
    try:
        is_cut = region.is_cut()
        region.fill()
    except OSError:
        del _regions[address]
        _lost.add(address)
        map_zeros(address, region.length, _READ_WRITE, _IN_PLACE, -1, 0)
        return True
    return is_cut


def _find(name: str, kind: Any) -> Any:
    return kind((name, _library))
