"""Rules as JSON: how one is written, and how what was sent becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

from netlimit.errors import RuleError
from netlimit.htb import bytes_per_second
from netlimit.malformed import Malformed
from netlimit.rates import Kind, Rate, format_number, format_rate, parse_rate
from netlimit.rules import Action, PortRange, Rule, format_port, format_target, parse_rule
from netlimit.store import Kept

RESERVED_NAMES = ("bulk",)
"""Names that are addresses under /rules already."""
LONGEST_TEXT = 1000
"""No field has more letters, so that nobody's time is spent on reading a number of a million digits."""
READ_ONLY = ("id", "revision", "created_at", "updated_at", "status", "effective_rate", "effective_burst", "warnings")
"""What netlimit alone sets; a rule that is sent back may have it."""


def read_rule(fields: Mapping[str, object], now: datetime) -> Rule:
    """Make a rule of what was sent. Raises RuleError."""
    for field, value in fields.items():
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise RuleError(field, f"`{field}` has {len(value)} letters; {LONGEST_TEXT} are the most.")
    for field in ("rate", "ceil"):
        _check_rate(field, fields.get(field))
    rule = parse_rule(fields, now)
    if rule.name in RESERVED_NAMES:
        raise RuleError("name", f"The name {rule.name!r} is an address of the API itself; choose another.")
    return rule


def without_read_only(fields: Mapping[str, object]) -> dict[str, object]:
    """What counts of a rule that is sent back as it was returned."""
    return {field: value for field, value in fields.items() if field not in READ_ONLY}


def merge(rule: Rule, changes: Mapping[str, object]) -> dict[str, object]:
    """The fields of a rule after a JSON merge patch (RFC 7396). `ttl` takes the place of `expires_at`."""
    fields: Any = _merge(write_input(rule), changes)
    if fields.get("ttl") is not None and "expires_at" not in changes:
        fields["expires_at"] = None
    return dict(fields)


def patch(rule: Rule, changes: Mapping[str, object], now: datetime) -> Rule:
    """The rule that a merge patch makes of it. What the patch does not name stays, also where it is more than rules may
    have today. Raises RuleError."""
    fields = merge(rule, changes)
    if isinstance(rule, Malformed):
        return read_rule(fields, now)
    kept: dict[str, Any] = {name: getattr(rule, name) for name in ("labels", "hosts") if name not in changes}
    return replace(read_rule({name: each for name, each in fields.items() if name not in kept}, now), **kept)


def write_kept(kept: Kept, standing: Mapping[str, object]) -> dict[str, object]:
    """A rule as it is returned."""
    return {
        "id": kept.rule.id,
        **write_input(kept.rule),
        "revision": kept.rule.revision,
        "created_at": write_time(kept.created_at),
        "updated_at": write_time(kept.updated_at),
        "status": standing,
        **write_effective(kept.rule),
    }


def write_draft(rule: Rule) -> dict[str, object]:
    """A rule as it would be returned if it were kept."""
    nothing = dict.fromkeys(("revision", "created_at", "updated_at", "status"))
    return {"id": None, **write_input(rule), **nothing, **write_effective(rule)}


def write_input(rule: Rule) -> dict[str, object]:
    """The fields of a rule that a client may set; of one that cannot be read, as it stands in the database."""
    if isinstance(rule, Malformed):
        return _write_raw(rule)
    return {
        "name": rule.name,
        "target": format_target(rule.target),
        "direction": rule.direction.value,
        "protocol": rule.selector.protocol.value,
        "ports": [_write_port(port) for port in rule.selector.ports],
        "source_ports": [_write_port(port) for port in rule.selector.source_ports],
        "interface": rule.selector.interface,
        "rate": write_rate(rule.rate),
        "burst": rule.burst,
        "per": rule.per,
        "action": rule.action.value,
        "ceil": write_rate(rule.ceil),
        "on_failure": rule.on_failure.value,
        "enabled": rule.enabled,
        "expires_at": write_time(rule.expires_at),
        "hosts": list(rule.hosts),
        "labels": dict(rule.labels),
        "comment": rule.comment,
        "forced_by": rule.forced_by,
    }


