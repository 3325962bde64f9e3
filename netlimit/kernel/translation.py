"""Who may translate addresses and ports here: the legacy nat tables, and chains of nftables of type nat."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

from netlimit.errors import KernelError
from netlimit.kernel import rtnetlink
from netlimit.kernel.marks import NFNL, read_generation
from netlimit.kernel.tables import has_rules

_GET_CHAIN, _CHAIN_TYPE = 10 << 8 | 4, 7
_HEADER = 4
"""Bytes of struct nfgenmsg, of which the first is the family."""
_INET = 1
_FAMILIES = {socket.AF_INET: (4,), socket.AF_INET6: (6,), _INET: (4, 6)}


class TranslationReader:
    """Knows the address families in which somebody may translate. Chains are read when nftables has changed."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._chained: frozenset[int] = frozenset()
        self._found: frozenset[int] = frozenset()

    def read(self) -> frozenset[int]:
        """Those of now; where they cannot be read, those that were known last."""
        try:
            generation = read_generation()
            if generation != self._generation:
                self._chained = frozenset() if generation is None else frozenset(_find_chained())
                self._generation = generation
            self._found = self._chained | frozenset(_find_legacy())
        except (KernelError, OSError, ValueError, LookupError, struct.error):
            pass
        return self._found


def _find_legacy() -> Iterator[int]:
    """The families with rules in the nat table. The table itself stays from its first use on, be that a mere look."""
    return (family for family in (4, 6) if has_rules(family, "nat"))


def _find_chained() -> Iterator[int]:
    for body in rtnetlink.dump(_GET_CHAIN, bytes(_HEADER), NFNL):
        if rtnetlink.decode(body, _HEADER).get(_CHAIN_TYPE, b"").rstrip(b"\0") == b"nat":
            yield from _FAMILIES.get(body[0], ())
