"""A database in which nothing was ever changed, on a gateway that holds rules: another one, empty, is in the place of
the one that had them. It is not taken for what is wanted: that would take every limit out of force, and say nothing.

Whoever restores a backup, or makes a rule, changes it: from then on it is gone by. Whoever means to begin anew tears
the gateway down first, as its copy knows then.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from netlimit.errors import StoreError
from netlimit.liveness import SILENCE, is_recent
from netlimit.records import HostStatus

if TYPE_CHECKING:  # for the types alone: the copy is handed over
    from netlimit.store import Replica

_FORGOTTEN = "Nothing was ever changed in this database"


def count_held(copy: Replica | None, host: str) -> int:
    """How many rules a gateway holds as its copy tells; 0 if it is another gateway's, cannot be read, or knows that a
    teardown has taken them out of force."""
    with suppress(StoreError):
        if copy is not None and copy.owner == host and copy.revision() and not copy.paused(host):
            return copy.select(limit=1)[1]
    return 0


def find_forgotten(revision: int, copy: Replica | None, host: str) -> str | None:
    """Why a database at this revision is not gone by, if it is not."""
    held = 0 if revision else count_held(copy, host)
    return None if copy is None or not held else word_forgotten(held, copy.revision())


def word_forgotten(held: int, revision: int) -> str:
    """What is wrong with a database in which nothing was ever changed, where the copy tells so much."""
    return (
        f"{_FORGOTTEN}, though {word_held(held, revision)}: it is a new one in the place of the one that had them. "
        "What the kernel holds stays in force until it is changed: put the database back, or restore a backup "
        "(`netlimit restore FILE`). The first rule that is made in it would take the place of all of them. To begin "
        "anew on purpose, run `netlimit teardown`, then `netlimit apply`."
    )


def find_told(reports: Iterable[HostStatus]) -> str | None:
    """What a gateway says that does not go by the database into which it reports, for that is a new one."""
    errors = [each.last_error for each in reports if is_recent(each.silence, SILENCE)]
    return next((each for each in errors if each is not None and each.startswith(_FORGOTTEN)), None)


def word_held(held: int, revision: int) -> str:
    """What the copy tells."""
    return f"this gateway holds {held} rule{'' if held == 1 else 's'} of revision {revision}, as its copy tells"
