"""Root qdiscs of others that ours took the place of, on each gateway."""

from __future__ import annotations

from sqlalchemy import Connection, delete, select

from netlimit.store.tables import saved_roots
from netlimit.store.upsert import upsert
from netlimit.tree import SavedRoot


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
    return {row.device: SavedRoot(row.handle, row.kind, row.options) for row in rows if _is_hex(row.options)}


def _is_hex(text: str) -> bool:
    """A root of which the options cannot be read could not be put back."""
    try:
        bytes.fromhex(text)
    except ValueError:
        return False
    return True
