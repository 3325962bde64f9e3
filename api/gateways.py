"""Gateways: who has reported, and forgetting one that is gone."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path
from fastapi.responses import Response

from netlimit.liveness import is_gone
from netlimit.records import HostStatus
from netlimit.roles import Act

from . import schemas
from .auth import CallerOf
from .context import StoreOf, no_query
from .headers import write_warnings
from .problems import responses
from .representation import write_time
from .standing import is_live
from .turns import InTurn, run_in_turn

router = APIRouter(prefix="/gateways", tags=["kernel"], dependencies=[Depends(no_query)], route_class=InTurn)
MOST_NAMED = 10
"""So many rules that name a forgotten gateway are told by their ids."""

Name = Annotated[str, Path(alias="name", description="The gateway's name (`HOST`).", examples=["gw1"])]


@router.get(
    "",
    summary="List the gateways",
    response_model=None,
    responses={200: {"model": schemas.GatewayList}, **responses(401, 403, 422, 503)},
)
def list_gateways(store: StoreOf) -> dict[str, Any]:
    """Every gateway whose controller has reported, by name."""
    naming = store.count_naming()
    return {"items": [_write(host, naming.get(host.host, 0)) for host in store.hosts()]}


@router.delete(
    "/{name:path}",
    status_code=204,
    summary="Forget a gateway that is gone",
    responses={204: {"description": "The gateway is not known any more."}, **responses(401, 403, 404, 409, 422, 503)},
)
async def forget_gateway(name: Name, caller: CallerOf, store: StoreOf) -> Response:
    """Forget what a gateway has said of itself, its counters and repairs. It takes an admin's token, for rules are not
    judged any more by where this gateway is, and it may come back. Refused while something of it still reports.
    Rules that name it stay as they are, and the header `Warning` tells of them. If it comes back by its name, it is
    known again, and paused as it was."""
    caller.require(Act.FORGET)
    await run_in_turn(store.forget_gateway, name, caller.actor, datetime.now(UTC))
    naming = await run_in_turn(store.find_naming, name, MOST_NAMED + 1)
    return Response(status_code=204, headers=write_warnings(_warn(name, naming)))


def _write(host: HostStatus, naming: int) -> dict[str, Any]:
    return {
        "name": host.host,
        "state": "live" if is_live(host) else "gone" if is_gone(host.silence) else "silent",
        "paused": host.paused,
        "backend": host.backend,
        "applied_revision": host.applied_revision,
        "seen_at": write_time(host.seen_at),
        "rules": naming,
    }


def _warn(name: str, naming: list[int]) -> list[str]:
    if not naming:
        return []
    named = ", ".join(map(str, naming[:MOST_NAMED])) + (" and more" if len(naming) > MOST_NAMED else "")
    return [
        f"Rules still name {name}, and wait for a gateway of that name: {named}. Change their hosts, or remove them."
    ]
