"""Rules that close a port by which a host is managed, at an address of its own, though nobody has forced them: what
they name was not known to be the host's own, or to be managed by that port, when they were kept.

They hold all the same: whoever blocks an address expects that. But he is told of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from netlimit.closure import MANAGED_BY, Part, Site, Way, cut, is_closed, is_on, list_ways, may_close
from netlimit.effort import TooMuchToJudge, bounded
from netlimit.limits import Facts
from netlimit.rules import Action, Rule, format_target

PREFIX = "Rules that nobody has forced close"
"""How the note of a gateway begins."""
_MOST_TOLD = 3
_MOST_STEPS = 50_000
"""A look is taken with each pass, and must not hold it up: so many steps take less than a tenth of a second."""

Shut = Mapping[Rule, tuple[int, ...]]
"""Rules, each with the ports that it closes, alone or with others."""


def may_shut(rule: Rule, facts: Facts) -> bool:
    """Whether a rule blocks an address of the host's own, whether it was forced or not. A limit is kept there without
    force, however small."""
    return rule.action is Action.BLOCK and facts.is_own(rule.target)


def find_shut(rules: Iterable[Rule], facts: Facts) -> Shut:
    """Of rules in force that block addresses of the host's own, those that nobody has forced and that close ports which
    those that were forced leave open. If that takes too long to find out, all that may do so."""
    rules = [rule for rule in rules if may_shut(rule, facts)]
    site = Site(facts.host, tuple(sorted({*facts.management, *MANAGED_BY})), frozenset(rule.target for rule in rules))
    found: dict[Rule, list[int]] = {}
    for family in (4, 6):
        parts = cut([rule for rule in rules if may_close(rule, site.places)], site, family)
        for way in list_ways(site, parts):
            here = [part for part in parts if is_on(part, way)]
            unforced = [part.rule for part in here if part.rule.forced_by is None]
            if way.port is None or not unforced:
                continue
            if _closes(site, way, here) and not _closes(site, way, [each for each in here if each.rule.forced_by]):
                for rule in unforced:
                    found.setdefault(rule, []).append(way.port)
    return {rule: tuple(ports) for rule, ports in found.items()}


def _closes(site: Site, way: Way, parts: list[Part]) -> bool:
    if not parts:
        return False
    try:
        with bounded(_MOST_STEPS):
            return any(is_closed(parts, way, world) for world in site.worlds[parts[0].rule.family])
    except TooMuchToJudge:
        return any(part.rule.forced_by is None for part in parts)


def tell_rule(rule: Rule, ports: tuple[int, ...]) -> str:
    """What an operator should know of one."""
    return (
        f"{format_target(rule.target)} is an address of this host's own now: nobody but who is safe, or connected "
        f"already, can come to {_say_ports(ports)} there any more, by which it is managed, and nobody has forced that. "
        "Remove the rule, or give it a protocol or ports that leave management open. If it is meant, an admin can "
        f"force it (`netlimit rule edit {rule.id} --enable --force`): then it hits who is safe, too."
    )


def tell_host(shut: Shut) -> str | None:
    """What is to be said of the host; None if there is nothing."""
    if not shut:
        return None
    each = [
        f"{_say_ports(ports)} at {format_target(rule.target)} (rule {rule.id})"
        for rule, ports in sorted(shut.items(), key=lambda item: item[0].id)
    ]
    more = f" and {len(each) - _MOST_TOLD} more" if len(each) > _MOST_TOLD else ""
    return (
        f"{PREFIX} what this host is managed by to all who are not safe: {', '.join(each[:_MOST_TOLD])}{more}. The "
        "address has become its own, or the port one that manages it, since they were kept."
    )


def _say_ports(ports: tuple[int, ...]) -> str:
    return f"port{'s' if len(ports) > 1 else ''} {', '.join(map(str, ports))}"
