"""Rules that hit nothing, or not all that they speak of: those for interfaces by which no packet seems to come or go
(loopback, which is never touched, devices that are not there, and those that belong to a bridge or a bond: what enters
by a bridge's port has entered by the bridge when it is routed), for what would leave by an interface and ends on the
host, for networks that end on it as a whole, and for addresses of loopback.

Such a rule stays in the kernel: it holds as soon as the device is there, or is no port any more.
"""

from __future__ import annotations

from typing import NamedTuple

from netlimit.limits import Facts
from netlimit.rules import Direction, Rule, Target, format_target
from netlimit.several import name_some
from netlimit.tree import Topology

_MOST_TOLD = 12
_WHAT = {
    "bridge": "a port of the bridge",
    "bond": "a slave of the bond",
    "team": "a port of the team",
    "macvlan": "below the macvlan (mode passthru)",
}


class Miss(NamedTuple):
    """Why a rule hits nothing, or (`partly`) not all that it speaks of."""

    text: str
    partly: bool = False


def may_miss(rule: Rule, facts: Facts) -> bool:
    """Whether it must be asked again and again what the rule misses: of most it is known that they miss nothing."""
    return bool(rule.selector.interface) or rule.target.is_loopback or _is_lost(rule.direction, rule.target, facts)


def find_miss(rule: Rule, facts: Facts) -> Miss | None:
    """What a rule that limits, blocks or allows misses on a host; None if nothing, or if that is not known."""
    interface = rule.selector.interface
    if _is_lost(rule.direction, rule.target, facts):
        return Miss(
            f"All of {format_target(rule.target)} ends on this host by a route (`ip route show table local`), and what "
            "ends here heeds only rules that name one address, so that the rule hits nothing. Name the addresses, each "
            "in a rule."
        )
    if rule.target.is_loopback and interface != "lo":
        return Miss(
            f"What this host sends to itself is never touched: the rule hits only what others send with an address of "
            f"{format_target(rule.target)}, if the kernel takes it.",
            partly=True,
        )
    if not interface:
        return None
    if rule.direction is Direction.TO and facts.is_own(rule.target) and not facts.vrfs:
        return Miss(
            f"{rule.target.network_address} is this host's own: what is sent to it ends here and leaves by no "
            "interface, so that the rule hits nothing. Leave out `interface`."
        )
    missing = find_missing(interface, rule.direction, facts.topology)
    if missing is None and rule.direction is Direction.TO and facts.ends(rule.target) and not facts.vrfs:
        return Miss(say_ending(rule.target, interface), partly=True)
    return missing


def say_ending(target: Target, interface: str) -> str:
    """Of what goes to an address that ends here, a rule with an interface hits next to nothing."""
    return (
        f"What comes for {format_target(target)} ends on this host by a route, and leaves by no interface: the rule "
        f"hits only what this host itself sends there by {interface}. Leave out `interface` for the rest."
    )


def _is_lost(direction: Direction, target: Target, facts: Facts) -> bool:
    return direction is Direction.TO and facts.ends_wholly(target)


def find_missing(interface: str, direction: Direction, topology: Topology) -> Miss | None:
    """Why packets of this interface are not seen; None if they are, or if nothing is known of the host's devices."""
    devices = topology.devices
    if interface == "lo":
        return Miss("Nothing of netlimit touches loopback, so that the rule hits nothing. Name another interface.")
    if not devices:
        return None
    device = devices.get(interface)
    if device is None:
        known = sorted(devices)
        return Miss(
            f"There is no device {interface} on this host, so that the rule hits nothing; there are "
            f"{name_some(known, _MOST_TOLD)}."
        )
    if not device.master:
        return None
    above = topology.every.get(device.master)
    kind = above.kind if above else ""
    if kind == "vrf":
        return _miss_in_vrf(interface, direction, device.master)
    return Miss(
        f"{interface} is {_WHAT.get(kind, 'a port of')} {device.master}: what is routed enters and leaves by "
        f"{device.master}, so that the rule hits nothing. Name {device.master} in `interface`, or the addresses behind "
        f"{interface} as target."
    )


def _miss_in_vrf(interface: str, direction: Direction, vrf: str) -> Miss | None:
    if direction is Direction.TO:
        return None
    return Miss(
        f"{interface} belongs to the VRF {vrf}: once routed, its packets have entered by {vrf}, and the rule misses "
        "them where it must wait for that (connections at once; all limits while an `allow to` is in force). Name "
        f"{vrf} in `interface`.",
        partly=True,
    )
