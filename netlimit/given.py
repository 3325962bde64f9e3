"""Addresses that NAT gives to packets on their way out: where rules `from` somebody are asked, they have another yet.

Read from what nft and iptables print of nat POSTROUTING. What nat PREROUTING leads elsewhere answers from there, and is
given the address that was asked for as late.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice

from netlimit.cases import EVERY
from netlimit.detours import LEFT, OF_SOURCE, STRING, follow_hooked, follow_tables, read_places
from netlimit.elements import write_out
from netlimit.publications import Publication, Publications
from netlimit.spans import EVERYWHERE, PORTS, Spans, count, cut, join, leave_out, name, number, read_address, read_ipv4

_GIVES = re.compile(
    r"(?<!\S)(?:snat (?:ip6? )?(?:addr \. port |interval |prefix )?to|-j SNAT\b.* --to-source|-j NETMAP\b.* --to) (\S+)"
)
_ONE_TO_ONE = re.compile(r"-j NETMAP\b|\bprefix to\b")
_FAMILIES = {"ip": (4,), "ip6": (6,)}
_SHOWN = 120
_MOST = 50_000
"""So many rules are looked through: the rest is left out then, and that is told."""


@lru_cache(maxsize=1)
def find_given(ruleset: str, nat: tuple[tuple[str, ...], ...], published: Publications, own: Spans) -> Publications:
    """What gives some places to others, which it `leads` from: in a ruleset of nftables, and in nat tables of iptables
    (the rules of each, as it saves them). To be asked of the targets of rules `from` them."""
    listed = ((rule, _FAMILIES.get(family, (4, 6))) for family, rule in follow_hooked(ruleset, LEFT))
    saved = ((rule, (4, 6)) for rule in follow_tables(nat, "POSTROUTING"))
    rules = chain(listed, saved)
    leaving = [found for rule, families in islice(rules, _MOST) for found in _read(rule, families)]
    whole = next(rules, None) is None
    return Publications((*leaving, *_list_answering(published, own)), whole=whole)


def _read(rule: str, families: tuple[int, ...]) -> Iterator[Publication]:
    for plain in write_out(STRING.sub('""', rule) if '"' in rule else rule):
        match = _GIVES.search(plain)
        places = _read_spans(match[1], families) if match else ()
        if places and not _is_every(places):  # else nobody can read whose they are
            source = OF_SOURCE.search(plain)
            leads = _read_spans(source[1] if source else "", families)
            yield Publication(rule, places, EVERY, PORTS, _name(leads), leads)


def _list_answering(published: Publications, own: Spans) -> Iterator[Publication]:
    """From its own addresses the gateway sends itself. In a network of which some ports alone are led elsewhere hosts
    have addresses."""
    others = leave_out(own, EVERYWHERE)
    for each in published.found:
        whole = each.protocols == EVERY and each.ports == PORTS
        places = tuple(place for place in cut(each.places, others) if whole or place[0] == place[1])
        if places and each.leads:
            yield each._replace(places=places, protocols=EVERY, ports=PORTS, place=_name(each.leads), after=None)


def _read_spans(text: str, families: tuple[int, ...]) -> Spans:
    plain = read_ipv4(text.partition(":")[0])  # as nearly all are; ports may be behind it
    return (plain,) if plain else join((number(first), number(last)) for first, last in read_places(text, families))


def _name(leads: Spans) -> str:
    """Nothing where that cannot be read."""
    first, last = name(leads[0][0]), name(leads[-1][1])
    return "" if _is_every(leads) else first if first == last else f"{first}-{last}"


def _is_every(places: Spans) -> bool:
    return any(place in EVERYWHERE for place in places)


def tell_given(found: Sequence[Publication], target: str) -> str:
    """What an operator should know of a rule `from` a target that they concern."""
    inner = _find_inner(found[0], target)
    return (
        f"What leaves with {target} may have been given it by NAT (`{found[0].rule[:_SHOWN]}`) behind this rule: then "
        "it has another source when the rule is asked, and does not meet it. Name that one in a rule `from`"
        f"{f' ({inner})' if inner else ''}."
    )


def _find_inner(each: Publication, target: str) -> str:
    """Whom a target is given to, as far as that can be read."""
    if each.leads and "/" not in target and _ONE_TO_ONE.search(each.rule) and count(each.leads) == count(each.places):
        return name(each.leads[0][0] + read_address(target)[0] - each.places[0][0])
    return each.place
