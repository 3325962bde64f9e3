"""Waiting for a lock file that other processes take too."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from netlimit.custody import give, opened
from netlimit.errors import KernelError, Occupied

SECONDS = 5.0
"""How long a lock is waited for: no longer than it may stay unsaid that nobody knows what the kernel holds."""


@contextmanager
def locked(path: str, purpose: str, *, keep: bool = True, patience: float = SECONDS) -> Iterator[None]:
    """Hold a lock file; without `keep` it is gone afterwards. Raises Occupied when another process keeps it for longer
    than `patience`, in seconds, and KernelError when it cannot be opened."""
    deadline = time.monotonic() + patience
    while (descriptor := _try_lock(path, purpose)) is None:
        if time.monotonic() >= deadline:
            raise Occupied(purpose, f"another program has held {path} for {patience:g} seconds")
        time.sleep(0.01)
    try:
        yield
    finally:
        if not keep:
            Path(path).unlink(missing_ok=True)
        os.close(descriptor)


def is_locked(path: str, purpose: str) -> bool:
    """Whether another process, or another part of this one, holds a lock file now. Raises KernelError."""
    descriptor = _try_lock(path, purpose) if Path(path).exists() else None
    if descriptor is None:
        return Path(path).exists()
    os.close(descriptor)
    return False


def _try_lock(path: str, purpose: str) -> int | None:
    """The open file that is locked now; None if somebody else has it."""
    try:
        descriptor = _open(Path(path))
    except OSError as error:
        helps = "; `netlimit prepare`, as root, gives it to the controller" if _is_kept_from_us(error) else ""
        raise KernelError(purpose, f"the lock file {path} cannot be opened: {error.strerror}{helps}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who had it before may have removed it: then it keeps nobody out. Nor does it where names have been exchanged.
        if Path(path).lstat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _is_kept_from_us(error: OSError) -> bool:
    return isinstance(error, PermissionError) and os.geteuid() != 0


def _open(path: Path) -> int:
    """The lock file, made where it is missing. What root makes in the directory of a controller without root belongs to
    that one, too, who may put there what he likes: no link is followed, and only a plain file is taken."""
    with opened(path.parent, directory=True) as directory:
        # Nobody else may open it: whoever can, can keep it.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(path.name, flags, dir_fd=directory)
        except FileNotFoundError:  # only now is it made: a disk that is frozen lets even the wish hang
            descriptor = os.open(path.name, flags | os.O_CREAT, 0o600, dir_fd=directory)
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "It is no plain file")
            owner = os.fstat(directory).st_uid
            if os.geteuid() == 0 and owner not in (0, os.fstat(descriptor).st_uid):
                give(descriptor, owner, -1)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
