"""By which devices a rule's traffic leaves: read from the routes, unless the rule names one."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from netlimit.limits import MOST_ENDING, Facts
from netlimit.misses import say_ending
from netlimit.routes import devices_of, find_around, find_best, find_inside, list_around, read_starts, read_table
from netlimit.rules import Direction, Rule, Target, format_target
from netlimit.several import name_some
from netlimit.tree import INGRESS_DEVICE, Topology


@dataclass(frozen=True, slots=True)
class Way:
    """The devices where a rule is held, in order; or the `problem` why there is none. `missing` says what it
    is not held for, `note` is for the operator."""

    devices: tuple[str, ...] = ()
    problem: str | None = None
    note: str | None = None
    missing: str | None = None


def find_way(rule: Rule, facts: Facts) -> Way:
    """Find where a shaping rule's traffic can be queued.

    `to`: towards the target, and, for what ends on this host, the IFB device: for an address of its own that alone,
    for one that is broadcast may be sent from here, too. `from`: wherever its traffic can leave, and the IFB device. A
    network that the target is in itself is no way out, unless the default route lies there too. Devices that nothing
    can be written for are left out, and told.
    """
    way = _find_way(rule, facts)
    bridges = [device for device in way.devices if device in facts.topology.joining]
    if bridges:
        way = replace(way, note=" ".join(filter(None, (way.note, _say_bridged(bridges)))))
    return _leave_out_unspeakable(way, facts.topology) if facts.topology.unspeakable and way.devices else way


def _find_way(rule: Rule, facts: Facts) -> Way:
    topology, interface = facts.topology, rule.selector.interface
    unshaped = _find_unshaped(rule, facts)
    if unshaped:
        return Way(problem=unshaped)
    if interface:
        if interface in topology.devices:
            ends = rule.direction is Direction.TO and facts.ends(rule.target) and not facts.vrfs
            return Way((interface,), note=say_ending(rule.target, interface) if ends else None)
        known = ", ".join(sorted(topology.devices)) or "none but loopback"
        return Way(problem=f"There is no device {interface} on this host; there are {known}.")
    if rule.direction is Direction.TO:
        return _find_way_to(rule.target, facts)
    own = names_host(rule, facts)
    devices = _find_out(rule.target, topology, own)
    if own and not devices:
        return Way(problem=f"No route leads away from {format_target(rule.target)}; name the device in `interface`.")
    return Way(devices if own else (*devices, INGRESS_DEVICE), note=_say_many(devices))


def _leave_out_unspeakable(way: Way, topology: Topology) -> Way:
    devices = tuple(device for device in way.devices if device not in topology.unspeakable)
    out = [device for device in way.devices if device in topology.unspeakable]
    into = sorted(topology.unspeakable.keys() & topology.entered) if INGRESS_DEVICE in devices else []
    missed = []
    if out:
        missed.append(f"What leaves by {name_some(out, _MOST_NAMED)} is not shaped")
    if into:
        missed.append(f"What comes in by {name_some(into, _MOST_NAMED)} and ends on this host is not shaped")
    if not missed:
        return way
    text = f"{'. '.join(missed)}: {NAMELESS}"
    if not devices:
        return Way(problem=text)
    note = _say_many(tuple(device for device in devices if device != INGRESS_DEVICE)) if out else way.note
    return Way(devices, missing=text, note=note)


NAMELESS = (
    "no tool can be told such a name so that it means this device alone (a `+` at its end, a `-` at its beginning, or "
    "an odd letter). Rename the device."
)
_MOST_NAMED = 3
_MOST_LISTED = 8


def _say_bridged(bridges: list[str]) -> str:
    return (
        f"What {name_some(bridges, _MOST_NAMED)} forwards from one port to another leaves by the ports, and is not "
        "shaped; what is routed there, or sent by this host, is."
    )


def _find_way_to(target: Target, facts: Facts) -> Way:
    if facts.is_own(target):
        return Way((INGRESS_DEVICE,))
    devices = find_towards(target, facts.topology)
    if facts.ends(target):
        return Way((*devices, INGRESS_DEVICE), note=_say_many(devices))
    if not devices:
        return Way(problem=f"No route leads to {format_target(target)}; name the device in `interface`.")
    return Way(devices, note=_say_many(devices))


def names_host(rule: Rule, facts: Facts) -> bool:
    """Whether a rule's target is one address of which every packet ends on this host."""
    return facts.ends(rule.target)


