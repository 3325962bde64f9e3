"""Blocking in the kernel whom the limiter keeps refusing: by an expiring rule, admitted as those that people send."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

from netlimit.contacts import Contacts
from netlimit.fallback import find_obstacle
from netlimit.forgotten import find_told
from netlimit.lockout import Havens
from netlimit.records import LIMITER, HostStatus
from netlimit.rules import Action, Rule, Target, parse_rule
from netlimit.spared import Spared, name_target

if TYPE_CHECKING:  # for the types alone: the store is handed over
    from netlimit.store import Store

log = logging.getLogger(__name__)

LABEL = ("blocked-by", "limiter")
"""What these rules bear, by which they are found again."""
MOST_STANDING, SHARE = 10_000, 8
"""So many rules of this kind a gateway has at most, and of one IPv6 /48 so many-th of them: who has one has 65,536
blocks to come from."""
ORPHAN_SECONDS = 3600
"""Rules of this kind that have been over for so long are cleared whose ever they are: that gateway may be no more."""
_CLEARED_AT_ONCE = 100
_PAGE = 1000
_LONGEST = 1000
_NEVER = datetime.max.replace(tzinfo=UTC)


class Blocks:
    """Who is blocked on one gateway because a limiter kept refusing him. `proxies` are those in whose name many speak
    (trusted ones), and so are `askers`, who have asked the limiter; `contacts` those whom the host talks to. All
    methods raise StoreError."""

    def __init__(
        self,
        store: Store,
        host: str,
        proxies: tuple[Target, ...] = (),
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        askers: Iterable[str] = (),
        contacts: Contacts | None = None,
    ) -> None:
        self._store = store
        self._host = host
        self._spared = Spared(host, proxies, contacts)
        self._now = now
        self._askers = askers
        self._standing: Counter[str] | None = None  # rules of this gateway, by their IPv6 /48, as far as is known

    def block(self, client: str, seconds: int, reason: str) -> bool | None:
        """Block a client (an address, or an IPv6 /64) from now on, or for longer if it is blocked already; whether it
        is blocked. Whoever is safe is not, which the log tells; and None is said where it is left alone, for an
        operator has switched its block off, or there are too many. Raises Conflict when somebody else has just blocked
        it."""
        now = self._now()
        rule = self._make_rule(_normalize(client), seconds, reason, now)
        hosts = self._store.hosts()
        # Where this gateway does not go by the database, nothing that is made there blocks anybody.
        here = find_told(each for each in hosts if each.host == self._host)
        obstacle = here or self._find_obstacle(rule.target, hosts) or Havens(hosts, now).refuse(rule)
        if obstacle is not None:
            log.warning("%s It is not blocked all the same: %s", reason, obstacle)
            return False
        others = [each for each in self._find_same(rule) if each.in_force(now) or _is_ours(each)]
        if not others:
            return self._add(rule, now)
        longest = max(others, key=lambda each: each.expires_at or _NEVER)
        if (longest.expires_at or _NEVER) < (rule.expires_at or _NEVER) and _is_ours(longest) and longest.enabled:
            changes = {"expires_at": rule.expires_at, "comment": rule.comment}
            self._store.change(longest.id, lambda before: replace(before, **changes), LIMITER, now)  # type: ignore[arg-type]
            log.warning("%s It stays blocked until %s.", reason, rule.expires_at)
        return longest.enabled or None

    def clear(self) -> None:
        """Remove such rules that are over, some at a time."""
        self._spared.look()
        now, cleared = self._now(), 0
        ours, orphaned = (self._host,), now - timedelta(seconds=ORPHAN_SECONDS)
        standing: Counter[str] = Counter()
        for rule in self._list():
            is_over = rule.expired(now if rule.hosts == ours else orphaned)
            if is_over and cleared < _CLEARED_AT_ONCE:
                self._store.remove(rule.id, LIMITER, now, rule.revision)
                cleared += 1
            elif rule.hosts == ours:
                standing[_find_group(rule.target)] += 1
        self._standing = standing

    def _add(self, rule: Rule, now: datetime) -> bool | None:
        if self._standing is None:
            self._standing = Counter(_find_group(each.target) for each in self._list() if each.hosts == rule.hosts)
        group, number = _find_group(rule.target), self._standing.total()
        if number >= MOST_STANDING or (group and self._standing[group] >= MOST_STANDING // SHARE):
            of_it = f", and {self._standing[group]} of {group}" if group else ""
            log.error(
                "%s It is not blocked: there are %d such rules of this gateway already%s.", rule.comment, number, of_it
            )
            return None
        self._store.add([rule], LIMITER, now)
        self._standing[group] += 1
        log.warning("%s Its packets are blocked until %s.", rule.comment, rule.expires_at)
        return True

    def _make_rule(self, address: str, seconds: int, reason: str, now: datetime) -> Rule:
        comment = "".join(letter if letter.isprintable() else "?" for letter in reason)[:_LONGEST]
        fields = {"target": address, "action": Action.BLOCK, "ttl": seconds, "hosts": [self._host], "comment": comment}
        return parse_rule({**fields, "labels": dict([LABEL])}, now)

    def _find_obstacle(self, target: Target, hosts: list[HostStatus]) -> str | None:
        """Why a target must not be blocked though it is in no safe set."""
        status = next((each for each in hosts if each.host == self._host), None)
        own, edges = (status.own, (*status.local, *status.networks)) if status else ((), ())
        obstacle = self._spared.find_obstacle(target, self._spared.look_around(own, edges))
        if obstacle is None and any(_is_in(each, target) for each in self._askers):
            asker = name_target(target)
            obstacle = f"{asker} asks the limiter, as proxies do. Is it missing in NETLIMIT_TRUSTED_PROXIES?"
        return obstacle or self._find_permission(str(target.network_address))

    def _find_permission(self, text: str) -> str | None:
        """Which rule lets an address pass: a block of the address alone would come before one for a network around
        it. Those that speak of some ports or protocols do not mean its requests."""
        now = self._now()
        for kept in self._store.select(contains=text, action=Action.ALLOW)[0]:
            rule = kept.rule
            if rule.in_force(now, self._host) and find_obstacle(rule) is None:
                return f"rule {rule.id} ('{rule}') lets it pass."
        return None

    def _find_same(self, rule: Rule) -> Iterator[Rule]:
        """The rules that block the same traffic here, or did."""
        kept, _ = self._store.select(target=str(rule.target), action=Action.BLOCK)
        for each in kept:
            if each.rule.identity == rule.identity and (not each.rule.hosts or self._host in each.rule.hosts):
                yield each.rule

    def _list(self) -> Iterator[Rule]:
        after = 0
        while kept := self._store.select(labels=dict([LABEL]), after=after, limit=_PAGE)[0]:
            yield from (each.rule for each in kept)
            after = kept[-1].rule.id


def _find_group(target: Target) -> str:
    """The /48 of an IPv6 client; nothing for an IPv4 one."""
    return str(target.supernet(new_prefix=48)) if target.version == 6 else ""


def _is_ours(rule: Rule) -> bool:
    return LABEL in rule.labels


def _is_in(text: str, target: Target) -> bool:
    address = ip_address(text)
    return address.version == target.version and address in target


def _normalize(text: str) -> str:
    """A client as the kernel sees it in packets: addresses of IPv4 that are mapped into IPv6 are of IPv4."""
    if "/" in text:
        return text
    address = ip_address(text)
    return str((address.version == 6 and address.ipv4_mapped) or address)
