"""Files of directories in which others than root may write, as root: whose they are decides, never their names.

Whoever may write a directory may at any moment put a link, a FIFO, or another file in the place of a name. So nothing
here follows a link, waits for who opens the other end, or gives away what is not known to be a plain file, or a
directory, of root's or of the owner-to-be. And what a library opens by name (SQLite) is opened with the rights of those
who could have exchanged it.
"""

from __future__ import annotations

import ctypes
import errno
import grp
import os
import pwd
import stat
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_UNSEEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2
_OTHERS_WRITE, _OTHERS_PASS = 0o022, 0o011
_NOBODY = 65534
"""A user who owns nothing: what he may do in a directory, its group may."""
_libc = ctypes.CDLL(None, use_errno=True)


class Rights(NamedTuple):
    """Those of a user and a group to files, by their ids."""

    user: int
    group: int


@contextmanager
def opened(name: str | Path, within: int | None = None, *, directory: bool = False) -> Iterator[int]:
    """The descriptor of a plain file, or of a directory, by its path or by its name within another directory. Raises
    OSError, of what is neither too."""
    descriptor = os.open(name, _UNSEEN | (os.O_DIRECTORY if directory else 0), dir_fd=within)
    try:
        if not directory and not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "It is no plain file", str(name))
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def made_directory(path: Path, mode: int = 0o700) -> Iterator[int]:
    """The descriptor of a directory, made where it is missing, with those above it. Raises OSError, where a link or
    something else has its name too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with opened(path.parent.resolve(), directory=True) as above:
        with suppress(FileExistsError):
            os.mkdir(path.name, mode, dir_fd=above)
        with opened(path.name, above, directory=True) as descriptor:
            yield descriptor


def give(descriptor: int, user: int, group: int, mode: int | None = None) -> None:
    """Let an open file or directory be this user's and group's (ids). Raises OSError, where it is neither root's nor
    the user's already, or has a second name."""
    found = os.fstat(descriptor)
    if found.st_uid not in (0, user):
        raise PermissionError(errno.EPERM, f"It belongs to {name_user(found.st_uid)}")
    if stat.S_ISREG(found.st_mode) and found.st_nlink != 1:
        raise PermissionError(errno.EPERM, "It has another name besides, as a hard link")
    if (found.st_uid, found.st_gid) != (user, group):
        os.fchown(descriptor, user, group)
    if mode is not None and stat.S_IMODE(found.st_mode) != mode:
        os.fchmod(descriptor, mode)


def find_rights(file: Path) -> Rights | None:
    """With whose rights root opens a file by its name: those of who could have put a link in its place, which then
    leads nowhere that he could not go himself. None, where nobody but root could, and for who is not root."""
    if os.geteuid() != 0:
        return None
    with suppress(FileNotFoundError, NotADirectoryError):
        place = file.parent.lstat()
        if stat.S_ISLNK(place.st_mode) and place.st_uid == 0:
            place = file.parent.stat()
        if place.st_uid != 0:
            return Rights(place.st_uid, place.st_gid)
        if not place.st_mode & _OTHERS_WRITE or not _is_in_reach(file.parent):
            return None
        if not place.st_mode & stat.S_ISVTX:
            return Rights(_find_member(place.st_gid), place.st_gid)
        found = file.lstat()  # in a directory with the sticky bit, whose it is may put another in its place
        if found.st_uid != 0:
            return Rights(found.st_uid, found.st_gid)
    return None


@contextmanager
def opening_as(rights: Rights | None) -> Iterator[None]:
    """Open files with these rights: this thread alone, and nothing but that (setfsuid(2)). Raises OSError."""
    if rights is None:
        yield
        return
    if os.getgroups():
        with suppress(PermissionError):  # some namespaces let nobody change them
            os.setgroups([])  # root needs none, and what root's group may do is not theirs
    before = _exchange(rights)
    try:
        yield
    finally:
        _exchange(before)


def acting_for(file: Path) -> AbstractContextManager[None]:
    """Do something with a file with the rights that `find_rights` tells. Raises OSError."""
    return opening_as(find_rights(file))


def name_user(number: int) -> str:
    """A user's name; the id of one without."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _find_member(group: int) -> int:
    """The user of the same name as a group, whom it was made for."""
    try:
        return pwd.getpwnam(grp.getgrgid(group).gr_name).pw_uid
    except KeyError:
        return _NOBODY


def _is_in_reach(directory: Path) -> bool:
    """Whether anybody but root can come to a directory."""
    return all(each.stat().st_mode & _OTHERS_PASS for each in directory.resolve().parents)


def _exchange(rights: Rights) -> Rights:
    """Have these rights, and give back those of before. The kernel forgets that this thread is to be told of its
    parent's end when they change (prctl(2), PR_SET_PDEATHSIG)."""
    told, parent = ctypes.c_int(), os.getppid()
    _libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(told), 0, 0, 0)
    group = _set(_libc.setfsgid, rights.group)
    try:
        user = _set(_libc.setfsuid, rights.user)
    except OSError:
        _libc.setfsgid(group)
        raise
    finally:
        if told.value:
            _libc.prctl(_PR_SET_PDEATHSIG, told.value, 0, 0, 0)
            if os.getppid() != parent:
                os.kill(os.getpid(), told.value)
    return Rights(user, group)


def _set(call: ctypes._NamedFuncPointer, number: int) -> int:
    """The id of before (setfsuid(2)). Neither call says whether it has changed anything but by the next."""
    before: int = call(number)
    if call(-1) != number:
        raise PermissionError(errno.EPERM, f"Files cannot be opened as {name_user(number)}")
    return before


def main(path: str, user: str, group: str, mode: str) -> None:
    """Make a directory, or take one that is there, for a user: `python -m netlimit.custody PATH USER GROUP MODE`."""
    try:
        with made_directory(Path(path)) as descriptor:
            give(descriptor, pwd.getpwnam(user).pw_uid, grp.getgrnam(group).gr_gid, int(mode, 8))
    except OSError as error:
        sys.exit(f"{path} cannot be given to {user}: {error.strerror}.")


if __name__ == "__main__":
    main(*sys.argv[1:])
