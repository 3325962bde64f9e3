"""How the whole stands: what the gateways can do, and what they have done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Depends, Request

from netlimit.liveness import is_gone
from netlimit.records import DISPENSABLE, HostStatus, Repair
from netlimit.skew import Skew
from netlimit.store import Store

from . import schemas
from .confirmation import write_window
from .context import StoreOf, no_query
from .problems import responses
from .representation import write_time
from .standing import describe_gone, describe_last, is_live, list_present
from .tally import count_states
from .turns import InTurn

router = APIRouter(tags=["kernel"], route_class=InTurn)
DIVIDED = (
    "Several servers of the database take changes: what the older is told alone is in force nowhere. The API's log and "
    "`netlimit doctor` name them."
)
REPAIRS = 5
"""So many of the newest repairs of each gateway are told."""


@router.get(
    "/status",
    summary="Show how things stand",
    dependencies=[Depends(no_query)],
    response_model=None,
    responses={200: {"model": schemas.Status}, **responses(401, 403, 422, 503)},
)
def get_status(request: Request, store: StoreOf) -> dict[str, Any]:
    """What the gateways can do, whether they are up to date, what went wrong, how many rules stand how."""
    skew: Skew = request.app.state.skew
    now, hosts = _read_clock(store, skew), store.hosts()
    window, guards = store.window(), store.guards()
    present = list_present(hosts)
    backends = {host.backend for host in present}
    return {
        "backend": backends.pop() if len(backends) == 1 else None,
        "capabilities": _write_capabilities(_merge_capabilities(present)),
        "wanted_revision": store.revision(),
        "applied_revision": min((host.applied_revision for host in present if not host.paused), default=0),
        "drift": sum(host.drift for host in present),
        "window": write_window(window, guards, now) if window and window.outcome is None else None,
        "last_error": next((_title(host, present) + host.last_error for host in present if host.last_error), None),
        "rules": count_states(store, hosts, now),
        "hosts": [_write_host(host, host.host in guards, store.repairs(host.host, REPAIRS)) for host in hosts],
        "notes": [*request.app.state.notes, *_collect_own(store, skew), *_collect_notes(hosts, present)],
    }


def _read_clock(store: Store, skew: Skew) -> datetime:
    """The database's, beside that of this host, by which `ttl` and tokens are counted."""
    sent = datetime.now(UTC)
    now = store.now()
    skew.note(sent, now, datetime.now(UTC))
    return now


def _merge_capabilities(hosts: Sequence[HostStatus]) -> dict[str, str | None]:
    """What every gateway can do; what one lacks is missing, for the reasons of those that lack it."""
    reasons: dict[str, list[str]] = {}
    for host in hosts:
        for name, reason in host.capabilities.items():
            reasons.setdefault(name, []).extend([_title(host, hosts) + reason] if reason is not None else [])
    return {name: " ".join(missing) if missing else None for name, missing in sorted(reasons.items())}


def _write_capabilities(reasons: Mapping[str, str | None]) -> dict[str, dict[str, object]]:
    return {
        name: {"available": reason is None, "reason": reason, "needed": name not in DISPENSABLE}
        for name, reason in reasons.items()
    }


def _write_host(host: HostStatus, guarded: bool, repairs: Sequence[Repair]) -> dict[str, Any]:
    return {
        "host": host.host,
        "backend": host.backend,
        "applied_revision": host.applied_revision,
        "paused": host.paused,
        "capabilities": _write_capabilities(host.capabilities),
        "own": list(host.own),
        "safe": list(host.safe),
        "safe_reasons": {network: why.text for network, why in host.safe_reasons.items()},
        "management": list(host.management),
        "notes": list(host.notes),
        "desired": host.desired,
        "enforced": host.enforced,
        "degraded": host.degraded,
        "drifted": host.drifted,
        "lifted": host.lifted,
        "drift": host.drift,
        "repairs": dict(host.repairs),
        "last_repairs": [
            {"at": write_time(each.at), "kind": each.kind, "found": each.found, "seconds": round(each.took, 3)}
            for each in repairs
        ],
        "guarded": guarded,
        "last_error": host.last_error,
        "seen_at": write_time(host.seen_at),
        "live": is_live(host),
        "gone": is_gone(host.silence),
    }


def _collect_own(store: Store, skew: Skew) -> list[str]:
    """What the API tells of itself."""
    divided = [DIVIDED] if store.divided is not None else []
    return [*divided, *filter(None, [skew.warning])]


def _collect_notes(hosts: Sequence[HostStatus], present: Sequence[HostStatus]) -> list[str]:
    notes = [_title(host, present) + note for host in present for note in host.notes]
    notes += [f"The controller of {host.host} is paused by a teardown." for host in present if host.paused]
    silent = [host for host in hosts if not is_live(host)]
    notes += [f"The controller of {host.host} {describe_last(host)}" for host in silent if not is_gone(host.silence)]
    notes += [describe_gone(host) for host in silent if is_gone(host.silence)]
    return notes if hosts else ["No controller has reported yet; run `netlimit serve` on a gateway."]


def _title(host: HostStatus, hosts: Sequence[HostStatus]) -> str:
    return f"{host.host}: " if len(hosts) > 1 else ""
