"""Root qdiscs of others that ours took the place of, on each gateway."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import Connection, Row, delete, select

from netlimit.store.tables import saved_roots
from netlimit.store.upsert import upsert
from netlimit.tree import SavedRoot

_KIND = re.compile(r"[a-z0-9_]{1,15}")
_OPTIONS = re.compile(r"(?:[0-9a-fA-F]{2}){0,16000}")
_LAST_HANDLE = 0xFFFF
"""The major number of a qdisc (`SavedRoot`)."""


def save(connection: Connection, host: str, device: str, root: SavedRoot) -> None:
    """Keep a root qdisc, in place of one that was kept of the same device."""
    row = {"host": host, "device": device, "handle": root.handle, "kind": root.kind, "options": root.options}
    connection.execute(upsert(connection, saved_roots), [row])


def forget(connection: Connection, host: str, device: str) -> None:
    """It was put back."""
    connection.execute(delete(saved_roots).where(saved_roots.c.host == host, saved_roots.c.device == device))


def saved(connection: Connection, host: str) -> dict[str, SavedRoot]:
    """What is kept of a gateway, by device."""
    rows = connection.execute(select(saved_roots).where(saved_roots.c.host == host))
    return {row.device: SavedRoot(row.handle, row.kind, row.options) for row in rows if _is_root(row)}


def _is_root(row: Row[Any]) -> bool:
    """Whether it is one that the kernel may have: another could not be put back."""
    said = _KIND.fullmatch(row.kind) and _OPTIONS.fullmatch(row.options)
    return said is not None and 0 <= row.handle <= _LAST_HANDLE
