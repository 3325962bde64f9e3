"""Which shaping rules a packet waits under, and why others do not concern it: what `explain` says of queues.

A packet waits in one class, on the device by which it leaves, and passes all that is around that class: the budgets
that its address lies in, and the cap of the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from netlimit.lanes import Lane, find_lane
from netlimit.limits import Facts
from netlimit.packet import Packet
from netlimit.rules import HOST, TARGET, Action, Protocol, Rule, format_target
from netlimit.tree import INGRESS_DEVICE


class Finding(NamedTuple):
    """What one rule has to do with a packet."""

    rule: Rule
    hits: bool
    reason: str


def find_exit(packet: Packet, facts: Facts) -> str | None:
    """The device where a packet waits: by which it leaves, or the IFB device if it ends here; None if nobody said."""
    if packet.out_interface is None and str(packet.dst) in facts.ending:
        return INGRESS_DEVICE
    return packet.out_interface


def is_cap(rule: Rule, device: str | None) -> bool:
    """Whether a rule is about all that leaves by a device, whatever family, exempt or not."""
    everything = rule.target.prefixlen == 0 and rule.selector.protocol is Protocol.ANY
    return rule.action is Action.SHAPE and everything and rule.per == TARGET and device != INGRESS_DEVICE


def find_elsewhere(rule: Rule, device: str | None) -> str | None:
    """Why the rule shapes where the packet does not come by; None if it does, or may."""
    named = rule.selector.interface
    if named is None or named == device:
        return None
    if device == INGRESS_DEVICE:
        return f"it ends on this host, and does not leave by {named}"
    return f"it leaves by {device or 'an interface not given'}, not {named}"


def ask_caps(rules: Iterable[Rule], device: str | None) -> Iterator[Finding]:
    """The caps of the device; of two, one is in force."""
    first: Rule | None = None
    for rule in sorted(rules, key=lambda each: each.id):
        elsewhere = find_elsewhere(rule, device)
        if elsewhere:
            yield Finding(rule, False, elsewhere)
        elif first is None:
            first = rule
            yield Finding(rule, True, f"queued {_say_where(device)}, with all that leaves there: {_say_rate(rule)}")
        else:
            yield Finding(rule, False, f"rule {first.id} caps the device already")


def ask_queues(rules: list[Rule], device: str | None, facts: Facts) -> Iterator[Finding]:
    """Of rules that speak of the packet: first the one that its class is for, then those around it, from the smallest
    to the largest; then those that are passed over."""
    lanes: dict[Lane, list[Rule]] = {}
    for rule in rules:
        lanes.setdefault(find_lane(rule, device or "", facts), []).append(rule)
    if not lanes:
        return
    ordered = sorted(lanes, key=lambda lane: (lane.order, lane.name))
    # Chains look in every lane, and the last that knows the packet decides; the program on the ingress takes the first.
    chosen = ordered[0] if device == INGRESS_DEVICE else ordered[-1]
    first, *around = _sort_out(lanes.pop(chosen))
    yield from (first, *around)
    for other in (rule for several in lanes.values() for rule in several):
        reason = f"it waits in a queue of rule {first.rule.id} already, and can wait in one only"
        yield Finding(other, False, reason)


def _sort_out(rules: list[Rule]) -> Iterator[Finding]:
    units = sorted((rule for rule in rules if rule.per != TARGET), key=_length, reverse=True)
    budgets = sorted((rule for rule in rules if rule.per == TARGET), key=_length, reverse=True)
    for rule in units[:1]:
        yield Finding(rule, True, f"queued: {_say_rate(rule)} for {_say_whose(rule)}")
    for rule in budgets:
        word = "queued within" if units or rule is not budgets[0] else "queued:"
        yield Finding(rule, True, f"{word} {_say_rate(rule)} for all of {format_target(rule.target)} together")
    for rule in units[1:]:
        reason = f"rule {units[0].id} of the same kind is more specific ({format_target(units[0].target)})"
        yield Finding(rule, False, reason)


def _say_rate(rule: Rule) -> str:
    assert rule.rate is not None
    return rule.rate.text + (f", up to {rule.ceil.text} while there is room," if rule.ceil else "")


def _say_whose(rule: Rule) -> str:
    if rule.per == HOST:
        return f"each address in {format_target(rule.target)}"
    return f"each {rule.per} of {format_target(rule.target)}"


def _say_where(device: str | None) -> str:
    return f"on {device}" if device else "where it leaves"


def _length(rule: Rule) -> int:
    return rule.target.prefixlen
