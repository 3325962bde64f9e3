"""The database. Nothing outside this package knows that it is SQLAlchemy."""

from netlimit.store.audit import AuditEntry, AuditFilter
from netlimit.store.errors import (
    Conflict,
    ManyErrors,
    NameTaken,
    NoSuchRevision,
    NotKept,
    NoWindow,
    Stale,
    TokenExists,
    WindowOpen,
)
from netlimit.store.replica import Replica, Snapshot, open_replica, take_snapshot
from netlimit.store.rows import Kept
from netlimit.store.store import Store
from netlimit.store.tokens import Token
from netlimit.store.watch import Watch

__all__ = [
    "AuditEntry",
    "AuditFilter",
    "Conflict",
    "Kept",
    "ManyErrors",
    "NameTaken",
    "NoSuchRevision",
    "NoWindow",
    "NotKept",
    "Replica",
    "Snapshot",
    "Stale",
    "Store",
    "Token",
    "TokenExists",
    "Watch",
    "WindowOpen",
    "open_replica",
    "take_snapshot",
]
