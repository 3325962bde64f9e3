"""What a rule matched and dropped."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.concurrency import run_in_threadpool

from api import schemas
from api.context import StoreOf, WaitingOf, no_query
from api.problems import responses
from api.representation import write_time
from api.rules import Key, find_kept
from api.standing import is_live
from netlimit.records import Counts
from netlimit.rules import Rule
from netlimit.store import Store

router = APIRouter(prefix="/rules", tags=["rules"])
READING_SECONDS = 2.0
"""How long a fresh reading may take; then the last one that is kept must do."""


@router.get(
    "/{key}/counters",
    summary="Show a rule's counters",
    dependencies=[Depends(no_query)],
    response_model=None,
    responses={200: {"model": schemas.RuleCounters}, **responses(401, 403, 404, 422, 503)},
)
async def get_counters(key: Key, store: StoreOf, waiting: WaitingOf) -> dict[str, Any]:
    """What a rule matched and dropped, on all its gateways together, read now if their controllers answer."""
    kept = await run_in_threadpool(find_kept, store, key)
    hosts = await run_in_threadpool(_find_hosts, store, kept.rule)
    await waiting.ask(hosts, "counters", {"rule": kept.rule.id}, READING_SECONDS)
    return await run_in_threadpool(_sum_up, store, kept.rule.id)


def _find_hosts(store: Store, rule: Rule) -> list[str]:
    """The gateways that can say something new about a rule."""
    now = datetime.now(UTC)
    return [host.host for host in store.hosts() if is_live(host, now) and rule.in_force(now, host.host)]


def _sum_up(store: Store, rule_id: int) -> dict[str, Any]:
    """The sum of all gateways: since the first began to count, as old as the oldest reading."""
    readings = list(store.counters(rule_id).values())
    total = sum((reading.total for reading in readings), Counts())
    return {
        "matched_packets": total.matched_packets,
        "matched_bytes": total.matched_bytes,
        "dropped_packets": total.dropped_packets,
        "dropped_bytes": total.dropped_bytes,
        "since": write_time(min((reading.since for reading in readings), default=None)),
        "as_of": write_time(min((reading.as_of for reading in readings), default=None)),
    }
