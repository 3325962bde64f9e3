"""What a packet can be, as far as whoever wants to evade a limit chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.e2e.evasion.headers import Ends

Build = Callable[[Ends], list[bytes]]


@dataclass(frozen=True)
class Kind:
    """One kind of packets.

    `build` makes the IP packets of one datagram. `protocol` is what a rule with ports finds in it ("tcp" or "udp"), ""
    where it bears no ports. `opens`: each datagram opens a connection of its own. `destination` is given where it is
    not the one who is meant. `spared`: why rules spare it where it is for the gateway itself, or the gateway's own.
    """

    name: str
    build: Build
    protocol: str = ""
    opens: bool = True
    destination: str = ""
    spared: str = ""
