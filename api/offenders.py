"""Who is being limited now."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import Field

from . import schemas
from .context import WaitingOf
from .plan import ANSWER_SECONDS
from .problems import responses
from .turns import InTurn, run_in_turn, write_json

router = APIRouter(tags=["kernel"], route_class=InTurn)


class OffendersQuery(schemas.Strict):
    """The parameters of the offenders."""

    host: str | None = Field(None, description="Only this gateway.")
    limit: int = Field(100, ge=1, le=10_000, description="The most addresses in the answer.")


@router.get(
    "/offenders",
    summary="Show who is being limited",
    response_model=None,
    responses={200: {"model": schemas.Offenders}, **responses(401, 403, 404, 422, 503)},
)
async def list_offenders(query: Annotated[OffendersQuery, Query()], waiting: WaitingOf) -> Response:
    """The addresses whose traffic is dropped now, worst first; one that several gateways see is summed up."""
    answers, silent = await waiting.ask_live("offenders", ANSWER_SECONDS, query.host)
    packets: Counter[str] = Counter()
    volume: Counter[str] = Counter()
    for answer in answers.values():
        for item in answer["items"]:
            packets[item["address"]] += item["packets"]
            volume[item["address"]] += item["bytes"]
    worst = sorted(packets, key=lambda address: (-packets[address], -volume[address], address))
    items = [{"address": each, "packets": packets[each], "bytes": volume[each]} for each in worst[: query.limit]]
    return await run_in_turn(write_json, {"items": items, "silent": silent})
