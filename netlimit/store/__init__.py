"""The database. Nothing outside this package knows that it is SQLAlchemy."""

from netlimit.store.audit import AuditEntry, AuditFilter, make_pause
from netlimit.store.backup import Label, NoBackup
from netlimit.store.errors import (
    ABSENT,
    ConcernsOthers,
    Conflict,
    DocumentChanged,
    GatewayAlive,
    ManyErrors,
    NameTaken,
    NoDocument,
    NoGateway,
    NoSuchRevision,
    NotKept,
    NoWindow,
    Stale,
    TokenEnded,
    TokenExists,
    TooMuchAtOnce,
    WindowOpen,
)
from netlimit.store.faults import Damaged
from netlimit.store.history import changed_fields
from netlimit.store.limits import LimitDocument, LimitHead
from netlimit.store.replica import (
    Replica,
    Snapshot,
    open_replica,
    read_held,
    read_owner,
    read_pause,
    read_revision,
    take_snapshot,
)
from netlimit.store.restore import InUse, Restored
from netlimit.store.room import Leave, NoRoom
from netlimit.store.rows import Kept
from netlimit.store.store import Store
from netlimit.store.tokens import Token
from netlimit.store.watch import Watch

__all__ = [
    "ABSENT",
    "AuditEntry",
    "AuditFilter",
    "ConcernsOthers",
    "Conflict",
    "Damaged",
    "DocumentChanged",
    "GatewayAlive",
    "InUse",
    "Kept",
    "Label",
    "Leave",
    "LimitDocument",
    "LimitHead",
    "ManyErrors",
    "NameTaken",
    "NoBackup",
    "NoDocument",
    "NoGateway",
    "NoRoom",
    "NoSuchRevision",
    "NoWindow",
    "NotKept",
    "Replica",
    "Restored",
    "Snapshot",
    "Stale",
    "Store",
    "Token",
    "TokenEnded",
    "TokenExists",
    "TooMuchAtOnce",
    "Watch",
    "WindowOpen",
    "changed_fields",
    "make_pause",
    "open_replica",
    "read_held",
    "read_owner",
    "read_pause",
    "read_revision",
    "take_snapshot",
]
