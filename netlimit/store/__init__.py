"""The database. Nothing outside this package knows that it is SQLAlchemy."""

from netlimit.store.audit import AuditEntry
from netlimit.store.errors import Conflict, ManyErrors, NameTaken, NotKept, Stale, TokenExists
from netlimit.store.rows import Kept
from netlimit.store.store import Store
from netlimit.store.tokens import Token
from netlimit.store.watch import Watch

__all__ = [
    "AuditEntry",
    "Conflict",
    "Kept",
    "ManyErrors",
    "NameTaken",
    "NotKept",
    "Stale",
    "Store",
    "Token",
    "TokenExists",
    "Watch",
]
