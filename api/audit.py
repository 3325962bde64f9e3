"""Who changed what, and when."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import AwareDatetime, BeforeValidator, Field

from netlimit.store import AuditEntry, AuditFilter

from . import schemas
from .context import StoreOf
from .cursors import read_cursor, write_cursor
from .problems import responses
from .representation import write_time
from .turns import InTurn

router = APIRouter(tags=["access"], route_class=InTurn)


def _read_moment(value: object) -> object:
    """Numbers would be taken for seconds or milliseconds, whichever seems likelier."""
    if isinstance(value, str) and re.match(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ]", value):
        return value
    raise ValueError('write a time as "2030-01-31T18:00:00Z"')


Moment = Annotated[AwareDatetime, BeforeValidator(_read_moment), Field(examples=["2030-01-31T18:00:00Z"])]


class AuditQuery(schemas.Strict):
    """The parameters of the audit."""

    actor: str | None = Field(None, description="Only what this token, or user of a gateway, has done.")
    action: str | None = Field(None, description="Only this kind of change, such as `remove`.")
    rule: int | None = Field(None, ge=1, description="Only changes of the rule of this id.")
    request: str | None = Field(None, description="Only what the request of this `X-Request-ID` has done.")
    since: Moment | None = Field(None, description="Only from this time on.")
    until: Moment | None = Field(None, description="Only before this time.")
    limit: int = Field(100, ge=1, le=1000, description="The most entries in the answer.")
    cursor: str | None = Field(None, description="`next` of the page before.")


@router.get(
    "/audit",
    summary="List changes",
    response_model=None,
    responses={200: {"model": schemas.AuditPage}, **responses(401, 403, 422, 503)},
)
def list_audit(query: Annotated[AuditQuery, Query()], store: StoreOf) -> dict[str, Any]:
    """Every change, the latest first: by whom, from where, what was before and what after. All the filters that are
    given must match."""
    which = AuditFilter(query.actor, query.action, query.rule, query.request, query.since, query.until)
    entries = store.audit(query.limit + 1, read_cursor(query.cursor), which)
    page, more = entries[: query.limit], len(entries) > query.limit
    return {"items": [_write(entry) for entry in page], "next": write_cursor(page[-1].id) if more else None}


def _write(entry: AuditEntry) -> Mapping[str, Any]:
    return {
        "id": entry.id,
        "at": write_time(entry.at),
        "actor": entry.actor,
        "address": entry.address,
        "request": entry.request,
        "revision": entry.revision,
        "action": entry.action,
        "rule": entry.rule_id,
        "old": entry.before,
        "new": entry.after,
    }
