"""What a rule would do if it were kept: every gateway that it concerns compiles it atop of what it enforces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from netlimit.liveness import is_gone
from netlimit.records import HostStatus
from netlimit.rules import Rule
from netlimit.store import Store

from .plan import ANSWER_SECONDS, put_together
from .representation import write_draft, write_input
from .standing import is_live
from .turns import run_in_turn
from .waiting import Waiting


async def preview(rule: Rule, store: Store, waiting: Waiting, now: datetime) -> dict[str, object]:
    """The draft of a rule, and what would become of it; one with an id would take the place of that rule.

    Raises Conflict and NameTaken, as keeping it would.
    """
    await run_in_turn(store.check, rule, now)
    hosts = await run_in_turn(store.hosts)
    concerned = [host for host in hosts if not rule.hosts or host.host in rule.hosts]
    live = [host.host for host in concerned if is_live(host)]
    answers = await waiting.ask(live, "preview", {"rule": write_input(rule), "id": rule.id}, ANSWER_SECONDS)
    told = {host: _read(answer) for host, answer in answers.items()}
    found: dict[str, object] = {
        "message": None if any(each["state"] != "pending" for each in told.values()) else _lament(rule, live, hosts),
        **put_together(told),
        "silent": [host.host for host in concerned if host.host not in answers and not is_gone(host.silence)],
    }
    return {**write_draft(rule), "id": rule.id or None, "preview": found}


def _read(answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer, or why there is none."""
    nothing = {"words": [], "relations": [], "text": "", "steps": []}
    if "state" in answer:
        return {"state": None, "enforced_by": None, "message": None, **nothing, **answer}
    reason = answer.get("error") or "Its controller cannot tell; it is of an older version."
    return {"state": "pending", "enforced_by": None, "message": reason, **nothing}


def _lament(rule: Rule, live: Sequence[str], hosts: Sequence[HostStatus]) -> str:
    if live:
        return f"The rule could be kept, but no controller could compile it; asked were {', '.join(live)}."
    if rule.hosts and hosts:
        return f"The rule could be kept, but none of its gateways has a controller that runs ({', '.join(rule.hosts)})."
    return "The rule could be kept, but no controller has reported lately that could compile it: run `netlimit serve`."
