"""Rules that would lock somebody out: which are refused unless they are forced, and which only spare somebody.

A rule whose target lies wholly within what is safe on one of its gateways can only be meant for who is safe. One around
it is kept, for the kernel lets pass who is safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from ipaddress import ip_network
from typing import NamedTuple

from netlimit.records import HostStatus, SafeReason
from netlimit.rules import Action, Direction, Protocol, Rule, Target, format_target
from netlimit.safety import CLIENT, COUNTERS, DATABASE, GATEWAY, REMEMBERED_SECONDS, SESSION

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
_LATELY_SECONDS = 60.0
_MOST_TOLD = 3


class Haven(NamedTuple):
    """A network that is safe on a gateway, and why."""

    network: Target
    host: str
    why: SafeReason

    def describe(self, now: datetime) -> str:
        """What it is, to stand behind its name."""
        sentence = _SENTENCES.get(self.why.text, "in the safe set of {host} (NETLIMIT_SAFE)").format(host=self.host)
        lately = self.why.seen and now.timestamp() - self.why.seen > _LATELY_SECONDS
        return f"{sentence}, or did a while ago" if lately and self.why.text in (SESSION, CLIENT) else sentence


class Havens:
    """What is safe on which gateway, at one moment. Finding is quick, for rules can come by the hundred thousand."""

    def __init__(self, hosts: Iterable[HostStatus], now: datetime, caller: tuple[str, str] | None = None) -> None:
        """`caller` is the address that asks, and the gateway of which. Of a gateway not heard of for longer than it
        remembers who is safe, nothing is known."""
        self._now = now
        self._hosts = [host for host in hosts if _is_known(host, now)]
        self._havens = [*_read_caller(caller), *(haven for host in self._hosts for haven in _read(host))]
        self._index: dict[tuple[int, int, int], list[Haven]] = {}
        for haven in self._havens:
            self._index.setdefault(_key(haven.network, haven.network.prefixlen), []).append(haven)
        self._lengths = sorted({(version, length) for version, length, _ in self._index})

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
            "it alone, and one that allows or observes can always be kept; an admin can force this one (`force=true`, "
            "`--force`)."
        )

    def spare(self, rule: Rule) -> str | None:
        """Whom a rule spares although they are in its target, as a sentence; None if it is nobody."""
        if rule.action in HARMLESS or not rule.in_force(self._now):
            return None
        inside = [
            f"{format_target(haven.network)} ({haven.describe(self._now)})"
            for haven in self._havens
            if haven.network.version == rule.target.version
            and haven.network.prefixlen > rule.target.prefixlen
            and _key(haven.network, rule.target.prefixlen) == _key(rule.target, rule.target.prefixlen)
            and (not rule.hosts or haven.host in rule.hosts)
        ]
        if not inside:
            return None
        more = f" and {len(inside) - _MOST_TOLD} more" if len(inside) > _MOST_TOLD else ""
        return f"It leaves alone who is safe: {', '.join(inside[:_MOST_TOLD])}{more}."

    def _find_closed(self, rule: Rule) -> str | None:
        """Why a rule would close a gateway to those who manage it, for a rule that names its own address comes before
        who is safe."""
        for host in self._hosts:
            ports = [port for port in host.management if _speaks_of(rule, port)]
            if ports and str(rule.target.network_address) in host.own and (not rule.hosts or host.host in rule.hosts):
                return (
                    f"'{rule}' would let nobody connect to port {ports[0]} of {host.host} at "
                    f"{format_target(rule.target)} any more, by which it is managed, not even who is safe. Name a "
                    "protocol or ports that leave it open; an admin can force this one (`force=true`, `--force`)."
                )
        return None

    def _find_around(self, rule: Rule) -> Iterator[Haven]:
        """Those in which all of the target lies."""
        for version, length in self._lengths:
            if version == rule.target.version and length <= rule.target.prefixlen:
                for haven in self._index.get(_key(rule.target, length), ()):
                    if not rule.hosts or haven.host in rule.hosts:
                        yield haven


def _is_known(host: HostStatus, now: datetime) -> bool:
    return host.seen_at is not None and (now - host.seen_at).total_seconds() <= REMEMBERED_SECONDS


def _read(host: HostStatus) -> Iterator[Haven]:
    unknown = SafeReason("")
    yield from (Haven(ip_network(text), host.host, host.safe_reasons.get(text, unknown)) for text in host.safe)


def _speaks_of(rule: Rule, port: int) -> bool:
    """Whether a rule blocks one address, and new TCP connections to a port of it."""
    alone = rule.action is Action.BLOCK and rule.target.prefixlen == rule.target.max_prefixlen
    where = rule.selector
    if not alone or where.protocol not in (Protocol.ANY, Protocol.TCP):
        return False
    ranges = where.ports if rule.direction is Direction.TO else where.source_ports
    others = where.source_ports if rule.direction is Direction.TO else where.ports
    return not others and (not ranges or any(low <= port <= high for low, high in ranges))


def _read_caller(caller: tuple[str, str] | None) -> Iterator[Haven]:
    if caller is not None:
        network = ip_network(caller[0])
        if not network.is_loopback:
            yield Haven(network, caller[1], SafeReason(CALLER))


def _key(network: Target, length: int) -> tuple[int, int, int]:
    """The first `length` bits of a network."""
    return network.version, length, int(network.network_address) >> network.max_prefixlen - length
