"""What rules matched, dropped and made wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response
from pydantic import Field

from netlimit.records import Counts, RuleCounters
from netlimit.rules import Rule
from netlimit.store import Kept, NoRoom, Store

from . import schemas
from .context import StoreOf, WaitingOf, no_query
from .problems import responses
from .representation import write_time
from .rules import MOST, Key, find_kept, find_some
from .standing import is_live
from .turns import InTurn, run_in_turn, write_json
from .waiting import Waiting

router = APIRouter(tags=["rules"], route_class=InTurn)
READING_SECONDS = 2.0
"""How long a fresh reading may take; then the last one that is kept must do."""


class CountersQuery(schemas.Strict):
    """The parameters of reading many counters."""

    rule: list[str] = Field(
        min_length=1, max_length=MOST, description="A rule's id or name; repeated: of all of them.", examples=[["1"]]
    )


@router.get(
    "/rules/{key}/counters",
    summary="Show a rule's counters",
    dependencies=[Depends(no_query)],
    response_model=None,
    responses={200: {"model": schemas.RuleCounters}, **responses(401, 403, 404, 422, 503)},
)
async def get_counters(key: Key, store: StoreOf, waiting: WaitingOf) -> dict[str, Any]:
    """What a rule matched, dropped and made wait, on all its gateways together, read now if their controllers answer.

    For a rule that shapes, bytes are Ethernet bytes, and those that were dropped are not counted.
    """
    kept = await run_in_turn(find_kept, store, key)
    await _read_afresh([kept.rule], store, waiting)
    readings = await run_in_turn(store.counters, kept.rule.id)
    return _sum_up(readings, kept.created_at)


@router.get(
    "/counters",
    summary="Show the counters of many rules",
    response_model=None,
    responses={200: {"model": schemas.CountersOfRules}, **responses(401, 403, 422, 503)},
)
async def list_counters(query: Annotated[CountersQuery, Query()], store: StoreOf, waiting: WaitingOf) -> Response:
    """The same of several rules, in the order in which they are named: all of them are read at once.

    A rule that is not there, or no longer, is no error: `missing` names it.
    """
    found = await run_in_turn(find_some, store, query.rule)
    every = list({kept.rule.id: kept for kept in found.values()}.values())
    await _read_afresh([kept.rule for kept in every], store, waiting)
    readings = await run_in_turn(store.counters_of, [kept.rule.id for kept in every])
    missing = [key for key in dict.fromkeys(query.rule) if key not in found]
    return await run_in_turn(_write_many, every, readings, missing)


def _write_many(
    every: Sequence[Kept], readings: Mapping[int, Mapping[str, RuleCounters]], missing: Sequence[str]
) -> Response:
    items = [
        {"rule": rule.id, "name": rule.name, **_sum_up(readings.get(rule.id, {}), made_at)}
        for rule, made_at in ((kept.rule, kept.created_at) for kept in every)
    ]
    return write_json({"items": items, "missing": missing})


async def _read_afresh(rules: Iterable[Rule], store: Store, waiting: Waiting) -> None:
    """Let the gateways that can say something new about rules do so, where the database has room for what they say."""
    now = datetime.now(UTC)
    live = [host.host for host in await run_in_turn(store.hosts) if is_live(host)]
    asked = {host: [rule.id for rule in rules if rule.in_force(now, host)] for host in live}
    hosts = [host for host, here in asked.items() if here]
    every = sorted({rule_id for here in asked.values() for rule_id in here})
    with suppress(NoRoom):
        await waiting.ask(hosts, "counters", {"rules": every}, READING_SECONDS)


def _sum_up(by_host: Mapping[str, RuleCounters], made_at: datetime) -> dict[str, Any]:
    """The sum of all gateways, since the rule was made: that is all it did. As old as the oldest reading."""
    readings = by_host.values()
    total = sum((reading.total for reading in readings), Counts())
    return {
        "matched_packets": total.matched_packets,
        "matched_bytes": total.matched_bytes,
        "dropped_packets": total.dropped_packets,
        "dropped_bytes": total.dropped_bytes,
        "delayed": total.delayed,
        "queued_packets": sum(reading.queued_packets for reading in readings),
        "queued_bytes": sum(reading.queued_bytes for reading in readings),
        "since": write_time(made_at if by_host else None),
        "as_of": write_time(min((reading.as_of for reading in readings), default=None)),
    }
