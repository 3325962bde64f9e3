"""Several things in one sentence: the first of them by name, the rest by number."""

from __future__ import annotations

from collections.abc import Sequence, Sized


def name_some(names: Sequence[str], told: int) -> str:
    """So many of the names, and how many there are besides: "eth0, eth1 and 3 more"."""
    return ", ".join(names[:told]) + say_more(names, told)


def say_more(things: Sized, told: int = 1, kind: str = "") -> str:
    """How many there are besides those that are told: " and 3 more", or nothing; of a `kind` " and 3 more rules"."""
    rest = len(things) - told
    counted = f" {kind}{'s' * (rest > 1)}" if kind else ""
    return f" and {rest:,} more{counted}" if rest > 0 else ""
