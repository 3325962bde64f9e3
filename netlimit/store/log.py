"""The write-ahead log of a SQLite file, which somebody may remove while it is in use.

Whoever has it open goes on with a log that has no name any more, and whoever comes then begins another: two databases
under one name, which see nothing of each other, and of which the file holds neither. So who has it open looks whether
it still has its name, and who comes looks whether somebody goes by another.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from netlimit.custody import opened
from netlimit.store.files import Place, find_place

_FLOCK = struct.Struct("hhqqi4x")
"""struct flock of fcntl(2): kind, whence, start, length, process."""
_SHARED_FIRST, _SHARED_SIZE = 0x40000002, 510
"""What every connection by way of a log holds a shared lock on, in the file, as long as it is open (SQLite, os.h)."""
_WAL_VERSION, _VERSION_AT = 2, 18
"""How the head of a file says that it has a log (sqlite.org/fileformat2.html, 1.3)."""


class Log(NamedTuple):
    """A file, its log, and the index of that, which all who use the log share."""

    file: Place
    log: Place
    shared: Place


def find_log(path: Path) -> Log | None:
    """The log that is beside a file now; None unless all of it is there."""
    file, log, index = find_place(path), find_place(_beside(path, "-wal")), find_place(_beside(path, "-shm"))
    return Log(file, log, index) if file and log and index else None


def has_successor(path: Path, lost: Log) -> bool:
    """Whether somebody else has begun a log in the place of a lost one: has written to it, or has it open."""
    log, index = _beside(path, "-wal"), _beside(path, "-shm")
    with suppress(OSError):
        if find_place(log) != lost.log and log.stat().st_size:
            return True
    if find_place(index) == lost.shared:  # to look at it would end every lock that this process has on it
        return False
    with suppress(OSError), opened(index) as descriptor:
        return _find_holder(descriptor, 0, 0) is not None
    return False


def find_user(path: Path) -> int | None:
    """The process that has the file open by way of a log which is not there any more; None where there is none. Only
    for who has not opened the file, for to look at it ends every lock that this process has on it."""
    if find_log(path) is not None:
        return None
    with suppress(OSError), opened(path.parent.resolve(), directory=True) as place, opened(path.name, place) as file:
        if os.pread(file, 1, _VERSION_AT) == bytes([_WAL_VERSION]):
            return _find_holder(file, _SHARED_FIRST, _SHARED_SIZE)
    return None


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _find_holder(descriptor: int, start: int, size: int) -> int | None:
    """Another process that holds a shared lock there. Who holds one for himself alone is about to open or to close."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, size, 0)
    kind, _, _, _, process = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return process if kind == fcntl.F_RDLCK else None
