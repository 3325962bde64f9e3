"""How a rule stands to the others: which it displaces, which displace it, in which it nests, what exempts from it.

In the terms of docs/rules.md: rules that differ in kind are different limits, and all of them apply; of one kind the
more specific wins, shared budgets nest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from netlimit.lanes import find_lane
from netlimit.limits import Facts, Limit, VerdictGroup, compile_rule
from netlimit.queueing import is_cap
from netlimit.rules import TARGET, Action, Rule, format_target
from netlimit.wording import title

MOST_NAMED = 10
"""So many of a kind are told one by one."""


def compare(rule: Rule, others: Iterable[Rule], facts: Facts) -> list[str]:
    """What others in force on a host have to do with a rule: a sentence each, the first few of every kind."""
    said: dict[str, list[str]] = {}
    for other in others:
        if other.id != rule.id and other.family == rule.family and other.target.overlaps(rule.target):
            for kind, sentence in _compare_two(rule, other, facts):
                said.setdefault(kind, []).append(sentence)
    return [sentence for kind in said for sentence in _shorten(said[kind])]


def _shorten(sentences: list[str]) -> list[str]:
    if len(sentences) <= MOST_NAMED:
        return sentences
    return [*sentences[:MOST_NAMED], f"The same is true of {len(sentences) - MOST_NAMED} more rules."]


def _compare_two(rule: Rule, other: Rule, facts: Facts) -> Iterator[tuple[str, str]]:
    if Action.ALLOW in (rule.action, other.action):
        yield from _compare_allow(rule, other)
    elif Action.BLOCK in (rule.action, other.action):
        yield from _compare_block(rule, other)
    elif Action.SHAPE in (rule.action, other.action):
        yield from _compare_queues(rule, other, facts)
    else:
        yield from _compare_limits(rule, other, facts)


def _compare_allow(rule: Rule, other: Rule) -> Iterator[tuple[str, str]]:
    """Whoever is allowed is limited and blocked by nothing, but a block that is more specific."""
    if rule.action is other.action or rule.direction is not other.direction:
        return
    allow, hit = (rule, other) if rule.action is Action.ALLOW else (other, rule)
    if hit.action is Action.BLOCK and hit.target.prefixlen > allow.target.prefixlen:
        yield "allow", f"{_call(hit)} blocks in spite of {title(allow)}, for it is more specific ({_name(hit)})."
    else:
        where = f" for {_name(_smaller(allow, hit))}"
        yield "allow", f"{_call(allow)} exempts from {title(hit)}{where}, as far as both speak of the same traffic."


def _compare_block(rule: Rule, other: Rule) -> Iterator[tuple[str, str]]:
    if rule.action is other.action or rule.direction is not other.direction:
        return
    block, limit = (rule, other) if rule.action is Action.BLOCK else (other, rule)
    where = _name(_smaller(block, limit))
    yield "block", f"{_call(block)} blocks {where} before {title(limit)} is asked, as far as both speak of the same."


def _compare_limits(rule: Rule, other: Rule, facts: Facts) -> Iterator[tuple[str, str]]:
    one, two = compile_rule(rule, facts).purpose, compile_rule(other, facts).purpose
    if isinstance(one, VerdictGroup) or isinstance(two, VerdictGroup):
        return
    forwarded = not (facts.is_own(rule.target) or facts.is_own(other.target))
    alike = one.group == two.group or (forwarded and replace(one.group, own=two.group.own) == two.group)
    if alike and one.group.scope != TARGET and not one.group.counts_each:
        inner, outer = (rule, other) if rule.target.prefixlen > other.target.prefixlen else (other, rule)
        yield (
            "specific",
            f"For {_name(inner)}, {title(inner)} takes the place of {title(outer)} ({_name(outer)}): "
            + ("of one kind the more specific target wins."),
        )
    elif _nest(one, two):
        inner, outer = (rule, other) if _size(one) > _size(two) else (other, rule)
        sentence = f"{_call(inner)} nests in {title(outer)} ({_name(outer)}): a packet must pass both."
        yield "nesting", sentence


def _nest(one: Limit, two: Limit) -> bool:
    """Whether both are shared budgets of one kind."""
    if one.group.scope != TARGET or two.group.scope != TARGET or one.group.watch or two.group.watch:
        return False
    first, second = (replace(each.group, target_length=0, bucket_length=0) for each in (one, two))
    return first == second


def _size(limit: Limit) -> tuple[int, int]:
    return limit.group.bucket_length, limit.group.target_length


def _compare_queues(rule: Rule, other: Rule, facts: Facts) -> Iterator[tuple[str, str]]:
    """Of what is shaped: budgets nest, and hosts lie in them; the cap of a device is around all."""
    if rule.action is not other.action:
        return
    devices = {each.selector.interface for each in (rule, other)} - {None}
    if len(devices) > 1:
        return
    device = next(iter(devices), None)
    if device is not None and is_cap(rule, device) != is_cap(other, device):
        cap, inner = (rule, other) if is_cap(rule, device) else (other, rule)
        yield "cap", f"{_call(inner)} lies under {title(cap)}, which caps all that leaves by {device}."
        return
    one, two = (find_lane(each, "", facts) for each in (rule, other))
    if one != two or (rule.target == other.target and rule.per == other.per):
        return
    if TARGET in (rule.per, other.per):
        inner, outer = (rule, other) if _depth(rule) > _depth(other) else (other, rule)
        if outer.per == TARGET:
            yield "nesting", f"{_call(inner)} lies in the budget of {title(outer)} ({_name(outer)}), and shares it."
    else:
        inner, outer = (rule, other) if rule.target.prefixlen > other.target.prefixlen else (other, rule)
        yield (
            "specific",
            f"For {_name(inner)}, {title(inner)} takes the place of {title(outer)} ({_name(outer)}): "
            + ("of one kind the more specific target wins."),
        )


def _depth(rule: Rule) -> tuple[int, bool]:
    """The smaller target lies in the larger; of two for the same, hosts lie in the budget."""
    return rule.target.prefixlen, rule.per != TARGET


def _smaller(one: Rule, two: Rule) -> Rule:
    return one if one.target.prefixlen >= two.target.prefixlen else two


def _name(rule: Rule) -> str:
    return format_target(rule.target)


def _call(rule: Rule) -> str:
    text = title(rule)
    return text[:1].upper() + text[1:]
