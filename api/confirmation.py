"""The window of confirmation: what is changed in it is undone unless somebody confirms it in time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from netlimit.copying import refuse_window
from netlimit.errors import RuleError
from netlimit.judgement import NeedsForce
from netlimit.records import Window
from netlimit.roles import Act

from . import bodies, schemas
from .audit import Moment
from .auth import CallerOf
from .context import StoreOf, WaitingOf, no_query
from .headers import Wait, preference_applied
from .lockout import LockoutOf
from .openapi import body_of
from .problems import Problem, responses
from .representation import write_time
from .turns import InTurn, ask_much, run_in_turn

router = APIRouter(prefix="/confirmation", tags=["undo"], route_class=InTurn)
SHORTEST, LONGEST = 10, 86400
"""Seconds that a window may be long."""
_EXAMPLES = {"a minute": {"seconds": 60}}
_NO_GUARD = (
    "No gateway has a guard that would undo what is not confirmed, so no window is opened; "
    "run `netlimit serve` or `netlimit guard` on the gateways."
)


class WhichQuery(schemas.Strict):
    """Which window is meant."""

    opened_at: Moment | None = Field(
        None, description="Only the window that was opened then, as its opening has answered; any other stays as it is."
    )


async def _read_seconds(request: Request) -> int:
    sent = bodies.parse_object(await bodies.read_body(request, bodies.SMALL, bodies.JSON))
    for field in sent:
        if field != "seconds":
            raise RuleError(field, f"There is no field {field!r} here; `seconds` is all.")
    seconds = sent.get("seconds")
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not SHORTEST <= seconds <= LONGEST:
        raise RuleError("seconds", f"`seconds` is a whole number from {SHORTEST} to {LONGEST}, such as 60.")
    return seconds


@router.post(
    "",
    status_code=201,
    summary="Open a window of confirmation",
    dependencies=[Depends(no_query)],
    responses={
        201: {"description": "The window.", "model": schemas.Window},
        **responses(400, 401, 403, 409, 413, 415, 422, 503),
    },
    openapi_extra=body_of({"application/json": (schemas.NewWindow, _EXAMPLES)}),
)
def open_window(seconds: Annotated[int, Depends(_read_seconds)], caller: CallerOf, store: StoreOf) -> Response:
    """From now on every change of a rule, whoever makes it, is undone by the gateways' guards unless it is confirmed in
    time. There is one window at a time. What was forced comes back into force only if who has opened it may force."""
    now = store.now()
    guards = store.guards()
    if not guards:
        raise Problem(503, _NO_GUARD)
    refusal = refuse_window(store.hosts())
    if refusal is not None:
        raise Problem(503, refusal)
    window = store.open_window(seconds, caller.actor, now, forces=caller.may(Act.FORCE))
    return JSONResponse(write_window(window, guards, now), 201)


@router.get(
    "",
    summary="Show the window of confirmation",
    dependencies=[Depends(no_query)],
    response_model=None,
    responses={200: {"model": schemas.Window}, **responses(401, 403, 404, 422, 503)},
)
def get_window(store: StoreOf) -> dict[str, Any]:
    """The window that was opened last: how long it is open, or how it has ended."""
    now = store.now()
    window = store.window()
    if window is None:
        raise Problem(404, "No window of confirmation is open, and none has been.")
    return write_window(window, store.guards(), now)


@router.put(
    "",
    summary="Confirm",
    response_model=None,
    responses={200: {"model": schemas.Window}, **responses(401, 403, 409, 422, 503)},
)
def confirm(query: Annotated[WhichQuery, Query()], caller: CallerOf, store: StoreOf) -> dict[str, Any]:
    """End the open window, and keep what was changed in it. With `opened_at` that is never somebody else's, who has
    opened one after yours has ended."""
    now = store.now()
    return write_window(store.confirm(caller.actor, now, query.opened_at), store.guards(), now)


@router.delete(
    "",
    summary="Abandon what was changed",
    responses={200: {"description": "The window as it has ended.", "model": schemas.Window},
               **responses(401, 403, 409, 422, 503)},
)  # fmt: skip
async def abandon(
    query: Annotated[WhichQuery, Query()],
    caller: CallerOf,
    lockout: LockoutOf,
    store: StoreOf,
    waiting: WaitingOf,
    wait: Wait,
) -> Response:
    """End the open window, and undo what was changed in it now. It is judged as a rollback is, but that an admin, who
    may force, has all back as it was."""
    ask_much()
    now = await run_in_turn(store.now)
    judge = None if caller.may(Act.FORCE) else await run_in_turn(lockout.judge, False)
    try:
        window = await run_in_turn(store.abandon, caller.actor, now, judge, query.opened_at)
    except NeedsForce as error:
        raise Problem(409, f"Only an admin can abandon this window, for that would need force. {error}") from None
    if wait is not None and window.revision is not None:
        await waiting.applied(window.revision, wait)
    guards = await run_in_turn(store.guards)
    return JSONResponse(write_window(window, guards, now), headers=preference_applied(wait))


def write_window(window: Window, guards: Sequence[str], now: datetime) -> dict[str, Any]:
    """A window, and which gateways have a guard."""
    return {
        "open": window.outcome is None,
        "base": window.base,
        "seconds": window.seconds,
        "opened_at": write_time(window.opened_at),
        "deadline": write_time(window.deadline),
        "left": round(window.left(now), 3) if window.outcome is None else 0,
        "actor": window.actor,
        "outcome": window.outcome,
        "ended_at": write_time(window.ended_at),
        "revision": window.revision,
        "guards": list(guards),
    }
