"""By which devices a rule's traffic leaves: read from the routes, unless the rule names one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_network

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
    return Way(devices if own else (*devices, INGRESS_DEVICE), note=_say_many(devices))


def find_home(target: Target, device: str, topology: Topology) -> Target | None:
    """The network behind a device that a target lies in: what two in it send each other does not come by here."""
    homes = (
        network
        for network, route in _parse_routes(topology, target.version)
        if route.connected and device in route.devices and target.subnet_of(network)  # type: ignore[arg-type]
    )
    return next(homes, None)


def _find_towards(target: Target, topology: Topology) -> tuple[str, ...]:
    """The devices of the best route to all of it, and of those to parts of it."""
    around, inside = _split_routes(target, topology)
    best = max((network.prefixlen for network, _ in around), default=-1)
    routes = [route for network, route in around if network.prefixlen == best] + [route for _, route in inside]
    return _devices_of(routes)


def _find_out(target: Target, topology: Topology, own: bool) -> tuple[str, ...]:
    routes = [(network, route) for network, route in _parse_routes(topology, target.version)]
    if own:
        return _devices_of(route for _, route in routes)
    around, inside = _split_routes(target, topology)
    best = max((network.prefixlen for network, _ in around), default=0)
    home = {d for network, route in around if network.prefixlen == best > 0 for d in route.devices}
    home |= {d for network, route in inside if network.prefixlen > 0 for d in route.devices}
    default = {d for network, route in routes if network.prefixlen == 0 for d in route.devices}
    return tuple(d for d in _devices_of(route for _, route in routes) if d not in home - default)


Parsed = tuple[Target, Route]


@lru_cache(maxsize=1024)
def _split_routes(target: Target, topology: Topology) -> tuple[tuple[Parsed, ...], tuple[Parsed, ...]]:
    """Routes to all of a target, and those to parts of it only."""
    routes = _parse_routes(topology, target.version)
    around = tuple(each for each in routes if target.subnet_of(each[0]))  # type: ignore[arg-type]
    return around, tuple(e for e in routes if e[0] != target and e[0].subnet_of(target))  # type: ignore[arg-type]


@lru_cache(maxsize=4)
def _parse_routes(topology: Topology, family: int) -> tuple[Parsed, ...]:
    parsed = ((ip_network(route.prefix), route) for route in topology.routes)
    return tuple(each for each in parsed if each[0].version == family)


def _devices_of(routes: Iterator[Route] | list[Route]) -> tuple[str, ...]:
    return tuple(sorted({device for route in routes for device in route.devices}))


def _say_many(devices: tuple[str, ...]) -> str | None:
    if len(devices) < 2:
        return None
    names = f"{', '.join(devices[:-1])} and {devices[-1]}"
    return f"Its traffic can leave by {names}: the rate holds on each of them by itself. `interface` names one."
