"""What the errors of the databases' drivers mean to an operator, and what helps."""

from __future__ import annotations

import re

from netlimit.errors import Busy, Slow, StoreError, Unavailable
from netlimit.stalls import Overworked

BUSY_SECONDS = 20
"""How long a writer waits for its turn, and a statement for a lock; the longest change, 100,000 rules, takes about
two."""


class Damaged(StoreError):
    """The SQLite file is not what SQLite has written."""


class TooNew(StoreError):
    """The database was brought to a schema that only a newer netlimit knows."""


class Undone(StoreError):
    """The server undid a transaction that stood in the way of another: it can be made again."""


_SENTENCES = {
    "SQLITE_BUSY": "{name} was busy for {seconds} seconds; another process holds it, try again.",
    "SQLITE_LOCKED": "{name} was busy for {seconds} seconds; another process holds it, try again.",
    "SQLITE_CORRUPT": "{name} is damaged ({reason}).",
    "SQLITE_NOTADB": "{name} is damaged ({reason}).",
    "SQLITE_FULL": "{name} cannot grow: {reason}; make room on its disk.",
    "SQLITE_IOERR": "{name} cannot be read or written ({reason}); look whether its disk has room, and is sound.",
    "SQLITE_CANTOPEN": "{name} cannot be opened for writing ({reason}); look at the rights of its directory.",
    "SQLITE_READONLY": "{name} cannot be opened for writing ({reason}); look at the rights of its directory.",
    "NETLIMIT_CUT": "{name} was lost for a moment ({reason}). Look who may write in its directory; what was asked just "
    "now has to be asked again.",
    "NETLIMIT_STALLED": "{name} does not answer: {reason} (it may be frozen for a backup, or be dying). What was asked "
    "just now may come about when it does again.",
    "08": "{name} cannot be reached ({reason}); look at NETLIMIT_DATABASE_URL and the server.",
    "25006": "{name} takes no changes ({reason}); let NETLIMIT_DATABASE_URL name the primary server.",
    "40001": "{name} undid this, for another change was in its way ({reason}); try again.",
    "40P01": "{name} undid this, for another change was in its way ({reason}); try again.",
    "42501": "{name} does not let this user do that ({reason}); its tables must belong to the user of the URL, and no "
    "row-level security may hide rows from him.",
    "53100": "{name} cannot grow: {reason}; make room on its disk.",
    "53300": "{name} has no connection to spare ({reason}); raise its max_connections.",
    "55P03": "{name} was busy for {seconds} seconds; another session holds a lock on it, try again.",
    "57P0": "{name} cannot be reached ({reason}); look at NETLIMIT_DATABASE_URL and the server.",
    "connection": "{name} cannot be reached ({reason}); look at NETLIMIT_DATABASE_URL and the server.",
    "": "{name} refused: {reason}.",
}
"""By how a code begins: SQLite's by name, or SQLSTATE (PostgreSQL, appendix A), which errors of connecting lack."""
_REASON = re.compile(r" \(\{reason\}\)|:? \{reason\}")
"""Where a sentence quotes the driver, which names hosts, files and users."""
_BUSY = ("SQLITE_BUSY", "SQLITE_LOCKED", "55P03")
_UNAVAILABLE = (
    *("08", "25006", "53100", "53300", "57P0"),
    *("NETLIMIT_CUT", "NETLIMIT_STALLED", "SQLITE_FULL", "SQLITE_IOERR"),
)
_OPERATIONAL = "OperationalError"
"""The name of the class (PEP 249) of what is wrong with a server: without a code none has answered, for its name cannot
be looked up, say."""
_RESCUE = (
    " What is in the kernel stays. Stop netlimit and bring back a backup with `netlimit restore FILE`, or move the "
    "file away and begin anew with `netlimit db upgrade`."
)


def explain_fault(error: BaseException, name: str, patience: float = BUSY_SECONDS) -> StoreError:
    """The error to raise for one of a driver; `name` is the database's, without any password, and `patience` how long
    it was waited for a lock."""
    if getattr(error, "allowed", None) is not None or isinstance(error, Overworked):
        return Slow(f"The database {name} answers too slowly ({error}).", name)
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    code = getattr(error, "sqlite_errorname", None) or getattr(error, "sqlstate", None)
    if not code and "connection" in reason:
        code = "connection"
    kind = next(kind for kind in _SENTENCES if (code or "").startswith(kind))
    said = {"reason": reason, "seconds": f"{patience:g}"}
    sentence = _SENTENCES[kind].format(name=f"The database {name}", **said)
    public = _REASON.sub("", _SENTENCES[kind]).format(name="The database", **said)
    if kind in ("SQLITE_CORRUPT", "SQLITE_NOTADB"):
        return Damaged(sentence + _RESCUE, public)
    if kind in _BUSY:
        return Busy(sentence, name)
    is_operational = any(each.__name__ == _OPERATIONAL for each in type(error).__mro__)
    is_unreached = code in (None, "connection") and is_operational
    if is_unreached or kind in _UNAVAILABLE:
        return Unavailable(sentence, public)
    return (Undone if kind.startswith("40") else StoreError)(sentence, public)
