"""What goes no further than this hop ends no connection.

Connections at once are those that connection tracking knows, and it hears of each end before anybody asks how far the
packet still goes. A FIN or RST with a hop limit of 1 that is for somebody behind this gateway is thrown away when it is
to be forwarded: the connection would go on, and count no more. So where connections at once are limited it is thrown
away before it is heard. What ends on this host has a socket here: by its address nobody knows yet whether it is led on
to somebody else.
"""

from __future__ import annotations

from collections.abc import Iterator

from netlimit.adverts import BGP
from netlimit.limits import Facts
from netlimit.state import (
    CHAIN_PREFIX,
    ChainRule,
    EndsNothing,
    HasSocket,
    HopLimit,
    Is,
    IsOwn,
    Jump,
    Ports,
    Verdict,
    chain_rule,
)

CHAIN = f"{CHAIN_PREFIX}DYING"

_RETURN, _DROP = Verdict("RETURN"), Verdict("DROP")
_GOES_ON = 2
"""With less than this hop limit nothing is forwarded."""
_NEAR = ((BGP, BGP), (639, 639), (646, 646))
"""Ports of BGP, MSDP and LDP, whose sessions may have a hop limit of 1 all along: neighbours talk by them, and this
host may be a bridge between two."""


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
    told = facts.capabilities.get("socket" if family == 4 else "socket6") is None
    yield chain_rule(_RETURN, HasSocket() if told else IsOwn("dst"))
    yield chain_rule(_DROP)
