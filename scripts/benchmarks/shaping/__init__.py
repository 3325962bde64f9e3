"""Shaped traffic: whether rates are held and shared, what others notice of it, and what many hosts cost."""

from __future__ import annotations

from scripts.benchmarks.figures import Figure
from scripts.benchmarks.shaping import cost, crowd, delay, rates, sharing


def measure() -> list[Figure]:
    """One part after the other: they share two cores."""
    return [figure for part in (rates, sharing, delay, crowd, cost) for figure in part.measure()]
