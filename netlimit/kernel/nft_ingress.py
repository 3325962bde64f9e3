"""Which chains of nftables stand on the ingress of devices.

The kernel itself is asked: `nft` need not be there, may take long, and leaves out chains that it is too old for, such
as those for `eth*`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from netlimit.errors import say_fault
from netlimit.kernel import rtnetlink
from netlimit.kernel.marks import NFNL, read_generation
from netlimit.plain import decode_name

_GET_CHAIN = 10 << 8 | 4
_TABLE, _NAME, _HOOK = 1, 3, 4
_HOOK_NUMBER, _DEVICE, _DEVICES = 1, 3, 4
"""What a chain is made of (linux/netfilter/nf_tables.h: NFTA_CHAIN_…, NFTA_HOOK_…)."""
_EXACT = 1
"""NFTA_DEVICE_NAME. How names begin the kernel tells by another number, and before Linux 6.18 by a name without its
zero."""
_HEADER = 4
"""Bytes of struct nfgenmsg, of which the first is the family."""
_INGRESS = {1: ("inet", 5), 5: ("netdev", 0)}
"""The families that have such chains, and the number of the hook in each (NF_INET_INGRESS, NF_NETDEV_INGRESS)."""


class Place(NamedTuple):
    """A device on whose ingress a chain stands (`netdev filter early`), or with `prefix` all whose names begin so."""

    chain: str
    device: str
    prefix: bool = False


@dataclass(frozen=True)
class EarlyChains:
    """Where chains stand; `unread` is why that is not known."""

    places: tuple[Place, ...] = ()
    unread: str | None = None

    def find(self, device: str) -> list[str]:
        """The chains on the ingress of a device."""
        alike = (each.chain for each in self._prefixes if device.startswith(each.device))
        return list(dict.fromkeys((*self._named.get(device, ()), *alike)))

    @cached_property
    def _named(self) -> Mapping[str, list[str]]:
        """The chains by the devices that they name: there can be thousands of both."""
        found: dict[str, list[str]] = {}
        for each in self.places:
            if not each.prefix:
                found.setdefault(each.device, []).append(each.chain)
        return found

    @cached_property
    def _prefixes(self) -> list[Place]:
        return [each for each in self.places if each.prefix]


class EarlyChainReader:
    """Knows them; chains are read when nftables has changed."""

    def __init__(self) -> None:
        self._kept: tuple[int | None, EarlyChains] | None = None

    def read(self) -> EarlyChains:
        """Those of now. Never raises."""
        try:
            generation = read_generation()
            if self._kept is None or self._kept[0] != generation:
                self._kept = None  # what cannot be read is not kept
                self._kept = generation, EarlyChains(() if generation is None else tuple(_find_places()))
        except (OSError, ValueError, LookupError, struct.error) as error:
            return EarlyChains(unread=say_fault(error))
        return self._kept[1]


def _find_places() -> Iterator[Place]:
    for family in _INGRESS:
        for body in rtnetlink.read_whole(_GET_CHAIN, bytes((family, 0, 0, 0)), NFNL):
            yield from read_chain(body)


def read_chain(body: bytes) -> Iterator[Place]:
    """Where a chain stands, as the kernel tells of it; nothing for one that stands at another hook, or at none."""
    family, number = _INGRESS[body[0]]
    told = rtnetlink.decode(body, _HEADER)
    hook = rtnetlink.decode(told.get(_HOOK, b""))
    if _HOOK_NUMBER in hook and struct.unpack(">I", hook[_HOOK_NUMBER])[0] == number:
        chain = f"{family} {decode_name(told[_TABLE])} {decode_name(told[_NAME])}"
        alone = [(_EXACT, hook[_DEVICE])] if _DEVICE in hook else []
        for kind, name in [*rtnetlink.list_attributes(hook.get(_DEVICES, b""))] or alone:
            yield Place(chain, decode_name(name), kind != _EXACT or not name.endswith(b"\0"))
