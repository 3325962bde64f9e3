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
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_READING = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_UNSEEN = _READING | os.O_NOFOLLOW
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2
_OTHERS_WRITE, _OTHERS_PASS = 0o022, 0o011
_FREE = (0o002, 0o020, 0o022)
"""Others may write, and the sticky bit keeps nobody from renaming what is another's."""
_ACL, _ACL_VERSION, _ACL_ENTRY = "system.posix_acl_access", struct.pack("<I", 2), struct.Struct("<HHI")
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
_READ, _WRITE, _UNNAMED = 4, 2, 0xFFFFFFFF
"""acl(5), as the kernel takes it (linux/posix_acl_xattr.h)."""
_NOBODY = 65534
"""A user who owns nothing: what he may do in a directory, its group may."""
_keeps_groups = False
"""Whether this process may not give up its groups."""
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


@contextmanager
def made_file(name: str, within: int, mode: int, owner: Rights | None = None) -> Iterator[int]:
    """The descriptor of a new file in a directory, with just this mode, whatever the mask, and of this owner where one
    is named. Raises OSError, FileExistsError where anything has the name."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=within)
    try:
        if owner is not None:
            os.fchown(descriptor, *owner)
        os.fchmod(descriptor, mode)
        yield descriptor
    finally:
        os.close(descriptor)


def give(descriptor: int, user: int, group: int, mode: int | None = None, of: Iterable[int] = ()) -> None:
    """Let an open file or directory be this user's and group's (ids; -1 leaves it whose it is). Raises OSError, where
    something would change and it is neither root's, nor the user's already, nor `of` these users, or has a second
    name."""
    found = os.fstat(descriptor)
    owned = user in (-1, found.st_uid) and group in (-1, found.st_gid)
    if owned and mode in (None, stat.S_IMODE(found.st_mode)):
        return
    _check_owner(found, (0, user, *of))
    if not owned:
        os.fchown(descriptor, user, group)
    if mode is not None and stat.S_IMODE(found.st_mode) != mode:
        os.fchmod(descriptor, mode)


def _check_owner(found: os.stat_result, users: Iterable[int]) -> None:
    """Raise PermissionError for what is none of these users', or has a second name."""
    if found.st_uid not in users:
        raise PermissionError(errno.EPERM, f"It belongs to {name_user(found.st_uid)}")
    if stat.S_ISREG(found.st_mode) and found.st_nlink != 1:
        raise PermissionError(errno.EPERM, "It has another name besides, as a hard link")


def admit(descriptor: int, user: int) -> None:
    """Let one user (id) read an open file of root's, which besides root's group may read, and nobody else. Raises
    OSError, ENOTSUP where the file system keeps no such lists."""
    entries = (
        (_OWNER, _READ | _WRITE, _UNNAMED),
        (_USER, _READ, user),
        (_GROUP, _READ, _UNNAMED),
        (_MASK, _READ, _UNNAMED),
        (_OTHERS, 0, _UNNAMED),
    )
    wanted = _ACL_VERSION + b"".join(_ACL_ENTRY.pack(*entry) for entry in entries)
    with suppress(OSError):
        if os.getxattr(descriptor, _ACL) == wanted:
            return
    _check_owner(os.fstat(descriptor), (0, user))
    os.setxattr(descriptor, _ACL, wanted)


def give_unopened(name: str, within: int, group: int, mode: int) -> None:
    """Let a group have what cannot be opened (a pinned program of the kernel's), in a directory of root's. Raises
    OSError."""
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        os.chown(f"/proc/self/fd/{descriptor}", 0, group)
        os.chmod(f"/proc/self/fd/{descriptor}", mode)
    finally:
        os.close(descriptor)


def find_bar(file: Path, user: pwd.struct_passwd) -> Path | None:
    """What keeps a user, with all groups that he is in, from reading a file: that file, or a directory above it. None
    where nothing does, and of what is not there. For root alone. Raises OSError where rights cannot be changed."""
    groups = os.getgroups()
    os.setgroups(os.getgrouplist(user.pw_name, user.pw_gid))
    try:
        before = _exchange(Rights(user.pw_uid, user.pw_gid))
        try:
            return next((each for each in (*reversed(file.absolute().parents), file) if _is_barred(each)), None)
        finally:
            _exchange(before)
    finally:
        os.setgroups(groups)


