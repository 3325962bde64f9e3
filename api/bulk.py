"""Many rules at once: all of them are kept, or none."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import Response

from netlimit.errors import RuleError
from netlimit.judgement import Change, NeedsForce
from netlimit.records import Actor, State
from netlimit.rules import Rule
from netlimit.store import Conflict, ManyErrors, Store

from . import bodies, schemas
from .auth import CallerOf
from .context import StoreOf, WaitingOf
from .headers import Wait, preference_applied
from .headroom import find_headroom
from .lockout import ForceQuery, Lockout, LockoutOf
from .openapi import reference, write_examples
from .problems import Problem, find_problem, list_problems, responses
from .representation import read_rule
from .standing import find_worst
from .turns import InTurn, run_in_turn

router = APIRouter(prefix="/rules/bulk", tags=["rules"], route_class=InTurn)
MOST_WRONG = 10_000
"""So many wrong lines are told at most; what comes after them is not read."""

MOST_RULES = 200_000
"""So many rules can be added at once; each takes about a kilobyte of memory meanwhile."""
MOST_WORDS = 500_000
"""So many names of gateways and labels can come with them: each is a row, and all are written while no other change can
be; so many take about five seconds."""
_BYTES_A_RULE = 450
"""What a rule that was read takes besides until it is written; measured: 330."""
_RESERVE = 16 * 2**20
_LOOK_EVERY = 500

_EXAMPLE = [
    {"target": "10.5.0.1", "rate": "200 packets/s"},
    {"target": "10.5.0.2", "rate": "20 Mbit/s", "direction": "to"},
    {"target": "203.0.113.8", "action": "block", "ttl": "10m"},
]
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"type": "array", "items": reference(schemas.NewRule)},
                "examples": write_examples({"three rules": _EXAMPLE}),
            },
            "application/x-ndjson": {
                "schema": {
                    "type": "string",
                    "description": "One rule on each line:\n\n" + "\n".join(json.dumps(rule) for rule in _EXAMPLE),
                },
            },
        },
    }
}


@dataclass
class Batch:
    """Rules as they come: `rules` those that are right, `lines` their numbers, `wrong` what is wrong with others."""

    rules: list[Rule] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    wrong: list[tuple[int, Problem]] = field(default_factory=list)
    words: int = 0

    def take(self, line: int, sent: object, now: datetime) -> None:
        """Read one rule. Raises Problem 413 for one too many, and for too many names and labels."""
        if len(self.rules) == MOST_RULES:
            raise Problem(
                413, f"At most {MOST_RULES} rules can be added at once; nothing was kept. Send several batches."
            )
        if len(self.rules) % _LOOK_EVERY == 0:
            self._check_memory()
        try:
            rule = read_rule(bodies.expect_object(sent), now)
        except RuleError as error:
            self.refuse(line, find_problem(error))
        except Problem as problem:
            self.refuse(line, problem)
        else:
            self.rules.append(rule)
            self.lines.append(line)
            self._count_words(rule)

    def _count_words(self, rule: Rule) -> None:
        """Raise Problem 413 for one too many."""
        self.words += len(rule.hosts) + len(rule.labels)
        if self.words > MOST_WORDS:
            raise Problem(
                413,
                f"At most {MOST_WORDS:,} names of gateways and labels can come with the rules that are added at once; "
                "nothing was kept. Send several batches.",
            )

    def _check_memory(self) -> None:
        """Raise Problem 413 rather than be ended: what was read is to be copied and written yet."""
        headroom = find_headroom()
        if headroom is not None and headroom < _RESERVE + len(self.rules) * _BYTES_A_RULE:
            raise Problem(
                413,
                f"The memory that the API may use does not suffice for more than {len(self.rules)} of these rules at "
                "once; nothing was kept. Send smaller batches, or raise its limit (MemoryMax).",
            )

    def refuse(self, line: int, problem: Problem) -> None:
        """Note what is wrong with a line. Raises Problem when that is as much as is told."""
        self.wrong.append((line, problem))
        if len(self.wrong) == MOST_WRONG:
            raise self.list_wrong(" at least")

    def list_wrong(self, words: str = "") -> Problem:
        """All that is wrong, by line; `words` stand behind its number."""
        return list_problems(sorted(self.wrong, key=itemgetter(0)), words)


@dataclass
class Sent:
    """A body, and whether it is NDJSON."""

    body: bytes
    by_line: bool

    def take(self) -> bytes:
        """The body, which is let go here: a large one must not stay in memory until all is done."""
        body, self.body = self.body, b""
        return body


async def _read_body(request: Request) -> Sent:
    body = await bodies.read_body(request, bodies.BULK, (*bodies.JSON, *bodies.NDJSON))
    return Sent(body, bodies.find_media_type(request) in bodies.NDJSON)


@router.post(
    "",
    status_code=201,
    summary="Add many rules",
    responses={
        201: {"description": "All of them are kept.", "model": schemas.BulkAdded},
        **responses(400, 401, 403, 409, 413, 415, 422, 503),
    },
    openapi_extra=_BODY,
)
async def add_rules(
    query: Annotated[ForceQuery, Query()],
    sent: Annotated[Sent, Depends(_read_body)],
    caller: CallerOf,
    lockout: LockoutOf,
    store: StoreOf,
    waiting: WaitingOf,
    wait: Wait,
) -> Response:
    """Keep all the rules of a JSON array, or of NDJSON, as one change; or none, and say what is wrong in which line.

    Lines are numbered from 1; in an array, an item is a line.
    """
    kept = await run_in_turn(_add, store, sent, caller.actor, lockout, query.force)
    revision = kept[0].revision if kept else await run_in_turn(store.revision)
    if wait is not None:
        await waiting.applied(revision, wait)
    state = await run_in_turn(_find_state, store, kept, wait is not None)
    ids = [rule.id for rule in kept]
    warnings = [*lockout.told, *await run_in_turn(lockout.warn_of_window)]
    added = {"added": len(kept), "revision": revision, "ids": ids, "state": state.value, "warnings": warnings}
    content = json.dumps(added, separators=(",", ":"))
    return Response(content, 201, preference_applied(wait), "application/json")


@router.api_route("", methods=["GET", "PUT", "PATCH", "DELETE"], include_in_schema=False)
def refuse_method() -> None:
    """Without this they would be asked of a rule named `bulk`, and there is none."""
    raise HTTPException(405)


def read_batch(sent: Sent, now: datetime) -> Batch:
    """Read all rules of a body. Raises Problem: 400 where an array stops being JSON, and when too many are wrong."""
    batch = Batch()
    text = bodies.decode(sent.take())
    if sent.by_line:
        for line, rule in bodies.parse_lines(text):
            try:
                item = bodies.parse_json(rule)
            except Problem as problem:
                batch.refuse(line, problem)
            else:
                batch.take(line, item, now)
    else:
        for line, item in enumerate(bodies.parse_array(text), 1):
            batch.take(line, item, now)
    return batch


def _add(store: Store, sent: Sent, actor: Actor, lockout: Lockout, force: bool) -> list[Rule]:
    now = datetime.now(UTC)
    try:
        return _keep(store, read_batch(sent, now), now, actor, lockout, force)
    except MemoryError:
        raise Problem(
            413, "The API has not got the memory for this batch; nothing was kept. Send smaller ones."
        ) from None


def _keep(store: Store, batch: Batch, now: datetime, actor: Actor, lockout: Lockout, force: bool) -> list[Rule]:
    judge = lockout.judge(force)
    for line, rule in zip(batch.lines, batch.rules, strict=True):
        if rule.forced_by and not force:
            batch.refuse(line, lockout.refuse_claim(rule))
    if not batch.wrong:
        lockout.make_room(batch.rules)
    try:
        if batch.wrong:
            store.judge([Change(None, rule) for rule in batch.rules], judge)
            raise batch.list_wrong()
        return lockout.keep(store.add, batch.rules, actor, now, lockout.weigh(judge))
    except NeedsForce as error:
        told = {line for line, _ in batch.wrong}
        for which, sentence in error.harms:
            if batch.lines[which] not in told:
                batch.refuse(batch.lines[which], Problem(409, sentence, field="target"))
        raise batch.list_wrong() from None
    except ManyErrors as errors:
        wrong = [(batch.lines[index], find_problem(error)) for index, error in errors.errors]
        raise list_problems(wrong) from None
    except Conflict as error:  # what the store says of a batch of one
        raise list_problems([(batch.lines[0], find_problem(error))]) from None


def _find_state(store: Store, kept: list[Rule], waited: bool) -> State:
    """How they stand: the worst of them. Nobody has had time to report an exception, unless somebody waited."""
    exceptional = store.exceptional([rule.id for rule in kept]) if waited else {}
    return find_worst(kept, store.hosts(), exceptional, store.now())
