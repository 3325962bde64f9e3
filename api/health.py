"""For load balancers: whether the API works."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from . import schemas
from .context import StoreOf, no_query
from .problems import responses
from .turns import InTurn

router = APIRouter(tags=["health"], route_class=InTurn)


@router.get(
    "/healthz",
    summary="Whether the process lives",
    dependencies=[Depends(no_query)],
    response_model=None,
    responses={200: {"model": schemas.Health}, **responses(422)},
)
async def check_health() -> dict[str, str]:
    """Answers as long as the process does; asks nothing of the database."""
    return {"status": "ok"}


@router.get(
    "/readyz",
    summary="Whether requests can be served",
    dependencies=[Depends(no_query)],
    response_model=None,
    responses={200: {"model": schemas.Health}, **responses(422, 503)},
)
def check_readiness(store: StoreOf) -> dict[str, str]:
    """Whether the database answers; 503 says what it lacks."""
    store.revision()
    return {"status": "ok"}
