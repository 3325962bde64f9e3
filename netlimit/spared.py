"""Whom no request may have blocked, whoever tells of it: nobody's client (broadcast, multicast, loopback), the host
itself, trusted proxies, and whom the host talks to. Limiter and controller go by the same."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from netlimit.contacts import Contacts, find_contact
from netlimit.rules import Action, Rule, Target


class Places:
    """A host's own addresses, and the first and last ones of networks: broadcast and anycast addresses. Of an IPv6
    network only the first (anycast) is one. Ten thousand targets are found among them without a look at each."""

    def __init__(self, own: Iterable[str], networks: Iterable[str]) -> None:
        self._own = sorted({(each.version, int(each)) for each in map(ip_address, own)})
        self._edges = sorted(set(_list_edges(networks)))

    def holds_own(self, target: Target) -> bool:
        """Whether an address of the host is one of a target."""
        first, last = _bounds(target)
        return bisect_left(self._own, first) < bisect_right(self._own, last)

    def holds_edge(self, target: Target) -> bool:
        """Whether an edge is one of a target, or of an equal network; of those within it, the edges do not count."""
        first, last = _bounds(target)
        found = self._edges[bisect_left(self._edges, first) : bisect_right(self._edges, (*last, target.max_prefixlen))]
        return any(length <= target.prefixlen for _, _, length in found)


class Surroundings(NamedTuple):
    """What is looked at: equal ones lead to equal answers. `contacts` are None as long as they are not known."""

    places: Places
    contacts: Mapping[str, str] | None


class Spared:
    """Whom no request may have blocked on a host. `proxies` are those in whose name many speak."""

    def __init__(self, host: str, proxies: tuple[Target, ...] = (), contacts: Contacts | None = None) -> None:
        self._host = host
        self._proxies = proxies
        self._contacts = contacts

    def look_around(self, own: tuple[str, ...], edges: tuple[str, ...]) -> Surroundings:
        """What there is at this moment. `own` are the host's addresses; `edges` what ends on it besides, and the
        networks that it reaches without a gateway, with prefixes."""
        return Surroundings(_find_places(own, edges), {} if self._contacts is None else self._contacts.look())

    def look(self) -> None:
        """Remember whom the host talks to now."""
        if self._contacts is not None:
            self._contacts.look()

    def find_obstacle(self, target: Target, around: Surroundings) -> str | None:
        """Why a target must not be blocked though it is in no safe set."""
        address = target.network_address
        if (
            address.is_loopback
            or address.is_multicast
            or address.is_unspecified
            or address.is_link_local
            or (target.version == 4 and address.is_reserved)
        ):
            return f"{address} is no client's address."
        if around.places.holds_own(target):
            return f"{name_target(target)} is an address of {self._host} itself{_or_has_one(target)}."
        if around.places.holds_edge(target):
            return f"{name_target(target)} is a broadcast address of {self._host}, or a network that it is in."
        if any(target.version == proxy.version and target.overlaps(proxy) for proxy in self._proxies):
            return f"{name_target(target)} is a proxy (NETLIMIT_TRUSTED_PROXIES){_or_has_one(target)}."
        return find_contact(target, around.contacts)

    def refuse(self, rule: Rule, around: Surroundings) -> str | None:
        """Why a rule to which requests have led must not be in force here; None for one that may, or blocks nobody."""
        obstacle = self.find_obstacle(rule.target, around) if rule.action is Action.BLOCK else None
        return obstacle and f"Requests have led to this block, and it is not in force: {obstacle}"


def name_target(target: Target) -> str:
    """An address without its prefix."""
    return str(target.network_address) if target.prefixlen == target.max_prefixlen else str(target)


@lru_cache(maxsize=4)
def _find_places(own: tuple[str, ...], edges: tuple[str, ...]) -> Places:
    return Places(own, edges)


def _list_edges(networks: Iterable[str]) -> Iterator[tuple[int, int, int]]:
    """The edges, each with the version of its network before it and the length of its prefix behind it."""
    for network in (ip_network(each, strict=False) for each in networks):
        if network.prefixlen:
            yield network.version, int(network.network_address), network.prefixlen
            if network.version == 4:
                yield network.version, int(network.broadcast_address), network.prefixlen


def _bounds(target: Target) -> tuple[tuple[int, int], tuple[int, int]]:
    return (target.version, int(target.network_address)), (target.version, int(target.broadcast_address))


def _or_has_one(target: Target) -> str:
    return "" if target.prefixlen == target.max_prefixlen else ", or has one"
