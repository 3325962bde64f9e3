"""Rules of which the database holds what cannot be read, whoever has written it: a hand, a restore, another version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from netlimit.errors import RuleError
from netlimit.hashlimit import fit_bucket
from netlimit.htb import check_rate
from netlimit.rates import Kind, Rate
from netlimit.rules import HOST, PEER, TARGET, Action, Protocol, Rule, Selector, is_interface


@dataclass(frozen=True, slots=True)
class Malformed(Rule):
    """A rule that nobody can enforce: never in force, whatever it says. What could be read of it is in its place (the
    target is else 0.0.0.0); `fields` is all of it as it stands in the database, `reason` says what is wrong."""

    reason: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)


def find_flaw(rule: Rule) -> str | None:
    """What of a rule cannot be meant, though each of its fields can be read; None for one that was once accepted."""
    if not isinstance(rule.enabled, bool):
        return f"`enabled` is {rule.enabled!r}, which is neither true nor false"
    if not (rule.name is None or isinstance(rule.name, str)) or not isinstance(rule.comment, str):
        return "its name or its comment is no text"
    if not (rule.forced_by is None or isinstance(rule.forced_by, str)):
        return "who forced it is no text"
    if rule.burst is not None and not isinstance(rule.burst, int):
        return f"the burst {rule.burst!r} is no number"
    if not isinstance(rule.revision, int):
        return f"the revision {rule.revision!r} is no number"
    shape = (rule.action, rule.rate, rule.burst, rule.per, rule.ceil, rule.selector)
    return _find_flaw(rule.target.prefixlen, rule.target.max_prefixlen, *shape)


@lru_cache(maxsize=16384)
def _find_flaw(
    length: int,
    longest: int,
    action: Action,
    rate: Rate | None,
    burst: int | None,
    per: str | None,
    ceil: Rate | None,
    selector: Selector,
) -> str | None:
    """The same of what rules have in common with many others, so that it costs nothing."""
    if selector.interface is not None and not is_interface(selector.interface):
        return f"{selector.interface!r} is no name of an interface"
    ports = (*selector.ports, *selector.source_ports)
    if not all(0 <= low <= high <= 65535 for low, high in ports):
        return "its ports are none"
    if ports and selector.protocol not in (Protocol.TCP, Protocol.UDP):
        return f"it names ports, and its protocol is {selector.protocol}"
    if not action.limits:
        return None if rate is None else f"the action {action} takes no rate"
    if rate is None:
        return f"the action {action} needs a rate"
    if per not in (HOST, TARGET, PEER) and not _is_block(per, length, longest):
        return f"`per` is {per!r}"
    return _find_wrong_rate(action, rate, burst, ceil)


def _is_block(per: str | None, length: int, longest: int) -> bool:
    return per is not None and per[:1] == "/" and per[1:].isdecimal() and length <= int(per[1:]) <= longest


def _find_wrong_rate(action: Action, rate: Rate, burst: int | None, ceil: Rate | None) -> str | None:
    try:
        if action is Action.SHAPE:
            check_rate("rate", rate)
            if rate.kind is not Kind.BYTES or (ceil is not None and ceil.kind is not Kind.BYTES):
                return "what is shaped is in bits or bytes"
        elif rate.kind is not Kind.CONCURRENT:
            fit_bucket(rate, burst)
    except (RuleError, ArithmeticError, ValueError) as error:
        return str(error)
    return "the burst is none" if burst is not None and burst < 1 else None
