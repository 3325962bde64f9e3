"""Numbers from the first to the last: of ports, and of addresses, which stand on one line, IPv6 behind IPv4.

Where there are several, they are sorted and apart from each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv6Address, ip_address
from socket import AF_INET, inet_ntop, inet_pton

from netlimit.addresses import Address
from netlimit.detours import merge, read_span

Span = tuple[int, int]
Spans = tuple[Span, ...]
_SIX = 1 << 32
_PLAIN = re.compile(r"\d+\.\d+\.\d+\.\d+(?:/(?:[12]?\d|3[0-2]))?", re.ASCII)
FAMILIES: dict[int, Span] = {4: (0, _SIX - 1), 6: (_SIX, _SIX + (1 << 128) - 1)}
EVERYWHERE: Spans = tuple(FAMILIES.values())
PORTS: Spans = ((0, 65535),)


def number(address: Address) -> int:
    """Where an address stands."""
    return FAMILIES[address.version][0] + int(address)


def name(place: int) -> str:
    """The address that stands there."""
    return str(IPv6Address(place - _SIX)) if place >= _SIX else inet_ntop(AF_INET, place.to_bytes(4, "big"))


def read_address(text: str) -> Span:
    """The span of one address. Raises ValueError."""
    place = number(ip_address(text))
    return place, place


def read_addresses(text: str) -> Span:
    """That of a network, a range or an address. Raises ValueError."""
    return read_ipv4(text) or _read_odd(text)


def read_ipv4(text: str) -> Span | None:
    """That of an address of IPv4, or of a network by the length of its prefix; None of all else. By hand, for they may
    be very many."""
    address, _, length = text.partition("/")
    if not _PLAIN.fullmatch(text):
        return None
    try:
        first = int.from_bytes(inet_pton(AF_INET, address), "big")
    except OSError:
        return None
    mask = _SIX - 1 >> int(length or 32)
    return first & ~mask, first | mask


def _read_odd(text: str) -> Span:
    first, last = read_span(text)
    return number(first), number(last)


def read_ports(text: str) -> Span:
    """That of a port, or of `from-to`. Raises ValueError."""
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def join(spans: Iterable[Span]) -> Spans:
    """All of them, sorted and apart."""
    return tuple(merge(sorted(spans)))


def cut(some: Spans, others: Spans) -> Spans:
    """What both have."""
    if some == others or others is EVERYWHERE or others is PORTS:
        return some
    return others if some is EVERYWHERE or some is PORTS else tuple(_cut(some, others))


def _cut(some: Sequence[Span], others: Sequence[Span]) -> Iterator[Span]:
    one = other = 0
    while one < len(some) and other < len(others):
        low, high = max(some[one][0], others[other][0]), min(some[one][1], others[other][1])
        if low <= high:
            yield low, high
        if some[one][1] < others[other][1]:
            one += 1
        else:
            other += 1


def leave_out(left_out: Spans, whole: Spans) -> Spans:
    """The whole without some."""
    begins = (whole[0][0], *(high + 1 for _, high in left_out))
    ends = (*(low - 1 for low, _ in left_out), whole[-1][1])
    return tuple(_cut(whole, [(low, high) for low, high in zip(begins, ends, strict=True) if low <= high]))


def count(spans: Iterable[Span]) -> int:
    """How many numbers they are."""
    return sum(high - low + 1 for low, high in spans)


def lie_in(some: Spans, others: Spans) -> bool:
    """Whether the others have all of them."""
    return count(cut(some, others)) == count(some)
