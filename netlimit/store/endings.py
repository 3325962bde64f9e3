"""How windows of confirmation have ended, in the copy of a gateway.

They stand where a database has the questions to controllers: a copy is asked none, and an older netlimit passes over
what is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import Connection, delete, insert, select

from netlimit.confirmed import Ending
from netlimit.origins import Origin
from netlimit.records import Outcome, Window
from netlimit.store.tables import requests

_KIND = "window"
_MOST = 20
"""So many are known: a database does not come back in a state from before more of them."""


def note(connection: Connection, host: str, ending: Ending) -> None:
    """Keep how a window has ended, in the place of what was known of that window."""
    revision, stamp = ending.origin.past
    told = {
        "opened_at": ending.opened_at.isoformat(),
        "base": ending.base,
        "outcome": ending.outcome.value,
        "identity": ending.origin.identity,
        "revision": revision,
        "stamp": stamp,
    }
    row = {"host": host, "kind": _KIND, "argument": told, "asked_at": ending.opened_at}
    connection.execute(insert(requests).values(row))
    newest = select(requests.c.id).where(requests.c.kind == _KIND).order_by(requests.c.id.desc()).limit(1).offset(_MOST)
    connection.execute(delete(requests).where(requests.c.kind == _KIND, requests.c.id <= newest.scalar_subquery()))


def find(connection: Connection, window: Window) -> Ending | None:
    """How that window has ended, as it was noted last; None if nothing is known of it."""
    wanted = select(requests.c.argument).where(requests.c.kind == _KIND).order_by(requests.c.id.desc())
    known = (_read(told) for told in connection.execute(wanted).scalars())
    return next((each for each in known if each is not None and each.is_of(window)), None)


def _read(told: object) -> Ending | None:
    """None where it is not as it was written."""
    if not isinstance(told, Mapping):
        return None
    try:
        past = int(told["revision"]), int(told["stamp"])
        origin = Origin(told["identity"], past[0], past=past)
        return Ending(datetime.fromisoformat(told["opened_at"]), int(told["base"]), Outcome(told["outcome"]), origin)
    except (KeyError, TypeError, ValueError):
        return None
