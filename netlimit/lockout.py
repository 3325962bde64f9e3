"""Rules that would lock somebody out: which are refused unless they are forced, and which only spare somebody.

A rule whose target lies wholly within what is safe on one of its gateways can only be meant for who is safe. One around
it is kept, for the kernel lets pass who is safe. What closes a whole gateway is meant for everybody else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from netlimit.addresses import read_network
from netlimit.closure import MANAGED_BY, Closed, Site
from netlimit.liveness import is_recent
from netlimit.openings import find_lost
from netlimit.queueing import is_cap
from netlimit.records import HostStatus, SafeReason
from netlimit.rules import Action, Direction, Rule, Target, format_target
from netlimit.safety import CLIENT, COUNTERS, DATABASE, GATEWAY, REMEMBERED_SECONDS, SESSION, is_needed
from netlimit.several import name_some
from netlimit.sites import find_closed
from netlimit.tunnels import FAR_END

CALLER = "caller"
"""The reason of who asks, of whom no controller has to know."""
HARMLESS = frozenset({Action.ALLOW, Action.OBSERVE})
_SENTENCES = {
    SESSION: "where an SSH session to {host} comes from",
    CLIENT: "where somebody speaks to the API of {host} from",
    GATEWAY: "a default gateway of {host}",
    DATABASE: "where {host} has its database",
    COUNTERS: "where {host} has its counter store (Redis)",
    CALLER: "where this request comes from",
}
FORCE = "an admin can force it (`force=true`, `--force`)."
_LATELY_SECONDS = 60.0
_MOST_TOLD = 3
_SITES_KEPT = timedelta(days=30)
"""For so long it is known where a gateway is that says nothing: one that is switched off comes back as it was."""


class Haven(NamedTuple):
    """A network that is safe on a gateway, and why."""

    network: Target
    host: str
    why: SafeReason

    def describe(self, now: datetime) -> str:
        """What it is, to stand behind its name."""
        lately = self.why.seen and now.timestamp() - self.why.seen > _LATELY_SECONDS
        if self.why.text.startswith(FAR_END):
            return f"{self.why.text} from {self.host}{', or was a while ago' if lately else ''}"
        sentence = _SENTENCES.get(self.why.text, "in the safe set of {host} (NETLIMIT_SAFE)").format(host=self.host)
        return f"{sentence}, or did a while ago" if lately and self.why.text in (SESSION, CLIENT) else sentence

    @property
    def spared(self) -> str:
        """What of its traffic rules for networks around it leave alone."""
        return f"what it exchanges with {self.host} itself" if is_needed(self.why.text) else "it"


class Havens:
    """What is safe on which gateway, at one moment. Finding is quick, for rules can come by the hundred thousand."""

    def __init__(self, hosts: Iterable[HostStatus], now: datetime, caller: tuple[str, str] | None = None) -> None:
        """`caller` is the address that asks, and the gateway of which. Of a gateway not heard of for longer than it
        remembers who is safe, it is not known who is: only where it is, and how it is managed."""
        self._now = now
        hosts = list(hosts)
        self.hosts = frozenset(host.host for host in hosts)
        """The gateways that have reported, however long ago."""
        self._hosts = [host for host in hosts if _is_known(host)]
        self._havens = [*_read_caller(caller), *(haven for host in self._hosts for haven in _read(host))]
        self._index: dict[tuple[int, int, int], list[Haven]] = {}
        for haven in self._havens:
            self._index.setdefault(_key(haven.network, haven.network.prefixlen), []).append(haven)
        self._lengths = sorted({(version, length) for version, length, _ in self._index})
        # Who is safe is soon forgotten; where a gateway is, it says again as it was when it comes back.
        self._sites = [_read_site(host) for host in hosts if is_recent(host.silence, _SITES_KEPT)]
        self.places = frozenset[str]().union(*(site.places for site in self._sites))
        """The targets, beside wide ones, of rules that can close one of the gateways."""
        self._hit: dict[Rule, list[Haven]] = {}

    def refuse(self, rule: Rule) -> str | None:
        """Why a rule should not be kept, as a sentence; None for one that hits nobody who is safe and nobody else."""
        if rule.action in HARMLESS or not rule.in_force(self._now):
            return None
        haven = next(self._find_around(rule), None)
        if haven is None:
            return self._find_closed(rule)
        target, network = format_target(rule.target), format_target(haven.network)
        where = target if target == network else f"{target} in {network}"
        return (
            f"'{rule}' would hit {where}, which is {haven.describe(self._now)}. A rule for a network around it leaves "
            f"{haven.spared} alone, and one that allows or observes can always be kept; {FORCE}"
        )

    def spare(self, rule: Rule) -> str | None:
        """Whom a rule spares although they are in its target, as a sentence; None if it is nobody."""
        if rule.action in HARMLESS or not rule.in_force(self._now):
            return None
        if rule.forced_by is not None and rule.target.prefixlen == rule.target.max_prefixlen:
            return None
        inside = [
            f"{format_target(haven.network)} ({haven.describe(self._now)}{_say_part(haven)})"
            for haven in self._havens
            if haven.network.version == rule.target.version
            and (not rule.hosts or haven.host in rule.hosts)
            and (_is_around(rule.target, haven.network) or str(rule.target.network_address) in self._own(haven.host))
        ]
        if not inside:
            return None
        if is_cap(rule, rule.selector.interface):
            return (
                "It is a cap: what is forwarded to and from those who are safe waits under it like all else. What the "
                "gateway's management ports (SSH, the API) answer them has a class of its own beside it."
            )
        return f"It leaves alone who is safe: {name_some(inside, _MOST_TOLD)}."

    def ends_here(self, rule: Rule) -> bool:
        """Whether it shapes, now, what ends on some gateway."""
        if rule.action is not Action.SHAPE or rule.selector.interface or not rule.in_force(self._now):
            return False
        address = str(rule.target.network_address)
        return rule.direction is Direction.FROM or any(address in each.own for each in self._hosts)

    def find_lost(
        self, changing: Iterable[Rule], gone: Collection[Rule], before: Sequence[Rule], after: Sequence[Rule]
    ) -> tuple[Rule, str] | None:
        """The rule that allows what nobody may lose, for all else is closed; and why, as a sentence. See
        `openings.find_lost`."""
        lost = find_lost(changing, gone, before, after, self._list_sites(after), self._now)
        if lost is None:
            return None
        whom = lost.gateway or "every gateway"
        return lost.allow, (
            f"Rules close port {lost.port} of {whom}, by which it is managed, to nearly everybody, but '{lost.allow}' "
            f"leaves it open. Without that, or with most of it blocked, those could not come to manage it any more; "
            f"{FORCE}"
        )

    def find_closure(self, before: Iterable[Rule], after: Iterable[Rule]) -> tuple[Rule, str] | None:
        """The rule with which those after it close a gateway that those before did not, and why it should not be kept,
        as a sentence."""
        before, after = list(before), list(after)
        closed = find_closed(before, after, self._list_sites(after), self._now)
        return closed and (closed.rule, _say_closed(closed))

    def are_hit(self, forced: Rule) -> bool:
        """Whether a rule that was forced would hit somebody who is safe, but for what is allowed."""
        single = forced.target.prefixlen == forced.target.max_prefixlen
        return single and forced.action not in HARMLESS and bool(self._list_hit(forced))

    def find_exposed(self, allow: Rule, forced: Rule) -> str | None:
        """Why an `allow` should stay: without it a rule that was forced would hit who is safe."""
        for haven in self._list_hit(forced) if self.are_hit(forced) else ():
            spared = allow.target.overlaps(haven.network) or allow.target.overlaps(forced.target)
            if spared and (not allow.hosts or haven.host in allow.hosts):
                return (
                    f"Without '{allow}', which spares them, '{forced}', which {forced.forced_by} has forced, would hit "
                    f"{format_target(haven.network)}, which is {haven.describe(self._now)}. Change that rule first; "
                    f"{FORCE}"
                )
        return None

    def _list_hit(self, forced: Rule) -> list[Haven]:
        """Those that a rule that was forced hits, but for what is allowed."""
        if forced not in self._hit:
            address, version = str(forced.target.network_address), forced.target.version
            self._hit[forced] = [
                haven for haven in self._havens
                if haven.network.version == version
                and (not forced.hosts or haven.host in forced.hosts)
                and (forced.target.overlaps(haven.network) or address in self._own(haven.host))
            ]  # fmt: skip
        return self._hit[forced]

    def _list_sites(self, rules: Iterable[Rule]) -> list[Site]:
        """The gateways that are known, and those that only rules name."""
        known = {site.name for site in self._sites}
        others = sorted({name for rule in rules for name in rule.hosts} - known) or ([] if known else [""])
        return sorted([*self._sites, *(Site(name, heard=False) for name in others)], key=lambda site: site.name)

    def _own(self, host: str) -> tuple[str, ...]:
        return next((each.own for each in self._hosts if each.host == host), ())

    def find_own_closure(self, before: Iterable[Rule], after: Iterable[Rule]) -> tuple[Rule, str] | None:
        """The rule with which those after it, for addresses of a gateway's own, close it there, which those before did
        not; whatever other rules do, for an `allow` may leave it open otherwise."""
        own = frozenset[Target]().union(*(site.own for site in self._sites))
        old, new = ([rule for rule in rules if rule.target in own] for rules in (before, after))
        closed = find_closed(old, new, self._sites, self._now) if new else None
        return None if closed is None or closed.address is None else (closed.rule, _say_closed(closed))

    def _find_closed(self, rule: Rule) -> str | None:
        """Why a rule for an address of a gateway's own would close it there, whatever other rules do."""
        sites = [site for site in self._sites if rule.target in site.own]
        closed = find_closed([], [rule], sites, self._now) if sites else None
        return None if closed is None or closed.address is None else _say_closed(closed, alone=True)

    def _find_around(self, rule: Rule) -> Iterator[Haven]:
        """Those in which all of the target lies."""
        for version, length in self._lengths:
            if version == rule.target.version and length <= rule.target.prefixlen:
                for haven in self._index.get(_key(rule.target, length), ()):
                    if not rule.hosts or haven.host in rule.hosts:
                        yield haven


