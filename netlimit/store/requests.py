"""Questions that only a controller can answer, asked through the database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, delete, insert, null, select, update

from netlimit.records import Request
from netlimit.store import moments
from netlimit.store.tables import requests

LIFETIME = timedelta(minutes=1)
"""After this nobody waits for the answer any more; who has stopped waiting before says so, unless he was killed."""


def ask(connection: Connection, host: str, kind: str, argument: Mapping[str, object]) -> int:
    """Put a question; sweeps out the old ones."""
    connection.execute(delete(requests).where(~moments.is_recent(requests.c.asked_at, LIFETIME)))
    row = {"host": host, "kind": kind, "argument": dict(argument), "asked_at": moments.now()}
    number: int = connection.execute(insert(requests).values(row).returning(requests.c.id)).scalar_one()
    return number


def unanswered(connection: Connection, host: str) -> list[Request]:
    """The open questions to a gateway, oldest first."""
    open_ones = (
        requests.c.host == host,
        requests.c.answer.is_(null()),
        moments.is_recent(requests.c.asked_at, LIFETIME),
    )
    rows = connection.execute(select(requests).where(*open_ones).order_by(requests.c.id))
    return [Request(row.id, row.kind, row.argument) for row in rows if isinstance(row.argument, dict)]


def answer(connection: Connection, request_id: int, text: Mapping[str, object]) -> None:
    """Answer a question; one that is gone already is no error, for nobody waits."""
    connection.execute(update(requests).where(requests.c.id == request_id).values(answer=dict(text)))


def answered(connection: Connection, request_id: int) -> dict[str, Any] | None:
    """The answer to a question, or None as long as there is none."""
    return connection.execute(select(requests.c.answer).where(requests.c.id == request_id)).scalar_one_or_none()


def withdraw(connection: Connection, request_ids: Iterable[int]) -> None:
    """Forget questions for whose answers nobody waits."""
    connection.execute(delete(requests).where(requests.c.id.in_(list(request_ids))))
