"""Rules that were forced, for tests that have no API to force them by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from netlimit.rules import Rule, parse_rule


def make_rule(fields: Mapping[str, object], now: datetime) -> Rule:
    """What `parse_rule` reads, forced by whom `forced_by` names."""
    forced_by = fields.get("forced_by")
    rule = parse_rule({name: value for name, value in fields.items() if name != "forced_by"}, now)
    return replace(rule, forced_by=forced_by and str(forced_by))
