"""How SQLite opens files, wherever others may write beside them: it neither waits at a FIFO nor goes where a directory
has led that somebody has put in the place of the one that was judged.

SQLite opens its journal and log by name whenever they are there, and who opens a FIFO waits until somebody opens its
other end. No look before can prevent that, for who may write there puts one in the place of a file in the moment after.
So SQLite is given our open(2) for its own (xSetSystemCall, sqlite.org/c3ref/vfs.html).
"""

from __future__ import annotations

import _sqlite3
import _thread
import atexit
import ctypes
import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

_PLACES: dict[bytes, int] = {}
"""Directories in which files are opened as root, whatever bears their names: an open descriptor of each."""
_DEVICES = b"/dev/"
_OPEN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, use_errno=True)
_installed = False


class _Vfs(ctypes.Structure):
    """sqlite3_vfs, up to what is called here."""


_SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Vfs), ctypes.c_char_p, ctypes.c_void_p)
_Vfs._fields_ = [
    ("version", ctypes.c_int),
    ("size", ctypes.c_int),
    ("longest", ctypes.c_int),
    ("next", ctypes.c_void_p),
    ("name", ctypes.c_char_p),
    ("data", ctypes.c_void_p),
    ("calls", ctypes.c_void_p * 12),  # xOpen to xGetLastError
    ("time", ctypes.c_void_p),
    ("set_system_call", _SET),
]


def install() -> None:
    """Have SQLite open files by our call, in this process. Where it cannot be given one (it hides its names, or may run
    nothing of ours), it opens them by its own, as before."""
    global _installed
    if _installed:
        return
    _installed = True
    try:
        find = ctypes.CDLL(_sqlite3.__file__).sqlite3_vfs_find
        find.restype, find.argtypes = ctypes.POINTER(_Vfs), [ctypes.c_char_p]
        found, call = find(b"unix"), _OPEN(_open)
    except (AttributeError, OSError, MemoryError):
        return
    if not found or found.contents.version < 3:
        return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(call))  # SQLite may open files when Python has thrown its own away
    if found.contents.set_system_call(found, b"open", ctypes.cast(call, ctypes.c_void_p)) == 0:
        atexit.register(found.contents.set_system_call, found, b"open", None)


def is_held(directory: Path) -> bool:
    """Whether files in the directory of this name are opened in one that is held."""
    return os.fsencode(directory) in _PLACES


def hold(directory: Path, descriptor: int) -> None:
    """From now on, what SQLite opens in the directory of this name it opens in this one, which is open."""
    name = os.fsencode(directory)
    if (held := _PLACES.get(name)) is None:
        _PLACES[name] = os.dup(descriptor)
    elif not os.path.sameopenfile(held, descriptor):
        os.dup2(descriptor, held, inheritable=False)  # in one step: another thread may be opening there


def _open_found(path: bytes, flags: int, mode: int, place: int | None) -> int:
    """What is there is not to be made: a disk that is frozen lets even that wish hang, and nobody could read by a log
    that is there."""
    if flags & os.O_CREAT and not flags & os.O_EXCL:
        with suppress(FileNotFoundError):
            return os.open(path, flags & ~os.O_CREAT, mode, dir_fd=place)
    return os.open(path, flags, mode, dir_fd=place)


def _open(path: bytes, flags: int, mode: int) -> int:
    """open(2), but what is no plain file, directory or device is refused, and nothing waited for."""
    try:
        directory, _, name = path.rpartition(b"/")
        place = _PLACES.get(directory)
        flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = _open_found(path if place is None else name, flags, mode, place)
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISREG(kind) or stat.S_ISDIR(kind) or path.startswith(_DEVICES):
            return descriptor
        os.close(descriptor)
        ctypes.set_errno(errno.EACCES)
    except OSError as error:
        ctypes.set_errno(error.errno or errno.EIO)
    except KeyboardInterrupt:  # SQLite is in between, and could not pass it on
        ctypes.set_errno(errno.EACCES)
        _thread.interrupt_main()
    return -1
