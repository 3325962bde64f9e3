"""The room on the disk of a SQLite file. Its last part is not for everybody: who has filled the disk, by rules or by
changing them to and fro, must not keep others from taking that back, and his token from him."""

from __future__ import annotations

import os
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection, text

from netlimit.errors import StoreError
from netlimit.records import LIMITER, Actor
from netlimit.roles import Role
from netlimit.stalls import find_disk

RESERVE = 64 * 2**20
"""Bytes that are left to admins and to who removes rules, and half of them to who ends tokens and windows of
confirmation; or a sixteenth of a small disk."""
_PART = 16


class Leave(IntEnum):
    """How many halves of the reserve a change has to leave."""

    NOTHING = 0
    HALF = 1
    ALL = 2


class NoRoom(StoreError):
    """A change would take of the disk what is kept for others."""


def find_share(actor: Actor) -> Leave:
    """What somebody's change has to leave, whatever it is."""
    is_admin = actor.token is None or actor.role == Role.ADMIN.value
    return Leave.HALF if is_admin and actor != LIMITER else Leave.ALL


def check_room(connection: Connection, path: Path, leave: Leave, due: int = 0) -> None:
    """Raise NoRoom if too little is left when this transaction is kept, and the bytes are taken that are `due` when an
    open window of confirmation ends."""
    found = _find_room(path, leave) if leave else None  # else the log may have room where the disk has none
    if found is None:
        return
    size, pages, free = (read_pragma(connection, name) for name in ("page_size", "page_count", "freelist_count"))
    # What stands in the log only has yet to come into the file; its free pages are used before the disk.
    left = found.left - max(0, size * pages - found.kept) + size * free
    if left - due < found.reserve:
        kept = f"{found.reserve / 2**20:.1f} MiB are kept for who removes rules or revokes tokens"
        said = (
            f"would have {max(0, left) / 2**20:.1f} MiB left after this change, which was not made: {kept}"
            + (f", and {due / 2**20:.1f} MiB for the end of the window of confirmation that is open. Confirm or end "
               "the window first, or make room on the disk." if due else ". Make room on it, or remove rules.")
        )  # fmt: skip
        raise NoRoom(f"The disk of the database {path} {said}", f"The disk of the database {said}")


def find_left(path: Path) -> int | None:
    """How many bytes are left of the disk of a file; None where that was moved away."""
    found = _find_room(path, Leave.NOTHING)
    return found.left if found is not None else None


def bound_growth(connection: Connection, path: Path, leave: Leave) -> None:
    """Have SQLite refuse in this transaction what would leave too little, before the disk itself does. For a file
    without a log of writes."""
    found = _find_room(path, leave)
    if found is not None:
        room = max(0, found.left - found.reserve)
        most = read_pragma(connection, "page_count") + room // read_pragma(connection, "page_size")
        connection.execute(text(f"PRAGMA max_page_count = {most}"))


def read_pragma(connection: Connection, pragma: str) -> int:
    """A number that SQLite says of a file."""
    return int(connection.execute(text(f"PRAGMA {pragma}")).scalar_one())


class _Room(NamedTuple):
    """Bytes: what is left of a disk, what of that is to be left, and how large a file on it is."""

    left: int
    reserve: int
    kept: int


def _find_room(path: Path, leave: Leave) -> _Room | None:
    """None where the file was moved away meanwhile, which is told in words of its own."""
    try:
        disk = find_disk(path).call(partial(os.statvfs, path))
        reserve = min(RESERVE, disk.f_blocks * disk.f_frsize // _PART) * leave // Leave.ALL
        return _Room(disk.f_bavail * disk.f_frsize, reserve, path.stat().st_size)
    except OSError:
        return None
