"""How SQLite opens files, wherever others may write beside them: it neither waits at a FIFO nor goes where a directory
has led that somebody has put in the place of the one that was judged.

SQLite opens its journal and log by name whenever they are there, and who opens a FIFO waits until somebody opens its
other end. No look before can prevent that, for who may write there puts one in the place of a file in the moment after.
So SQLite is given our open(2) for its own (xSetSystemCall, sqlite.org/c3ref/vfs.html), and our mmap(2) (see `mapping`).

It also removes files by names that it has read: a journal that a crash has left may name another that it was one part
of (a super-journal), which goes once the last part is undone. Who may write beside a file writes such a journal, too.
We have none, so nothing is removed but what SQLite makes beside the file that is worked at. Nor does a log go that is
beside another one by now, as on a disk that was mounted over the directory: SQLite tells files by their inodes' numbers
alone, which are the same on a copy of a disk.
"""

from __future__ import annotations

import _sqlite3
import _thread
import atexit
import ctypes
import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from netlimit.store import mapping
from netlimit.store.files import Place

_PLACES: dict[bytes, int] = {}
"""Directories in which files are opened as root, whatever bears their names: an open descriptor of each."""
_DEVICES = b"/dev/"
_OPEN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, use_errno=True)
_UNLINK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, use_errno=True)
_LOG = (b"-wal", b"-shm")
_BESIDE = (b"-journal", *_LOG)
"""How names of what SQLite makes beside a file end."""
_opened: set[bytes] = set()
_passing: set[bytes] = set()
"""Names of what SQLite has opened, and of what it has made for itself alone."""
_work = threading.local()
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
    """Have SQLite open and map files by our calls, in this process. Where it cannot be given any (it hides its names,
    or may run nothing of ours), it does so by its own, as before."""
    global _installed
    if _installed:
        return
    _installed = True
    try:
        find = ctypes.CDLL(_sqlite3.__file__).sqlite3_vfs_find
        find.restype, find.argtypes = ctypes.POINTER(_Vfs), [ctypes.c_char_p]
        found, calls = find(b"unix"), {b"open": _OPEN(_open), b"unlink": _UNLINK(_unlink), **mapping.make_calls()}
    except (AttributeError, OSError, MemoryError):
        return
    if not found or found.contents.version < 3:
        return
    for name, call in calls.items():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(call))  # SQLite may call it when Python has thrown its own away
        if found.contents.set_system_call(found, name, ctypes.cast(call, ctypes.c_void_p)) == 0:
            atexit.register(found.contents.set_system_call, found, name, None)
    atexit.register(mapping.heed_cuts())


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


@contextmanager
def working_at(file: Path, place: Place | None) -> Iterator[None]:
    """Say that what this thread has SQLite do is of the file that had this name as it was opened: of the one at this
    place, if that is known."""
    _work.file, _work.place = file, place
    try:
        yield
    finally:
        _work.file = None


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
        (_passing if flags & os.O_EXCL else _opened).add(path)
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


def _unlink(path: bytes) -> int:
    """unlink(2), of what SQLite makes."""
    directory, _, name = path.rpartition(b"/")
    place = _PLACES.get(directory)
    try:
        if not _is_made(path) or _is_of_another(path, place):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        os.unlink(path if place is None else name, dir_fd=place)
        _passing.discard(path)
        return 0
    except OSError as error:
        ctypes.set_errno(error.errno or errno.EIO)
    except KeyboardInterrupt:
        ctypes.set_errno(errno.EPERM)
        _thread.interrupt_main()
    return -1


def _is_of_another(path: bytes, place: int | None) -> bool:
    """Whether it is a log, and beside another file than the one that this thread works at. Raises OSError."""
    at: Path | None = getattr(_work, "file", None)
    if at is None or not path.endswith(_LOG):
        return False
    found = os.stat(at if place is None else at.name, dir_fd=place)
    opened: Place | None = _work.place
    return (found.st_dev, found.st_ino) != opened


def _is_made(path: bytes) -> bool:
    """Whether SQLite makes files of this name: beside the file that this thread works at, if that is known."""
    at: Path | None = getattr(_work, "file", None)
    known = _opened if at is None else {os.fsencode(at.resolve())}
    return path in _passing or any(path.endswith(end) and path.removesuffix(end) in known for end in _BESIDE)
