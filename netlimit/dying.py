"""What goes no further than this hop ends no connection.

Connections at once are those that connection tracking knows, and it hears of each end before anybody asks how far the
packet still goes. A FIN or RST with a hop limit of 1 that is for somebody behind this gateway is thrown away when it is
to be forwarded: the connection would go on, and count no more. So where connections at once are limited it is thrown
away before it is heard. What ends on this host has a socket here: by its address nobody knows yet whether it is led on
to somebody else. A socket that listens at that very address says as little: docker-proxy has one for each port that a
DNAT leads to a container. Such places are known by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from netlimit.adverts import BGP
from netlimit.limits import Facts
from netlimit.state import (
    CHAIN_PREFIX,
    LED_PREFIX,
    ChainRule,
    EndsNothing,
    HasSocket,
    HopLimit,
    IpSet,
    Is,
    IsOwn,
    Jump,
    Ports,
    Reaches,
    Verdict,
    chain_rule,
)

CHAIN = f"{CHAIN_PREFIX}DYING"

_RETURN, _DROP = Verdict("RETURN"), Verdict("DROP")
MOST_LED = 65536
"""So many places are known in each address family at which a program listens, and that may lead to others."""
_GOES_ON = 2
"""With less than this hop limit nothing is forwarded."""
_NEAR = ((BGP, BGP), (639, 639), (646, 646))
"""Ports of BGP, MSDP and LDP, whose sessions may have a hop limit of 1 all along: neighbours talk by them, and this
host may be a bridge between two."""


def led_set(family: int) -> IpSet:
    """Where programs of this host listen though a DNAT may lead to another host what comes for it."""
    return IpSet(f"{LED_PREFIX}{family}", family, "ip,port,ip", size=MOST_LED)


def list_led(places: Iterable[tuple[str, int]]) -> Mapping[str, tuple[str, ...]]:
    """Addresses and ports as the sets have them: as many of each family as they take."""
    led: dict[str, list[str]] = {led_set(family).name: [] for family in (4, 6)}
    for address, port in sorted(places):
        led[led_set(6 if ":" in address else 4).name].append(f"{address},tcp:{port},{address}")
    return {name: tuple(keys[:MOST_LED]) for name, keys in led.items()}


def lead(family: int, facts: Facts) -> Iterator[ChainRule]:
    """The rule that leads to the chain what goes no further; none on a host that cannot tell."""
    needs = ("raw", "ttl", "multiport") if family == 4 else ("raw6", "hl6", "multiport6")
    if not any(map(facts.capabilities.get, needs)):
        yield chain_rule(Jump(CHAIN), Is("tcp"), HopLimit(_GOES_ON, family, below=True))


def silence(family: int, facts: Facts) -> Iterator[ChainRule]:
    """The rules of the chain."""
    tcp = Is("tcp")
    yield chain_rule(_RETURN, tcp, EndsNothing())
    yield from (chain_rule(_RETURN, tcp, ports) for ports in (Ports(_NEAR), Ports(_NEAR, "src")))
    yield chain_rule(_DROP, tcp, Reaches(led_set(family).name))
    told = facts.capabilities.get("socket" if family == 4 else "socket6") is None
    yield chain_rule(_RETURN, HasSocket() if told else IsOwn("dst"))
    yield chain_rule(_DROP)
