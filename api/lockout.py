"""No rule is kept that would lock out who is safe, unless an admin forces it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Depends, Request
from pydantic import Field

from api import schemas
from api.auth import Caller, CallerOf
from api.context import StoreOf
from api.problems import Problem
from netlimit.lockout import Havens
from netlimit.roles import Act
from netlimit.rules import Rule
from netlimit.store import Store


class Lockout:
    """What one request may keep: who asks is safe too, on the gateway that is asked."""

    def __init__(self, store: Store, caller: Caller, host: str) -> None:
        self._store, self._caller, self._host = store, caller, host
        self._havens: Havens | None = None

    def look(self) -> Havens:
        """Who is safe at the moment. Raises StoreError."""
        if self._havens is None:
            address = self._caller.actor.address
            caller = (address, self._host) if address else None
            self._havens = Havens(self._store.hosts(), datetime.now(UTC), caller)
        return self._havens

    def check(self, rule: Rule, force: bool, before: Rule | None = None) -> None:
        """Raise Problem 409 for a rule that would lock somebody out, or 403 for one that is forced by somebody who may
        not. One that takes the place of another, and does the same, may stay."""
        problem = self.find(rule, force)
        if problem is not None and (before is None or not _does_the_same(rule, before)):
            raise problem

    def find(self, rule: Rule, force: bool) -> Problem | None:
        """What is wrong with a rule, if anything. Raises Problem 403."""
        if force:
            self._caller.require(Act.FORCE)
            return None
        sentence = self.look().refuse(rule)
        return Problem(409, sentence, field="target") if sentence else None

    def warn(self, rule: Rule) -> list[str]:
        """What somebody should know who keeps it."""
        sentence = self.look().spare(rule)
        return [sentence] if sentence else []


def _does_the_same(rule: Rule, before: Rule) -> bool:
    told = replace(rule, id=before.id, revision=before.revision, name=before.name, labels=before.labels)
    return replace(told, comment=before.comment) == before


async def _find_lockout(request: Request, caller: CallerOf, store: StoreOf) -> Lockout:
    return Lockout(store, caller, request.app.state.settings.host)


class ForceQuery(schemas.Strict):
    """Whether the safe set is to be heeded."""

    force: schemas.Flag = Field(
        False, description="Keep it even if it would hit who is safe (an SSH session, the database …). Admins only."
    )


LockoutOf = Annotated[Lockout, Depends(_find_lockout)]
"""The parameter of an operation that keeps rules."""
