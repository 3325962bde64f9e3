"""What a change costs a forwarded packet: this checkout beside another one, in one run, in interleaved pairs."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median

from scripts.benchmarks.figures import Figure
from scripts.benchmarks.forwarding import LIMITS, RULES, cost, make_limits, make_verdicts
from scripts.benchmarks.gateway import ROOT, Gateway
from scripts.testbed.namespaces import Lab

PAIRS = 15
GOAL = 1.02
SAMPLES, SURE = 4000, 0.95
SETS = {"8 allowed, 8 blocked": 8, "128 allowed, 128 blocked": 128}


def compare_with(other: Path) -> list[Figure]:
    """One figure for each set of rules: the cost here by the cost there, with the interval of the median."""
    return [_compare(other, f"{RULES:,} rules of {LIMITS} limits, {name}", number) for name, number in SETS.items()]


def _compare(other: Path, what: str, verdicts: int) -> Figure:
    ratios: list[float] = []
    with (
        Lab() as here,
        Lab() as there,
        Gateway(here, checkout=ROOT) as mine,
        Gateway(there, checkout=other) as theirs,
    ):
        for gateway in (mine, theirs):
            gateway.add([*make_limits(), *make_verdicts(verdicts)])
        for number in range(PAIRS):
            # In turns, for whoever comes second may find the processor warmer.
            first, second = (here, there) if number % 2 else (there, here)
            costs = {first: cost(first)}
            costs[second] = cost(second)
            ratios.append(costs[here] / costs[there])
    low, high = _find_interval(ratios)
    value = f"{median(ratios):.3f} times ({low:.3f} to {high:.3f}, {PAIRS} pairs)"
    return Figure(what, value, f"{GOAL} at the lower end", low <= GOAL)


def _find_interval(ratios: list[float]) -> tuple[float, float]:
    """Where the median lies with 95 % certainty, by the bootstrap (Efron, 1979)."""
    chance = random.Random(1)
    medians = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(SAMPLES))
    edge = int(SAMPLES * (1 - SURE) / 2)
    return medians[edge], medians[-1 - edge]
