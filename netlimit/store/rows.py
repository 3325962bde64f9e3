"""Rules as rows and back. Rows come from rules that were validated once, and what is read of one is looked at only so
far that nobody stumbles over it: whatever stands in a row, it is a Rule or Malformed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import Any, TypeVar

from netlimit.errors import RuleError, say_fault
from netlimit.malformed import Malformed, find_flaw
from netlimit.plain import decode
from netlimit.rates import Rate, parse_rate
from netlimit.rules import Action, Direction, OnFailure, PortRange, Protocol, Rule, Selector, Target, format_port
from netlimit.store import tables
from netlimit.store.columns import EPOCH, to_microseconds

RULE_COLUMNS = tuple(tables.rules.c)[:21]
"""What `from_row` wants, in its order: from `id` to `forced_by`."""
WRITTEN_COLUMNS = (*RULE_COLUMNS, tables.rules.c.identity)
"""What `to_row` gives, in its order."""

T = TypeVar("T")
_ACTIONS = {action.value: action for action in Action}
_DIRECTIONS = {direction.value: direction for direction in Direction}
_FAILURES = {failure.value: failure for failure in OnFailure}


@dataclass(frozen=True, slots=True)
class Kept:
    """A rule as kept, with its `id` and `revision`, and when it was made and last changed."""

    rule: Rule
    created_at: datetime
    updated_at: datetime


def to_row(rule: Rule) -> tuple[Any, ...]:
    """The values of `WRITTEN_COLUMNS` for a rule, times as microseconds."""
    if isinstance(rule, Malformed):
        return _to_same_row(rule)
    selector = rule.selector
    return (
        rule.id,
        rule.revision,
        _write_target(rule.target),
        rule.action.value,
        rule.direction.value,
        selector.protocol.value,
        _write_ports(selector.ports) if selector.ports else "",
        _write_ports(selector.source_ports) if selector.source_ports else "",
        selector.interface,
        rule.rate.text if rule.rate else None,
        rule.burst,
        rule.per,
        rule.ceil.text if rule.ceil else None,
        rule.on_failure.value,
        rule.enabled,
        to_microseconds(rule.expires_at) if rule.expires_at else None,
        ",".join(rule.hosts),
        rule.name,
        _write_labels(rule.labels) if rule.labels else "",
        rule.comment,
        rule.forced_by,
        rule.identity,
    )


def from_row(row: Sequence[Any]) -> Rule:
    """The rule of a row of `RULE_COLUMNS`; Malformed if it cannot be read."""
    try:
        rule = _read(row)
        flaw = find_flaw(rule)
    except Exception as error:
        flaw = say_fault(error)
    else:
        if rule.expires_at == EPOCH:
            flaw = "its end cannot be read"
        if flaw is None:
            return rule
    return _salvage(row, flaw)


def _salvage(row: Sequence[Any], flaw: str) -> Malformed:
    """What can be told of a row that cannot be read."""
    said = {column.name: _show(value) for column, value in zip(RULE_COLUMNS, row, strict=True)}
    number, revision, hosts, name = (said[key] for key in ("id", "revision", "hosts", "name"))
    reason = f"The database holds what is no rule: {flaw.rstrip('.')}. Replace rule {number}, or delete it."
    return Malformed(
        target=IPv4Network("0.0.0.0/32"),
        action=Action.ALLOW,
        enabled=False,
        hosts=read_hosts(hosts) if isinstance(hosts, str) and hosts else (),
        name=name if isinstance(name, str) else None,
        id=number if isinstance(number, int) else 0,
        revision=revision if isinstance(revision, int) else 0,
        reason=reason,
        fields=said,
    )


def _show(value: Any) -> Any:
    """A value as every database and every answer bears it."""
    if isinstance(value, bytes):
        return decode(value)
    if isinstance(value, datetime):
        return to_microseconds(value)
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def _read(row: Sequence[Any]) -> Rule:
    (number, revision, target, action, direction, protocol, ports, source_ports, interface, rate, burst, per, ceil,
     on_failure, enabled, expires_at, hosts, name, labels, comment, forced_by) = row  # fmt: skip
    return Rule(
        _read_target(target),
        _choose("action", _ACTIONS, action),
        _choose("direction", _DIRECTIONS, direction),
        _read_selector(protocol, ports, source_ports, interface),
        _read_rate(rate) if rate else None,
        burst,
        per,
        _read_rate(ceil) if ceil else None,
        _choose("on_failure", _FAILURES, on_failure),
        enabled,
        expires_at,
        read_hosts(hosts) if hosts else (),
        name,
        _read_labels(labels) if labels else (),
        comment,
        forced_by,
        number,
        revision,
    )


def _to_same_row(rule: Malformed) -> tuple[Any, ...]:
    """The row as it was read, as far as the types of the columns let it be written."""
    fields: dict[str, Any] = {**rule.fields, "id": rule.id, "revision": rule.revision}
    for name in ("burst", "expires_at"):
        value = fields[name]
        fields[name] = value if value is None or isinstance(value, int) else 0
    fields["enabled"] = fields["enabled"] is True
    return (*(fields[column.name] for column in RULE_COLUMNS), f"malformed {rule.id}")


def kept_from_row(row: Sequence[Any]) -> Kept:
    """The rule of a row of `RULE_COLUMNS` followed by `created_at` and `updated_at`."""
    return Kept(from_row(row[:-2]), row[-2], row[-1])


def with_number(rule: Rule, number: int, revision: int) -> Rule:
    """The same rule under an id and a revision: `dataclasses.replace`, at a third of its price."""
    if isinstance(rule, Malformed):
        return replace(rule, id=number, revision=revision)
    return Rule(
        rule.target, rule.action, rule.direction, rule.selector, rule.rate, rule.burst, rule.per, rule.ceil,
        rule.on_failure, rule.enabled, rule.expires_at, rule.hosts, rule.name, rule.labels, rule.comment,
        rule.forced_by, number, revision,
    )  # fmt: skip


def to_fields(rule: Rule) -> dict[str, Any]:
    """The rule as a client would write it, for the audit; what is empty is left out."""
    fields = {column.name: value for column, value in zip(RULE_COLUMNS, to_row(rule), strict=False)}
    del fields["id"], fields["revision"]
    fields["hosts"] = list(rule.hosts)
    fields["labels"] = dict(rule.labels)
    fields["expires_at"] = rule.expires_at.isoformat() if rule.expires_at else None
    return {key: value for key, value in fields.items() if value not in (None, "", [], {})}


def _choose(field: str, known: Mapping[str, T], word: Any) -> T:
    found = known.get(word)
    if found is None:
        raise RuleError(field, f"`{field}` is {word!r}")
    return found


def _write_ports(ports: tuple[PortRange, ...]) -> str:
    return ",".join(map(format_port, ports))


@lru_cache(maxsize=4096)
def _write_labels(labels: tuple[tuple[str, str], ...]) -> str:
    return json.dumps(labels)


def _write_target(target: Target) -> str:
    """`str`, at a third of its price for IPv4; the C library writes some IPv6 addresses in another way."""
    if isinstance(target, IPv4Network):
        return f"{inet_ntop(AF_INET, target.network_address.packed)}/{target.prefixlen}"
    return str(target)


def _read_target(text: str) -> Target:
    """`ip_network` on text costs three times as much: it is most of what loading a rule costs."""
    try:
        address, _, length = text.partition("/")
        if ":" in address:
            return IPv6Network((int.from_bytes(inet_pton(AF_INET6, address), "big"), int(length)))
        return IPv4Network((int.from_bytes(inet_pton(AF_INET, address), "big"), int(length)))
    except (OSError, ValueError, TypeError):
        raise RuleError("target", f"the target is {text!r}") from None


@lru_cache(maxsize=4096)
def _read_selector(protocol: str, ports: str, source_ports: str, interface: str | None) -> Selector:
    return Selector(Protocol(protocol), _read_ports(ports), _read_ports(source_ports), interface)


def _read_ports(text: str) -> tuple[PortRange, ...]:
    ranges = []
    for part in text.split(",") if text else ():
        low, dash, high = part.partition("-")
        ranges.append((int(low), int(high if dash else low)))
    return tuple(ranges)


@lru_cache(maxsize=16384)
def _read_rate(text: str) -> Rate:
    return parse_rate(text)


@lru_cache(maxsize=4096)
def read_hosts(text: str) -> tuple[str, ...]:
    """The gateways of a rule, from the text in which a row has them."""
    return tuple(text.split(","))


@lru_cache(maxsize=4096)
def _read_labels(text: str) -> tuple[tuple[str, str], ...]:
    labels = tuple((key, value) for key, value in json.loads(text))
    if not all(isinstance(word, str) for label in labels for word in label):
        raise RuleError("labels", "its labels are no texts")
    return labels
