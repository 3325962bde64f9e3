"""One rule of every form that netlimit writes, to find out whether a host's tools can say them all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from netlimit.packet import Side
from netlimit.state import (
    CHAIN_PREFIX,
    SET_PREFIX,
    Above,
    AddTo,
    ChainRule,
    Confirmed,
    Connected,
    Continues,
    Crowded,
    Diverted,
    Effect,
    Ended,
    EndsNothing,
    Enters,
    Has,
    HasSocket,
    HopLimit,
    Icmp6,
    InSet,
    Invalid,
    Is,
    IsOwn,
    Jump,
    Leaves,
    Led,
    MapMark,
    MapPriority,
    Marked,
    Match,
    Opens,
    Ports,
    Reaches,
    Reject,
    SentPorts,
    SetClass,
    SetMark,
    Syn,
    Table,
    Verdict,
    chain_rule,
)

CHAIN = f"{CHAIN_PREFIX}FORM"
OTHER = f"{CHAIN_PREFIX}NEXT"
SET = f"{SET_PREFIX}probe"
_RETURN = Verdict("RETURN")


def list_specimens(family: int) -> Iterator[tuple[Table, ChainRule]]:
    """Rules of every form, each with a table that takes it. They stand in `CHAIN`, jump to `OTHER`,
    and look into the set `SET` (for IPv6 with a 6 behind it), which has marks."""
    name = SET if family == 4 else f"{SET}6"
    yield from (("mangle", chain_rule(_RETURN, *matches)) for matches in _list_matches(family, name))
    yield from (("mangle", chain_rule(effect)) for effect in _list_effects(name))
    yield "mangle", chain_rule(_RETURN, HasSocket())
    yield "filter", chain_rule(Reject("icmp-port-unreachable" if family == 4 else "icmp6-port-unreachable"))
    yield "filter", chain_rule(Reject("tcp-reset"), Is("tcp"))


def _list_matches(family: int, name: str) -> Iterator[tuple[Match, ...]]:
    longest = 32 if family == 4 else 128
    yield Has("src", "10.0.0.0/8" if family == 4 else "fd00::/64"), Has("dst", "10.0.0.1" if family == 4 else "fd00::1")
    yield Enters("lo"), Leaves("lo")
    yield Enters("nl+"), Leaves("nl+")
    yield (Is("udp", inverted=True),)
    yield (Is("vrrp"),)
    yield Is("icmp" if family == 4 else "ipv6-icmp"), *(() if family == 4 else (Icmp6(133),))
    yield Is("tcp"), Ports(((80, 80), (8000, 8100)))
    yield Is("udp"), Ports(((53, 53),), "src")
    yield Is("tcp"), Ports(((80, 80),)), Led(inverted=True)
    yield Is("tcp"), Ports(((80, 80),)), Led(answers=True)
    yield (Led(),)
    yield (Diverted(),)
    yield (Diverted(answers=True),)
    yield Is("tcp"), SentPorts(80, 80), Syn()
    yield Is("udp"), SentPorts(8000, 8100), Ports(((53, 53),), "src")
    yield Is("tcp"), Syn()
    yield Is("tcp"), Continues()
    yield Is("tcp"), Continues(resets=False)
    yield Is("tcp"), EndsNothing()
    yield (Opens(),)
    yield Is("udplite"), Invalid()
    yield (Ended(),)
    yield (Confirmed(),)
    yield Connected(name, "src"), Connected(name, "dst")
    yield (Reaches(name),)
    yield from ((IsOwn(side),) for side in get_args(Side))
    yield from ((IsOwn(side, inverted=True),) for side in get_args(Side))
    yield (IsOwn("dst", broadcast=True),) if family == 4 else (HopLimit(255),)
    yield (HopLimit(1, family),)
    yield (HopLimit(2, family, below=True),)
    yield InSet(name, "src"), InSet(name, "dst", inverted=True), InSet(name, "src", quiet=True)
    yield (Marked(0x1000000, 0xFF000000),)
    yield (_above("200/sec", "20", (("src", longest),), longest),)
    yield (_above("1/day", "1", (("src", longest - 8), ("dst", longest)), longest),)
    yield (_above("2441kb/s", None, (("dst", longest - 8),), longest),)
    yield (Crowded(5, longest, "src"),)
    yield (Crowded(5, longest - 8, "dst"),)


def _above(rate: str, burst: str | None, sides: tuple[tuple[Side, int], ...], longest: int) -> Above:
    """A bucket with a rate that is printed as it is told."""
    return Above(
        f"{SET}-{len(sides)}{rate[-3:-1]}".replace("/", ""),
        rate,
        rate,
        burst,
        sides,
        10_000,
        1.0,
        1,
        burst is None,
        longest,
    )


def _list_effects(name: str) -> Iterator[Effect]:
    yield Verdict("DROP")
    yield Verdict("ACCEPT")
    yield Jump(OTHER)
    yield Jump(OTHER, goto=True)
    yield SetMark(0x1000000, 0xFF000000)
    yield SetClass(0x1000A)
    yield MapMark(name, "src")
    yield MapPriority(name, "dst")
    yield AddTo(name, "src")
    yield AddTo(name, "dst", refresh=True)
