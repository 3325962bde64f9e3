"""By which devices a rule's traffic leaves: read from the routes, unless the rule names one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_network
from typing import NamedTuple

from netlimit.limits import Facts
from netlimit.rules import Direction, Rule, Target, format_target
from netlimit.tree import INGRESS_DEVICE, Route, Topology


@dataclass(frozen=True, slots=True)
class Way:
    """The devices where a rule is held, in order; or the `problem` why there is none. `note` is for the operator."""

    devices: tuple[str, ...] = ()
    problem: str | None = None
    note: str | None = None


def find_way(rule: Rule, facts: Facts) -> Way:
    """Find where a shaping rule's traffic can be queued.

    `to`: towards the target. `from`: wherever its traffic can leave, and, for what ends on this host, the IFB device.
    A network that the target is in itself is no way out, unless the default route lies there too.
    """
    topology, interface = facts.topology, rule.selector.interface
    if interface:
        if interface in topology.devices:
            return Way((interface,))
        known = ", ".join(sorted(topology.devices)) or "none but loopback"
        return Way(problem=f"There is no device {interface} on this host; there are {known}.")
    own = rule.target.prefixlen == rule.target.max_prefixlen and str(rule.target.network_address) in facts.own
    if rule.direction is Direction.TO:
        if own:
            return Way((INGRESS_DEVICE,))
        devices = _find_towards(rule.target, topology)
        if not devices:
            return Way(problem=f"No route leads to {format_target(rule.target)}; name the device in `interface`.")
        return Way(devices, note=_say_many(devices))
    devices = _find_out(rule.target, topology, own)
    if own and not devices:
        return Way(problem=f"No route leads away from {format_target(rule.target)}; name the device in `interface`.")
    return Way(devices if own else (*devices, INGRESS_DEVICE), note=_say_many(devices))


def find_home(target: Target, device: str, topology: Topology) -> Target | None:
    """The network behind a device that a target lies in: what two in it send each other does not come by here."""
    for each in _parse_routes(topology, target.version):
        if each.route.connected and device in each.route.devices and each.holds(target):
            return each.network
    return None


def _find_towards(target: Target, topology: Topology) -> tuple[str, ...]:
    """The devices of the best route to all of it, and of those to parts of it."""
    best, inside = _find_routes(target, topology)
    return _devices_of([*best, *inside])


def _find_out(target: Target, topology: Topology, own: bool) -> tuple[str, ...]:
    routes = _parse_routes(topology, target.version)
    out = _devices_of(each.route for each in routes)
    if own:
        return out
    best, inside = _find_routes(target, topology)
    default = _devices_of(each.route for each in routes if each.length == 0)
    home = _devices_of([*best, *inside])
    return tuple(device for device in out if device in default or device not in home)


def _find_routes(target: Target, topology: Topology) -> tuple[list[Route], list[Route]]:
    """The best routes to all of a target, and those to parts of it."""
    routes = _parse_routes(topology, target.version)
    around = [each for each in routes if each.holds(target)]
    best = max((each.length for each in around), default=-1)
    inside = [each.route for each in routes if each.lies_in(target)]
    return [each.route for each in around if each.length == best], inside


class _Parsed(NamedTuple):
    """A route with its prefix as numbers, for targets are many."""

    route: Route
    network: Target
    length: int
    shift: int
    bits: int

    def holds(self, target: Target) -> bool:
        """Whether all of a target (of the route's family) lies in it."""
        return self.length <= target.prefixlen and int(target.network_address) >> self.shift == self.bits

    def lies_in(self, target: Target) -> bool:
        """Whether it is a part of a target."""
        rest = target.max_prefixlen - target.prefixlen
        return target.prefixlen < self.length and self.bits << self.shift >> rest == int(target.network_address) >> rest


@lru_cache(maxsize=4)
def _parse_routes(topology: Topology, family: int) -> tuple[_Parsed, ...]:
    parsed = []
    for route in topology.routes:
        network = ip_network(route.prefix)
        if network.version == family:
            shift = network.max_prefixlen - network.prefixlen
            parsed.append(_Parsed(route, network, network.prefixlen, shift, int(network.network_address) >> shift))
    return tuple(parsed)


def _devices_of(routes: Iterable[Route]) -> tuple[str, ...]:
    return tuple(sorted({device for route in routes for device in route.devices}))


def _say_many(devices: tuple[str, ...]) -> str | None:
    if len(devices) < 2:
        return None
    names = f"{', '.join(devices[:-1])} and {devices[-1]}"
    return f"Its traffic can leave by {names}: the rate holds on each of them by itself. `interface` names one."
