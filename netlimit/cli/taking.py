"""`netlimit apply --take-database`: going by another database than the one whose rules are in force here, or by an
older state of it.

The copy is told alone, and goes on holding what it holds: nothing is out of force until the rules of the other database
are compared with what is in the kernel.
"""

from __future__ import annotations

import time
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING

from netlimit.cli.errors import CommandError
from netlimit.forgotten import find_forgotten
from netlimit.liveness import is_recent
from netlimit.settings import Settings

if TYPE_CHECKING:
    from netlimit.kernel.base import Kernel
    from netlimit.store import Store

RETURN_SECONDS = 15.0
"""How long a controller is waited for, which looks every half second whether it may go by the database."""
_LOOK_SECONDS = 0.1


def take_database(settings: Settings, store: Store, kernel: Kernel) -> None:
    """Let the copy of this gateway be one of this database as it is, if it is of another, or of a later state. A
    controller that runs goes by it when this returns, and repairs nothing by the other one any more. Raises
    CommandError, StoreError."""
    from netlimit.store import open_replica, read_held

    held = read_held(settings.state, settings.host)
    origin = store.origin(held.origin.revision)
    if find_forgotten(origin, held) is None:
        return
    if not origin.revision:
        raise CommandError(
            "Nothing was ever changed in this database: to take it would take every limit out of force. Make its rules "
            "first (`netlimit restore`, `netlimit rule import`), then take it. To begin anew, run `netlimit teardown`, "
            "then `netlimit apply`."
        )
    with closing(open_replica(settings.state, settings.host)) as replica:
        replica.take(store.origin())
    if kernel.controlled():
        _wait_for_controller(settings.host, store)


def _wait_for_controller(host: str, store: Store) -> None:
    """It would undo what is done beside it, until it has said here that it goes by this database."""
    began = time.monotonic()
    while not _is_gone_by(host, store, timedelta(seconds=time.monotonic() - began)):
        if time.monotonic() - began >= RETURN_SECONDS:
            raise CommandError(
                "The database is taken, but the controller has not begun to go by it yet; see `netlimit status`."
            )
        time.sleep(_LOOK_SECONDS)


def _is_gone_by(host: str, store: Store, within: timedelta) -> bool:
    reports = (each for each in store.hosts() if each.host == host and is_recent(each.silence, within))
    return any(each.refused is None for each in reports)
