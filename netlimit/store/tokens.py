"""Access tokens. The token itself is never kept, only its hash."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, exists, insert, or_, select, update

from netlimit.records import Actor
from netlimit.store import audit, clock
from netlimit.store.errors import TokenEnded, TokenExists
from netlimit.store.tables import LARGEST, tokens


@dataclass(frozen=True, slots=True)
class Token:
    """A token as kept: `role` is what it may do; once `expires_at` or `revoked_at` has come it may nothing.

    `handle` is the part of the token that it is found by; None for one whose text was chosen by somebody.
    """

    id: int
    name: str
    hash: str = field(repr=False)
    role: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    handle: str | None = None

    def describe(self) -> dict[str, Any]:
        """What the audit says of it."""
        expires_at = self.expires_at.isoformat() if self.expires_at else None
        return {"token": self.name, "role": self.role, "expires_at": expires_at}


def any_kept(connection: Connection) -> bool:
    """Whether there ever was a token."""
    return bool(connection.execute(select(exists(select(tokens.c.id)))).scalar_one())


def add(
    connection: Connection,
    name: str,
    token_hash: str,
    role: str,
    now: datetime,
    expires_at: datetime | None,
    handle: str | None,
    actor: Actor,
) -> Token:
    """Keep a new token. Raises TokenExists."""
    clock.lock(connection)  # of two who want a name at once, one is told so
    if find(connection, name):
        raise TokenExists(name)
    row = {"name": name, "hash": token_hash, "role": role, "created_at": now, "expires_at": expires_at}
    row["handle"] = handle
    token = Token(**connection.execute(insert(tokens).values(row).returning(tokens)).mappings().one())
    audit.note_other(connection, "create-token", actor, now, after=token.describe())
    return token


def find(connection: Connection, key: int | str) -> Token | None:
    """The token of this id or name."""
    wanted = tokens.c.id == min(key, LARGEST) if isinstance(key, int) else tokens.c.name == key
    row = connection.execute(select(tokens).where(wanted)).mappings().one_or_none()
    return Token(**row) if row else None


def every(connection: Connection) -> list[Token]:
    """All tokens, by id."""
    return [Token(**row) for row in connection.execute(select(tokens).order_by(tokens.c.id)).mappings()]


def active(connection: Connection, now: datetime) -> list[Token]:
    """The tokens that are neither revoked nor expired."""
    good = (tokens.c.revoked_at.is_(None), or_(tokens.c.expires_at.is_(None), tokens.c.expires_at > now))
    return [Token(**row) for row in connection.execute(select(tokens).where(*good).order_by(tokens.c.id)).mappings()]


def check(connection: Connection, actor: Actor, until_kept: bool = False) -> None:
    """Raise TokenEnded if the actor is a token that is good no more, or of another role. `until_kept`: whoever ends it
    waits until this transaction has ended. (In SQLite nobody else writes meanwhile.)"""
    if actor.token is None:
        return
    wanted = select(tokens.c.role, tokens.c.expires_at, tokens.c.revoked_at).where(
        tokens.c.id == actor.token, tokens.c.name == actor.name
    )
    row = connection.execute(wanted.with_for_update(read=True) if until_kept else wanted).one_or_none()
    is_over = row is None or (row.expires_at is not None and row.expires_at <= datetime.now(UTC))
    if row is None or is_over or row.revoked_at is not None or row.role != actor.role:
        raise TokenEnded(actor.name)


def revoke(connection: Connection, token_id: int, now: datetime, actor: Actor) -> bool:
    """Revoke a token; False when there is none that was good until now."""
    good = (tokens.c.id == min(token_id, LARGEST), tokens.c.revoked_at.is_(None))
    revoked = connection.execute(update(tokens).where(*good).values(revoked_at=now).returning(tokens)).mappings()
    row = revoked.one_or_none()
    if row is not None:
        audit.note_other(connection, "revoke-token", actor, now, before=Token(**row).describe())
    return row is not None
