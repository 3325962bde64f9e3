"""What is shaped of the traffic that ends on this host: it never leaves, so it is led over an IFB device.

Packets come there before netfilter sees them, so a program on the devices' ingress finds the class, as sets do for
what is forwarded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from netlimit.packet import Side

REVISION = 8
"""Counts how often what programs do for the same lanes has changed: one of before must give way to one of now."""


class IngressLane(NamedTuple):
    """Packets of one kind, told by family, protocol ("any", "tcp", "udp", "icmp") and ports, whose class is looked up
    by the address at `side` (the longest prefix decides). Later fragments, which tell no port (nor surely, with IPv6,
    the protocol), and what has more headers before them than are read, pass for any where the address at "src" is asked
    for. The first lane that has an entry for a packet decides; an
    entry without a class (prio 0) lets it pass unshaped. An entry with a mark says that the address shall be
    remembered as seen, under that mark. `copies` names the set that the lane has its entries from. `devices` are the
    indices of those by one of which packets have come in (none: by any)."""

    name: str
    family: int
    side: Side
    protocol: str = "any"
    ports: tuple[tuple[int, int], ...] = ()
    source_ports: tuple[tuple[int, int], ...] = ()
    copies: str = ""
    devices: tuple[int, ...] = ()

    @classmethod
    def copy(
        cls,
        of: str,
        family: int,
        side: Side,
        protocol: str = "any",
        ports: tuple[tuple[int, int], ...] = (),
        source_ports: tuple[tuple[int, int], ...] = (),
        devices: tuple[int, ...] = (),
    ) -> IngressLane:
        """A lane with the addresses of a set, none of which gets a class: they pass."""
        return cls(f"{of}-in", family, side, protocol, ports, source_ports, of, devices)


@dataclass(frozen=True, slots=True)
class Ingress:
    """The program on the ingress of `devices`: what comes for one of the addresses `own`, the host's own
    and others of which every packet ends on it (broadcast, anycast, local by a route), goes through `lanes`.

    In the families of `translated` somebody may translate, and what comes for an own address be an answer to somebody
    behind it, whom a lane of side "dst" does not mean: of such a lane passes what has no ports, and what only a socket
    that listens has been found for.

    `stacked` are the indices of those among the devices on which a packet comes by that has come by on the one below
    for the same address: there it goes through no lane once more."""

    devices: tuple[str, ...]
    own: tuple[str, ...]
    lanes: tuple[IngressLane, ...]
    translated: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()

    def lines(self) -> Iterator[str]:
        """A line for each part, as a golden text has it."""
        yield f"on {' '.join(self.devices)} for {' '.join(self.own)}"
        if self.translated:
            yield f"translated {' '.join(f'ipv{family}' for family in self.translated)}"
        if self.stacked:
            yield f"stacked {' '.join(map(str, self.stacked))}"
        for lane in self.lanes:
            ports = "".join(
                f" {name} {ranges}" for name, ranges in zip(("ports", "from"), lane[4:6], strict=True) if ranges
            )
            devices = f" by {' '.join(map(str, lane.devices))}" if lane.devices else ""
            yield f"lane {lane.name} ipv{lane.family} {lane.side} {lane.protocol}{ports}{devices}"

    @property
    def digest(self) -> str:
        """Ten letters that stand for what the program does, wherever it is."""
        return sha256(repr((REVISION, self.own, self.lanes, self.translated, self.stacked)).encode()).hexdigest()[:10]
