"""Addresses of IPv6 that stand for hosts of IPv4, as translators between the two make them (NAT64, SIIT).

Whoever is such a host has that one address, and its neighbours in the same /64 are others' hosts. Which prefixes a
network's translators have is so for all that a process does, and is told it once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network, ip_network
from typing import Self

_LENGTHS = (32, 40, 48, 56, 64, 96)
_WIDTH, _IPV4 = 128, 32
_OCTET = 8
_AT = 64
"""Where the octet "u" stands, which is zero."""
_ZERO = ((1 << _OCTET) - 1) << (_WIDTH - _AT - _OCTET)


@dataclass(frozen=True, slots=True)
class TranslationPrefix:
    """A prefix of a translator. RFC 6052, section 2.2: the IPv4 address comes behind it, around bits 64 to 71, and what
    comes behind that is zero."""

    network: IPv6Network
    zero: int
    """Bits that no translator sets."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a prefix. Raises ValueError with a sentence."""
        try:
            network = ip_network(text, strict=False)
        except ValueError:
            raise ValueError(f"{text!r} is no prefix of a translator; write for example 2001:db8:64::/96.") from None
        if not isinstance(network, IPv6Network):
            raise ValueError(f"{text!r} is no prefix of a translator: it is of IPv6.")
        if network.prefixlen not in _LENGTHS:
            lengths = f"{', '.join(map(str, _LENGTHS[:-1]))} or {_LENGTHS[-1]}"
            raise ValueError(f"{text!r} is no prefix of a translator: it has {lengths} bits (RFC 6052).")
        if int(network.network_address) != int(IPv6Address(text.partition("/")[0].partition("%")[0])):
            raise ValueError(f"{text!r} has bits behind its length; write {network}.")
        if int(network.network_address) & _ZERO:
            raise ValueError(f"{text!r} is no prefix of a translator: bits 64 to 71 are zero (RFC 6052).")
        behind = network.prefixlen + _IPV4 + (_OCTET if network.prefixlen <= _AT else 0)
        return cls(network, _ZERO | (1 << (_WIDTH - min(behind, _WIDTH))) - 1)

    def translates(self, address: IPv6Address) -> bool:
        """Whether it is what a translator with this prefix makes of an IPv4 address."""
        return address in self.network and not int(address) & self.zero

    def __str__(self) -> str:
        return str(self.network)


def parse_prefixes(value: object) -> tuple[TranslationPrefix, ...]:
    """Read a list of prefixes, or a text with commas between them. Raises ValueError with a sentence."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError('it is a list of prefixes, such as ["2001:db8:64::/96"].')
    texts = [str(item).strip() for item in items]
    return tuple(TranslationPrefix.parse(text) for text in texts if text)


@dataclass(frozen=True, slots=True, eq=False)
class Translators:
    """The prefixes that are known: the well-known ones, and this network's `own`. Equal to itself alone, so that what
    was found by it is remembered with it at no cost."""

    own: tuple[TranslationPrefix, ...] = ()

    def translate(self, address: IPv6Address) -> bool:
        """Whether one of them makes it of an IPv4 address."""
        return any(each.translates(address) for each in (*_WELL_KNOWN, *self.own))


_WELL_KNOWN = tuple(
    TranslationPrefix(IPv6Network(prefix), 0) for prefix in ("64:ff9b::/96", "64:ff9b:1::/48", "::ffff:0:0:0/96")
)
"""RFC 6052, RFC 8215 (for local use, in prefixes of any length), RFC 7915."""
_known = Translators()


def know_translators(prefixes: Iterable[TranslationPrefix]) -> None:
    """Know further prefixes from now on, in all of this process, before limits are read that name such hosts."""
    global _known
    new = [each for each in prefixes if each not in _known.own]
    if new:
        _known = Translators((*_known.own, *new))


def find_translators() -> Translators:
    """Those that are known."""
    return _known