def _say_part(haven: Haven) -> str:
    return f"; only {haven.spared}" if is_needed(haven.why.text) else ""


def _is_around(target: Target, network: Target) -> bool:
    """Whether a network lies in a target (of its family), and is not all of it."""
    length = target.prefixlen
    return network.prefixlen > length and _key(network, length) == _key(target, length)


def _is_known(host: HostStatus) -> bool:
    return is_recent(host.silence, timedelta(seconds=REMEMBERED_SECONDS))


def _read(host: HostStatus) -> Iterator[Haven]:
    unknown = SafeReason("")
    yield from (Haven(read_network(text), host.host, host.safe_reasons.get(text, unknown)) for text in host.safe)


def _read_site(host: HostStatus) -> Site:
    own = frozenset(read_network(text) for text in host.own)
    networks = {read_network(prefix, strict=False): devices for prefix, devices in host.networks.items()}
    # That no sshd has been seen may mean that it is about to start, or that systemd listens for it.
    return Site(host.host, tuple(sorted({*host.management, *MANAGED_BY})), own, networks)


def _say_closed(closed: Closed, alone: bool = False) -> str:
    whom = closed.gateway or "every gateway"
    if closed.address is None:
        return (
            f"With '{closed.rule}', rules would close {whom} {closed.whom}: but for who is safe by now, nobody could "
            f"come to manage it any more. Name a smaller target, or a protocol and ports that leave it open; {FORCE}"
        )
    what = f"'{closed.rule}' would" if alone else f"With '{closed.rule}', rules would"
    return (
        f"{what} let nobody connect to port {closed.port} of {whom} at {format_target(closed.address)} any more, by "
        f"which it is managed, but for who is safe by now. Name a protocol or ports that leave it open; {FORCE}"
    )


def _read_caller(caller: tuple[str, str] | None) -> Iterator[Haven]:
    if caller is not None:
        network = read_network(caller[0])
        if not network.is_loopback:
            yield Haven(network, caller[1], SafeReason(CALLER))


def _key(network: Target, length: int) -> tuple[int, int, int]:
    """The first `length` bits of a network."""
    return network.version, length, int(network.network_address) >> network.max_prefixlen - length