def find_home(target: Target, device: str, topology: Topology) -> Target | None:
    """The network that a target lies in, if what two in it send each other does not leave by a device: one that is
    connected there, or that lies behind others.

    A default route makes nobody a neighbour, with a gateway or without one (ppp, a tunnel).
    """
    best = next((alike for alike in list_around(target, topology) if alike[0].length), [])
    parts = (each for each in find_inside(target, topology) if device in each.route.devices)
    if best and not any(device in each.route.devices for each in best) and next(parts, None) is None:
        return best[0].network
    for each in find_around(target, topology):
        if each.length and each.route.connected and device in each.route.devices:
            return each.network
    return None


def find_entrances(topology: Topology) -> tuple[str, ...]:
    """The devices by which packets come in, but for those for which nothing can be written."""
    return tuple(sorted(topology.devices.keys() & topology.entered))


def find_stacked(topology: Topology) -> tuple[int, ...]:
    """The indices of the devices whose packets have come by on the device below for the same MAC address (ipvlan).
    Others stack, too: but of those the device below tells that a packet is for another, or has taken off no tag yet."""
    return tuple(sorted(each.index for each in topology.devices.values() if each.kind in ("ipvlan", "ipvtap")))


def find_entries(direction: Direction, interface: str | None, topology: Topology) -> tuple[int, ...] | None:
    """The indices of the devices by which packets for this host come in that a rule with an interface speaks of; none
    of them: of what comes in by any. None if it speaks of no such packet: it is about what leaves by the interface, or
    there is none of this name. What comes in by a VRF comes in by its ports."""
    if interface is None:
        return ()
    if direction is Direction.TO or interface not in topology.devices:
        return None
    found = (each.index for name, each in topology.devices.items() if interface in (name, each.master))
    return tuple(sorted(found))


def find_towards(target: Target, topology: Topology) -> tuple[str, ...]:
    """The devices of the best routes to all of it, and of those to parts of it."""
    return devices_of([*find_best(target, topology), *find_inside(target, topology)])


def leads_towards(target: Target, devices: tuple[str, ...], topology: Topology) -> bool:
    """Whether `find_towards` names one of the devices: for many targets, where there can be many routes."""
    if any(device in devices for each in find_best(target, topology) for device in each.route.devices):
        return True
    starts = read_starts(topology, target.version, devices)
    at = bisect_left(starts, (int(target.network_address), target.prefixlen + 1))
    return at < len(starts) and starts[at][0] <= int(target.broadcast_address)


def _find_out(target: Target, topology: Topology, own: bool) -> tuple[str, ...]:
    table = read_table(topology, target.version)
    home = () if own else find_towards(target, topology)
    return tuple(device for device in table.devices if own or device in table.default or device not in home)


def _find_unshaped(rule: Rule, facts: Facts) -> str | None:
    """Why nothing shapes what goes to a target: it ends on this host, and not where the rule looks for it."""
    target = rule.target
    if rule.direction is not Direction.TO:
        return None
    if facts.ends_wholly(target):
        return (
            f"All of {format_target(target)} ends on this host by a route, and what ends here is shaped by single "
            "addresses. Name them, each in a rule."
        )
    if rule.selector.interface and facts.is_own(target) and not facts.vrfs:
        return (
            f"{format_target(target)} is this host's own: what is sent to it ends here and leaves by no device. Leave "
            "out `interface`."
        )
    if not facts.ends_unshaped(target):
        return None
    return (
        f"{format_target(target)} ends on this host by a route, and of such addresses only those with a route of "
        f'their own are shaped, {MOST_ENDING:,} at most. Limit it (`action: "drop"`), or give it such a route: '
        f"`ip route add local {format_target(target)} dev lo`."
    )


def _say_many(devices: tuple[str, ...]) -> str | None:
    if len(devices) < 2:
        return None
    names = f"{', '.join(devices[:-1])} and {devices[-1]}" if len(devices) <= _MOST_LISTED else name_some(devices, 4)
    return f"Its traffic can leave by {names}: the rate holds on each of them by itself. `interface` names one."
