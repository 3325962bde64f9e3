"""Rules in words: what one does to whom, and what it means that one comes, changes or goes."""

from __future__ import annotations

from datetime import UTC

from netlimit.rates import Kind
from netlimit.rules import HOST, PEER, TARGET, Action, Direction, Protocol, Rule, Selector, format_port, format_target

_EFFECTS = {
    Action.DROP: "what exceeds is dropped",
    Action.REJECT: "what exceeds is rejected",
    Action.OBSERVE: "what exceeds is counted and passes",
    Action.SHAPE: "what exceeds waits in a queue",
}


def title(rule: Rule) -> str:
    """The rule as a sentence calls it: "rule 17 (office)"; one that has no id yet is "the new rule"."""
    name = f"rule {rule.id}" if rule.id else "the new rule"
    return f"{name} ({rule.name})" if rule.name else name


def describe(rule: Rule) -> str:
    """What a rule does: "at most 200 packets/s from each address of 10.1.0.0/16; what exceeds is dropped"."""
    what = _say_what(rule.selector)
    ends = f", until {rule.expires_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if rule.expires_at else ""
    if rule.rate is None:
        effect = "is limited and blocked by nothing" if rule.action is Action.ALLOW else "is blocked"
        return f"{what or 'everything'} {rule.direction} {_say_all(rule)}{_say_way(rule)} {effect}{ends}"
    limit = f"{say_limit(rule)}{f' of {what}' if what else ''} {_say_whose(rule)}{_say_way(rule)}"
    return f"at most {limit}{ends}; {_EFFECTS[rule.action]}"


def say_limit(rule: Rule) -> str:
    """The rate with what belongs to it: "20 Mbit/s, up to 50 Mbit/s while there is room"."""
    if rule.rate is None:
        return str(rule.action)
    burst = f" (bursts of {rule.burst})" if rule.burst is not None else ""
    counted = " at once" if rule.rate.kind is Kind.CONCURRENT else ""
    ceil = f", and up to {rule.ceil.text} while there is room," if rule.ceil else ""
    return f"{rule.rate.text}{counted}{burst}{ceil}"


def say_comes(rule: Rule, again: bool = False) -> str:
    """A rule that the kernel does not hold yet; `again`: it should have."""
    return f"{_capital(title(rule))} comes into force{' again' if again else ''}: {describe(rule)}."


def say_goes(rule: Rule) -> str:
    """A rule that the kernel holds no longer. One without an id is told by its limit."""
    if rule.id:
        return f"{_capital(title(rule))} is lifted: {describe(rule)}."
    return f"A rule of {format_target(rule.target)} is lifted: {describe(rule)}."


def say_changes(before: Rule, after: Rule) -> str:
    """A rule that the kernel holds otherwise from now on."""
    called = _capital(title(after))
    shared = (before.target, before.direction, before.selector, before.per, before.action)
    if shared == (after.target, after.direction, after.selector, after.per, after.action):
        if say_limit(before) != say_limit(after):
            return f"{called} changes from {say_limit(before)} to {say_limit(after)}: {describe(after)}."
        if before.expires_at != after.expires_at:
            return f"{called} ends {_say_end(after)} rather than {_say_end(before)}: {describe(after)}."
    return f"{called} changes: {describe(after)}. Until now: {describe(before)}."


def _say_end(rule: Rule) -> str:
    return f"at {rule.expires_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if rule.expires_at else "never"


def _say_whose(rule: Rule) -> str:
    """Whose bucket the rate is."""
    target, other = format_target(rule.target), "to" if rule.direction is Direction.FROM else "from"
    single = rule.target.prefixlen == rule.target.max_prefixlen
    if rule.per == PEER:
        return f"{rule.direction} {_say_all(rule)} {other} each address that talks with it"
    if single:
        return f"{rule.direction} {target}"
    if rule.per == TARGET:
        return f"{rule.direction} {_say_all(rule)} together"
    each = "each address" if rule.per == HOST else f"each {rule.per}"
    return f"{rule.direction} {each} of {_say_all(rule)}"


def _say_all(rule: Rule) -> str:
    if rule.target.prefixlen:
        return format_target(rule.target)
    return f"all of IPv{rule.family}"


def _say_what(selector: Selector) -> str:
    """The kind of traffic; nothing where it is any."""
    if selector.protocol is Protocol.ANY:
        return ""
    words = [selector.protocol.value.upper()]
    for name, ranges in (("to port", selector.ports), ("from port", selector.source_ports)):
        if ranges:
            words.append(f"{name} {', '.join(map(format_port, ranges))}")
    return " ".join(words)


def _say_way(rule: Rule) -> str:
    interface = rule.selector.interface
    if interface is None:
        return ""
    enters = rule.direction is Direction.FROM and rule.action is not Action.SHAPE
    return f" that {'enters' if enters else 'leaves'} by {interface}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