def _is_barred(path: Path) -> bool:
    """Whether this thread may not read a file, or not pass a directory."""
    try:
        os.stat(os.path.join(path, ".")) if path.is_dir() else os.close(os.open(path, _READING))
    except PermissionError:
        return True
    except OSError:  # what is wrong with it is so for everybody
        return False
    return False


def open_to_all(path: str) -> None:
    """Let everybody who comes to its directory connect to a Unix socket of this process's user, which cannot be opened.
    Raises OSError, where it is another's, or something else."""
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        _check_owner(found, (os.geteuid(),))
        if not stat.S_ISSOCK(found.st_mode):
            raise FileExistsError(errno.EEXIST, "It is no socket")
        os.chmod(f"/proc/self/fd/{descriptor}", 0o666)  # noqa: S103  # who may come to it its directory says
    finally:
        os.close(descriptor)


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


def is_exchangeable(directory: Path) -> bool:
    """Whether others than root could put another directory in the place of this one, or of one above it."""
    above = (each.stat() for each in directory.resolve().parents)
    return any(each.st_uid != 0 or each.st_mode & (_OTHERS_WRITE | stat.S_ISVTX) in _FREE for each in above)


@contextmanager
def opening_as(rights: Rights | None) -> Iterator[None]:
    """Open files with these rights: this thread alone, and nothing but that (setfsuid(2)). Raises OSError."""
    if rights is None:
        yield
        return
    _leave_groups()
    before = _exchange(rights)
    try:
        yield
    finally:
        _exchange(before)


def _leave_groups() -> None:
    """Root needs none, and what root's group may do is not theirs. Where nobody may change them, as in some namespaces,
    that is asked once: the C library has every thread do it, and waits for one whose call hangs."""
    global _keeps_groups
    if _keeps_groups or not os.getgroups():
        return
    try:
        os.setgroups([])
    except PermissionError:
        _keeps_groups = True


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


def move_directory(former: Path, path: Path, user: int) -> None:
    """Move a user's (id) directory, with all that is in it, out of one where others may exchange it, to where root
    alone may write. All or nothing. Raises OSError, where it is another's or somebody has exchanged it, and
    FileExistsError where there is something already."""
    with (
        opened(former.parent.resolve(), directory=True) as source,
        opened(path.parent.resolve(), directory=True) as target,
        opened(former.name, source, directory=True) as moved,
    ):
        if os.fstat(moved).st_uid not in (0, user):
            raise PermissionError(errno.EPERM, f"It belongs to {name_user(os.fstat(moved).st_uid)}")
        if _is_there(path.name, target):
            raise FileExistsError(errno.EEXIST, "There is something of that name already", str(path))
        os.rename(former.name, path.name, src_dir_fd=source, dst_dir_fd=target)
        if not os.path.samestat(os.stat(path.name, dir_fd=target, follow_symlinks=False), os.fstat(moved)):
            os.rename(path.name, former.name, src_dir_fd=target, dst_dir_fd=source)
            raise PermissionError(errno.EPERM, "Somebody exchanges it meanwhile")


def _is_there(name: str, within: int) -> bool:
    try:
        os.stat(name, dir_fd=within, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _give_path(path: Path, user: str, group: str, mode: int) -> None:
    """A plain file that is there, or a directory that is there or is made; "-" leaves it whose it is."""
    owner = -1 if user == "-" else pwd.getpwnam(user).pw_uid
    group_id = -1 if group == "-" else grp.getgrnam(group).gr_gid
    with opened(path) if path.is_file() else made_directory(path) as descriptor:
        give(descriptor, owner, group_id, mode)


def _find_user(word: str) -> int:
    """A user's id, by the name here, or as it is: the users of an image are not those of who makes it."""
    return int(word) if word.isdecimal() else pwd.getpwnam(word).pw_uid


_USAGE = "netlimit.custody: PATH USER GROUP MODE, or move FORMER PATH USER|ID"


def main(words: Sequence[str]) -> None:
    """What scripts/install has done: give a file or directory to a user, or move a user's directory."""
    try:
        match words:
            case ["move", former, path, user]:
                task = f"{former} cannot be moved to {path}"
                move_directory(Path(former), Path(path), _find_user(user))
            case [path, user, group, mode]:
                task = f"{path} cannot be given to {user}"
                _give_path(Path(path), user, group, int(mode, 8))
            case _:
                sys.exit(_USAGE)
    except OSError as error:
        sys.exit(f"{task}: {error.strerror}.")
    except KeyError as error:
        sys.exit(f"{task}: {error.args[0]}.")


if __name__ == "__main__":
    main(sys.argv[1:])
