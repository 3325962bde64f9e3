"""Nothing is changed that would lock out who is safe, or all others, unless an admin forces it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Annotated, ParamSpec, TypeVar

from fastapi import Depends, Request
from pydantic import Field

from netlimit import crowding
from netlimit.judgement import Change, Judge, Standing, do_the_same, force, mark_forced, refuse
from netlimit.lockout import Havens
from netlimit.memory import TooMuchMemory, weigh
from netlimit.rates import MANY_CONNECTIONS, Kind
from netlimit.roles import Act
from netlimit.rules import Action, Rule
from netlimit.store import Store

from . import schemas
from .auth import Caller, CallerOf
from .context import StoreOf
from .problems import Problem

_COUNTED = (
    "Connections that are open already are never counted; and a number that no such rule has yet begins the counts of "
    "others of the kind anew (docs/rules.md, connections at once)."
)


_WALKED = (
    f"Each connection beyond more than {MANY_CONNECTIONS:,} makes the kernel look through all of them: a flood of such "
    "keeps a processor busy, whomever it is for. Put a rate of new connections beside it, or count each host by itself."
)
_EMPTIED = (
    "The first rule that shapes what ends on a gateway has the kernel empty the queues of its devices, once: what "
    "waits there at that moment is lost, whoever it is of (docs/rules.md, shaping)."
)
_MOST_LOOKED_AT = 100
"""So many rules that shape are looked at for one by which that has been done already."""
P = ParamSpec("P")
Result = TypeVar("Result")


class _Unseen(Exception):
    """All rules are to be looked at before."""


class Lockout:
    """What one request may keep: who asks is safe too, on the gateway that is asked."""

    def __init__(self, store: Store, caller: Caller, host: str) -> None:
        self._store, self._caller, self._host = store, caller, host
        self._havens: Havens | None = None
        self._now: datetime | None = None
        self._seen: tuple[int, list[tuple[Rule, int]]] | None = None
        self.told: list[str] = []
        """What was said of the memory that limits may come to, with the last judgement."""

    def look(self) -> Havens:
        """Who is safe at the moment. Raises StoreError."""
        if self._havens is None:
            address = self._caller.actor.address
            caller = (address, self._host) if address else None
            self._havens = Havens(self._store.hosts(), self._find_now(), caller)
        return self._havens

    def judge(self, forces: bool) -> Judge:
        """Who is asked before anything is changed. Raises Problem 403 for somebody who forces and may not, and
        StoreError."""
        now = self._find_now()
        if forces:
            self._caller.require(Act.FORCE)
            return force(self.look(), now, self._caller.actor.name)
        return refuse(self.look(), now)

    def claim(self, rule: Rule, forces: bool, before: Rule | None = None) -> Rule:
        """A rule as somebody sent it, with who has forced it: whoever forces now, unless it was forced before, as it
        is. Raises Problem: 409 for one that says so of itself, 403 for somebody who forces and may not."""
        known = before.forced_by if before else None
        if forces:
            self._caller.require(Act.FORCE)
            changed = before is not None and not do_the_same(before, rule)
            return mark_forced(replace(rule, forced_by=None) if changed else rule, self._caller.actor.name)
        if rule.forced_by not in (None, known):
            raise self.refuse_claim(rule)
        return rule

    def refuse_claim(self, rule: Rule) -> Problem:
        """What is wrong with a rule that says that it was forced."""
        detail = (
            f"'{rule}' says that {rule.forced_by} has forced it; only an admin can bring in such a rule (`force=true`, "
            "`--force`). Without `forced_by` it spares who is safe."
        )
        return Problem(409, detail, field="forced_by")

    def make_room(self, new: Sequence[Rule]) -> None:
        """Look whether gateways can hold these rules beside those that are kept. Raises Problem 422, StoreError."""
        if any(map(crowding.is_particular, new)):
            crowd = crowding.find_crowd(chain(self._store.sample_selectors(), new))
            if crowd is not None:
                raise Problem(422, f"{crowd} Nothing was kept.")

    def weigh(self, judge: Judge) -> Judge:
        """The same judge, who looks besides how much memory limits may come to, and how many gateways that nobody knows
        are named: Problem 422 if too much. For rules
        that somebody sends: those that a rollback brings were taken once, and may return. To be asked within `keep`."""

        def judge_all(changes: Sequence[Change], standing: Standing) -> Mapping[int, Rule]:
            self._check_names(changes, standing)
            much, problem = None, None
            try:  # first, for it may have to be done again
                much = weigh(changes, partial(self._find_stays, changes, standing), self._find_now())
            except TooMuchMemory as error:
                problem = Problem(422, f"{error} Nothing was kept.")
            forced = judge(changes, standing)
            if problem is not None:
                raise problem
            self.told = [much] if much else []
            return forced

        return judge_all

    def _check_names(self, changes: Sequence[Change], standing: Standing) -> None:
        new = [after for _, after in changes if after is not None]
        sentence = crowding.find_strangers(new, self.look().hosts, standing.named)
        if sentence is not None:
            raise Problem(422, f"{sentence} Nothing was kept.", field="hosts")

    def keep(self, work: Callable[P, Result], *arguments: P.args, **named: P.kwargs) -> Result:
        """Do what asks the judge of `weigh`. If all rules are to be looked at for it, that is done before, while
        others write; in the turn of those who write, only what has come since is."""
        try:
            return work(*arguments, **named)
        except _Unseen:
            self._seen = self._store.look_at_meters(self._find_now())
        try:
            return work(*arguments, **named)
        finally:
            self._seen = None

    def _find_now(self) -> datetime:
        """When it was asked first, by the database's clock: whatever that of this gateway shows, rules are in force at
        others."""
        if self._now is None:
            self._now = self._store.now()
        return self._now

    def _find_stays(self, changes: Sequence[Change], standing: Standing, now: datetime) -> Iterable[tuple[Rule, int]]:
        if self._seen is None:
            raise _Unseen
        revision, seen = self._seen
        gone = (before for before, _ in changes if before is not None and before.revision <= revision)
        taken = ((before, -1) for before in gone if before.in_force(now))
        return chain(seen, standing.metering_since(revision, now), taken)

    def warn(self, rule: Rule) -> list[str]:
        """What somebody should know who keeps it."""
        sentence = self.look().spare(rule)
        told = [sentence] if sentence else []
        if rule.enabled and rule.rate is not None and rule.rate.kind is Kind.CONCURRENT:
            told.append(_COUNTED)
            if rule.rate.amount > MANY_CONNECTIONS:
                told.append(_WALKED)
        if self._is_first_to_end_here(rule):
            told.append(_EMPTIED)
        crowds = self._find_crowds() if crowding.is_particular(rule) else []
        return [*told, *self.told, *crowds, *self.warn_of_window()]

    def _is_first_to_end_here(self, rule: Rule) -> bool:
        """Whether no other rule shapes what ends on a gateway. One that has gone may have before: nobody knows here."""
        if not self.look().ends_here(rule):
            return False
        others, _ = self._store.select(action=Action.SHAPE, limit=_MOST_LOOKED_AT)
        return not any(self.look().ends_here(kept.rule) for kept in others if kept.rule.id != rule.id)

    def warn_of_window(self) -> list[str]:
        """What somebody should know who changes anything while a window of confirmation is open."""
        return self._store.warn_of_window("this change")

    def _find_crowds(self) -> list[str]:
        """The gateways that hold many kinds of limits already."""
        notes = ((host.host, note) for host in self._store.hosts() for note in host.notes)
        return [f"{host}: {note}" for host, note in notes if note.startswith(crowding.PREFIX)]


async def _find_lockout(request: Request, caller: CallerOf, store: StoreOf) -> Lockout:
    return Lockout(store, caller, request.app.state.settings.host)


class ForceQuery(schemas.Strict):
    """Whether the safe set is to be heeded."""

    force: schemas.Flag = Field(
        False,
        description="Do it even if it would hit who is safe (an SSH session, the database …), or close a whole "
        "gateway. The rule keeps who has forced it. Admins only.",
    )


LockoutOf = Annotated[Lockout, Depends(_find_lockout)]
"""The parameter of an operation that keeps rules."""
