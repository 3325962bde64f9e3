"""Who changed what, and when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from api import schemas
from api.context import StoreOf
from api.cursors import read_cursor, write_cursor
from api.problems import responses
from api.representation import write_time
from netlimit.store import AuditEntry

router = APIRouter(tags=["rules"])


class AuditQuery(schemas.Strict):
    """The parameters of the audit."""

    limit: int = Field(100, ge=1, le=1000, description="The most entries in the answer.")
    cursor: str | None = Field(None, description="`next` of the page before.")


@router.get(
    "/audit",
    summary="List changes",
    response_model=None,
    responses={200: {"model": schemas.AuditPage}, **responses(401, 403, 422, 503)},
)
def list_audit(query: Annotated[AuditQuery, Query()], store: StoreOf) -> dict[str, Any]:
    """Every change of a rule, the latest first: by whose token, what was before and what after."""
    entries = store.audit(query.limit + 1, read_cursor(query.cursor))
    page, more = entries[: query.limit], len(entries) > query.limit
    return {"items": [_write(entry) for entry in page], "next": write_cursor(page[-1].id) if more else None}


def _write(entry: AuditEntry) -> Mapping[str, Any]:
    return {
        "id": entry.id,
        "at": write_time(entry.at),
        "actor": entry.actor,
        "revision": entry.revision,
        "action": entry.action,
        "rule": entry.rule_id,
        "old": entry.before,
        "new": entry.after,
    }
