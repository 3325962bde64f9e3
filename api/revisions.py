"""Revisions: who made them, how they differ, and going back to one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from netlimit.records import Difference, Revision
from netlimit.store import changed_fields

from . import schemas
from .auth import CallerOf
from .context import StoreOf, WaitingOf, no_query
from .cursors import read_cursor, write_cursor
from .headers import Wait, preference_applied
from .lockout import ForceQuery, LockoutOf
from .problems import responses
from .representation import write_time
from .turns import InTurn, ask_much, run_in_turn

router = APIRouter(prefix="/revisions", tags=["undo"], route_class=InTurn)
_LARGEST = 2**63 - 1

Number = Annotated[int, Path(ge=0, le=_LARGEST, description="A revision.", examples=[1])]
Other = Annotated[int, Path(ge=0, le=_LARGEST, description="Another revision.", examples=[0])]


class PageQuery(schemas.Strict):
    """The parameters of a list that comes in pages."""

    limit: int = Field(100, ge=1, le=1000, description="The most entries in the answer.")
    cursor: str | None = Field(None, description="`next` of the page before.")


Page = Annotated[PageQuery, Query()]


@router.get(
    "",
    summary="List revisions",
    response_model=None,
    responses={200: {"model": schemas.RevisionPage}, **responses(401, 403, 422, 503)},
)
def list_revisions(query: Page, store: StoreOf) -> dict[str, Any]:
    """The changes of rules that can be undone, the latest first. The settings of the API say how many are kept."""
    found = store.revisions(query.limit + 1, read_cursor(query.cursor))
    page, more = found[: query.limit], len(found) > query.limit
    following = write_cursor(page[-1].revision) if more else None
    return {"items": [_write_revision(each) for each in page], "next": following}


@router.get(
    "/{revision}",
    summary="Show a revision",
    dependencies=[Depends(no_query)],
    response_model=None,
    responses={200: {"model": schemas.Revision}, **responses(401, 403, 404, 422, 503)},
)
def get_revision(revision: Number, store: StoreOf) -> dict[str, Any]:
    """Who made a revision, and what it was. What it changed is its difference to the one before."""
    return _write_revision(store.find_revision(revision))


@router.get(
    "/{revision}/diff/{other}",
    summary="Compare two revisions",
    response_model=None,
    responses={200: {"model": schemas.RevisionDiff}, **responses(401, 403, 404, 422, 503)},
)
def compare_revisions(revision: Number, other: Other, query: Page, store: StoreOf) -> dict[str, Any]:
    """The rules that two revisions do not have in common, by id, with the fields in which they differ."""
    found = store.compare(revision, other, query.limit, read_cursor(query.cursor) or 0)
    return {
        "from": revision,
        "to": other,
        "added": found.added,
        "removed": found.removed,
        "changed": found.changed,
        "items": [_write_difference(each) for each in found.page],
        "next": write_cursor(found.page[-1].rule_id) if found.more else None,
    }


@router.post(
    "/{revision}/rollback",
    summary="Return to a revision",
    responses={
        200: {"description": "What has come of it.", "model": schemas.Rollback},
        **responses(401, 403, 404, 409, 422, 503),
    },
)
async def roll_back(
    revision: Number,
    query: Annotated[ForceQuery, Query()],
    caller: CallerOf,
    lockout: LockoutOf,
    store: StoreOf,
    waiting: WaitingOf,
    wait: Wait,
) -> Response:
    """Bring back the rules of a revision under their ids, as one change, which can be undone like any other. When they
    are as they were, there is no new revision. Refused where a rule that comes back would hit who is safe
    by now, or was forced, or where rules would close a whole gateway."""
    ask_much()
    now = await run_in_turn(store.now)
    judge = await run_in_turn(lockout.judge, query.force)
    after = await run_in_turn(store.rollback, revision, caller.actor, now, judge)
    if wait is not None:
        await waiting.applied(after, wait)
    warnings = await run_in_turn(lockout.warn_of_window)
    back = {"returned_to": revision, "revision": after, "warnings": warnings}
    return JSONResponse(back, headers=preference_applied(wait))


def _write_revision(revision: Revision) -> dict[str, Any]:
    return asdict(revision) | {"at": write_time(revision.at)}


def _write_difference(difference: Difference) -> dict[str, Any]:
    fields = changed_fields(difference)
    rule = difference.after or difference.before
    return {
        "rule": difference.rule_id,
        "name": rule.name if rule else None,
        "kind": difference.kind,
        "before": {field: old for field, (old, _) in fields.items()} if difference.before else None,
        "after": {field: new for field, (_, new) in fields.items()} if difference.after else None,
    }
