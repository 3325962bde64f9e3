"""Rules that close a port by which a host is managed, at an address of its own, though nobody has forced them: what
they name was not known to be the host's own, or to be managed by that port, when they were kept.

They hold all the same: whoever blocks an address expects that. But he is told of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from netlimit.closure import MANAGED_BY, Part, Site, Way, cut, is_closed, is_on, may_close
from netlimit.effort import TooMuchToJudge, bounded
from netlimit.limits import Facts
from netlimit.rules import Action, Rule, Target, format_target
from netlimit.several import name_some

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
    by_address: dict[Target, list[Rule]] = {}
    for rule in rules:
        if may_shut(rule, facts):
            by_address.setdefault(rule.target, []).append(rule)
    ports = tuple(sorted({*facts.management, *MANAGED_BY}))
    sites = {address: Site(facts.host, ports, frozenset({address})) for address in by_address}
    parts = {
        address: cut([rule for rule in by_address[address] if may_close(rule, site.places)], site, address.version)
        for address, site in sites.items()
    }
    found: dict[Rule, list[int]] = {}
    with bounded(_MOST_STEPS):
        for address, site in sites.items():
            for port in ports:
                for rule in _find_shutting(site, Way(port, address), parts[address]):
                    found.setdefault(rule, []).append(port)
    return {rule: tuple(shut) for rule, shut in found.items()}


def _find_shutting(site: Site, way: Way, parts: list[Part]) -> list[Rule]:
    """The rules that nobody has forced and that close a way which the others leave open."""
    here = [part for part in parts if is_on(part, way)]
    unforced = [part.rule for part in here if part.rule.forced_by is None]
    try:
        shut = _closes(site, way, here) and not _closes(site, way, [part for part in here if part.rule.forced_by])
    except TooMuchToJudge:
        shut = True
    return unforced if shut else []


def _closes(site: Site, way: Way, parts: list[Part]) -> bool:
    return bool(parts) and any(is_closed(parts, way, world) for world in site.worlds[parts[0].rule.family])


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
    return (
        f"{PREFIX} what this host is managed by to all who are not safe: {name_some(each, _MOST_TOLD)}. The "
        "address has become its own, or the port one that manages it, since they were kept."
    )


def _say_ports(ports: tuple[int, ...]) -> str:
    return f"port{'s' if len(ports) > 1 else ''} {', '.join(map(str, ports))}"
