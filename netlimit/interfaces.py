"""Interfaces that rules name, and by which no packet seems to come or go: loopback, which is never touched, devices
that are not there, and those that belong to a bridge or a bond. What enters by a bridge's port has entered by the
bridge when it is routed.

Such a rule stays in the kernel: it holds as soon as the device is there, or is no port any more.
"""

from __future__ import annotations

from typing import NamedTuple

from netlimit.rules import Direction
from netlimit.tree import Topology

_MOST_TOLD = 12
_WHAT = {"bridge": "a port of the bridge", "bond": "a slave of the bond", "team": "a port of the team"}


class Miss(NamedTuple):
    """Why a rule for an interface hits nothing, or (`partly`) not all that it speaks of."""

    text: str
    partly: bool = False


def find_miss(interface: str, direction: Direction, topology: Topology) -> Miss | None:
    """Why packets of this interface are not seen; None if they are, or if nothing is known of the host's devices."""
    devices = topology.devices
    if interface == "lo":
        return Miss("Nothing of netlimit touches loopback, so that the rule hits nothing. Name another interface.")
    if not devices:
        return None
    device = devices.get(interface)
    if device is None:
        known = sorted(devices)
        more = f" and {len(known) - _MOST_TOLD} more" if len(known) > _MOST_TOLD else ""
        return Miss(
            f"There is no device {interface} on this host, so that the rule hits nothing; there are "
            f"{', '.join(known[:_MOST_TOLD])}{more}."
        )
    if not device.master:
        return None
    above = devices.get(device.master)
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
