"""How evenly something is shared."""

from __future__ import annotations

from collections.abc import Collection


def jain(shares: Collection[float]) -> float:
    """Jain's index: 1 when all have the same, 1/n when one of n has everything.

    The square of the sum over n times the sum of squares (Jain, Chiu and Hawe, DEC-TR-301, 1984). Raises
    ZeroDivisionError when nobody has anything.
    """
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
