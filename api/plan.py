"""What the controllers would do now: the steps from what the kernel holds to what it should hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import Field

from . import schemas
from .context import WaitingOf
from .problems import responses
from .turns import InTurn, run_in_turn, write_json

router = APIRouter(tags=["kernel"], route_class=InTurn)
ANSWER_SECONDS = 8.0
"""How long a controller may take to plan, or to compile a rule that is only tried."""


class PlanQuery(schemas.Strict):
    """The parameters of a plan."""

    host: str | None = Field(None, description="Only this gateway.")


@router.get(
    "/plan",
    summary="Show the plan",
    response_model=None,
    responses={200: {"model": schemas.Plan}, **responses(401, 403, 404, 422, 503)},
)
async def get_plan(query: Annotated[PlanQuery, Query()], waiting: WaitingOf) -> Response:
    """What every live controller would do to its kernel now; nothing, where all is as it should be."""
    answers, silent = await waiting.ask_live("plan", ANSWER_SECONDS, query.host)
    plans = {host: {field: answer[field] for field in ("words", "text", "steps")} for host, answer in answers.items()}
    return await run_in_turn(write_json, {**put_together(plans), "silent": silent})


def put_together(plans: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The plans of several gateways as one, and each of them."""
    several = len(plans) > 1
    return {
        "words": [f"{host}: {said}" if several else said for host, plan in plans.items() for said in plan["words"]],
        "text": "\n".join(_title(host, plan["text"], len(plans)) for host, plan in plans.items()),
        "steps": [step for plan in plans.values() for step in plan["steps"]],
        "hosts": dict(plans),
    }


def _title(host: str, text: str, hosts: int) -> str:
    return text if hosts == 1 else f"# {host}\n{text}"
