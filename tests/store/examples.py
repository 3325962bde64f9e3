"""Rules to test with."""

from __future__ import annotations

from datetime import UTC, datetime

from netlimit.rules import Rule, parse_rule
from netlimit.store import Store

NOW = datetime(2030, 5, 6, 7, 8, 9, 123456, UTC)


def rule(target: str = "10.0.0.1", **fields: object) -> Rule:
    """A rule of 100 packets/s, unless told otherwise."""
    fields = {"target": target, "rate": "100 packets/s"} | fields
    if fields.get("action") in ("allow", "block"):
        del fields["rate"]
    return parse_rule(fields, NOW)


def keep(store: Store, target: str = "10.0.0.1", **fields: object) -> Rule:
    """Add one rule; gives it back as kept."""
    return store.add([rule(target, **fields)], "test", NOW)[0]
