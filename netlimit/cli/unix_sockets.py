"""Unix sockets that the limiter listens at: who may come to one, its directory says, and whose its path is, a lock.

All of it is done as the user whom the limiter runs as, in a directory where nobody else may write: so no link leads
anywhere that he could not go himself.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from netlimit.cli.errors import CommandError
from netlimit.custody import name_user, open_to_all
from netlimit.l7.service.room import BACKLOG
from netlimit.plain import read_text
from netlimit.settings import LocalListen

log = logging.getLogger(__name__)

_STRANGERS = stat.S_IWGRP | stat.S_IWOTH | stat.S_IXOTH
"""Who may write there puts another socket in its place; and whom the socket is to keep away may not come to it."""


@contextmanager
def held(place: LocalListen, setting: str) -> Iterator[None]:
    """Have the path of a socket for this process alone, until the block ends. What a process that is dead has left
    there goes, and so does what is there in the end. Raises CommandError, where somebody listens there already, or the
    directory would keep nobody away."""
    try:
        _check_directory(place.path)
        lock = _lock(f"{place.path}.lock")
        try:
            _clear(place.path)
        except OSError:
            os.close(lock)
            raise
    except OSError as error:
        raise _refuse(place, setting, error) from None
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(place.path)
        os.close(lock)


@contextmanager
def listening(place: LocalListen, setting: str) -> Iterator[socket.socket]:
    """Listen there until the block ends. Raises CommandError."""
    with held(place, setting), socket.socket(socket.AF_UNIX) as made:
        try:
            made.bind(place.path)
            open_to_all(place.path)
            made.listen(BACKLOG)
        except OSError as error:
            raise _refuse(place, setting, error) from None
        if (most := _read_backlog()) < BACKLOG:
            log.warning(
                "Where %d connections wait for the limiter, the next is told that there is none, and proxies let pass "
                "what it would ask. Set net.core.somaxconn to %d.",
                most,
                BACKLOG,
            )
        yield made


def _read_backlog() -> int:
    """How many connections the kernel lets wait at a socket."""
    with suppress(OSError, ValueError):
        return int(read_text("/proc/sys/net/core/somaxconn"))
    return BACKLOG


def _check_directory(path: str) -> None:
    directory, own = os.path.dirname(path), os.geteuid()
    try:
        found = os.stat(directory)
    except FileNotFoundError:
        raise CommandError(f"There is no directory {directory} for {path}. {_advise(directory)}") from None
    if found.st_uid != own:
        raise CommandError(
            f"The directory {directory} belongs to {name_user(found.st_uid)}, who could put another socket in the "
            f"place of {path}. {_advise(directory)}"
        )
    if found.st_mode & _STRANGERS:
        raise CommandError(
            f"The directory {directory} (mode {stat.S_IMODE(found.st_mode):04o}) keeps nobody from {path}: others than "
            f"its owner may write there, or others than its group may enter it. {_advise(directory)}"
        )


def _advise(directory: str) -> str:
    return (
        f"Make it by `install -d -m 0710 -o {name_user(os.geteuid())} -g GROUP {directory}`, with a GROUP that the "
        f"proxies are in and nobody else."
    )


def _lock(path: str) -> int:
    """A descriptor that holds the lock of a socket's path, as long as this process lives. Raises OSError."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise _taken() from None
        raise
    return lock


def _clear(path: str) -> None:
    """Remove a socket at which nobody listens any more. Raises OSError for whatever else is there."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError(errno.EEXIST, "There is something else of that name")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as asking:
        try:
            asking.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:  # as many have come as may wait
            pass
    raise _taken()


def _taken() -> OSError:
    return OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _refuse(place: LocalListen, setting: str, error: OSError) -> CommandError:
    reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return CommandError(f"The limiter cannot listen at {place}: {reason}. Set NETLIMIT_{setting} to another place.")
