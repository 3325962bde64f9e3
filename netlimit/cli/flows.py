"""What rules do now, from two readings of their counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from netlimit.cli.describing import describe_limit, describe_traffic
from netlimit.rules import Action

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Flow:
    """What a rule does now, per second; what is queued is what waits. `sent_bits` have passed the rule."""

    rule: int
    name: str | None
    action: str
    what: str
    matched_packets: float
    sent_bits: float
    dropped_packets: float
    dropped_bits: float
    delayed: float
    queued_packets: int
    queued_bytes: int


def measure(rule: Document, before: Document, after: Document) -> Flow:
    """What a rule did between two readings of its counters, per second."""
    seconds = 0.0
    if before["as_of"] and after["as_of"]:
        seconds = (datetime.fromisoformat(after["as_of"]) - datetime.fromisoformat(before["as_of"])).total_seconds()

    def rate(grown: int) -> float:
        return max(0, grown) / seconds if seconds > 0 else 0.0

    def grown(counter: str) -> int:
        return int(after[counter] - before[counter])

    lost = 0 if rule["action"] == Action.OBSERVE else grown("dropped_bytes")
    what = " ".join(part for part in (rule["target"], describe_traffic(rule), describe_limit(rule)) if part)
    return Flow(
        rule=rule["id"],
        name=rule["name"],
        action=rule["action"],
        what=f"{rule['action']} {what}",
        matched_packets=rate(grown("matched_packets")),
        sent_bits=8 * rate(grown("matched_bytes") - grown("queued_bytes") - lost),
        dropped_packets=rate(grown("dropped_packets")),
        dropped_bits=8 * rate(grown("dropped_bytes")),
        delayed=rate(grown("delayed")),
        queued_packets=after["queued_packets"],
        queued_bytes=after["queued_bytes"],
    )
