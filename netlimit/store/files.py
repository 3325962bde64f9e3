"""The SQLite file: made with the right rights before SQLite opens it, because SQLite would make it readable to all."""

from __future__ import annotations

import grp
import os
import secrets
import stat
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from netlimit.custody import Rights, acting_for, give, made_directory, made_file, opened
from netlimit.errors import StoreError

GROUP = "netlimit"
"""Controller (root) and API (unprivileged) share the database through this group."""

Place = tuple[int, int]
"""Which file it is, whatever its name: device and inode."""


class Surroundings(NamedTuple):
    """The directory that a database lies in, and its log, if there is one."""

    directory: Place | None
    log: Place | None


def make_file(path: Path) -> None:
    """Make the database file (0660), and its directory where that is missing, unless they are there.

    The directory gets mode 2770 and the group `netlimit` where that group exists and may be given, else 0700.
    Raises StoreError.
    """
    try:
        if not path.parent.is_dir():
            _make_directory(path.parent)
        with (
            opened(path.parent.resolve(), directory=True) as place,
            acting_for(path),
            suppress(FileExistsError),
            made_file(path.name, place, 0o660),
        ):
            pass
    except OSError as error:
        raise StoreError(
            f"The database {path} cannot be made: {error.strerror}. "
            "Set NETLIMIT_DATABASE_URL to a place that this user may write to, or run as root."
        ) from error


def check_file(path: Path) -> None:
    """Raise StoreError unless the file is there and this process may read and write it; where the disk can only be
    read, as after an error of it, and nobody may write, reading is enough."""
    try:
        present = path.is_file()
    except OSError:
        present = True  # a directory on the way is closed to us, and the next question says so
    if not present:
        raise StoreError(
            f"There is no database at {path}; `netlimit db upgrade` makes one.",
            "There is no database; `netlimit db upgrade` makes one.",
        )
    if _is_read_only(path) and os.access(path, os.R_OK):
        return
    if not os.access(path, os.R_OK | os.W_OK) or not os.access(path.parent, os.W_OK | os.X_OK):
        raise StoreError(
            f"This user may not read and write the database {path} and its directory; "
            f"run as root, or join the group that owns them ({GROUP!r} where netlimit was installed)."
        )


def cut_log(path: Path, size: int) -> None:
    """Have the file of a database's log be no larger than so many bytes. Raises OSError."""
    with acting_for(path), opened(path.parent.resolve(), directory=True) as place:
        descriptor = os.open(
            f"{path.name}-wal", os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place
        )
        try:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_size > size:
                os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)  # no lock of SQLite's is on this file


def check_names(path: Path) -> None:
    """Raise StoreError where the database is a link, for SQLite keeps its log beside what that leads to; or where a
    file beside it is no plain one: who opens a FIFO waits for ever, and SQLite opens its journal and log whenever they
    are there."""
    if os.path.islink(path):  # of a directory that is closed to us the next question tells
        raise StoreError(
            f"The database {path} is a symbolic link; SQLite would keep its log elsewhere than beside that name. Name "
            "the file itself in NETLIMIT_DATABASE_URL, or have a link to its directory."
        )
    for ending in ("-journal", "-wal", "-shm"):
        name = path.with_name(path.name + ending)
        try:
            mode = name.lstat().st_mode
        except OSError:
            continue
        if not stat.S_ISREG(mode):
            raise StoreError(
                f"{name}, beside the database, is no plain file: find out who put it there, and remove it."
            )


def _is_read_only(path: Path) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def find_place(path: Path) -> Place | None:
    """Which file bears this name; None when there is none, or it cannot be seen."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def find_surroundings(path: Path) -> Surroundings:
    """Where the file of this name lies now."""
    return Surroundings(find_place(path.parent), find_place(_name_log(path)))


def check_exchange(path: Path, former: Surroundings) -> None:
    """Raise StoreError if the file that was open under this name has gone, or another one in its place cannot be opened
    yet: SQLite would take the log of the former for its own. A disk that is mounted over the directory brings its own:
    what is beside a file in another directory is the former's only if somebody has moved it there."""
    if find_place(path) is None:
        raise StoreError(f"The database {path} is not there any more; put it back, or restore a backup.")
    log, present = _name_log(path), find_surroundings(path)
    if not _is_empty(log) and (present.directory == former.directory or present.log == former.log):
        raise StoreError(
            f"Another file is in the place of the database {path}, beside the log of the former ({log.name}). End "
            "netlimit, put the database in its place with its own log or without any, and start netlimit again."
        )


def _name_log(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _is_empty(path: Path) -> bool:
    """Whether nothing is there, or nothing in it."""
    try:
        return not path.stat().st_size
    except OSError:
        return True


def put_aside(path: Path, now: datetime) -> Path:
    """Give a damaged file and its log other names, and put an empty one of the same owner and rights in its place.
    There is no moment without a file of this name: others may write in the directory, too.

    Gives the new name. Raises OSError.
    """
    ending = f".damaged-{now:%Y%m%dT%H%M%S}"
    with opened(path.parent.resolve(), directory=True) as place, opened(path.name, place) as former:
        fresh = f".{path.name}.{secrets.token_hex(8)}"
        found = os.fstat(former)
        with made_file(fresh, place, stat.S_IMODE(found.st_mode), Rights(found.st_uid, found.st_gid)):
            pass
        for name in (f"{path.name}-wal", f"{path.name}-shm"):
            with suppress(FileNotFoundError):
                os.rename(name, name + ending, src_dir_fd=place, dst_dir_fd=place)
        os.link(path.name, path.name + ending, src_dir_fd=place, dst_dir_fd=place, follow_symlinks=False)
        os.rename(fresh, path.name, src_dir_fd=place, dst_dir_fd=place)
    return path.with_name(path.name + ending)


def _make_directory(path: Path) -> None:
    with made_directory(path) as directory, suppress(KeyError, PermissionError):
        give(directory, -1, grp.getgrnam(GROUP).gr_gid, 0o2770, of=(os.geteuid(),))
