"""How many different texts there have been, without keeping them."""

from __future__ import annotations

from math import log

_REGISTERS = 256
_BITS = 56
"""Of a hash of 64, those that are left when 8 have named a register."""
_REST = 2**_BITS - 1
_WEIGHTS = [2.0**-rank for rank in range(_BITS + 2)]
_ALPHA = 0.7213 / (1 + 1.079 / _REGISTERS)


class Distinct:
    """A HyperLogLog (Flajolet, Fusy, Gandouet, Meunier 2007) of 256 bytes: true within 6.5 % (standard error).

    The hash is Python's own of texts, which is keyed anew in every process: nobody can choose texts that mislead it.
    """

    __slots__ = ("_ranks",)

    def __init__(self) -> None:
        self._ranks = bytearray(_REGISTERS)

    def add(self, text: str) -> None:
        """Count a text, if it has not been there."""
        bits = hash(text)
        register = bits & 255
        rank = _BITS + 1 - (bits >> 8 & _REST).bit_length()
        if rank > self._ranks[register]:
            self._ranks[register] = rank

    def __bool__(self) -> bool:
        """Whether there has been any."""
        return self._ranks.count(0) < _REGISTERS

    def merge(self, other: Distinct) -> Distinct:
        """What has been in either."""
        both = Distinct()
        both._ranks = bytearray(map(max, self._ranks, other._ranks)) if other else self._ranks[:]
        return both

    def estimate(self) -> int:
        """How many there have been; exact for none, and nearly so for a few."""
        empty = self._ranks.count(0)
        if empty == _REGISTERS:
            return 0
        rough = _ALPHA * _REGISTERS**2 / sum(map(_WEIGHTS.__getitem__, self._ranks))
        if empty and rough <= 2.5 * _REGISTERS:
            return round(_REGISTERS * log(_REGISTERS / empty))
        return round(rough)