def _write_raw(rule: Malformed) -> dict[str, object]:
    """In the shape that every rule has, so that whoever reads rules need not know of such."""
    raw = rule.fields
    asked = ("name", "target", "direction", "protocol", "interface", "burst", "per", "action", "on_failure", "enabled")
    rates = {
        name: None if raw.get(name) is None else {"text": str(raw[name]), "amount": None, "unit": None, "seconds": None}
        for name in ("rate", "ceil")
    }
    ports = {name: [raw[name]] if raw.get(name) else [] for name in ("ports", "source_ports")}
    return {
        **{name: raw.get(name) for name in asked},
        **rates,
        **ports,
        "expires_at": None if raw.get("expires_at") is None else str(raw["expires_at"]),
        "hosts": list(rule.hosts),
        "labels": {},
        "comment": raw.get("comment"),
    }


def write_effective(rule: Rule) -> dict[str, object]:
    """What the kernel really holds, in the unit and the period that were asked for.

    The burst of what is shaped is in no rule: it depends on the clock tick of each gateway.
    """
    bucket, rate = rule.bucket, rule.rate
    if rate is not None and rule.action is Action.SHAPE:
        return {"effective_rate": _write_held(rate, Fraction(bytes_per_second(rate))), "effective_burst": None}
    if rate is None or bucket is None:
        same = write_rate(rate) if rate and rate.kind is Kind.CONCURRENT else None
        return {"effective_rate": same, "effective_burst": None}
    return {"effective_rate": _write_held(rate, bucket.per_second), "effective_burst": bucket.depth}


def _write_held(rate: Rate, per_second: Fraction) -> dict[str, object]:
    """A rate that is not quite the one that was asked for: packets, bytes or connections a second."""
    held = per_second * (rate.seconds or 1) * (8 if rate.unit == "bits" else 1)
    amount = Fraction(round(held)) if rate.kind is Kind.BYTES else Fraction(format_number(held))
    number = int(amount) if amount.denominator == 1 else float(amount)
    text = format_rate(amount, rate.unit, rate.seconds)
    return {"text": text, "amount": number, "unit": rate.unit, "seconds": rate.seconds}


def write_rate(rate: Rate | None) -> dict[str, object] | None:
    """A rate as an object."""
    if rate is None:
        return None
    return {"text": rate.text, "amount": rate.amount, "unit": rate.unit, "seconds": rate.seconds}


def write_time(moment: datetime | None) -> str | None:
    """A time as RFC 3339 has it, in UTC."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z") if moment else None


def _write_port(port: PortRange) -> int | str:
    return port[0] if port[0] == port[1] else format_port(port)


def _check_rate(field: str, value: object) -> None:
    """A rate may be sent in the form in which it is returned; its parts must not contradict each other."""
    if not isinstance(value, Mapping):
        return
    text = value.get("text")
    if isinstance(text, str) and len(text) > LONGEST_TEXT:
        raise RuleError(field, f"The text of `{field}` has {len(text)} letters; {LONGEST_TEXT} are the most.")
    unknown = [key for key in value if key not in ("text", "amount", "unit", "seconds")]
    if unknown or not isinstance(text, str):
        raise RuleError(field, f'`{field}` is a text such as "200 packets/s", or an object whose `text` is that.')
    try:
        written = write_rate(parse_rate(text)) or {}
    except RuleError as error:
        raise RuleError(field, str(error)) from None
    for part, said in value.items():
        if part != "text" and said is not None and (isinstance(said, bool) or said != written[part]):
            raise RuleError(
                field,
                f"The {part} of `{field}` is {said!r}, but its text {text!r} means {written[part]!r}; "
                "change the text, which is enough.",
            )


def _merge(target: object, patch: object) -> object:
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value)
    return merged
